//! Asks the server 0 of a job at the port of its metrics. That is plain HTTP without credentials: nothing there is a secret.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::StatusCode;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::de::DeserializeOwned;

/// How long a connection may take. Pods that cannot be reached would hold up the questions to others.
const CONNECT: Duration = Duration::from_secs(2);

/// One of the questions that a server answers.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    pub path: &'static str,
    /// The longest answer that is read.
    pub most_bytes: usize,
    /// How long a server may take to answer. A later answer is dropped.
    pub deadline: Duration,
}

/// The answer of a server; `None` if it does not know the question, because it is of an older version. The text says why there is none.
pub type Answer<T> = Result<Option<T>, String>;

/// Asks servers.
#[derive(Clone)]
pub struct Asker(Client<HttpConnector, Body>);

impl Default for Asker {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        // A connection that is kept until the next question would only keep a server from ending.
        Self(Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector))
    }
}

impl Asker {
    /// Returns the answer of a server.
    ///
    /// # Errors
    /// As [`Answer`].
    pub async fn ask<T: DeserializeOwned>(&self, server: SocketAddr, question: Question) -> Answer<T> {
        let answer = tokio::time::timeout(question.deadline, self.read(server, question)).await;
        answer.unwrap_or_else(|_| Err("it did not answer in time".to_owned()))
    }

    async fn read<T: DeserializeOwned>(&self, server: SocketAddr, question: Question) -> Answer<T> {
        let Question { path, most_bytes, .. } = question;
        let uri = format!("http://{server}{path}").parse().map_err(|error| format!("{server}: {error}"))?;
        let reply = self.0.get(uri).await.map_err(|error| error.to_string())?;
        match reply.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Ok(None),
            other => return Err(format!("it answered {other}")),
        }
        let body = to_bytes(Body::new(reply.into_body()), most_bytes).await.map_err(|error| error.to_string())?;
        serde_json::from_slice(&body).map(Some).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::get;

    use super::*;

    #[tokio::test]
    async fn an_answer_is_read_within_bounds() {
        let never = || async { std::future::pending::<String>().await };
        let router = Router::new()
            .route("/list", get(|| async { "[1, 2]" }))
            .route("/text", get(|| async { "no JSON" }))
            .route("/later", get(|| async { (StatusCode::SERVICE_UNAVAILABLE, "not yet\n") }))
            .route("/long", get(|| async { format!("[{}1]", "1, ".repeat(1_000)) }))
            .route("/never", get(never));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let server = listener.local_addr().expect("an address");
        tokio::spawn(axum::serve(listener, router).into_future());
        let ask = async |server, path, seconds| {
            let question = Question { path, most_bytes: 1_000, deadline: Duration::from_secs(seconds) };
            Asker::default().ask::<Vec<u32>>(server, question).await
        };
        assert_eq!(ask(server, "/list", 30).await, Ok(Some(vec![1, 2])));
        assert_eq!(ask(server, "/missing", 30).await, Ok(None), "an older server");
        for (path, seconds, wanted) in [
            ("/text", 30, "expected"),
            ("/later", 30, "it answered 503"),
            ("/long", 30, "limit"),
            ("/never", 0, "in time"),
        ] {
            let error = ask(server, path, seconds).await.expect_err(path);
            assert!(error.contains(wanted), "{path}: {error}");
        }
        let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("an address");
        assert!(ask(gone, "/list", 30).await.is_err(), "no server");
    }
}
