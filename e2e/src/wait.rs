//! Waits that watch, have a deadline, and name in their error what they waited for.

use std::fmt::Debug;
use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Result, anyhow};
use futures::StreamExt;
use kube::api::{Api, ListParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::MissedTickBehavior;

/// Deadline of everything that takes less time than training.
pub const SHORT: Duration = Duration::from_secs(90);
/// Deadline of a job from its first step to its last, on a small and busy machine.
pub const TRAINING: Duration = Duration::from_secs(420);
/// Pause between two attempts of [`until_ok`].
const ATTEMPTS: Duration = Duration::from_secs(1);

/// Awaits `future` for at most `limit`.
///
/// # Errors
/// Its own, or that `what` did not happen within `limit`.
pub async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| anyhow!("waited {} s in vain for {what}", limit.as_secs());
    tokio::time::timeout(limit, future).await.map_err(late)?
}

/// Repeats an operation until it succeeds, and returns its result: what it asks may be away for a while.
///
/// # Errors
/// If that takes longer than `limit`; the error holds that of the last attempt.
pub async fn until_ok<T, F>(limit: Duration, what: &str, mut operation: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let (mut attempts, mut last) = (tokio::time::interval(ATTEMPTS), None);
    attempts.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let succeeds = async {
        loop {
            attempts.tick().await;
            match operation().await {
                Ok(result) => return Ok(result),
                Err(error) => last = Some(error),
            }
        }
    };
    let result = within(limit, what, succeeds).await;
    result.map_err(|late| {
        last.map_or(late, |error| error.context(format!("waited {} s in vain for {what}", limit.as_secs())))
    })
}

/// Waits until `is` holds for the object, and returns it (`None`: it does not exist).
///
/// # Errors
/// If that takes longer than `limit`.
pub async fn until<K>(
    api: &Api<K>,
    name: &str,
    limit: Duration,
    what: &str,
    is: impl Fn(Option<&K>) -> bool,
) -> Result<Option<K>>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    // A watch that ends with an error is started again: only the deadline ends the wait.
    let watch = watch_object(api.clone(), name).default_backoff();
    let seen = async {
        let mut watch = pin!(watch);
        while let Some(event) = watch.next().await {
            match event {
                Ok(object) if is(object.as_ref()) => return Ok(object),
                Ok(_) => {}
                Err(error) => eprintln!("watching {name}: {error}"),
            }
        }
        Err(anyhow!("the watch of {name} ended"))
    };
    within(limit, what, seen).await
}

/// Waits until no object that `parameters` select is left.
///
/// # Errors
/// If that takes longer than `limit`.
pub async fn until_none<K>(api: &Api<K>, parameters: &ListParams, limit: Duration, what: &str) -> Result<()>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let gone = async {
        while let Some(object) = api.list_metadata(parameters).await?.items.first() {
            let (name, uid) = (object.name_any(), object.uid());
            until(api, &name, limit, what, |now| now.is_none_or(|now| now.uid() != uid)).await?;
        }
        Ok(())
    };
    within(limit, what, gone).await
}
