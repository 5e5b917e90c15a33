//! The role of a server in a shard that it holds, and its transitions by what is known of the other holder: a pure
//! function.
//!
//! Nothing proves that the other process has ended, so a holder that may not be the only one with all that was
//! acknowledged leads alone only when the trainers have elected it ([`super::election`]).

use crate::proto::ShardRole;

/// The role of a server in one shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The server has just started and does not know its role.
    #[default]
    Starting,
    /// The server serves trainers.
    Primary {
        /// No other process may lead: answers do not wait for the other holder.
        alone: bool,
    },
    /// The server follows the primary.
    Backup {
        /// It holds everything that was acknowledged.
        complete: bool,
    },
}

/// Knowledge of the other holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Nothing listens at its address, or a firewall is in the way.
    Refused,
    /// It has not answered, for a short time.
    Unknown,
    /// It has not been heard for so long that it may be gone.
    Silent,
    /// It reported this role.
    Is(ShardRole),
    /// It leads, and its copy contains updates that the copy here lacks.
    LeadsLater,
}

impl Evidence {
    /// Returns whether the other holder may be gone.
    #[must_use]
    pub fn may_stand(self) -> bool {
        matches!(self, Self::Refused | Self::Silent)
    }
}

/// Knowledge of this server about its own copy.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// The shard is named after this server.
    pub home: bool,
    /// Another process may be elected.
    pub rival: bool,
    /// The other holder is another process than that one, which may have been elected, and is gone with what it was given.
    pub replaced: bool,
    /// A trainer was given parameters by a later leader than those of this copy.
    pub outdated: bool,
}

/// Consequence of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// The server keeps its role, and its candidacy.
    Stay,
    /// It takes this role.
    To(Role),
    /// It asks the trainers to elect it.
    Stand,
    /// It is no candidate any more: the other holder is there.
    Withdraw,
    /// No process has all of the shard: the other one has started anew, and this one lacks a part.
    Lost,
}

impl Role {
    /// Returns what follows from `evidence`.
    #[must_use]
    pub fn after(self, evidence: Evidence, Known { home, rival, replaced, outdated }: Known) -> Transition {
        use Evidence::{Is, LeadsLater, Refused, Silent};
        use Transition::{Lost, Stand, Stay, To, Withdraw};
        match (self, evidence) {
            (Self::Starting, Is(ShardRole::Primary) | LeadsLater) => To(Self::Backup { complete: false }),
            // Only a later leader has what trainers were given. If another process speaks for it, none has.
            (here, _) if outdated && here.is_whole() => To(Self::Backup { complete: false }),
            (Self::Backup { complete: false }, Is(ShardRole::Backup)) if outdated => Lost,
            // Both have just started; by agreement the one that it is named after takes it.
            (Self::Starting, Is(ShardRole::Starting)) if home => To(Self::Primary { alone: false }),
            (Self::Backup { complete: true }, Refused | Silent | Is(ShardRole::Starting)) => Stand,
            (Self::Backup { complete: false }, Is(ShardRole::Starting)) => Lost,
            (Self::Primary { alone: false }, Refused | Silent) if rival => Stand,
            (Self::Primary { alone: false }, Is(ShardRole::Backup | ShardRole::Starting)) if rival && replaced => Stand,
            (Self::Primary { alone: false }, Refused | Silent) => To(Self::Primary { alone: true }),
            // A copy that is being made anew is in no state to be elected.
            (Self::Primary { .. } | Self::Backup { complete: true }, LeadsLater) => {
                To(Self::Backup { complete: false })
            }
            // Both were outvoted, and the leader is gone. The trainers decide whose copy has all.
            (Self::Backup { complete: true }, Is(ShardRole::Backup)) => Stand,
            // Of two candidates that hear each other the primary stays one.
            (Self::Backup { .. }, Is(ShardRole::Primary) | LeadsLater)
            | (Self::Primary { .. }, Is(ShardRole::Backup | ShardRole::Starting)) => Withdraw,
            _ => Stay,
        }
    }

