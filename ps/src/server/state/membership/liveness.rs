//! Decides which trainers are lost or finished, and when the job is done.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::report::{awaited, lost};
use super::{LastStep, LivenessEvent, Member, Membership, Presence};
use crate::checkpoint::Concluded;

/// Interval between two checks for silent trainers.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Membership {
    /// Records that a trainer has sent its last step, and whether nothing can take that back any more.
    pub fn conclude(&mut self, trainer: u32, is_durable: bool) {
        let last_step = if is_durable { LastStep::Durable } else { LastStep::Given };
        let member = &mut self.members[trainer as usize];
        member.last_step = member.last_step.max(last_step);
    }

    /// Records that a trainer has given so many steps, which other servers may have acknowledged.
    pub fn claim(&mut self, trainer: u32, steps: u64, now: Instant) {
        if steps > 0 {
            self.gave(trainer, steps - 1, now);
            self.members[trainer as usize].claimed = steps;
        }
    }

    /// Returns the most steps that a trainer has claimed since the servers last went to a checkpoint.
    #[must_use]
    pub fn most_claimed(&self) -> u64 {
        self.members.iter().map(|member| member.claimed).max().unwrap_or(0)
    }

    /// Records that a checkpoint has the last step of the trainers in `concluded`.
    pub fn kept(&mut self, concluded: &Concluded) {
        for (index, member) in (0..).zip(&mut self.members) {
            if member.last_step == LastStep::Given && concluded.get(&index) == Some(&member.steps) {
                member.last_step = LastStep::Durable;
            }
        }
    }

    /// Returns the trainers that have sent their last step, with the number of their steps. In an elastic job these are all trainers as soon
    /// as one has and none is active, because no batch is left then.
    #[must_use]
    pub fn concluded(&self) -> Concluded {
        let over = |member: &Member| member.last_step >= LastStep::Given || member.presence == Presence::Finished;
        let is_all = self.least.is_some()
            && self.members.iter().any(over)
            && self.members.iter().all(|member| over(member) || member.presence != Presence::Active);
        let members = (0..).zip(&self.members).filter(|(_, member)| is_all || over(member));
        members.map(|(index, member)| (index, member.steps)).collect()
    }

    /// Returns the trainers that are not active, which rounds of an elastic job do not wait for.
    #[must_use]
    pub fn absent(&self) -> Vec<u32> {
        let absent = |(_, member): &(u32, &Member)| member.presence != Presence::Active;
        (0..).zip(&self.members).filter(absent).map(|(index, _)| index).collect()
    }

    /// Returns the active trainers with their incarnations: they elect who leads a shard.
    #[must_use]
    pub fn voters(&self) -> BTreeSet<(u32, u32)> {
        let voter = |(index, member): (u32, &Member)| {
            member.incarnation.filter(|_| member.presence == Presence::Active).map(|incarnation| (index, incarnation))
        };
        (0..).zip(&self.members).filter_map(voter).collect()
    }

    /// Returns whether this process of a trainer was replaced, has left, or is lost.
    #[must_use]
    pub fn is_gone(&self, trainer: u32, incarnation: u32) -> bool {
        self.members.get(trainer as usize).is_none_or(|member| {
            member.presence != Presence::Active || member.incarnation.is_some_and(|current| current > incarnation)
        })
    }

    /// Returns the trainers that have finished.
    pub fn finished(&self) -> Vec<u32> {
        let finished = |(_, member): &(u32, &Member)| member.presence == Presence::Finished;
        (0..).zip(&self.members).filter(finished).map(|(index, _)| index).collect()
    }

    /// Records a check for silent trainers, of which there is one every [`CHECK_INTERVAL`]. All trainers count as heard now if this
    /// server stood still since the last one.
    pub fn begin_check(&mut self, now: Instant) {
        if self.checks.come_late(now, CHECK_INTERVAL + self.timeouts.silence / 2) {
            self.members.iter_mut().for_each(|member| member.heard = now);
        }
    }

    /// Marks trainers as finished that had finished before this server started. Returns their indices.
    pub fn finish_ended(&mut self) -> Vec<u32> {
        self.finish_each(|_, member| member.ended)
    }

    /// Marks those of `trainers` as finished that this server has not heard since it started. Returns their indices.
    pub fn learn_finished(&mut self, trainers: &[u32]) -> Vec<u32> {
        let is_new = |member: &Member| member.presence == Presence::Awaited;
        self.finish_each(|index, member| is_new(member) && trainers.contains(&index))
    }

    /// Marks trainers as finished whose last step is durable, because this server ends: it does not hear them leave.
    pub fn finish_durable(&mut self) {
        self.finish_each(|_, member| member.last_step == LastStep::Durable);
    }

    /// Marks trainers as finished whose last step is durable and that then timed out: their Leave was lost, or received by an
    /// earlier process of this server. Returns their indices. One whose last step is not durable may have to give it again.
    pub fn presume_finished(&mut self, now: Instant) -> Vec<u32> {
        let silence = self.timeouts.silence;
        let is_silent = |member: &Member| now.saturating_duration_since(member.heard) >= silence;
        self.finish_each(|_, member| member.last_step == LastStep::Durable && is_silent(member))
    }

    fn finish_each(&mut self, has_finished: impl Fn(u32, &Member) -> bool) -> Vec<u32> {
        let mut finished = Vec::new();
        for (index, member) in (0..).zip(&mut self.members) {
            if member.presence != Presence::Finished && has_finished(index, member) {
                member.presence = Presence::Finished;
                member.rate = 0.0;
                finished.push(index);
            }
        }
        finished
    }

    /// Returns whether every trainer has finished; in an elastic job, whether one has and none is active.
    #[must_use]
    pub fn done(&self) -> bool {
        let mut members = self.members.iter();
        let finished = |member: &Member| member.presence == Presence::Finished;
        if self.least.is_some() { !self.active() && members.any(finished) } else { members.all(finished) }
    }

    /// Marks trainers that timed out as lost. Returns the changes since the last call.
    pub fn look(&mut self, now: Instant) -> Vec<LivenessEvent> {
        let waited = now.saturating_duration_since(self.started);
        let mut news = Vec::new();
        for (index, member) in (0..).zip(&mut self.members) {
            let quiet = now.saturating_duration_since(member.heard);
            match member.presence {
                Presence::Active if quiet >= self.timeouts.silence => {
                    member.presence = Presence::Lost;
                    member.rate = 0.0;
                    news.push(LivenessEvent { trainer: index, is_lost: true, sentence: lost(index, member, quiet) });
                }
                Presence::Awaited
                    if self.least.is_none() && !member.ended && waited >= self.timeouts.join && !member.missed =>
                {
                    member.missed = true;
                    news.push(LivenessEvent { trainer: index, is_lost: false, sentence: awaited(index, waited) });
                }
                _ => {}
            }
        }
        news
    }

    /// Returns how long no trainer has been active, and which are missing; nothing while one is.
    #[must_use]
    pub fn alone(&self, now: Instant) -> Option<(Duration, String)> {
        if self.active() {
            return None;
        }
        let alone = now.saturating_duration_since(self.last_active);
        let came = self.least.is_some() && self.members.iter().any(|member| member.incarnation.is_some());
        let missing: Vec<String> = (self.members.iter().enumerate())
            .filter(|(_, member)| member.presence != Presence::Finished)
            .filter(|(_, member)| !(came && member.presence == Presence::Awaited))
            .map(|(index, member)| match member.presence {
                Presence::Awaited => format!("{index} (never joined)"),
                Presence::Left => format!("{index} (left to be replaced)"),
                _ => format!("{index} (lost)"),
            })
            .collect();
        let why = format!("no trainer was active for {} s; missing: trainer {}", alone.as_secs(), missing.join(", "));
        Some((alone, why))
    }

    /// Returns why the server should give up, once no trainer has been active for too long.
    #[must_use]
    pub fn abandoned(&self, now: Instant) -> Option<String> {
        self.alone(now).filter(|(alone, _)| *alone >= self.timeouts.abandon).map(|(_, why)| why)
    }

    /// Returns the error with which a trainer has ended, if the job cannot go on without it. An elastic job can while
    /// another trainer is active.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        if self.least.is_some() && self.active() {
            return None;
        }
        let failure = |(index, member): (usize, &Member)| {
            member.failure.as_ref().map(|failure| format!("trainer {index} ended with an error: {failure}"))
        };
        self.members.iter().enumerate().find_map(failure)
    }
}
