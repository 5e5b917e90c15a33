//! The tracking server, and how to show it who asks.

use reqwest::Url;

use crate::error::TrackingError;

const USERNAME: &str = "MLFLOW_TRACKING_USERNAME";
const PASSWORD: &str = "MLFLOW_TRACKING_PASSWORD";
const TOKEN: &str = "MLFLOW_TRACKING_TOKEN";

/// Where and as whom a job is tracked.
pub struct Settings {
    /// Address without a slash at its end.
    pub(crate) uri: String,
    pub(crate) experiment: String,
    pub(crate) credentials: Credentials,
}

/// Proof of who sends a request. It is never logged.
#[derive(Clone, PartialEq)]
pub(crate) enum Credentials {
    Nothing,
    Basic { username: String, password: String },
    Token(String),
}

impl Settings {
    /// Reads the address of a tracking server. The credentials are among `variables`, those of an environment, with the names
    /// that MLflow's own client knows.
    ///
    /// # Errors
    /// If it is no address, or has credentials itself, or of a name and a password one is missing.
    pub fn new(
        uri: &str,
        experiment: &str,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, TrackingError> {
        // A log shows no credentials.
        let shown = uri.rsplit_once('@').map_or(uri, |(_, behind)| behind).to_owned();
        let wrong = |problem: String| TrackingError::Address { uri: shown.clone(), problem };
        let url = Url::parse(uri).map_err(|error| wrong(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong("it is neither http:// nor https://".to_owned()));
        }
        if uri.contains(['@', '?', '#']) {
            let problem = "it has one of the letters @, ? and #; credentials belong to the environment";
            return Err(wrong(problem.to_owned()));
        }
        Ok(Self {
            uri: uri.trim_end_matches('/').to_owned(),
            experiment: experiment.to_owned(),
            credentials: Credentials::find(variables)?,
        })
    }
}

impl Credentials {
    fn find(variables: impl IntoIterator<Item = (String, String)>) -> Result<Self, TrackingError> {
        let (mut username, mut password, mut token) = (None, None, None);
        for (name, value) in variables.into_iter().filter(|(_, value)| !value.is_empty()) {
            match name.as_str() {
                USERNAME => username = Some(value),
                PASSWORD => password = Some(value),
                TOKEN => token = Some(value),
                _ => {}
            }
        }
        match (username, password, token) {
            (Some(username), Some(password), _) => Ok(Self::Basic { username, password }),
            (_, _, Some(token)) => Ok(Self::Token(token)),
            (Some(_), None, None) => Err(TrackingError::Credentials { set: USERNAME, missing: PASSWORD }),
            (None, Some(_), None) => Err(TrackingError::Credentials { set: PASSWORD, missing: USERNAME }),
            (None, None, None) => Ok(Self::Nothing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(variables: &[(&str, &str)]) -> Vec<(String, String)> {
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn an_address_is_one_of_http() {
        for (uri, trimmed) in
            [("http://localhost:5000", "http://localhost:5000"), ("https://a.b/mlflow/", "https://a.b/mlflow")]
        {
            assert_eq!(Settings::new(uri, "e", []).map(|settings| settings.uri).ok().as_deref(), Some(trimmed));
        }
        for (uri, said) in [
            ("mlflow:5000", "neither http:// nor https://"),
            ("file:///mlruns", "neither http:// nor https://"),
            ("mlruns", "no address"),
            ("http://user:secret@host", "credentials belong to the environment"),
            ("http://host?x=1", "letters @, ? and #"),
        ] {
            let error = Settings::new(uri, "e", []).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(said) && !error.contains("secret"), "{uri}: {error}");
        }
    }

    #[test]
    fn credentials_are_those_of_the_environment() {
        let basic = Credentials::Basic { username: "u".into(), password: "p".into() };
        for (variables, wanted) in [
            (&[][..], Some(Credentials::Nothing)),
            (&[(USERNAME, "u"), (PASSWORD, "p"), (TOKEN, "t")], Some(basic)),
            (&[(TOKEN, "t"), ("MLFLOW_TRACKING_URI", "x")], Some(Credentials::Token("t".into()))),
            (&[(USERNAME, "u"), (TOKEN, "t")], Some(Credentials::Token("t".into()))),
            (&[(USERNAME, "u"), (PASSWORD, "")], None),
            (&[(PASSWORD, "p")], None),
        ] {
            let found = Credentials::find(set(variables));
            assert!(found.ok() == wanted, "{variables:?}");
        }
    }
}
