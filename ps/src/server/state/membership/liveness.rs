//! Who is gone, who is done, and when all are.

use std::time::Instant;

use super::report::{awaited, lost};
use super::{LivenessEvent, Member, Membership, Presence};

impl Membership {
    /// A trainer has given all its steps.
    pub fn conclude(&mut self, trainer: u32) {
        self.members[trainer as usize].concluded = true;
    }

    /// The trainers that have given all their steps, in order. In an elastic job, when somebody has and nobody is at
    /// work, nothing is missing from the others either.
    #[must_use]
    pub fn concluded(&self) -> Vec<u32> {
        let over = |member: &Member| member.concluded || member.presence == Presence::Finished;
        let is_all = self.least.is_some()
            && self.members.iter().any(over)
            && self.members.iter().all(|member| over(member) || member.presence != Presence::Active);
        (0..).zip(&self.members).filter(|(_, member)| is_all || over(member)).map(|(index, _)| index).collect()
    }

    /// Trainers that nobody waits for in an elastic job: not at work.
    #[must_use]
    pub fn absent(&self) -> Vec<u32> {
        let absent = |(_, member): &(u32, &Member)| member.presence != Presence::Active;
        (0..).zip(&self.members).filter(absent).map(|(index, _)| index).collect()
    }

    /// Takes trainers that have given all and then were silent for finished: their last words got lost, or
    /// were said to a process before this one. Which those are.
    pub fn presume_finished(&mut self, now: Instant) -> Vec<u32> {
        let mut finished = Vec::new();
        for (index, member) in (0..).zip(&mut self.members) {
            let quiet = now.saturating_duration_since(member.heard) >= self.timeouts.silence;
            if member.concluded && quiet && member.presence != Presence::Finished {
                member.presence = Presence::Finished;
                member.rate = 0.0;
                finished.push(index);
            }
        }
        finished
    }

    /// Whether every trainer has left well; in an elastic job, one of them, and nobody is at work.
    #[must_use]
    pub fn done(&self) -> bool {
        let mut members = self.members.iter();
        let finished = |member: &Member| member.presence == Presence::Finished;
        if self.least.is_some() { !self.active() && members.any(finished) } else { members.all(finished) }
    }

    /// Marks who has been silent too long as lost; what is new since the last call.
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
                Presence::Awaited if self.least.is_none() && waited >= self.timeouts.join && !member.missed => {
                    member.missed = true;
                    news.push(LivenessEvent { trainer: index, is_lost: false, sentence: awaited(index, waited) });
                }
                _ => {}
            }
        }
        news
    }

    /// Says why the server should give up, once nobody has been active for too long.
    #[must_use]
    pub fn abandoned(&self, now: Instant) -> Option<String> {
        let alone = now.saturating_duration_since(self.last_active);
        if self.active() || alone < self.timeouts.abandon {
            return None;
        }
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
        Some(format!("no trainer was active for {} s; missing: trainer {}", alone.as_secs(), missing.join(", ")))
    }
}
