//! The changes of jobs as server-sent events, as long as their reader may see them.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Extension, Path, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures::stream;
use psjobs_web::{Reader, State as Changes, Watching};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tracing::warn;

use super::{Site, forbidden, refuse, split};
use crate::access::{LIFETIME, Right, Visitor};

/// Changes of this time are one event.
const PERIOD: Duration = Duration::from_millis(250);

/// The part of the jobs that one connection sends.
struct News {
    site: Site,
    visitor: Visitor,
    changed: watch::Receiver<Changes>,
    /// The job, and `None` for the list of all.
    job: Option<String>,
    reader: Reader,
    /// Uid of the job whose record has been sent.
    recorded: Option<String>,
    is_first: bool,
    /// Server 0 is asked for its trainers as long as somebody looks.
    _watching: Option<Watching>,
}

pub async fn list(State(site): State<Site>, Extension(visitor): Extension<Visitor>) -> Response {
    News::new(site, visitor, None).into_response()
}

pub async fn job(
    State(site): State<Site>,
    Extension(visitor): Extension<Visitor>,
    headers: HeaderMap,
    Path(key): Path<String>,
) -> Response {
    let Some((namespace, _)) = split(&key) else { return forbidden() };
    match visitor.may(Right::Jobs, namespace).await {
        Ok(true) => News::new(site, visitor, Some(key)).into_response(),
        Ok(false) => forbidden(),
        Err(error) => refuse(&headers, &error),
    }
}

impl News {
    fn new(site: Site, visitor: Visitor, job: Option<String>) -> Self {
        let (changed, reader) = (site.board.watch(), Reader::new(job.clone()));
        let watching = job.as_ref().map(|job| site.board.look_at(job));
        Self { site, visitor, changed, job, reader, recorded: None, is_first: true, _watching: watching }
    }

    fn into_response(self) -> Response {
        let events = stream::unfold(self, |mut news| async move {
            let event = news.next().await?;
            Some((Ok::<_, Infallible>(event), news))
        });
        Sse::new(events).keep_alive(KeepAlive::default()).into_response()
    }

    /// Returns the next event, the first one at once. `None` ends the connection: the server ends, or the reader may not see this
    /// any more, or the cluster does not say if they may. A browser connects again.
    async fn next(&mut self) -> Option<Event> {
        loop {
            let is_closed = self.changed.borrow_and_update().is_closed;
            let news = match self.job.clone() {
                None => self.of_all().await?,
                Some(key) => self.of_one(&key).await?,
            };
            if self.is_first || !news.is_empty() {
                self.is_first = false;
                return Some(Event::default().data(Value::Object(news).to_string()));
            }
            if is_closed {
                return None;
            }
            self.wait().await?;
        }
    }

    async fn of_all(&mut self) -> Option<Map<String, Value>> {
        let names = self.site.board.names();
        let namespaces: BTreeSet<String> = names.iter().filter_map(|name| Some(split(name)?.0.to_owned())).collect();
        let seen = self.visitor.sees(namespaces).await.ok()?;
        let is_seen = |name: &str| split(name).is_some_and(|(namespace, _)| seen.contains(namespace));
        Some(self.reader.news(&self.site.board, is_seen))
    }

    async fn of_one(&mut self, key: &str) -> Option<Map<String, Value>> {
        let (namespace, _) = split(key)?;
        if !self.visitor.may(Right::Jobs, namespace).await.ok()? {
            return None;
        }
        match self.site.records.find(key) {
            Some(entry) if self.recorded.as_deref() == Some(entry.uid.as_str()) => Some(Map::new()),
            Some(entry) => match self.site.records.page(&entry).await {
                Ok(page) => {
                    self.recorded = Some(entry.uid);
                    Some(page.into_news())
                }
                Err(error) => {
                    warn!("the record of {key} cannot be read: {error}");
                    None
                }
            },
            None => {
                if self.recorded.take().is_some() {
                    self.reader = Reader::new(Some(key.to_owned()));
                }
                Some(self.reader.news(&self.site.board, |_| true))
            }
        }
    }

    /// Waits for changes, at most until rights have to be looked at again.
    async fn wait(&mut self) -> Option<()> {
        let changed = tokio::time::timeout(LIFETIME, self.changed.changed()).await;
        if let Ok(changed) = changed {
            changed.ok()?;
            let is_closed = self.changed.borrow().is_closed;
            if !is_closed {
                tokio::time::sleep(PERIOD).await;
            }
        }
        Some(())
    }
}
