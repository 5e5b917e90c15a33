//! The election of the server that leads a shard alone, as one of its two holders sees it: a state machine without I/O
//! or clock. The trainers vote, because a server that hears nothing of the other one cannot know whether that one has
//! ended or leads elsewhere; a refused connection proves nothing either, since a firewall refuses, too.
//!
//! Two holders never lead both. To lead alone, a holder needs the votes of more than half of the voters. A trainer that
//! has voted for one holder votes for the other only when the first is known to be no candidate any more, or when the
//! other's copy contains the first one's updates (`client::ballots`). The lists of voters of the two holders differ by
//! at most one trainer, so that two majorities share a voter. The scheme is that of Raft's elections (Ongaro and
//! Ousterhout 2014, sections 5.2 and 4.1 of the thesis) with the trainers as the ones who vote.

use std::collections::BTreeSet;

use crate::election_term::{self, is_of_lost_copies};
use crate::proto;

/// One process of a trainer: its index and incarnation.
pub type Voter = (u32, u32);

/// The trainers that elect the leader of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Voters {
    /// Grows with each change.
    pub version: u64,
    /// The trainers.
    pub trainers: BTreeSet<Voter>,
}

impl Voters {
    /// Returns these voters with one change that brings them closer to `wanted`, `None` if none is needed. A new process
    /// comes in before the one that it replaced goes out, and the last one stays, so that the majorities before and
    /// after the change share a trainer.
    #[must_use]
    pub fn toward(&self, wanted: &BTreeSet<Voter>) -> Option<Self> {
        let mut trainers = self.trainers.clone();
        if let Some(new) = wanted.difference(&self.trainers).next() {
            trainers.insert(*new);
        } else {
            let gone = *self.trainers.difference(wanted).next().filter(|_| trainers.len() > 1)?;
            trainers.remove(&gone);
        }
        Some(Self { version: self.version + 1, trainers })
    }
}

impl From<&Voters> for proto::Voters {
    fn from(voters: &Voters) -> Self {
        let voter = |&(trainer, incarnation): &Voter| proto::Voter { trainer, incarnation };
        Self { version: voters.version, voters: voters.trainers.iter().map(voter).collect() }
    }
}

impl From<proto::Voters> for Voters {
    fn from(voters: proto::Voters) -> Self {
        let trainers = voters.voters.iter().map(|voter| (voter.trainer, voter.incarnation)).collect();
        Self { version: voters.version, trainers }
    }
}

/// The elections of one shard.
#[derive(Clone, Debug)]
pub struct Election {
    /// The shard is named after this server.
    home: bool,
    /// The terms in which leaders were elected whose updates the copy here contains, ascending.
    terms: Vec<u64>,
    /// The term of the last candidacy of this process.
    term: u64,
    /// The votes of a candidate.
    votes: Option<BTreeSet<Voter>>,
    voters: Voters,
    /// Voters that were sent to the backup, which has not acknowledged them yet.
    proposed: Option<Voters>,
    /// Another process may hold all that was acknowledged, so that it could be elected.
    rival: bool,
    /// The process of the other holder that was no candidate when it was last heard, and its term then.
    withdrawn: (u64, u64),
    /// A trainer was given parameters by a later leader than those of this copy, which therefore may not lead.
    outdated: bool,
}

impl Election {
    /// Creates the state of a process that has just started.
    #[must_use]
    pub fn new(home: bool) -> Self {
        Self {
            home,
            terms: Vec::new(),
            term: 0,
            votes: None,
            voters: Voters::default(),
            proposed: None,
            rival: false,
            withdrawn: (0, 0),
            outdated: false,
        }
    }

    /// Returns whether another process may be elected, so that this one may not lead alone without votes.
    #[must_use]
    pub fn has_rival(&self) -> bool {
        self.rival
    }

    /// Returns whether this process is a candidate.
    #[must_use]
    pub fn is_candidate(&self) -> bool {
        self.votes.is_some()
    }

    /// Returns whether a trainer was given parameters by a later leader than those of this copy.
    #[must_use]
    pub fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// Returns the term of the newest leader whose updates this copy contains, 0 if none was elected.
    #[must_use]
    pub fn newest_term(&self) -> u64 {
        self.terms.last().copied().unwrap_or(0)
    }

    /// Begins with blocks that trainers fill, because both holders were lost, or the job has just begun: the two servers were
    /// replaced so often in all.
    pub fn begin(&mut self, replacements: u64) {
        self.terms = Some(election_term::first(replacements)).filter(|term| *term > 0).into_iter().collect();
    }

    /// Makes this process a candidate in a term that no candidate had.
    pub fn stand(&mut self) {
        let next = self.term.max(self.newest_term()) + 1;
        self.term = if next.is_multiple_of(2) == self.home { next + 1 } else { next };
        self.votes = Some(BTreeSet::new());
    }

    /// Records that a trainer was given parameters by the leader of `term`, 0 if that one was not elected.
    pub fn hear_of_leader(&mut self, term: u64) {
        self.outdated |= term > 0 && self.lacks(term);
    }

