//! An experiment in one or two plots: on top of its page, and as a picture of its own for documents.

use std::fmt::Write as _;

use super::grid::{Experiment, Section};
use super::plot::{Axis, COLORS, HEIGHT, Series, WIDTH, bars, columns, lines};
use super::record::{Record, mean};
use crate::cases::together::LM;

const STYLE: &str = include_str!("plot.css");
/// Heights of a caption and of the line with the keys, and the space around all.
const CAPTION: f64 = 26.0;
const KEYS: f64 = 26.0;
const MARGIN: f64 = 16.0;

/// A plot with its caption.
pub struct Panel {
    pub caption: String,
    pub svg: String,
    /// Names and colours of its curves or bars.
    pub keys: Vec<(&'static str, &'static str)>,
}

/// Returns the plots that show an experiment in short; none where there are none.
pub fn panels(experiment: Experiment, sections: &[Section], records: &[Record]) -> Vec<Panel> {
    match experiment {
        Experiment::Local => {
            sections.iter().flat_map(|section| [over_tokens(section, records), sent(section, records)]).collect()
        }
        Experiment::Trainers => vec![by_trainers(experiment, sections, records)],
        Experiment::Modes | Experiment::Staleness | Experiment::Codecs => Vec::new(),
    }
}

/// The ways of a section with their colours and records.
fn ways<'a>(
    section: &Section,
    records: &'a [Record],
) -> impl Iterator<Item = (&'static str, &'static str, Vec<&'a Record>)> {
    section
        .ways
        .iter()
        .zip(COLORS)
        .map(move |(way, color)| (way.name, color, records.iter().filter(|record| record.way == way.name).collect()))
}

fn keys(section: &Section) -> Vec<(&'static str, &'static str)> {
    section.ways.iter().zip(COLORS).map(|(way, color)| (way.name, color)).collect()
}

/// Returns the perplexity over the tokens that all trainers have read.
fn over_tokens(section: &Section, records: &[Record]) -> Panel {
    let mut series = Vec::new();
    for (name, color, runs) in ways(section, records) {
        for run in runs {
            let millions = |steps: u64| steps as f64 * LM.per_step / 1e6;
            let points = run.metric_over_steps.iter().map(|(steps, value)| (millions(*steps), *value)).collect();
            series.push(Series { name, color, points, faint: false });
        }
    }
    let points = || series.iter().flat_map(|curve| &curve.points);
    let last = points().map(|(at, _)| *at).fold(0.1, f64::max);
    let lowest = points().map(|(_, value)| *value).fold(500.0, f64::min);
    // A model that has read little has perplexities of thousands, by which the ends could not be distinguished.
    let y = Axis { title: "perplexity", from: (lowest / 50.0).floor() * 50.0, to: 600.0, log: false };
    let x = Axis { title: "million tokens read by all trainers", from: 0.0, to: last, log: false };
    let svg = lines(&x, &y, &series);
    Panel { caption: "Perplexity of held-out text; a curve for each seed".into(), svg, keys: keys(section) }
}

/// Returns the bytes that were sent, on an axis of powers of ten.
fn sent(section: &Section, records: &[Record]) -> Panel {
    let of = |(name, color, runs): (&'static str, &'static str, Vec<&Record>)| {
        let bytes = mean(runs.iter().filter_map(|run| run.bytes).map(|bytes| bytes as f64))?;
        (bytes > 0.0).then_some((name, color, bytes / 1e6))
    };
    let values: Vec<_> = ways(section, records).filter_map(of).collect();
    let megabytes = || values.iter().map(|(.., value)| *value);
    let power = |exponent: f64| 10_f64.powf(exponent);
    let (from, to) = match (megabytes().reduce(f64::min), megabytes().reduce(f64::max)) {
        (Some(least), Some(most)) => (power(least.log10().floor() - 1.0), power(most.log10().floor() + 1.0)),
        _ => (1.0, 10.0),
    };
    let svg = columns(&values, &Axis { title: "MB", from, to, log: true });
    let caption = "MB between trainers and server, both ways (each line is ten times the one below)".into();
    Panel { caption, svg, keys: keys(section) }
}

