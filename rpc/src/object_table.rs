//! The objects that this process hosts and who holds them. An object lives while somebody holds a
//! reference to it, or for as long as the process if it is a singleton.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use super::RemoteError;
use super::autograd::HostedModule;
use super::lock::lock;
use super::object::ObjectQueue;

/// Number of a hosted object, unique in its process.
pub type ObjectId = u64;
/// A process that holds references, known by the session that it drew when it started.
pub type Session = u64;

/// What hides behind a reference.
#[derive(Clone, Debug)]
pub(crate) enum Hosted {
    /// Has its own thread, which takes the calls in order.
    Object(ObjectQueue),
    /// A function of parameters and inputs; calls run side by side.
    Module(Arc<HostedModule>),
    /// The result of a function.
    Value(Arc<Mutex<Vec<super::Value>>>),
}

#[derive(Debug, Default)]
pub(crate) struct ObjectTable {
    table: Mutex<Table>,
    singletons: Mutex<HashMap<String, Arc<Mutex<Option<ObjectId>>>>>,
}

#[derive(Debug, Default)]
struct Table {
    last_id: ObjectId,
    objects: HashMap<ObjectId, Entry>,
}

#[derive(Debug)]
struct Entry {
    name: Arc<str>,
    hosted: Hosted,
    /// References by holder, each at least 1.
    holders: BTreeMap<Session, u64>,
    pinned: bool,
}

impl ObjectTable {
    /// Adds an object, held once by `holder`.
    pub fn insert(&self, name: Arc<str>, hosted: Hosted, holder: Session) -> ObjectId {
        let mut table = lock(&self.table);
        table.last_id += 1;
        let id = table.last_id;
        table.objects.insert(id, Entry { name, hosted, holders: BTreeMap::from([(holder, 1)]), pinned: false });
        id
    }

    /// The place of the singleton `name`: empty until it is made. Whoever locks it makes it.
    pub fn singleton(&self, name: &str) -> Arc<Mutex<Option<ObjectId>>> {
        Arc::clone(lock(&self.singletons).entry(name.to_owned()).or_default())
    }

    /// Keeps an object for as long as the process lives.
    pub fn pin(&self, id: ObjectId) {
        if let Some(entry) = lock(&self.table).objects.get_mut(&id) {
            entry.pinned = true;
        }
    }

    pub fn find(&self, id: ObjectId) -> Result<(Arc<str>, Hosted), RemoteError> {
        let table = lock(&self.table);
        let entry = table.objects.get(&id).ok_or_else(|| gone(id))?;
        Ok((Arc::clone(&entry.name), entry.hosted.clone()))
    }

    /// Counts one more reference; gives the object's name.
    pub fn retain(&self, id: ObjectId, holder: Session) -> Result<Arc<str>, RemoteError> {
        let mut table = lock(&self.table);
        let entry = table.objects.get_mut(&id).ok_or_else(|| gone(id))?;
        *entry.holders.entry(holder).or_default() += 1;
        Ok(Arc::clone(&entry.name))
    }

    /// Counts one reference less and frees the object with the last.
    pub fn release(&self, id: ObjectId, holder: Session) {
        let freed = {
            let mut table = lock(&self.table);
            let Some(entry) = table.objects.get_mut(&id) else { return };
            if let Some(count) = entry.holders.get_mut(&holder) {
                *count -= 1;
                if *count == 0 {
                    entry.holders.remove(&holder);
                }
            }
            table.remove_unheld()
        };
        // Outside the lock: what is freed may hold references to other objects here.
        drop(freed);
    }

    /// Sets the references of one holder to what it says it has; with nothing, it is forgotten.
    pub fn reconcile(&self, holder: Session, held: &HashMap<ObjectId, u64>) {
        let freed = {
            let mut table = lock(&self.table);
            for (id, entry) in &mut table.objects {
                match held.get(id) {
                    Some(&count) if count > 0 => entry.holders.insert(holder, count),
                    _ => entry.holders.remove(&holder),
                };
            }
            table.remove_unheld()
        };
        drop(freed);
    }

    /// Drops every object, also the singletons.
    pub fn clear(&self) {
        lock(&self.singletons).clear();
        let freed = std::mem::take(&mut lock(&self.table).objects);
        drop(freed);
    }

    /// Number of objects, and of references to them.
    pub fn count(&self) -> (usize, u64) {
        let table = lock(&self.table);
        let references = table.objects.values().flat_map(|entry| entry.holders.values()).sum();
        (table.objects.len(), references)
    }
}

impl Table {
    fn remove_unheld(&mut self) -> Vec<Entry> {
        self.objects.extract_if(|_, entry| entry.holders.is_empty() && !entry.pinned).map(|(_, entry)| entry).collect()
    }
}

fn gone(id: ObjectId) -> RemoteError {
    RemoteError::new(format!(
        "object {id} is not here any more: its last reference was released, or the holder was silent for a whole lease"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_with_one() -> (ObjectTable, ObjectId) {
        let host = ObjectTable::default();
        let id = host.insert("test".into(), Hosted::Value(Arc::default()), 1);
        (host, id)
    }

    #[test]
    fn an_object_lives_until_its_last_holder_lets_go() {
        let (host, id) = host_with_one();
        host.retain(id, 1).expect("it lives");
        host.retain(id, 2).expect("it lives");
        assert_eq!(host.count(), (1, 3));
        host.release(id, 1);
        host.release(id, 1);
        assert_eq!(host.count(), (1, 1));
        host.release(id, 1);
        assert_eq!(host.count(), (1, 1), "a release too many takes nothing from others");
        host.release(id, 2);
        assert_eq!(host.count(), (0, 0));
        assert!(host.find(id).expect_err("freed").to_string().contains("not here any more"));
    }

    #[test]
    fn a_dead_holder_frees_what_only_it_held() {
        let (host, id) = host_with_one();
        let shared = host.insert("shared".into(), Hosted::Value(Arc::default()), 1);
        host.retain(shared, 2).expect("it lives");
        host.reconcile(1, &HashMap::new());
        assert!(host.find(id).is_err());
        assert!(host.find(shared).is_ok());
    }

    #[test]
    fn a_reconnect_tells_the_true_counts() {
        let (host, id) = host_with_one();
        host.reconcile(1, &HashMap::from([(id, 4)]));
        assert_eq!(host.count(), (1, 4));
    }

    #[test]
    fn a_pinned_object_needs_no_holder() {
        let (host, id) = host_with_one();
        host.pin(id);
        host.release(id, 1);
        assert_eq!(host.count(), (1, 0));
    }
}
