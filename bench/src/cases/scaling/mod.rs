//! Measures the constants of `psjobs estimate` on this machine ([`fit`]), and compares what the model says with them to jobs
//! whose servers are behind links of a limited rate ([`check`]).

mod check;
mod fit;

use clap::Args;

use crate::report::{Case, Line, median, say};

/// The constants of `psjobs estimate`, and its step times over those of jobs with limited links
///
/// Cases `*-ns` and `*-us` are constants as measured here, from the time that a server has the cores, over the model's defaults.
/// The flags with their medians go to standard error. Cases of trainers by servers are milliseconds of a step in Sync without
/// computing, over what the model says with these constants; each server is in a network namespace behind a link of its own,
/// which takes root and the programs ip and tc (iproute2). docs/scaling.md explains both.
#[derive(Debug, Args)]
pub struct ScalingArgs {
    /// Size of the parameters for the constants in MB (10^6 bytes of f32)
    #[arg(long, value_name = "MB", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    megabytes: u32,
    /// Steps of each run for the constants
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps of each run for the cost of a message, with one parameter
    #[arg(long, value_name = "STEPS", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
    /// Size of the parameters over the links in MB
    #[arg(long, value_name = "MB", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    link_megabytes: u32,
    /// Steps of each run over the links
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    link_steps: u32,
    /// Rate of each server's link in Mbit/s, each way
    #[arg(long, value_name = "MBIT/S", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    mbit: u32,
}

const BENCH: &str = "scaling";

impl ScalingArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Line>> {
        let mut fits = Vec::new();
        for run in 1..=runs {
            say(&format!("scaling: constants, run {run} of {runs}"));
            fits.push(fit::measure(self)?);
        }
        let defaults = fit::list(&Default::default());
        let mut lines = Vec::new();
        let mut fitted = Vec::new();
        for (place, (case, default)) in defaults.into_iter().enumerate() {
            let values: Vec<f64> = fits.iter().map(|fit| fit::list(fit)[place].1).collect();
            fitted.push((case, median(&values)));
            lines.push(Line::Measured(Case::new(BENCH, case, "", &values, &[default])));
        }
        let flags: Vec<String> = fitted.iter().map(|(case, value)| format!("--{case} {value:.3}")).collect();
        eprintln!("the constants of this machine: psjobs estimate {}", flags.join(" "));
        lines.extend(check::measure(self, &fit::of(&fitted), runs)?);
        Ok(lines)
    }
}
