//! The page: a paragraph, then for each section its plots and a table. One file, nothing fetched.

use std::fmt::Write as _;

use super::grid::{Experiment, Extent, Metric, Section};
use super::link::Carried;
use super::plot::{Axis, COLORS, Series, bars, columns, lines};
use super::record::{Record, mean};
use super::sheet::{Panel, panels};

const STYLE: &str = concat!(include_str!("page.css"), include_str!("plot.css"));
/// Upper ends of the staleness buckets that are drawn; the rest is one.
const STALENESS: [&str; 9] = ["0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "more"];

/// The records of a section, way by way.
struct Drawn<'a> {
    section: &'a Section,
    records: Vec<&'a Record>,
}

impl<'a> Drawn<'a> {
    /// The ways' names and colours, and their records.
    fn ways(&self) -> impl Iterator<Item = (&'a str, &'static str, Vec<&'a Record>)> {
        self.section.ways.iter().zip(COLORS).enumerate().map(|(number, (way, color))| {
            (way.name, color, self.records.iter().copied().filter(|record| record.run.way == number).collect())
        })
    }
}

/// The page for `records`.
pub fn page(
    experiment: Experiment,
    sections: &[Section],
    records: &[Record],
    carried: &[Carried],
    extent: &Extent,
) -> String {
    let Extent { epochs, evaluate_every, workload, .. } = extent;
    let (title, metric) = (experiment.title(), experiment.metric());
    let seeds = records.iter().map(|record| record.run.seed).max().unwrap_or(0);
    let net = match workload.as_str() {
        "lm" => "a language model (LSTM, 9.3 million parameters)",
        "mlp" => "a perceptron (784-256-10) on MNIST by SGD",
        _ => "a convolutional network on MNIST by SGD",
    };
    let passes = if *epochs == 1 { "one epoch".to_owned() } else { format!("{epochs} epochs") };
    let often =
        if *evaluate_every == 1 { "once a second".to_owned() } else { format!("every {evaluate_every} seconds") };
    let times = if seeds == 1 { "once".to_owned() } else { format!("{seeds} times, with other seeds,") };
    let mut html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\
         <title>{title}</title><style>{STYLE}</style><main><h1>{title}</h1>\
         <p>Each way trains {net} {times} for {passes} in all. The {} is seen by the first trainer about {often}.</p>",
        metric.title
    );
    for Panel { caption, svg, keys } in panels(experiment, sections, records) {
        html += &legend(keys.into_iter());
        figure(&mut html, &caption, &svg);
    }
    for (number, section) in sections.iter().enumerate() {
        let drawn = Drawn { section, records: records.iter().filter(|record| record.run.section == number).collect() };
        let Section { title, note, .. } = section;
        let _ = write!(
            html,
            "<h2>{title}</h2><p>{note}</p>{}<div class=plots>",
            legend(drawn.ways().map(|(name, color, _)| (name, color)))
        );
        let caption = format!("The {} over time; thin lines are single runs", metric.title);
        figure(&mut html, &caption, &metric_over_time(&drawn, metric));
        figure(&mut html, "Throughput", &by_way(&drawn, "examples/s", None, |record| record.examples_per_second));
        let waiting = |record: &Record| record.waiting.map(|share| share * 100.0);
        let waited = by_way(&drawn, "% of the trainers' time", Some(100.0), waiting);
        figure(&mut html, "Time spent waiting for servers and other trainers", &waited);
        // In Sync nothing is stale.
        if drawn.records.iter().any(|record| record.staleness.iter().any(|count| *count > 0)) {
            figure(&mut html, "Staleness of the updates: how many others came in between", &staleness(&drawn));
        }
        let _ = write!(html, "</div>{}", table(&drawn, metric));
        if let Some(Carried { link_mbit, .. }) = carried.first() {
            let _ = write!(html, "<h2>Over a link of {link_mbit} Mb/s</h2>{}", over_link(&drawn, carried));
        }
    }
    html + "<p class=foot>Made by <code>psjobs compare</code>.</p></main></html>\n"
}

fn figure(html: &mut String, caption: &str, svg: &str) {
    let _ = write!(html, "<figure><figcaption>{caption}</figcaption>{svg}</figure>");
}

fn legend<'a>(keys: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let keys = keys.map(|(name, color)| format!("<li><i style='background:{color}'></i>{name}</li>"));
    format!("<ul class=legend>{}</ul>", keys.collect::<String>())
}

/// The metric at `seconds`, on the straight line between two evaluations.
fn value_at(record: &Record, seconds: f64) -> Option<f64> {
    let seen = &record.metric_over_seconds;
    let next = seen.partition_point(|(at, _)| *at < seconds);
    let (&(to, after), before) = (seen.get(next)?, next.checked_sub(1));
    let Some((from, start)) = before.map(|before| seen[before]) else { return (to <= seconds).then_some(after) };
    Some(start + (after - start) * (seconds - from) / (to - from))
}