/// Returns the metric at the end by the number of trainers, a bar for each section.
fn by_trainers(experiment: Experiment, sections: &[Section], records: &[Record]) -> Panel {
    let metric = experiment.metric();
    let mut numbers: Vec<u32> = sections.iter().flat_map(|section| &section.ways).map(|way| way.trainers).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let groups: Vec<String> = numbers.iter().map(u32::to_string).collect();
    let colored = || sections.iter().zip([COLORS[0], COLORS[3]]);
    let series = colored().map(|(section, color)| {
        let at_end = |(place, trainers): (usize, &u32)| {
            let way = section.ways.iter().find(|way| way.trainers == *trainers)?;
            let runs = records.iter().filter(|record| record.section == section.title && record.way == way.name);
            Some((place as f64, mean(runs.filter_map(|run| run.end.1))?))
        };
        let points = numbers.iter().enumerate().filter_map(at_end).collect();
        Series { name: section.title, color, points, faint: false }
    });
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    let svg = bars(&groups, &Axis { title: metric.title, from: 0.9, to: 1.0, log: false }, &series.collect::<Vec<_>>());
    let caption = "Accuracy at the end by number of trainers; what is below .9 is not drawn".into();
    Panel { caption, svg, keys: colored().map(|(section, color)| (section.title, color)).collect() }
}

/// Returns a picture with these plots side by side.
pub fn sheet(panels: &[Panel]) -> String {
    let wide = MARGIN + panels.len() as f64 * (WIDTH + MARGIN);
    let high = CAPTION + KEYS + HEIGHT + 2.0 * MARGIN;
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif"><style>{STYLE}</style><rect width="{wide}" height="{high}" fill="#fff"/>"##
    );
    for (number, panel) in panels.iter().enumerate() {
        let left = MARGIN + number as f64 * (WIDTH + MARGIN);
        let line = MARGIN + CAPTION;
        let _ = write!(
            svg,
            r#"<text x="{left}" y="{}" font-size="15" font-weight="600">{}</text>"#,
            line - 8.0,
            panel.caption
        );
        let mut at = left;
        for (name, color) in &panel.keys {
            let _ = write!(svg, r#"<rect x="{at}" y="{}" width="12" height="12" rx="3" fill="{color}"/>"#, line + 4.0);
            let _ = write!(svg, r#"<text x="{}" y="{}" class="title">{name}</text>"#, at + 18.0, line + 15.0);
            // Letters of this size take some 7.5 units.
            at += 40.0 + 7.5 * name.len() as f64;
        }
        let place = format!(r#"<svg x="{left}" y="{}" width="{WIDTH}" height="{HEIGHT}" "#, line + KEYS);
        svg += &panel.svg.replacen("<svg ", &place, 1);
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::super::grid::{self, Extent};
    use super::*;

    #[test]
    fn a_sheet_is_one_picture_with_each_way_and_no_hole() {
        let (workload, settings) = ("mlp".into(), Vec::new());
        let extent = Extent { trainers: 2, epochs: 1, evaluate_every: 1, slow: 3.0, workload, settings };
        for (experiment, want, title) in [
            (Experiment::Local, 2, "50 steps"),
            (Experiment::Trainers, 1, "A momentum for each trainer"),
            (Experiment::Modes, 0, ""),
        ] {
            let sections = experiment.sections(&extent);
            let records: Vec<Record> = grid::runs(&sections, 2)
                .into_iter()
                .map(|run| {
                    let Section { title, ways, .. } = &sections[run.section];
                    let bytes = [5_000_000_000, 100_000_000][run.way.min(1)];
                    let failed = run.way == 2;
                    Record {
                        metric_over_steps: vec![(500, 900.0), (1500, 200.0)],
                        end: (experiment.metric(), (!failed).then_some(0.97)),
                        bytes: (!failed).then_some(bytes),
                        ..Record::new(run, title, ways[run.way].name, experiment.metric())
                    }
                })
                .collect();
            let panels = panels(experiment, &sections, &records);
            assert_eq!(panels.len(), want);
            let svg = sheet(&panels);
            assert_eq!((svg.matches("<svg").count(), svg.matches("</svg>").count()), (want + 1, want + 1));
            assert!(svg.contains(title) && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            if experiment == Experiment::Local {
                assert!(svg.contains(">5000</text>") && svg.contains(">100</text>"), "MB of both ways: {svg}");
            }
        }
        for section in Experiment::Trainers.sections(&extent) {
            let empty = panels(Experiment::Trainers, &[section], &[]);
            assert!(!sheet(&empty).contains("NaN"), "nothing has ended");
        }
    }
}
