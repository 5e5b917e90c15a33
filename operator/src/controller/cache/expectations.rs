//! Children that were created, until their watch tells of them. While hundreds of jobs begin, a watch is seconds behind:
//! without this, the next reconcile of a job would try to create what the last one has.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::reflector::Lookup;
use kube::runtime::watcher::Event;

/// How long a watch may be silent before creating again finds out; longer than one is ever behind that works.
const PATIENCE: Duration = Duration::from_secs(30);

/// Namespace and name.
type Key = (String, String);

/// By namespace and name; each with what the creator knows of it.
#[derive(Debug)]
pub struct Unseen<V>(Arc<Mutex<HashMap<Key, Child<V>>>>);

#[derive(Debug)]
enum Child<V> {
    /// The request is under way; the watch may tell of the child before the answer comes.
    Requested,
    Created(V, Instant),
}

impl<V> Clone for Unseen<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V> Default for Unseen<V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// The request that creates a child. Dropped before its child was created, it leaves nothing.
#[derive(Debug)]
pub struct Request<'a, V> {
    unseen: &'a Unseen<V>,
    key: Key,
}

impl<V> Request<'_, V> {
    /// The child was created. Not kept if the watch was faster: it may be deleted by now.
    pub fn created(self, child: V, now: Instant) {
        if let Some(known) = self.unseen.lock().get_mut(&self.key) {
            *known = Child::Created(child, now);
        }
    }
}

impl<V> Drop for Request<'_, V> {
    fn drop(&mut self) {
        let mut children = self.unseen.lock();
        if let Some(Child::Requested) = children.get(&self.key) {
            children.remove(&self.key);
        }
    }
}

impl<V> Unseen<V> {
    /// A child is about to be created.
    pub fn request(&self, namespace: &str, name: &str) -> Request<'_, V> {
        let key = (namespace.to_owned(), name.to_owned());
        self.lock().insert(key.clone(), Child::Requested);
        Request { unseen: self, key }
    }

    /// The watch has told of a child, or begins anew with a list that has them all. To be called when the cache has it.
    pub fn told<K: Lookup>(&self, event: &Event<K>) {
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

    /// A child that was created and not told of yet; newer than what the cache has.
    pub fn get(&self, namespace: &str, name: &str, now: Instant) -> Option<V>
    where
        V: Clone,
    {
        let children = self.lock();
        match children.get(&(namespace.to_owned(), name.to_owned()))? {
            Child::Created(child, at) if now.saturating_duration_since(*at) < PATIENCE => Some(child.clone()),
            Child::Created(..) | Child::Requested => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Child<V>>> {
        // Every change above is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_child_is_remembered_from_the_answer_until_the_watch_tells_of_it() {
        let now = Instant::now();
        for event in [Event::Apply(pod("a")), Event::Delete(pod("a")), Event::InitApply(pod("a")), Event::Init] {
            let unseen = Unseen::default();
            let request = unseen.request("team", "a");
            assert_eq!(unseen.get("team", "a", now), None, "nobody knows yet whether it is created");
            request.created(1, now);
            unseen.told(&Event::Apply(pod("b")));
            unseen.told(&Event::<Pod>::InitDone);
            assert_eq!(unseen.get("team", "a", now), Some(1));
            assert_eq!(unseen.get("other", "a", now), None);
            unseen.told(&event);
            assert_eq!(unseen.get("team", "a", now), None, "{event:?}");
        }
    }

    #[test]
    fn an_answer_after_the_watch_and_one_that_refuses_leave_nothing() {
        let (unseen, now) = (Unseen::default(), Instant::now());
        let request = unseen.request("team", "a");
        unseen.told(&Event::Apply(pod("a")));
        request.created(1, now);
        assert_eq!(unseen.get("team", "a", now), None, "it may be deleted by now");
        drop(unseen.request("team", "a"));
        assert!(unseen.lock().is_empty());
    }

    #[test]
    fn a_watch_that_is_silent_is_not_waited_for_without_end() {
        let (unseen, now) = (Unseen::default(), Instant::now());
        unseen.request("team", "a").created(1, now);
        assert_eq!(unseen.get("team", "a", now + PATIENCE - Duration::from_millis(1)), Some(1));
        assert_eq!(unseen.get("team", "a", now + PATIENCE), None);
    }
}