/// The mean of all runs, from when all have been evaluated to when the first one ended.
fn mean_curve(runs: &[&Record], until: f64) -> Vec<(f64, f64)> {
    let ends = runs.iter().filter_map(|run| run.metric_over_seconds.last()).map(|(at, _)| *at);
    let end = ends.fold(f64::MAX, f64::min);
    let moments = (0..=200).map(|n| until * f64::from(n) / 200.0).filter(|at| *at <= end);
    let value = |at| {
        let seen: Option<Vec<f64>> = runs.iter().map(|run| value_at(run, at)).collect();
        Some((at, mean(seen?)?))
    };
    moments.filter_map(value).collect()
}

fn metric_over_time(drawn: &Drawn, metric: Metric) -> String {
    let points = || drawn.records.iter().flat_map(|record| &record.metric_over_seconds);
    let last = points().map(|(seconds, _)| *seconds).fold(1.0, f64::max);
    let [one, other] = metric.levels;
    let lowest = points().map(|(_, value)| *value).fold(one.min(other), f64::min);
    let highest = points().map(|(_, value)| *value).fold(one.max(other), f64::max);
    let (mut single, mut means) = (Vec::new(), Vec::new());
    for (name, color, runs) in drawn.ways() {
        for run in &runs {
            single.push(Series { name, color, points: run.metric_over_seconds.clone(), faint: true });
        }
        means.push(Series { name, color, points: mean_curve(&runs, last), faint: false });
    }
    single.extend(means);
    // In steps of a fiftieth of what is usual.
    let step = one.max(other) / 50.0;
    let y = Axis {
        title: metric.title,
        from: (lowest / step).floor() * step,
        to: (highest / step).ceil() * step,
        log: false,
    };
    lines(&Axis { title: "seconds", from: 0.0, to: last, log: false }, &y, &single)
}

/// One column for each way, the mean of its runs.
fn by_way(drawn: &Drawn, title: &str, most: Option<f64>, figure: impl Fn(&Record) -> Option<f64>) -> String {
    let means =
        drawn.ways().filter_map(|(name, color, runs)| Some((name, color, mean(runs.into_iter().filter_map(&figure))?)));
    let means: Vec<_> = means.collect();
    let highest = means.iter().map(|(.., value)| *value).fold(1e-9, f64::max);
    columns(&means, &Axis { title, from: 0.0, to: most.unwrap_or(highest * 1.1), log: false })
}

fn staleness(drawn: &Drawn) -> String {
    let (mut series, mut highest) = (Vec::new(), 0.0_f64);
    for (name, color, runs) in drawn.ways() {
        let mut counts = [0_u64; STALENESS.len()];
        for (bucket, count) in runs.iter().flat_map(|run| run.staleness.iter().enumerate()) {
            counts[bucket.min(STALENESS.len() - 1)] += count;
        }
        let total: u64 = counts.iter().sum();
        if total > 0 {
            let share = |(bucket, count): (usize, &u64)| (bucket as f64, *count as f64 / total as f64 * 100.0);
            let points: Vec<_> = counts.iter().enumerate().map(share).collect();
            highest = points.iter().map(|(_, share)| *share).fold(highest, f64::max);
            series.push(Series { name, color, points, faint: false });
        }
    }
    bars(
        &STALENESS,
        &Axis { title: "% of updates", from: 0.0, to: (highest * 1.1).clamp(10.0, 100.0), log: false },
        &series,
    )
}

fn table(drawn: &Drawn, metric: Metric) -> String {
    let Metric { name, levels: [first, second], digits, .. } = metric;
    let mut html = format!(
        "<table><tr><th>way<th>final {name}<th>lowest, highest<th>seconds to {first}<th>to {second}<th>seconds in \
         all<th>examples/s<th>waiting"
    );
    for (name, color, runs) in drawn.ways() {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
        let of = |figure: fn(&Record) -> Option<f64>, digits| {
            number(mean(runs.iter().filter_map(|run| figure(run))), digits)
        };
        let reached = |level: f64| {
            let times: Option<Vec<f64>> = runs.iter().map(|run| run.reached(level)).collect();
            times.map_or_else(|| "not by all".to_owned(), |times| number(mean(times), 1))
        };
        let ended: Vec<f64> = runs.iter().filter_map(|run| run.end.1).collect();
        let failed = runs.len() - ended.len();
        let extremes = match failed {
            0 => {
                let fold = |from, pick: fn(f64, f64) -> f64| ended.iter().copied().fold(from, pick);
                format!("{:.digits$}, {:.digits$}", fold(f64::MAX, f64::min), fold(f64::MIN, f64::max))
            }
            failed => format!("{failed} of {} failed", runs.len()),
        };
        let _ = write!(
            html,
            "<tr><td><i style='background:{color}'></i>{name}<td>{}<td>{extremes}<td>{}<td>{}<td>{}<td>{}<td>{} %",
            of(|run| run.end.1, digits),
            reached(first),
            reached(second),
            of(|run| run.seconds, 1),
            of(|run| run.examples_per_second, 0),
            of(|run| run.waiting.map(|share| share * 100.0), 1),
        );
    }
    html + "</table>"
}

