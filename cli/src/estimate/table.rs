//! The tables of docs/scaling.md: the efficiency of many sizes of a job, on three networks.

use psjobs_ps::layout::LayoutError;

use super::constants::Constants;
use super::model::{Setup, enough_servers, estimate};

const GBIT: [u32; 3] = [10, 25, 100];
const TRAINERS: [u32; 10] = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
const SERVERS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Returns the tables of the job of `setup`, whose trainers, servers and links are those of the tables.
///
/// # Errors
/// If 256 servers do not hold the model.
pub fn tables(setup: &Setup, constants: &Constants) -> Result<String, LayoutError> {
    let tables = GBIT.map(|gbit| table(setup, constants, gbit)).into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(tables.join("\n\n"))
}

fn table(setup: &Setup, constants: &Constants, gbit: u32) -> Result<String, LayoutError> {
    let link = f64::from(gbit) * 1e9 / 8.0;
    let most = SERVERS[SERVERS.len() - 1];
    let heading: String = SERVERS.iter().map(|servers| format!(" {servers} |")).collect();
    let rule = "---|".repeat(SERVERS.len() + 2);
    let mut lines = vec![format!("| {gbit} Gbit/s: trainers |{heading} enough |"), format!("|{rule}")];
    for trainers in TRAINERS {
        let setup = Setup { trainers, trainer_link: link, server_link: link, ..setup.clone() };
        let cell = |servers| match estimate(&Setup { servers, ..setup.clone() }, constants) {
            Ok(estimate) => format!(" {} |", share(estimate.efficiency)),
            // Too few servers for the model.
            Err(_) => " |".to_owned(),
        };
        let cells: String = SERVERS.map(cell).concat();
        lines.push(format!("| {trainers} |{cells} {} |", enough_servers(&setup, constants, most)?));
    }
    Ok(lines.join("\n"))
}

/// Writes a share as the other pages do: `.93`.
fn share(efficiency: f64) -> String {
    let text = format!("{efficiency:.2}");
    text.strip_prefix('0').unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use psjobs_api::training::{Compression, ConsistencyMode};

    use super::*;

    fn setup(parameters: u64) -> Setup {
        Setup {
            parameters,
            compute: 0.25,
            examples: 32.0,
            trainers: 1,
            servers: 1,
            trainer_link: 1.0,
            server_link: 1.0,
            round_trip: 1e-4,
            compression: Compression::default(),
            mode: ConsistencyMode::Sync,
            backup_trainers: 0,
            local: None,
            is_replicated: false,
            has_tls: false,
            overlap: 0.5,
            spread: 0.03,
            server_cores: 4.0,
            trainer_cores: 1.0,
            slots: 0.0,
            keeps_previous: false,
        }
    }

    #[test]
    fn there_is_a_table_for_each_network_and_a_cell_for_each_size() {
        let text = tables(&setup(9_300_000), &Constants::default()).expect("a model");
        let tables: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(tables.len(), GBIT.len());
        for (table, gbit) in tables.into_iter().zip(GBIT) {
            let lines: Vec<&str> = table.lines().collect();
            assert!(lines[0].starts_with(&format!("| {gbit} Gbit/s: trainers | 1 | 2 |")), "{}", lines[0]);
            assert_eq!(lines.len(), 2 + TRAINERS.len());
            // A cell lies between two bars.
            let bars = |line: &str| line.matches('|').count();
            assert!(lines.iter().all(|line| bars(line) == SERVERS.len() + 3), "{table}");
            assert!(lines[2].starts_with("| 8 | .") || lines[2].starts_with("| 8 | 1.00"), "{}", lines[2]);
        }
    }

    #[test]
    fn a_model_that_few_servers_do_not_hold_has_empty_cells() {
        // Three servers hold it, two do not.
        let text = table(&setup(5 << 34), &Constants::default(), 100).expect("256 servers hold it");
        let first = text.lines().nth(2).expect("8 trainers");
        assert!(first.starts_with("| 8 | | | "), "{first}");
        assert!(tables(&setup(1 << 47), &Constants::default()).is_err(), "no 256 servers hold that");
    }

    #[test]
    fn shares_are_written_as_in_the_other_pages() {
        for (efficiency, want) in [(0.934, ".93"), (1.0, "1.00"), (0.004, ".00")] {
            assert_eq!(share(efficiency), want);
        }
    }
}
