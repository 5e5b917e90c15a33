//! Sends requests to MLflow.

use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, LOCATION};
use reqwest::redirect::Policy;
use reqwest::{Body, Method, RequestBuilder, Url};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::{TrackingError, shortened, words};
use crate::messages::{self, Done, Experiment, Found, Job, Metric, OneExperiment, OneRun, Refusal, Run};
use crate::settings::{Credentials, Settings};

/// Time for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Time for a request and its answer.
const REQUEST: Duration = Duration::from_secs(20);
/// The most parameters that MLflow takes at once.
const MOST_PARAMETERS: usize = 100;
/// MLflow's name of the error that something is not there.
const MISSING: &str = "RESOURCE_DOES_NOT_EXIST";

/// A tracking server, asked by its REST API.
pub struct Client {
    http: reqwest::Client,
    settings: Settings,
}

impl Client {
    /// Makes a client. Sends no request.
    ///
    /// # Errors
    /// If this process cannot send any.
    pub fn new(settings: Settings) -> Result<Self, TrackingError> {
        // HTTPS uses the cryptography of the servers' connections.
        drop(psjobs_ps::tls::cryptography());
        // A request that follows a redirect may come without its body or credentials.
        let mut http = reqwest::Client::builder().connect_timeout(CONNECT).redirect(Policy::none());
        // Without TLS a system that lacks certificates of authorities can send requests, too.
        if Url::parse(&settings.uri).is_ok_and(|url| url.scheme() == "http") {
            http = http.tls_certs_only([]);
        }
        let http = http.build().map_err(|error| TrackingError::Client(words(&error)))?;
        Ok(Self { http, settings })
    }

    /// Returns the address of the server.
    pub fn uri(&self) -> &str {
        &self.settings.uri
    }

    /// Returns the id of the experiment, which is made if there is none.
    ///
    /// # Errors
    /// If the server is away or refuses.
    pub async fn experiment(&self) -> Result<String, TrackingError> {
        let name = &self.settings.experiment;
        match self.get("experiments/get-by-name", &[("experiment_name", name.as_str())]).await {
            Ok(OneExperiment { experiment }) => return Ok(experiment.experiment_id),
            Err(error) if error.has_code(MISSING) => {}
            Err(error) => return Err(error),
        }
        // If another job makes it meanwhile, this one finds it in its next attempt.
        let Experiment { experiment_id } = self.post("experiments/create", &json!({"name": name})).await?;
        Ok(experiment_id)
    }

    /// Returns the run of `job` with all that it has; it is made if there is none.
    ///
    /// # Errors
    /// If the server is away or refuses.
    pub async fn run(&self, experiment: &str, job: &Job, unix_milliseconds: i64) -> Result<Run, TrackingError> {
        let Found { runs } = self.post("runs/search", &messages::search(experiment, &job.uid)).await?;
        let run_id = match runs.into_iter().next() {
            Some(run) => run.info.run_id,
            None => {
                let request = messages::create(experiment, job, unix_milliseconds);
                let OneRun { run } = self.post("runs/create", &request).await?;
                run.info.run_id
            }
        };
        let OneRun { run } = self.get("runs/get", &[("run_id", run_id.as_str())]).await?;
        Ok(run)
    }

    /// Gives a run parameters, which it must not have.
    ///
    /// # Errors
    /// If the server is away or refuses.
    pub async fn log_parameters(&self, run: &str, parameters: &[(String, String)]) -> Result<(), TrackingError> {
        for some in parameters.chunks(MOST_PARAMETERS) {
            let Done {} = self.post("runs/log-batch", &messages::log_parameters(run, some)).await?;
        }
        Ok(())
    }

    /// Gives a run values of metrics.
    ///
    /// # Errors
    /// If the server is away or refuses. It may have taken the values all the same.
    pub async fn log_metrics(&self, run: &str, metrics: &[Metric]) -> Result<(), TrackingError> {
        let Done {} = self.post("runs/log-batch", &messages::log_metrics(run, metrics)).await?;
        Ok(())
    }

    /// Gives a run a status.
    ///
    /// # Errors
    /// If the server is away or refuses.
    pub async fn update(
        &self,
        run: &str,
        status: &str,
        end_unix_milliseconds: Option<i64>,
    ) -> Result<(), TrackingError> {
        let Done {} = self.post("runs/update", &messages::update(run, status, end_unix_milliseconds)).await?;
        Ok(())
    }

