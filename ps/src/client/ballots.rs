//! The votes of one trainer on which of the two holders of a shard leads it: pure. The servers' side is
//! `server::state::election`.

use std::collections::BTreeMap;

use crate::election_term::is_of_lost_copies;
use crate::proto::ShardHolder;

/// A trainer's vote on one candidacy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The candidate may lead, as far as this trainer knows.
    Grant,
    /// It may not, because the other holder may be elected, or was. `outdated` says that this trainer was given
    /// parameters by a later leader than those of the candidate's copy.
    Refuse { outdated: bool },
}

/// The votes of this process.
#[derive(Clone, Debug, Default)]
pub struct Ballots {
    /// By shard.
    ballots: BTreeMap<u32, Ballot>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Ballot {
    vote: Option<Vote>,
    followed: Leader,
}

/// The newest leader that has given this trainer parameters or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leader {
    /// The term in which it, or the leader of whose updates it goes on, was elected; 0 if none was.
    pub term: u64,
    /// The epoch then. A leader of a later epoch went back to a checkpoint, and needs none of those updates.
    pub epoch: u64,
}

/// A vote that may still help a candidate to be elected.
#[derive(Clone, Copy, Debug)]
struct Vote {
    server: u32,
    instance: u64,
    incarnation: u32,
    term: u64,
}

impl Ballots {
    /// Votes on `candidate`, a process of `server`.
    pub fn consider(&mut self, server: u32, candidate: &ShardHolder) -> Answer {
        if self.lacks_followed(candidate) {
            return Answer::Refuse { outdated: true };
        }
        let ballot = self.ballots.entry(candidate.shard).or_default();
        let binds = |vote: Vote| {
            if vote.server == server { vote.incarnation > candidate.incarnation } else { !vote.is_void_by(candidate) }
        };
        if ballot.vote.is_some_and(binds) {
            return Answer::Refuse { outdated: false };
        }
        let ShardHolder { instance, incarnation, term, .. } = *candidate;
        ballot.vote = Some(Vote { server, instance, incarnation, term });
        Answer::Grant
    }

    /// Returns whether this trainer was given parameters by a later leader than those of the candidate's copy. One that has gone
    /// to a checkpoint since lacks nothing. Words of a candidate that was elected may come late.
    #[must_use]
    pub fn lacks_followed(&self, candidate: &ShardHolder) -> bool {
        let Leader { term, epoch } = self.followed(candidate.shard);
        let counts = term > 0 && term != candidate.term && candidate.epoch <= epoch;
        counts && !candidate.terms.contains(&term) && !is_of_lost_copies(term, newest(candidate))
    }

    /// Records what a process of `server` says of its part in a shard: a vote for it may count no more.
    pub fn hear(&mut self, server: u32, holder: &ShardHolder) {
        let Some(ballot) = self.ballots.get_mut(&holder.shard) else { return };
        let is_void = |vote: &mut Vote| {
            if vote.server == server { vote.is_over(holder) } else { vote.is_void_by(holder) }
        };
        ballot.vote.take_if(is_void);
    }

    /// Records that `leader` lets this trainer in for `shard`. Servers refuse to lead what lacks updates that a trainer was
    /// given in the same epoch, by what [`Ballots::followed`] reports to them.
    pub fn follow(&mut self, shard: u32, leader: Leader) {
        let followed = &mut self.ballots.entry(shard).or_default().followed;
        // The answer of an earlier one may come late.
        let order = |leader: &Leader| (leader.epoch, leader.term);
        if order(&leader) >= order(followed) {
            *followed = leader;
        }
    }

    /// Records that `leader`, which has let this trainer in for `shard`, answers a call of it: it may have been elected
    /// again since. An answer that comes late says nothing new.
    pub fn answered(&mut self, shard: u32, leader: Leader) {
        let followed = &mut self.ballots.entry(shard).or_default().followed;
        if followed.epoch == leader.epoch {
            followed.term = followed.term.max(leader.term);
        }
    }

    /// Returns the newest leader of `shard` that has given this trainer parameters.
    #[must_use]
    pub fn followed(&self, shard: u32) -> Leader {
        self.ballots.get(&shard).map(|ballot| ballot.followed).unwrap_or_default()
    }
}

impl Vote {
    /// Returns whether `other`, the other holder, shows that the vote elects no candidate any more: its copy contains the
    /// updates of that term, or it has heard that the candidacy ended.
    fn is_void_by(&self, other: &ShardHolder) -> bool {
        let withdrawn = other.withdrawn_instance == self.instance && other.withdrawn_term >= self.term;
        withdrawn || other.terms.contains(&self.term) || is_of_lost_copies(self.term, newest(other))
    }

    /// Returns whether the server that got the vote says that it is a candidate in that term no more, and was not
    /// elected; or its successor speaks for it.
    fn is_over(&self, holder: &ShardHolder) -> bool {
        if holder.instance != self.instance {
            return holder.incarnation >= self.incarnation;
        }
        let goes_on = holder.candidate && holder.term == self.term;
        holder.term >= self.term && !goes_on && !holder.terms.contains(&self.term)
    }
}

/// Returns the term of the newest leader whose updates a holder's copy contains, 0 if none was elected.
fn newest(holder: &ShardHolder) -> u64 {
    holder.terms.last().copied().unwrap_or(0)
}

