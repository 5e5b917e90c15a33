//! Errors of tracking, with the tracking server's own words.

use std::error::Error;

/// The most characters of a server's words; some answer with a page.
const LONGEST: usize = 400;

/// A request to a tracking server failed, with what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrackingError {
    /// The address is none of a tracking server.
    #[error("{uri} is no address of a tracking server: {problem}; give for example http://mlflow.mlflow:5000")]
    Address {
        /// The address as it was given, without credentials.
        uri: String,
        /// The fault.
        problem: String,
    },
    /// The environment has half of the credentials.
    #[error("{set} is set and {missing} is not; set both, or MLFLOW_TRACKING_TOKEN")]
    Credentials {
        /// The variable that is set.
        set: &'static str,
        /// The variable that is not.
        missing: &'static str,
    },
    /// This process cannot send requests.
    #[error("cannot send requests: {0}; check the certificates of this system's authorities")]
    Client(String),
    /// No answer came.
    #[error("{uri} does not answer: {words}")]
    Away {
        /// The server.
        uri: String,
        /// The client's words.
        words: String,
    },
    /// The server says no.
    #[error("{uri} refused {request} with {status}: {words}{}", advice(*.status, .code.as_deref()))]
    Refused {
        /// The server.
        uri: String,
        /// The path of the request.
        request: String,
        /// Status of HTTP.
        status: u16,
        /// MLflow's name of the error, if it gave one.
        code: Option<String>,
        /// MLflow's words.
        words: String,
    },
    /// The answer is not one of MLflow.
    #[error("{uri} answered {request} with something else than MLflow does: {problem}; check the address")]
    Answer {
        /// The server.
        uri: String,
        /// The path of the request.
        request: String,
        /// The fault.
        problem: String,
    },
    /// The event files or checkpoints cannot be read.
    #[error("cannot read what is to be tracked: {0}")]
    Disk(String),
}

impl TrackingError {
    /// Returns whether the server has answered so with this name of an error.
    pub(crate) fn has_code(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { code: Some(code), .. } if code == wanted)
    }
}

fn advice(status: u16, code: Option<&str>) -> &'static str {
    match (status, code) {
        (401 | 403, _) => {
            "; check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment or in \
             spec.tracking.mlflow.secret"
        }
        (300..=399, _) => "; give the address that it redirects to, if that is one of MLflow",
        (404, None) => "; check that this is the address of an MLflow tracking server",
        _ => "",
    }
}

/// Returns the words of an error and of its causes in one line, not too long.
pub fn words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let said = inner.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = inner.source();
    }
    shortened(&text)
}

/// Returns a text in one line, not too long.
pub fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_mlflows_words_and_what_to_do() {
        for (status, code, said) in [
            (308, None, "give the address that it redirects to"),
            (401, None, "MLFLOW_TRACKING_TOKEN"),
            (404, None, "the address of an MLflow tracking server"),
            (404, Some("RESOURCE_DOES_NOT_EXIST"), "with 404: no such run"),
            (500, None, "with 500: no such run"),
        ] {
            let error = TrackingError::Refused {
                uri: "http://mlflow:5000".into(),
                request: "runs/get".into(),
                status,
                code: code.map(str::to_owned),
                words: "no such run".into(),
            };
            assert!(error.to_string().contains(said), "{error}");
            assert_eq!(error.has_code("RESOURCE_DOES_NOT_EXIST"), code.is_some());
        }
        assert!(shortened(&"ä ".repeat(5000)).chars().count() <= LONGEST + 3);
    }
}