    /// Sends an artefact through the server, within `limit`. `path` is that below the root of all artefacts.
    ///
    /// # Errors
    /// If the server is away or refuses, or the body breaks off.
    pub async fn upload(&self, path: &str, body: Body, limit: Duration) -> Result<(), TrackingError> {
        let request = "api/2.0/mlflow-artifacts/artifacts";
        let url = self.url(&format!("{request}/{path}"))?;
        let sent = self.http.request(Method::PUT, url).body(body).timeout(limit);
        let Done {} = self.send(request, sent).await?;
        Ok(())
    }

    async fn get<T: DeserializeOwned>(&self, request: &str, query: &[(&str, &str)]) -> Result<T, TrackingError> {
        let mut url = self.url(&format!("api/2.0/mlflow/{request}"))?;
        url.query_pairs_mut().extend_pairs(query);
        self.send(request, self.http.request(Method::GET, url).timeout(REQUEST)).await
    }

    async fn post<T: DeserializeOwned>(&self, request: &str, body: &Value) -> Result<T, TrackingError> {
        let url = self.url(&format!("api/2.0/mlflow/{request}"))?;
        let sent = self.http.request(Method::POST, url).header(CONTENT_TYPE, "application/json");
        self.send(request, sent.body(body.to_string()).timeout(REQUEST)).await
    }

    fn url(&self, path: &str) -> Result<Url, TrackingError> {
        let uri = &self.settings.uri;
        let wrong = |problem: String| TrackingError::Address { uri: uri.clone(), problem };
        Url::parse(&format!("{uri}/{path}")).map_err(|error| wrong(error.to_string()))
    }

    async fn send<T: DeserializeOwned>(&self, request: &str, sent: RequestBuilder) -> Result<T, TrackingError> {
        let uri = || self.settings.uri.clone();
        let away = |error: reqwest::Error| TrackingError::Away { uri: uri(), words: words(&error.without_url()) };
        let sent = match &self.settings.credentials {
            Credentials::Nothing => sent,
            Credentials::Basic { username, password } => sent.basic_auth(username, Some(password)),
            Credentials::Token(token) => sent.bearer_auth(token),
        };
        let response = sent.send().await.map_err(away)?;
        let status = response.status();
        let location = response.headers().get(LOCATION).filter(|_| status.is_redirection());
        let location = location.and_then(|location| location.to_str().ok()).map(without_query);
        let text = response.text().await.map_err(away)?;
        if !status.is_success() {
            let Refusal { error_code, message } = serde_json::from_str(&text).unwrap_or_default();
            let redirected = location.map(|location| format!("it redirects to {location}"));
            let words = shortened(&redirected.or(message).unwrap_or(text));
            let (request, status) = (request.to_owned(), status.as_u16());
            return Err(TrackingError::Refused { uri: uri(), request, status, code: error_code, words });
        }
        serde_json::from_str(&text).map_err(|error| TrackingError::Answer {
            uri: uri(),
            request: request.to_owned(),
            problem: error.to_string(),
        })
    }
}

/// Returns an address without what follows its path, which may be secret.
fn without_query(address: &str) -> String {
    address.split(['?', '#']).next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn a_client_that_is_made_first_chooses_the_cryptography_of_connections() {
        drop(Client::new(Settings::new("http://tracking", "digits", []).expect("an address")).expect("a client"));
        // This would not choose again.
        let first = psjobs_ps::tls::cryptography().cipher_suites[0].suite();
        assert_eq!(first.as_str(), Some("TLS13_AES_128_GCM_SHA256"));
    }

    #[tokio::test]
    async fn a_redirect_is_not_followed_and_the_error_says_where_to() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let uri = format!("http://{}", listener.local_addr().expect("an address"));
        let client = Client::new(Settings::new(&uri, "digits", []).expect("an address")).expect("a client");
        let answer = async {
            let (mut stream, _) = listener.accept().await.expect("a request");
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).await.expect("a request") > 0);
            let answer = "HTTP/1.1 308 Permanent Redirect\r\nLocation: https://other/mlflow?state=secret\r\n\
                          Content-Length: 0\r\nConnection: close\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.expect("sends");
        };
        let (asked, ()) = tokio::join!(client.experiment(), answer);
        let error = asked.expect_err("it is none of MLflow").to_string();
        assert!(error.contains("it redirects to https://other/mlflow; give the address"), "{error}");
    }
}
