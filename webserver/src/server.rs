//! Serves the page to those who may see it. The list has the jobs of the namespaces whose jobs a visitor may list; an answer about
//! a job of another namespace is the same, whether there is such a job or not.

mod news;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Extension, Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use kubectl_psjob::web::tail;
use psjobs_web::{Board, files, protect};

use crate::access::{Access, AccessError, Right, Visitor};
use crate::login;
use crate::records::Records;

/// Paths that need no token; nor does the form, which is posted to `/`.
const OPEN: [&str; 4] = ["/login", "/page.css", "/healthz", "/readyz"];
/// Bytes of a form.
const FORM: usize = 32 << 10;

const FORBIDDEN: &str = "Your token does not give the right to see this, if it is there.\n";
const NOT_A_TOKEN: &str = "This is not a token. Copy the whole of it, without blanks and quotes.";
const NO_TOKEN: &str = "This page shows the jobs that your token gives the right to list.";

/// The jobs that are served, and what answers need.
#[derive(Clone)]
pub struct Site {
    pub board: Arc<Board>,
    pub records: Arc<Records>,
    pub access: Arc<Access>,
    /// Reads logs.
    pub client: Client,
    /// The jobs of the cluster are known.
    pub ready: Arc<AtomicBool>,
}

/// Returns the routes of the page.
pub fn router(site: Site) -> Router {
    Router::new()
        .route("/events", get(news::list))
        .route("/events/{*job}", get(news::job))
        .route("/logs/{process}/{*job}", get(log))
        .route("/", post(enter))
        .route("/login", post(enter).get(form))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .merge(files())
        .layer(from_fn_with_state(site.clone(), guard))
        .layer(DefaultBodyLimit::max(FORM))
        .with_state(site)
}

/// Lets a request with a token that the cluster knows pass, and adds to every answer what protects its reader.
async fn guard(State(site): State<Site>, mut request: Request, next: Next) -> Response {
    let is_form = request.method() == Method::POST && request.uri().path() == "/";
    if is_form || OPEN.contains(&request.uri().path()) {
        return protect(next.run(request).await);
    }
    let headers = request.headers().clone();
    let response = match login::token(&headers) {
        None => login::refuse(&headers, NO_TOKEN),
        Some(token) => match site.access.visitor(&token).await {
            Ok(visitor) => {
                request.extensions_mut().insert(visitor);
                next.run(request).await
            }
            Err(error) => refuse(&headers, &error),
        },
    };
    protect(response)
}

/// Takes the token of the form, if the cluster knows it.
async fn enter(State(site): State<Site>, headers: HeaderMap, body: Bytes) -> Response {
    if login::is_foreign(&headers) {
        return forbidden();
    }
    let Some(token) = login::of_form(&body) else { return login::refuse(&headers, NOT_A_TOKEN) };
    match site.access.visitor(&token).await {
        Ok(_) => login::enter(&token, &headers),
        Err(error) => refuse(&headers, &error),
    }
}

async fn form(headers: HeaderMap) -> Response {
    login::refuse(&headers, NO_TOKEN)
}

async fn readiness(State(site): State<Site>) -> Response {
    match site.ready.load(Ordering::Relaxed) {
        true => "ok\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the jobs of the cluster are not known yet\n").into_response(),
    }
}

/// The last lines of a process: those of the job's record, if it has one.
async fn log(
    State(site): State<Site>,
    Extension(visitor): Extension<Visitor>,
    headers: HeaderMap,
    Path((process, key)): Path<(String, String)>,
) -> Response {
    let Some((namespace, job)) = split(&key) else { return forbidden() };
    for right in [Right::Jobs, Right::Logs] {
        match visitor.may(right, namespace).await {
            Ok(true) => {}
            Ok(false) => return forbidden(),
            Err(error) => return refuse(&headers, &error),
        }
    }
    let missing = |why: String| (StatusCode::NOT_FOUND, why).into_response();
    if let Some(entry) = site.records.find(&key) {
        return match site.records.page(&entry).await {
            Ok(mut page) => match page.tails.remove(&process) {
                Some(text) => text.into_response(),
                None => missing(format!("The record of {key} has no lines of {process}.")),
            },
            Err(error) => missing(format!("The record of {key} cannot be read: {error}.")),
        };
    }
    let pods = Api::<Pod>::namespaced(site.client.clone(), namespace);
    tail(&pods, job, &process).await.map_or_else(missing, |text| text.into_response())
}

/// Returns namespace and name of a job. A text that can be no namespace is asked about no cluster.
fn split(key: &str) -> Option<(&str, &str)> {
    let (namespace, name) = key.split_once('/')?;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_namespace = !namespace.is_empty() && namespace.len() <= 63 && namespace.bytes().all(fits);
    is_namespace.then_some((namespace, name))
}

fn forbidden() -> Response {
    (StatusCode::FORBIDDEN, FORBIDDEN).into_response()
}

fn refuse(headers: &HeaderMap, error: &AccessError) -> Response {
    match error {
        AccessError::Unknown => login::refuse(headers, "The cluster does not know this token, or it has expired."),
        AccessError::Unanswered(_) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_named_with_its_namespace() {
        for (key, wanted) in [
            ("team/mnist", Some(("team", "mnist"))),
            ("team-2/a.b", Some(("team-2", "a.b"))),
            ("mnist", None),
            ("/mnist", None),
            ("Team/mnist", None),
            ("../mnist", None),
        ] {
            assert_eq!(split(key), wanted, "{key}");
        }
        assert_eq!(split(&format!("{}/a", "a".repeat(64))), None);
    }
}