    /// Records that this copy goes back to a checkpoint, with all others: what trainers were given before counts no more.
    pub fn restore(&mut self) {
        self.outdated = false;
    }

    /// Ends a candidacy. Votes that arrive later count no more, because its term is never used again.
    pub fn withdraw(&mut self) {
        self.votes = None;
    }

    /// Counts the vote of `voter` in `term`, if this process is a candidate in it.
    pub fn vote(&mut self, voter: Voter, term: u64, granted: bool, outdated: bool) {
        if term != self.term {
            return;
        }
        if let Some(votes) = self.votes.as_mut().filter(|_| granted) {
            votes.insert(voter);
        }
        // It may have been elected by others meanwhile.
        self.outdated |= outdated && (self.votes.is_some() || self.terms.contains(&term));
    }

    /// Returns whether the candidate has the votes of more than half of the voters. Once the other holder was replaced
    /// (`replaced`), no server can follow its last process any more, and voters that have `gone` count as well.
    #[must_use]
    pub fn is_elected(&self, replaced: bool, gone: impl Fn(Voter) -> bool) -> bool {
        let Some(votes) = self.votes.as_ref().filter(|_| !self.outdated) else { return false };
        let voters = &self.voters.trainers;
        let counts = |voter: &&Voter| votes.contains(voter) || (replaced && gone(**voter));
        if voters.is_empty() { replaced } else { 2 * voters.iter().filter(counts).count() > voters.len() }
    }

    /// Makes the candidate the leader of its term: no other copy contains what follows.
    pub fn win(&mut self) {
        self.votes = None;
        self.terms.push(self.term);
        self.proposed = None;
        self.rival = false;
    }

    /// Returns whether the candidate was elected in `term`, `None` while that is open.
    #[must_use]
    pub fn outcome(&self, term: u64) -> Option<bool> {
        if self.terms.contains(&term) {
            return Some(true);
        }
        if self.votes.is_some() && term == self.term { None } else { Some(false) }
    }

    /// Records on the primary that the backup is about to hold everything, and may be elected from then on by `wanted`,
    /// or those who elected it before. Returns the terms and voters to send to it.
    pub fn complete(&mut self, wanted: BTreeSet<Voter>) -> proto::Complete {
        if !self.rival {
            self.voters = Voters { version: self.voters.version + 1, trainers: wanted };
        }
        self.rival = true;
        let voters = self.proposed.as_ref().unwrap_or(&self.voters);
        proto::Complete { terms: self.terms.clone(), voters: Some(voters.into()) }
    }

    /// Returns the next change of the voters that the primary sends to its backup, if the one before was acknowledged.
    pub fn propose(&mut self, wanted: &BTreeSet<Voter>) -> Option<proto::Voters> {
        if self.proposed.is_some() || !self.rival {
            return None;
        }
        self.proposed = self.voters.toward(wanted);
        self.proposed.as_ref().map(proto::Voters::from)
    }

    /// Records that the backup has taken the voters of `version`.
    pub fn acknowledged(&mut self, version: u64) {
        if let Some(taken) = self.proposed.take_if(|proposed| proposed.version == version) {
            self.voters = taken;
        }
    }

    /// Records on the backup that it holds everything, as the primary says.
    pub fn completed(&mut self, complete: proto::Complete) {
        self.terms = complete.terms;
        self.outdated = false;
        self.rival = true;
        self.voters = complete.voters.unwrap_or_default().into();
    }

    /// Takes the voters of the primary.
    pub fn adopt_voters(&mut self, voters: proto::Voters) {
        self.voters = voters.into();
    }

    /// Records what the other holder said of itself.
    pub fn hear(&mut self, other: &proto::ShardHolder) {
        if !other.candidate && !self.terms_beyond(other) {
            self.withdrawn = (other.instance, other.term);
        }
    }

    /// Returns whether the other holder's copy contains the updates of a later leader than the copy here.
    #[must_use]
    pub fn terms_beyond(&self, other: &proto::ShardHolder) -> bool {
        other.terms.last().is_some_and(|newest| self.lacks(*newest))
    }

    /// Returns whether the copy here lacks updates of the leader of `term`, which another copy may contain.
    fn lacks(&self, term: u64) -> bool {
        !self.terms.contains(&term) && !is_of_lost_copies(term, self.newest_term())
    }

    /// Describes this state to others. The caller adds the process.
    #[must_use]
    pub fn describe(&self, shard: u32, role: proto::ShardRole) -> proto::ShardHolder {
        let (withdrawn_instance, withdrawn_term) = self.withdrawn;
        proto::ShardHolder {
            shard,
            role: role.into(),
            term: self.term,
            candidate: self.votes.is_some(),
            terms: self.terms.clone(),
            withdrawn_instance,
            withdrawn_term,
            ..proto::ShardHolder::default()
        }
    }
}

#[cfg(test)]
#[path = "election/tests.rs"]
mod tests;