/// Bytes and steps over the slow link, beside those on this machine.
fn over_link(drawn: &Drawn, carried: &[Carried]) -> String {
    let of = |name: &str| carried.iter().find(|carried| carried.way == name);
    let bars = |title, figure: fn(&Carried) -> f64| {
        let values: Vec<_> =
            drawn.ways().filter_map(|(name, color, _)| Some((name, color, figure(of(name)?)))).collect();
        let highest = values.iter().map(|(.., value)| *value).fold(1e-9, f64::max);
        columns(&values, &Axis { title, from: 0.0, to: highest * 1.1, log: false })
    };
    let mut html = "<div class=plots>".to_owned();
    figure(
        &mut html,
        "Bytes on the wire for a step of one trainer, both ways",
        &bars("kB", |c| c.bytes_per_step / 1e3),
    );
    figure(&mut html, "Steps a second of all trainers", &bars("steps/s", |c| c.steps_per_second));
    html += "</div><table><tr><th>way<th>kB/step<th>steps/s on this machine<th>steps/s over the link<th>at the end";
    for (name, color, runs) in drawn.ways() {
        let Some(Carried { bytes_per_step, steps_per_second, .. }) = of(name) else { continue };
        let mean_of = |figure: fn(&Record) -> Option<f64>| mean(runs.iter().filter_map(|run| figure(run)));
        let here = mean_of(|run| run.steps_per_second).map_or("-".to_owned(), |rate| format!("{rate:.0}"));
        let digits = runs.first().map_or(0, |run| run.end.0.digits);
        let end = mean_of(|run| run.end.1).map_or("-".to_owned(), |value| format!("{value:.digits$}"));
        let _ = write!(
            html,
            "<tr><td><i style='background:{color}'></i>{name}<td>{:.1}<td>{here}<td>{steps_per_second:.1}<td>{end}",
            bytes_per_step / 1e3
        );
    }
    html + "</table>"
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::super::grid;
    use super::*;

    #[test]
    fn a_page_holds_every_way_and_no_hole() {
        let (workload, settings) = ("mlp".into(), Vec::new());
        let extent = Extent { trainers: 4, epochs: 1, evaluate_every: 1, slow: 3.0, workload, settings };
        for experiment in Experiment::value_variants().iter().copied() {
            let sections = experiment.sections(&extent);
            let runs = grid::runs(&sections, 2).into_iter();
            let record = |run: grid::Run| {
                let Section { title, ways, .. } = &sections[run.section];
                Record::new(run, title, ways[run.way].name, experiment.metric())
            };
            // Of some ways every run has failed before it was evaluated.
            let records: Vec<Record> = runs
                .map(|run| match run.way {
                    1 => record(run),
                    way => Record {
                        metric_over_seconds: vec![(1.0, 0.8), (2.0, 0.92), (3.0, 0.96)],
                        staleness: if way == 0 { Vec::new() } else { vec![1, 2, 3] },
                        end: (experiment.metric(), Some(0.97)),
                        seconds: Some(4.0),
                        steps_per_second: Some(30.0),
                        examples_per_second: Some(1000.0),
                        waiting: Some(0.1),
                        ..record(run)
                    },
                })
                .collect();
            let over = |way: &grid::Way| Carried {
                way: way.name,
                link_mbit: 100,
                bytes_per_step: 1.5e6,
                steps_per_second: 7.0,
            };
            let carried = match experiment {
                Experiment::Codecs | Experiment::Local => sections[0].ways.iter().map(over).collect(),
                _ => Vec::new(),
            };
            let html = page(experiment, &sections, &records, &carried, &extent);
            for way in sections.iter().flat_map(|section| &section.ways) {
                assert!(html.contains(way.name), "{}", way.name);
            }
            let in_short = panels(experiment, &sections, &records).len();
            let over_link = if carried.is_empty() { 0 } else { 2 };
            assert_eq!(html.matches("<svg").count(), in_short + sections.len() * 4 + over_link);
            assert_eq!(html.matches("1500.0<td>").count(), carried.len(), "kB a step");
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
            assert!(html.contains("2 of 2 failed"), "{html}");
        }
    }
}
