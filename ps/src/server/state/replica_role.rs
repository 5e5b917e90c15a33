//! The role of a server in a shard that it holds, and its transitions by evidence about the other holder: a pure
//! function.
//!
//! A backup becomes the primary, and a primary goes on alone, only when it is certain that the other process
//! has ended: nothing listens at its address, or a successor speaks for it. Of one that is merely silent
//! nothing is assumed, so that two primaries can never be.

use crate::proto::ShardRole;

/// The role of a server in one shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The server has just started and does not know its role.
    #[default]
    Starting,
    /// The server serves trainers.
    Primary {
        /// The other server has ended: answers do not wait for it.
        alone: bool,
    },
    /// The server follows the primary.
    Backup {
        /// It holds everything that was acknowledged.
        complete: bool,
    },
}

/// Result of a probe of the other server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Nothing listens at its address.
    Gone,
    /// It does not answer.
    Silent,
    /// It reported this role.
    Is(ShardRole),
}

impl Role {
    /// Returns the role after `evidence`; `home` is set if the shard is named after this server.
    #[must_use]
    pub fn after(self, evidence: Evidence, home: bool) -> Self {
        use Evidence::{Gone, Is, Silent};
        match (self, evidence) {
            (Self::Starting, Is(ShardRole::Primary)) => Self::Backup { complete: false },
            // Both have just started; by agreement the one that it is named after takes it.
            (Self::Starting, Is(ShardRole::Starting)) if home => Self::Primary { alone: false },
            (Self::Backup { complete: true }, Gone) | (Self::Primary { .. }, Gone) => Self::Primary { alone: true },
            (Self::Backup { complete: true }, Is(ShardRole::Starting)) => Self::Primary { alone: false },
            // It lacks a part, which no other process has.
            (Self::Backup { complete: false }, Gone | Is(ShardRole::Starting)) => Self::Starting,
            (_, Gone | Silent | Is(_)) => self,
        }
    }

    /// Returns the role as reported to others.
    #[must_use]
    pub fn told(self) -> ShardRole {
        match self {
            Self::Starting => ShardRole::Starting,
            Self::Primary { .. } => ShardRole::Primary,
            Self::Backup { .. } => ShardRole::Backup,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Role = Role::Backup { complete: true };
    const PARTIAL: Role = Role::Backup { complete: false };
    const ALONE: Role = Role::Primary { alone: true };
    const PRIMARY: Role = Role::Primary { alone: false };

    #[test]
    fn a_role_follows_from_evidence() {
        use Evidence::{Gone, Is, Silent};
        let rows = [
            (Role::Starting, Is(ShardRole::Primary), PARTIAL, PARTIAL),
            (Role::Starting, Is(ShardRole::Starting), PRIMARY, Role::Starting),
            (Role::Starting, Is(ShardRole::Backup), Role::Starting, Role::Starting),
            (Role::Starting, Gone, Role::Starting, Role::Starting),
            (WHOLE, Gone, ALONE, ALONE),
            (WHOLE, Is(ShardRole::Starting), PRIMARY, PRIMARY),
            (WHOLE, Is(ShardRole::Primary), WHOLE, WHOLE),
            (WHOLE, Silent, WHOLE, WHOLE),
            (PARTIAL, Gone, Role::Starting, Role::Starting),
            (PARTIAL, Is(ShardRole::Starting), Role::Starting, Role::Starting),
            (PARTIAL, Silent, PARTIAL, PARTIAL),
            (PRIMARY, Gone, ALONE, ALONE),
            (PRIMARY, Silent, PRIMARY, PRIMARY),
            (PRIMARY, Is(ShardRole::Starting), PRIMARY, PRIMARY),
            (ALONE, Is(ShardRole::Backup), ALONE, ALONE),
        ];
        for (role, evidence, at_home, elsewhere) in rows {
            assert_eq!(role.after(evidence, true), at_home, "{role:?} {evidence:?} at home");
            assert_eq!(role.after(evidence, false), elsewhere, "{role:?} {evidence:?}");
        }
    }

    #[test]
    fn silence_changes_nothing() {
        for role in [Role::Starting, WHOLE, PARTIAL, PRIMARY, ALONE] {
            assert_eq!(role.after(Evidence::Silent, true), role);
        }
    }
}
