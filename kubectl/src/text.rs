//! Numbers and times as kubectl shows them, and tables of them.

use std::io::Write as _;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase, Progress};

/// A span of time in the two largest units that matter: `42s`, `7m5s`, `3h`, `12d`.
pub fn span(seconds: i64) -> String {
    let (seconds, minutes, hours, days) = (seconds, seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if minutes < 2 => format!("{seconds}s"),
        () if minutes < 10 && seconds % 60 > 0 => format!("{minutes}m{}s", seconds % 60),
        () if hours < 3 => format!("{minutes}m"),
        () if hours < 8 && minutes % 60 > 0 => format!("{hours}h{}m", minutes % 60),
        () if days < 2 => format!("{hours}h"),
        () if days < 8 && hours % 24 > 0 => format!("{days}d{}h", hours % 24),
        () => format!("{days}d"),
    }
}

/// The time since then.
pub fn age(since: Option<&Time>, now: Timestamp) -> String {
    since.map_or_else(|| "<unknown>".to_owned(), |since| span(now.duration_since(since.0).as_secs().max(0)))
}

/// A number with four significant digits, without an exponent where it is short without.
pub fn number(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    if !(0..=8).contains(&digits) {
        return if digits < 0 { format!("{value:.0}") } else { format!("{value:.3e}") };
    }
    let text = format!("{value:.*}", digits as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A number of bytes in the unit that makes it short: `96 B`, `3.246 MB`.
pub fn size(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    format!("{} {}", number(value), units[unit])
}

/// The phase of a job, if an operator has written one.
pub fn phase(job: &ParameterServerJob) -> Option<Phase> {
    job.status.as_ref()?.phase
}

/// `step 788 of 1500 (52%)`.
pub fn steps(progress: &Progress) -> String {
    let Progress { step, total_steps, percent, .. } = progress;
    if *total_steps > 0 { format!("step {step} of {total_steps} ({percent}%)") } else { format!("step {step}") }
}

/// The reason of a job's phase, where it says more than the phase.
pub fn reason(status: &ParameterServerJobStatus) -> Option<&str> {
    let phase = status.phase?;
    status.reason.as_deref().filter(|&reason| phase != Phase::Succeeded && reason != format!("{phase:?}"))
}

/// A message of a condition as a sentence of its own. Names, such as `spec.suspend` and `mnist-ps-0`, stay as they are.
pub fn sentence(message: &str) -> String {
    let mut letters = message.chars();
    let word = message.split_whitespace().next().unwrap_or_default();
    let first = letters.next().map(|first| {
        if word.chars().all(char::is_alphabetic) { first.to_uppercase().to_string() } else { first.to_string() }
    });
    let first = first.unwrap_or_default();
    let end = if message.ends_with(['.', '!', '?', '…']) { "" } else { "." };
    format!("{first}{}{end}", letters.as_str())
}

/// Rows below a header, in columns as wide as their widest cell.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).chain([header[column].len()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("   ").trim_end().to_owned()
    };
    let header: Vec<String> = header.iter().map(|&name| name.to_owned()).collect();
    std::iter::once(&header).chain(rows).map(|row| line(row)).collect::<Vec<_>>().join("\n")
}

/// Prints a line. Returns whether anybody reads on: a reader that has gone away wants no line.
pub fn print(line: impl std::fmt::Display) -> bool {
    writeln!(std::io::stdout(), "{line}").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_the_units_that_matter() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (425, "7m5s"),
            (3_601, "60m"),
            (11_000, "3h3m"),
            (100_000, "27h"),
            (200_000, "2d7h"),
            (1_000_000, "11d"),
        ] {
            assert_eq!(span(seconds), text, "{seconds} s");
        }
    }

    #[test]
    fn numbers_have_four_digits() {
        for (value, text) in [
            (0.143_965_4, "0.144"),
            (0.98, "0.98"),
            (641.53, "641.5"),
            (12_345.6, "12346"),
            (0.000_012_3, "0.0000123"),
            (1.5e-9, "1.500e-9"),
            (-2.0, "-2"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(number(value), text, "{value}");
        }
    }

    #[test]
    fn sizes_have_the_unit_that_makes_them_short() {
        for (bytes, text) in [(0, "0 B"), (96, "96 B"), (1_000, "1 kB"), (3_246_100, "3.246 MB"), (2 << 40, "2.199 TB")]
        {
            assert_eq!(size(bytes), text, "{bytes} bytes");
        }
    }

    #[test]
    fn messages_become_sentences() {
        for (message, wanted) in [
            ("trainer 0 cannot start", "Trainer 0 cannot start."),
            ("spec.suspend is true; set it to false", "spec.suspend is true; set it to false."),
            ("is it there?", "Is it there?"),
            ("", "."),
        ] {
            assert_eq!(sentence(message), wanted);
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["mnist".to_owned(), "Running".to_owned()], vec!["a".to_owned(), String::new()]];
        assert_eq!(table(&["NAME", "STATE"], &rows), "NAME    STATE\nmnist   Running\na");
    }
}