    /// Returns whether the copy here has everything that was acknowledged, as far as this server knows.
    #[must_use]
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Primary { .. } | Self::Backup { complete: true })
    }

    /// Returns the role as reported to others.
    #[must_use]
    pub fn shard_role(self) -> ShardRole {
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
        use Evidence::{Is, LeadsLater, Refused, Silent};
        use Transition::{Lost, Stand, Stay, To, Withdraw};
        let (starting, primary, backup) = (ShardRole::Starting, ShardRole::Primary, ShardRole::Backup);
        let rows = [
            (Role::Starting, Is(primary), To(PARTIAL)),
            (Role::Starting, LeadsLater, To(PARTIAL)),
            (Role::Starting, Is(backup), Stay),
            (Role::Starting, Refused, Stay),
            (WHOLE, Refused, Stand),
            (WHOLE, Silent, Stand),
            (WHOLE, Is(starting), Stand),
            (WHOLE, Is(primary), Withdraw),
            (WHOLE, LeadsLater, To(PARTIAL)),
            (WHOLE, Is(backup), Stand),
            (PARTIAL, Refused, Stay),
            (PARTIAL, Silent, Stay),
            (PARTIAL, Is(starting), Lost),
            (PRIMARY, Refused, Stand),
            (PRIMARY, Silent, Stand),
            (PRIMARY, Is(starting), Withdraw),
            (PRIMARY, Is(backup), Withdraw),
            (PRIMARY, LeadsLater, To(PARTIAL)),
            (ALONE, Refused, Stay),
            (ALONE, Silent, Stay),
            (ALONE, LeadsLater, To(PARTIAL)),
        ];
        let known = Known { rival: true, ..Known::default() };
        for (role, evidence, want) in rows {
            for home in [true, false] {
                assert_eq!(role.after(evidence, Known { home, ..known }), want, "{role:?} {evidence:?} {home}");
            }
        }
        let alone = Known::default();
        assert_eq!(Role::Starting.after(Is(starting), Known { home: true, ..alone }), To(PRIMARY), "at home");
        assert_eq!(Role::Starting.after(Is(starting), alone), Stay, "elsewhere");
        assert_eq!(PRIMARY.after(Refused, alone), To(ALONE), "no other process may lead");
        assert_eq!(PRIMARY.after(Silent, alone), To(ALONE), "no other process may lead");
        for role in [starting, backup] {
            let replaced = Known { replaced: true, ..known };
            assert_eq!(PRIMARY.after(Is(role), replaced), Stand, "the process before may have been elected");
            assert_eq!(ALONE.after(Is(role), replaced), Withdraw, "it was not");
        }
    }

    #[test]
    fn a_short_silence_changes_nothing() {
        let known = Known { home: true, rival: true, ..Known::default() };
        for role in [Role::Starting, WHOLE, PARTIAL, PRIMARY, ALONE] {
            assert_eq!(role.after(Evidence::Unknown, known), Transition::Stay);
        }
    }

    #[test]
    fn a_copy_without_what_trainers_were_given_leads_no_more() {
        let known = Known { home: true, rival: true, outdated: true, ..Known::default() };
        for evidence in [Evidence::Unknown, Evidence::Refused, Evidence::Is(ShardRole::Starting)] {
            for role in [WHOLE, PRIMARY, ALONE] {
                assert_eq!(role.after(evidence, known), Transition::To(PARTIAL), "{role:?} {evidence:?}");
            }
        }
        for role in [ShardRole::Starting, ShardRole::Backup] {
            assert_eq!(PARTIAL.after(Evidence::Is(role), known), Transition::Lost);
        }
        assert_eq!(PARTIAL.after(Evidence::LeadsLater, known), Transition::Withdraw, "it follows that one");
    }
}
