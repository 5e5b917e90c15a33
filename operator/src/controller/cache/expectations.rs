//! Expectations: children that were created and that the watch has not shown yet. While hundreds of jobs begin, a watch
//! is seconds behind; without expectations, the next reconcile of a job would create the children of the last one again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::runtime::reflector::Lookup;
use kube::runtime::watcher::Event;
use parking_lot::{Mutex, MutexGuard};

/// How long an unconfirmed creation is trusted; longer than the lag of a healthy watch.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Namespace and name.
type Key = (String, String);

/// Expected children by namespace and name, each with a value from the answer to its creation.
#[derive(Debug)]
pub struct Expectations<V>(Arc<Mutex<HashMap<Key, Child<V>>>>);

#[derive(Debug)]
enum Child<V> {
    /// The request is under way; the watch may show the child before the answer arrives.
    Requested,
    Created(V, Instant),
}

impl<V> Clone for Expectations<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V> Default for Expectations<V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// The request that creates a child. If it is dropped before the child was created, nothing is expected.
#[derive(Debug)]
pub struct Request<'a, V> {
    expectations: &'a Expectations<V>,
    key: Key,
}

impl<V> Request<'_, V> {
    /// Expects the child, which was created. Does nothing if the watch has shown it already: it may be deleted by now.
    pub fn created(self, child: V, now: Instant) {
        if let Some(known) = self.expectations.lock().get_mut(&self.key) {
            *known = Child::Created(child, now);
        }
    }
}

impl<V> Drop for Request<'_, V> {
    fn drop(&mut self) {
        let mut children = self.expectations.lock();
        if let Some(Child::Requested) = children.get(&self.key) {
            children.remove(&self.key);
        }
    }
}

impl<V> Expectations<V> {
    /// Begins the creation of a child.
    pub fn request(&self, namespace: &str, name: &str) -> Request<'_, V> {
        let key = (namespace.to_owned(), name.to_owned());
        self.lock().insert(key.clone(), Child::Requested);
        Request { expectations: self, key }
    }

    /// Removes the child that an event shows; all of them when the watch starts again with a list. Must be called after
    /// the cache was updated, so that a child is never missing in both.
    pub fn observe_event<K: Lookup>(&self, event: &Event<K>) {
        match event {
            Event::Apply(child) | Event::InitApply(child) | Event::Delete(child) => {
                if let (Some(namespace), Some(name)) = (child.namespace(), child.name()) {
                    self.lock().remove(&(namespace.into_owned(), name.into_owned()));
                }
            }
            Event::Init => self.lock().clear(),
            Event::InitDone => {}
        }
    }

    /// Returns an expected child. It is newer than the cache's.
    pub fn get(&self, namespace: &str, name: &str, now: Instant) -> Option<V>
    where
        V: Clone,
    {
        let children = self.lock();
        match children.get(&(namespace.to_owned(), name.to_owned()))? {
            Child::Created(child, at) if now.saturating_duration_since(*at) < TIMEOUT => Some(child.clone()),
            Child::Created(..) | Child::Requested => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Child<V>>> {
        // Every change above is complete before anything can panic.
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    fn pod(name: &str) -> Pod {
        serde_yaml::from_str(&format!("metadata: {{name: {name}, namespace: team}}")).expect("a pod")
    }

    #[test]
    fn a_child_is_remembered_from_the_answer_until_the_watch_reports_it() {
        let now = Instant::now();
        for event in [Event::Apply(pod("a")), Event::Delete(pod("a")), Event::InitApply(pod("a")), Event::Init] {
            let expectations = Expectations::default();
            let request = expectations.request("team", "a");
            assert_eq!(expectations.get("team", "a", now), None, "it is not known yet whether it is created");
            request.created(1, now);
            expectations.observe_event(&Event::Apply(pod("b")));
            expectations.observe_event(&Event::<Pod>::InitDone);
            assert_eq!(expectations.get("team", "a", now), Some(1));
            assert_eq!(expectations.get("other", "a", now), None);
            expectations.observe_event(&event);
            assert_eq!(expectations.get("team", "a", now), None, "{event:?}");
        }
    }

    #[test]
    fn an_answer_after_the_watch_and_one_that_refuses_leave_nothing() {
        let (expectations, now) = (Expectations::default(), Instant::now());
        let request = expectations.request("team", "a");
        expectations.observe_event(&Event::Apply(pod("a")));
        request.created(1, now);
        assert_eq!(expectations.get("team", "a", now), None, "it may be deleted by now");
        drop(expectations.request("team", "a"));
        assert!(expectations.lock().is_empty());
    }

    #[test]
    fn a_watch_that_is_silent_is_not_waited_for_without_end() {
        let (expectations, now) = (Expectations::default(), Instant::now());
        expectations.request("team", "a").created(1, now);
        assert_eq!(expectations.get("team", "a", now + TIMEOUT - Duration::from_millis(1)), Some(1));
        assert_eq!(expectations.get("team", "a", now + TIMEOUT), None);
    }
}