/// Returns whether a trainer that `other`, the last words of the other holder, does not call away votes for `candidate`:
/// a holder that answers and leads stays the leader.
#[must_use]
pub fn is_wanted(candidate: &ShardHolder, other: Option<&ShardHolder>) -> bool {
    use crate::proto::ShardRole::Primary;
    candidate.role() == Primary || other.is_none_or(|other| other.role() != Primary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::election_term;
    use crate::proto::ShardRole;

    const INSTANCES: [u64; 3] = [70, 71, 72];

    /// Server `server` as a candidate in `term`, with a copy of `terms`.
    fn candidate(server: usize, term: u64, terms: &[u64]) -> ShardHolder {
        ShardHolder {
            instance: INSTANCES[server],
            incarnation: u32::from(server == 2),
            role: ShardRole::Backup.into(),
            term,
            candidate: true,
            terms: terms.to_vec(),
            ..ShardHolder::default()
        }
    }

    #[test]
    fn a_trainer_votes_for_one_of_two_candidates() {
        let no = Answer::Refuse { outdated: false };
        let withdrawn = |term| ShardHolder { withdrawn_instance: 70, withdrawn_term: term, ..candidate(1, 2, &[]) };
        let rows = [
            ("the other one", 1, candidate(1, 2, &[]), no),
            ("the same one again", 0, candidate(0, 3, &[]), Answer::Grant),
            ("its successor", 0, candidate(2, 5, &[]), Answer::Grant),
            ("the other one, after the first withdrew", 1, withdrawn(3), Answer::Grant),
            ("the other one, after an earlier candidacy of the first", 1, withdrawn(1), no),
            ("the other one, which has followed the first", 1, candidate(1, 4, &[3]), Answer::Grant),
        ];
        for (label, server, next, want) in rows {
            let mut ballots = Ballots::default();
            assert_eq!(ballots.consider(0, &candidate(0, 3, &[])), Answer::Grant);
            assert_eq!(ballots.consider(server, &next), want, "{label}");
        }
    }

    #[test]
    fn a_vote_is_free_again_when_the_candidate_says_that_it_is_none() {
        let rows = [
            ("still a candidate", candidate(0, 3, &[]), false),
            ("said before it was one", ShardHolder { candidate: false, ..candidate(0, 1, &[]) }, false),
            ("elected", ShardHolder { candidate: false, ..candidate(0, 3, &[3]) }, false),
            ("withdrawn", ShardHolder { candidate: false, ..candidate(0, 3, &[]) }, true),
            ("a candidate again", candidate(0, 5, &[]), true),
            ("another process", ShardHolder { candidate: false, ..candidate(2, 0, &[]) }, true),
        ];
        for (label, said, free) in rows {
            let mut ballots = Ballots::default();
            assert_eq!(ballots.consider(0, &candidate(0, 3, &[])), Answer::Grant);
            ballots.hear(0, &said);
            assert_eq!(ballots.consider(1, &candidate(1, 2, &[])) == Answer::Grant, free, "{label}");
        }
    }

    #[test]
    fn a_trainer_votes_for_no_copy_that_lacks_what_it_was_given() {
        let mut ballots = Ballots::default();
        ballots.follow(0, Leader { term: 3, epoch: 0 });
        assert_eq!(ballots.consider(1, &candidate(1, 4, &[])), Answer::Refuse { outdated: true });
        assert_eq!(ballots.consider(1, &candidate(1, 6, &[3])), Answer::Grant);
        ballots.answered(0, Leader { term: 6, epoch: 0 });
        assert_eq!(ballots.consider(1, &candidate(1, 8, &[3])), Answer::Refuse { outdated: true });
        ballots.answered(0, Leader { term: 3, epoch: 0 });
        assert_eq!(ballots.followed(0), Leader { term: 6, epoch: 0 }, "an answer came late");
        ballots.follow(0, Leader { term: 0, epoch: 1 });
        ballots.answered(0, Leader { term: 6, epoch: 0 });
        assert_eq!(ballots.followed(0), Leader { term: 0, epoch: 1 }, "both have gone back to a checkpoint");
    }

    #[test]
    fn what_was_given_before_the_servers_went_to_a_checkpoint_binds_no_trainer() {
        let rows = [
            ("of the same epoch", 3, 4, 4, Answer::Refuse { outdated: true }),
            ("restored since", 3, 4, 5, Answer::Grant),
            ("yet to be restored", 3, 5, 4, Answer::Refuse { outdated: true }),
            ("yet to be restored, and no leader was elected", 0, 5, 4, Answer::Grant),
            ("elected in that term", 4, 4, 4, Answer::Grant),
        ];
        for (label, term, followed, epoch, want) in rows {
            let mut ballots = Ballots::default();
            ballots.follow(0, Leader { term, epoch: followed });
            assert_eq!(ballots.consider(1, &ShardHolder { epoch, ..candidate(1, 4, &[1]) }), want, "{label}");
        }
    }

    #[test]
    fn what_was_given_before_both_holders_were_lost_binds_no_trainer() {
        let anew = election_term::first(2);
        let mut ballots = Ballots::default();
        ballots.follow(0, Leader { term: 3, epoch: 0 });
        assert_eq!(ballots.consider(1, &candidate(1, 5, &[3])), Answer::Grant);
        assert_eq!(ballots.consider(0, &candidate(0, anew + 2, &[anew])), Answer::Grant, "the shard was filled anew");
        ballots.follow(0, Leader { term: anew, epoch: 0 });
        assert_eq!(ballots.consider(1, &candidate(1, 5, &[3])), Answer::Refuse { outdated: true }, "one of before");
    }

    #[test]
    fn a_leader_that_answers_stays() {
        let leader = ShardHolder { role: ShardRole::Primary.into(), ..candidate(0, 1, &[]) };
        let backup = candidate(1, 2, &[]);
        assert!(!is_wanted(&backup, Some(&leader)) && is_wanted(&backup, None));
        assert!(is_wanted(&leader, Some(&backup)) && is_wanted(&leader, Some(&leader)));
        assert!(is_wanted(&backup, Some(&ShardHolder { role: ShardRole::Starting.into(), ..leader })));
    }
}
