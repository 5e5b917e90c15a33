//! Logs go to standard error: lines for people, or one JSON object a line.

use std::io::{self, IsTerminal};
use std::panic::{self, PanicHookInfo};

use tracing_subscriber::EnvFilter;

/// The value of `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Human,
    Json,
}

/// Begins to log, at level info unless `RUST_LOG` says otherwise.
pub fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_target(false);
    match format {
        LogFormat::Human => logs.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => logs.json().flatten_event(true).with_current_span(false).init(),
    }
}

/// Logs a panic as one line, without a back trace. libtorch's errors come this way: out of memory, say.
pub fn log_panics() {
    panic::set_hook(Box::new(|info: &PanicHookInfo| {
        let line = first_line(info.payload_as_str().unwrap_or("a panic without words"));
        match info.location() {
            Some(place) => tracing::error!(at = %place, "{line}"),
            None => tracing::error!("{line}"),
        }
    }));
}

/// Cuts off the back trace that libtorch appends to its errors; tch quotes it, with its line ends.
fn first_line(text: &str) -> &str {
    let end = [text.find('\n'), text.find("\\n")].into_iter().flatten().min();
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_libtorch_is_cut_to_its_first_line() {
        let quoted = r#"called `Result::unwrap()` on an `Err` value: Torch("out of memory\nException raised from"#;
        assert!(first_line(quoted).ends_with("out of memory"));
        assert_eq!(first_line("index 9\nstack"), "index 9");
        assert_eq!(first_line("one line"), "one line");
    }
}
