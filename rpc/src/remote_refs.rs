//! What this process holds elsewhere: references and open contexts, by the session of the process that
//! has them. Pure bookkeeping; it makes a reconnect tell the truth.

use std::collections::{BTreeMap, BTreeSet};

use super::object_table::{ObjectId, Session};

/// Number of an autograd context, drawn at random by the process that opened it.
pub type ContextId = u64;

#[derive(Debug, Default)]
pub(crate) struct RemoteRefs {
    references: BTreeMap<(Session, ObjectId), u64>,
    contexts: BTreeSet<(Session, ContextId)>,
}

/// What was held at one process at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Snapshot {
    pub references: BTreeMap<ObjectId, u64>,
    pub contexts: BTreeSet<ContextId>,
}

/// What happened since a snapshot, for the process that has it.
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

    /// True if the context was open there.
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

    /// How to get from `before` to what is held now. Contexts are only opened over a connection, so
    /// none can have been added.
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
        let mut holdings = RemoteRefs::default();
        for id in [1, 1, 2] {
            holdings.add_reference(7, id);
        }
        holdings.add_reference(8, 1);
        holdings.add_context(7, 50);
        let before = holdings.snapshot(7);
        assert_eq!(before.references, BTreeMap::from([(1, 2), (2, 1)]), "only what is held at 7");

        holdings.remove_reference(7, 1);
        holdings.remove_reference(7, 2);
        holdings.add_reference(7, 3);
        assert!(holdings.remove_context(7, 50));
        assert_eq!(
            holdings.since(&before, 7),
            [Change::Release(1), Change::Release(2), Change::Retain(3), Change::End(50)]
        );
    }
}
