//! The objects that this process hosts, and the processes that hold references to them. An object lives while there
//! is a reference to it, or for as long as the process if it is a singleton.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::RemoteError;
use crate::ids::{ObjectId, Session};

/// Hosted objects by number; `H` is an object, cheap to clone.
pub(crate) struct ObjectTable<H> {
    table: Mutex<Table<H>>,
    singletons: Mutex<HashMap<String, Arc<Mutex<Option<ObjectId>>>>>,
}

struct Table<H> {
    last_id: ObjectId,
    objects: HashMap<ObjectId, Entry<H>>,
}

struct Entry<H> {
    name: Arc<str>,
    hosted: H,
    /// References by holder, each at least 1.
    holders: BTreeMap<Session, u64>,
    pinned: bool,
}

impl<H> Default for ObjectTable<H> {
    fn default() -> Self {
        Self { table: Mutex::new(Table { last_id: 0, objects: HashMap::new() }), singletons: Mutex::default() }
    }
}

impl<H: Clone> ObjectTable<H> {
    /// Adds an object, held once by `holder`.
    pub fn insert(&self, name: Arc<str>, hosted: H, holder: Session) -> ObjectId {
        let mut table = self.table.lock();
        table.last_id += 1;
        let id = table.last_id;
        table.objects.insert(id, Entry { name, hosted, holders: BTreeMap::from([(holder, 1)]), pinned: false });
        id
    }

    /// Returns the place of the singleton `name`: empty until it is made. The thread that locks it makes it.
    pub fn singleton(&self, name: &str) -> Arc<Mutex<Option<ObjectId>>> {
        Arc::clone(self.singletons.lock().entry(name.to_owned()).or_default())
    }

    /// Keeps an object for as long as the process lives.
    pub fn pin(&self, id: ObjectId) {
        if let Some(entry) = self.table.lock().objects.get_mut(&id) {
            entry.pinned = true;
        }
    }

    /// Returns whether an object is kept for as long as the process lives.
    pub fn is_pinned(&self, id: ObjectId) -> bool {
        self.table.lock().objects.get(&id).is_some_and(|entry| entry.pinned)
    }

    pub fn find(&self, id: ObjectId) -> Result<(Arc<str>, H), RemoteError> {
        let table = self.table.lock();
        let entry = table.objects.get(&id).ok_or_else(|| gone(id))?;
        Ok((Arc::clone(&entry.name), entry.hosted.clone()))
    }

    /// Counts one more reference; gives the object's name.
    pub fn retain(&self, id: ObjectId, holder: Session) -> Result<Arc<str>, RemoteError> {
        let mut table = self.table.lock();
        let entry = table.objects.get_mut(&id).ok_or_else(|| gone(id))?;
        *entry.holders.entry(holder).or_default() += 1;
        Ok(Arc::clone(&entry.name))
    }

    /// Counts one reference less and frees the object with the last.
    pub fn release(&self, id: ObjectId, holder: Session) {
        let freed = {
            let mut table = self.table.lock();
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

    /// Sets the references of one holder; a holder of none is removed.
    pub fn reconcile(&self, holder: Session, held: &HashMap<ObjectId, u64>) {
        let freed = {
            let mut table = self.table.lock();
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
        self.singletons.lock().clear();
        let freed = std::mem::take(&mut self.table.lock().objects);
        drop(freed);
    }

    /// Returns the number of objects, and of references to them.
    pub fn count(&self) -> (usize, u64) {
        let table = self.table.lock();
        let references = table.objects.values().flat_map(|entry| entry.holders.values()).sum();
        (table.objects.len(), references)
    }
}

impl<H> Table<H> {
    fn remove_unheld(&mut self) -> Vec<Entry<H>> {
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

    fn table_with_one() -> (ObjectTable<()>, ObjectId) {
        let table = ObjectTable::default();
        let id = table.insert("test".into(), (), 1);
        (table, id)
    }

    #[test]
    fn an_object_lives_until_its_last_holder_lets_go() {
        let (table, id) = table_with_one();
        table.retain(id, 1).expect("it lives");
        table.retain(id, 2).expect("it lives");
        assert_eq!(table.count(), (1, 3));
        table.release(id, 1);
        table.release(id, 1);
        assert_eq!(table.count(), (1, 1));
        table.release(id, 1);
        assert_eq!(table.count(), (1, 1), "a release too many takes nothing from others");
        table.release(id, 2);
        assert_eq!(table.count(), (0, 0));
        assert!(table.find(id).expect_err("freed").to_string().contains("not here any more"));
    }

    #[test]
    fn a_dead_holder_frees_what_only_it_held() {
        let (table, id) = table_with_one();
        let shared = table.insert("shared".into(), (), 1);
        table.retain(shared, 2).expect("it lives");
        table.reconcile(1, &HashMap::new());
        assert!(table.find(id).is_err());
        assert!(table.find(shared).is_ok());
    }

    #[test]
    fn a_reconnect_tells_the_true_counts() {
        let (table, id) = table_with_one();
        table.reconcile(1, &HashMap::from([(id, 4)]));
        assert_eq!(table.count(), (1, 4));
    }

    #[test]
    fn a_pinned_object_needs_no_holder() {
        let (table, id) = table_with_one();
        table.pin(id);
        table.release(id, 1);
        assert_eq!(table.count(), (1, 0));
    }
}
