//! Serves the page: its files, and the changes of jobs as server-sent events. Nothing is served without the token.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures::stream::{self, Stream};
use tokio::net::TcpListener;

use crate::board::{Board, Reader};
use crate::files::{files, protect};
use crate::token::Token;

/// Changes of this time are one event.
const PERIOD: Duration = Duration::from_millis(250);

const UNAUTHORIZED: &str = "This page needs its token: open the address that psjobs printed.\n";

/// Reads the logs of processes.
pub trait Logs: Send + Sync + 'static {
    /// Returns the last lines that a process of a job wrote; an error is a sentence for people.
    fn tail<'a>(
        &'a self,
        job: &'a str,
        process: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + 'a>>;
}

/// The jobs that are served, their logs, and the token that a visitor needs.
#[derive(Clone)]
pub struct Site {
    pub board: Arc<Board>,
    pub logs: Arc<dyn Logs>,
    pub token: Token,
}

/// A site at its address.
#[derive(Clone)]
struct Served {
    site: Site,
    /// Cookies have no port: two jobs of one machine need two names.
    cookie: Arc<str>,
}

/// Serves until the board is closed and every browser has its last state.
///
/// # Errors
/// If the listener fails.
pub async fn serve(listener: TcpListener, site: Site) -> io::Result<()> {
    let mut changed = site.board.watch();
    let cookie = format!("psjobs-{}", listener.local_addr()?.port()).into();
    let served = Served { site, cookie };
    let router = Router::new()
        .route("/events", get(list))
        .route("/events/{*job}", get(job))
        .route("/logs/{process}/{*job}", get(log))
        .merge(files())
        .layer(from_fn_with_state(served.clone(), guard))
        .with_state(served);
    let closed = async move {
        changed.wait_for(|state| state.is_closed).await.ok();
    };
    axum::serve(listener, router).with_graceful_shutdown(closed).await
}

/// Lets a request with the token pass, and adds to every answer what protects its reader.
async fn guard(State(served): State<Served>, request: Request, next: Next) -> Response {
    let given = request.uri().query().and_then(|query| query.split('&').find_map(|part| part.strip_prefix("token=")));
    let response = if given.is_some_and(|token| served.site.token.matches(token)) {
        enter(&served)
    } else if is_known(&served, request.headers()) {
        next.run(request).await
    } else {
        (StatusCode::UNAUTHORIZED, UNAUTHORIZED).into_response()
    };
    protect(response)
}

/// Exchanges the token in the address for a cookie, so that the address can be shown to others. The cookie is not strict: the
/// address may be opened from a terminal in another page.
fn enter(served: &Served) -> Response {
    let cookie = format!("{}={}; HttpOnly; SameSite=Lax; Path=/", served.cookie, served.site.token.as_str());
    let headers = [(header::SET_COOKIE, cookie), (header::LOCATION, "/".to_owned())];
    (StatusCode::SEE_OTHER, headers).into_response()
}

/// Says if a request has the token, as a browser's cookie or as a program's `Authorization: Bearer TOKEN`.
fn is_known(served: &Served, headers: &HeaderMap) -> bool {
    let texts = |name| headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    let bearer = texts(header::AUTHORIZATION).filter_map(|value| value.strip_prefix("Bearer "));
    let pairs = texts(header::COOKIE).flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.split_once('='));
    let cookies = pairs.filter(|(name, _)| name.trim() == &*served.cookie).map(|(_, value)| value);
    bearer.chain(cookies).any(|token| served.site.token.matches(token.trim()))
}

async fn list(State(served): State<Served>) -> Response {
    events(served.site.board, None).into_response()
}

async fn job(State(served): State<Served>, Path(job): Path<String>) -> Response {
    events(served.site.board, Some(job)).into_response()
}

async fn log(State(served): State<Served>, Path((process, job)): Path<(String, String)>) -> Response {
    match served.site.logs.tail(&job, &process).await {
        Ok(text) => text.into_response(),
        Err(error) => (StatusCode::NOT_FOUND, error).into_response(),
    }
}

/// The changes of one job, or of the list of all, until the board is closed. The first event has everything.
fn events(board: Arc<Board>, job: Option<String>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let changed = board.watch();
    let changes = stream::unfold((board, Reader::new(job), changed), async |(board, mut reader, mut changed)| {
        loop {
            let is_closed = changed.borrow_and_update().is_closed;
            let news = reader.news(&board, |_| true);
            if !news.is_empty() {
                let event = Event::default().data(serde_json::Value::Object(news).to_string());
                return Some((Ok(event), (board, reader, changed)));
            }
            if is_closed || changed.changed().await.is_err() {
                return None;
            }
            if !changed.borrow().is_closed {
                tokio::time::sleep(PERIOD).await;
            }
        }
    });
    Sse::new(changes).keep_alive(KeepAlive::default())
}

#[cfg(test)]
mod tests;
