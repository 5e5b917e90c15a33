//! The operator: a controller for `ParameterServerJob`s, and what surrounds it in a process: flags,
//! leader election, progress, metrics and health. The way of a job through it is in [`controller`].

pub mod controller;
pub mod http;
pub mod leader;
pub mod metrics;
pub mod operate;
pub mod progress;
pub mod settings;
pub mod traces;
mod trim;

/// An error and its causes as one line; what a cause repeats is left out.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
