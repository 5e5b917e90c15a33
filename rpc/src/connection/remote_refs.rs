//! Counts what this process holds elsewhere: references and open contexts, by the session of the process that
//! has them. Does no I/O; a reconnect sends these counts.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{ContextId, ObjectId, Session};

#[derive(Debug, Default)]
pub(crate) struct RemoteRefs {
    references: BTreeMap<(Session, ObjectId), u64>,
    contexts: BTreeSet<(Session, ContextId)>,
}

/// A copy of what was held at one process at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Snapshot {
    pub references: BTreeMap<ObjectId, u64>,
    pub contexts: BTreeSet<ContextId>,
}

/// A change since a snapshot, as it is sent to the process that has the object or context.
#[derive(Debug, PartialEq)]
pub(crate) enum Change {
    Retain(ObjectId),
    Release(ObjectId),
    End(ContextId),
}

impl RemoteRefs {
    pub fn add_reference(&mut self, owner: Session, object: ObjectId) {
        *self.references.entry((owner, object)).or_default() += 1;
    }

    pub fn remove_reference(&mut self, owner: Session, object: ObjectId) {
        if let Some(count) = self.references.get_mut(&(owner, object)) {
            *count -= 1;
            if *count == 0 {
                self.references.remove(&(owner, object));
            }
        }
    }

    pub fn add_context(&mut self, at: Session, context: ContextId) {
        self.contexts.insert((at, context));
    }

    /// Removes a context; true if it was open there.
    pub fn remove_context(&mut self, at: Session, context: ContextId) -> bool {
        self.contexts.remove(&(at, context))
    }

    /// Number of objects and contexts held.
    pub fn count(&self) -> usize {
        self.references.len() + self.contexts.len()
    }

    pub fn snapshot(&self, at: Session) -> Snapshot {
        let references =
            self.references.range((at, 0)..=(at, u64::MAX)).map(|((_, id), count)| (*id, *count)).collect();
        let contexts = self.contexts.range((at, 0)..=(at, u64::MAX)).map(|(_, id)| *id).collect();
        Snapshot { references, contexts }
    }

    /// Returns the changes that lead from `before` to what is held now. Contexts are only opened over a connection,
    /// so none can have been added.
    pub fn since(&self, before: &Snapshot, at: Session) -> Vec<Change> {
        let now = self.snapshot(at);
        let mut changes = Vec::new();
        let ids: BTreeSet<_> = before.references.keys().chain(now.references.keys()).collect();
        for &id in ids {
            let count = |snapshot: &Snapshot| snapshot.references.get(&id).copied().unwrap_or(0);
            let (old, new) = (count(before), count(&now));
            changes.extend((old..new).map(|_| Change::Retain(id)));
            changes.extend((new..old).map(|_| Change::Release(id)));
        }
        changes.extend(before.contexts.difference(&now.contexts).map(|&id| Change::End(id)));
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_lead_from_a_snapshot_to_now() {
        let mut refs = RemoteRefs::default();
        for id in [1, 1, 2] {
            refs.add_reference(7, id);
        }
        refs.add_reference(8, 1);
        refs.add_context(7, 50);
        let before = refs.snapshot(7);
        assert_eq!(before.references, BTreeMap::from([(1, 2), (2, 1)]), "only what is held at 7");

        refs.remove_reference(7, 1);
        refs.remove_reference(7, 2);
        refs.add_reference(7, 3);
        assert!(refs.remove_context(7, 50));
        assert_eq!(
            refs.since(&before, 7),
            [Change::Release(1), Change::Release(2), Change::Retain(3), Change::End(50)]
        );
    }
}
