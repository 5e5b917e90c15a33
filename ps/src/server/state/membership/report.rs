//! Reports on the trainers: for other servers, for `Status` and for the result of the server.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use psjobs_api::index_ranges;

use super::stragglers::stragglers;
use super::{Member, Membership, Presence};
use crate::proto;
use crate::series::{LONGEST_NAME, MOST_METRICS};

impl Membership {
    /// Returns the model and the members, for another server.
    #[must_use]
    pub fn model_and_roster(&self) -> (Vec<proto::TensorSpec>, Vec<proto::RosterEntry>) {
        let tensors = self.tensors.iter().map(proto::TensorSpec::from);
        let mut named = BTreeSet::new();
        let roster = (0..).zip(&self.members).filter_map(|(index, member)| {
            let finished = member.presence == Presence::Finished;
            // One that had finished before this process started has never contacted it.
            let incarnation = member.incarnation.or(finished.then_some(0))?;
            let trainer = proto::TrainerId { job_uid: self.job_uid.clone(), index, incarnation };
            let entry = proto::RosterEntry {
                trainer: Some(trainer),
                finished,
                step: member.steps,
                total_steps: member.total_steps,
                examples: member.examples.0,
                ..proto::RosterEntry::default()
            };
            if !entry.finished {
                return Some(entry);
            }
            let metrics = member.metrics.iter().filter(|(name, _)| named.len() < MOST_METRICS && named.insert(*name));
            let metrics = metrics.map(|(name, value)| (name.clone(), *value)).collect();
            Some(proto::RosterEntry { own_examples: member.examples.1, metrics, ..entry })
        });
        (tensors.collect(), roster.collect())
    }

    /// Describes current problems in sentences.
    #[must_use]
    pub fn warnings(&self, now: Instant) -> Vec<String> {
        let waited = now.saturating_duration_since(self.started);
        let describe = |(index, member): (u32, &Member)| match member.presence {
            Presence::Awaited if self.least.is_none() && !member.ended && waited >= self.timeouts.join => {
                Some(awaited(index, waited))
            }
            Presence::Lost => Some(lost(index, member, now.saturating_duration_since(member.heard))),
            _ => None,
        };
        if let (Some(least), (there, false)) = (self.least, self.present()) {
            return vec![format!(
                "{there} trainers are there, the job goes on with {least}; start more, or lower the minimum"
            )];
        }
        let more = |(index, member): (u32, &Member)| {
            member.has_more_metrics.then(|| {
                format!(
                    "trainer {index} reports more than {MOST_METRICS} metrics, or names of more than {LONGEST_NAME} bytes; \
                     the others are not shown"
                )
            })
        };
        let members = || (0..).zip(&self.members);
        members().filter_map(describe).chain(members().filter_map(more)).collect()
    }

    /// Returns the metrics of all trainers. The lowest index overrides others that report the same name. A server-side
    /// evaluation overrides trainers that were last heard before it; those heard later override it. Of more than
    /// [`MOST_METRICS`] names those of the evaluation come first.
    #[must_use]
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        let (measured, at) = &self.evaluation;
        let said = |after| {
            let then = self.members.iter().filter(move |member| (member.heard >= *at) == after);
            then.flat_map(|member| &member.metrics)
        };
        // No name is copied before it is known to count: thousands of trainers report the same names.
        let mut all = BTreeMap::<&str, f64>::new();
        for (name, value) in said(true).chain(measured).chain(said(false)) {
            all.entry(name.as_str()).or_insert(*value);
        }
        let (evaluated, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(name, _)| measured.contains_key(*name));
        let kept = evaluated.into_iter().chain(others).take(MOST_METRICS);
        kept.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Returns the result of this server.
    #[must_use]
    pub fn result(&self) -> psjobs_api::ReplicaResult {
        psjobs_api::ReplicaResult {
            steps: self.steps(),
            examples: self.members.iter().map(|member| member.examples.0 + member.examples.1).sum(),
            seconds: self.training.map_or(0.0, |(first, last)| (last - first).as_secs_f64()),
            metrics: self.metrics(),
            left: self.left(),
            ..psjobs_api::ReplicaResult::default()
        }
    }

    /// Returns the incarnations of the trainers that left well, each with their indexes as ranges.
    fn left(&self) -> BTreeMap<u32, String> {
        let mut left = BTreeMap::<u32, Vec<u32>>::new();
        let finished = |(_, member): &(u32, &Member)| self.least.is_none() && member.presence == Presence::Finished;
        for (index, member) in (0..).zip(&self.members).filter(finished) {
            left.entry(member.incarnation.unwrap_or(0)).or_default().push(index);
        }
        left.into_iter().map(|(incarnation, trainers)| (incarnation, index_ranges::format(&trainers))).collect()
    }

    /// Returns the steps done by all trainers.
    fn steps(&self) -> u64 {
        let steps = |member: &Member| if self.least.is_some() { member.given } else { member.steps };
        self.members.iter().map(steps).sum()
    }

    /// Returns the answer to `Status`.
    #[must_use]
    pub fn status(&self, now: Instant) -> proto::StatusReply {
        let phase = match () {
            () if self.done() => proto::JobPhase::Done,
            () if self.least.is_some() && !self.present().1 => proto::JobPhase::Waiting,
            () if self.least.is_none()
                && self.members.iter().any(|member| member.presence == Presence::Awaited && !member.ended) =>
            {
                proto::JobPhase::Waiting
            }
            () => proto::JobPhase::Training,
        };
        let shown = |(_, member): &(u32, &Member)| self.least.is_none() || member.presence != Presence::Awaited;
        let trainers = (0..).zip(&self.members).filter(shown).map(|(index, member)| proto::TrainerStatus {
            index,
            incarnation: member.incarnation.unwrap_or(0),
            state: match member.presence {
                Presence::Awaited => proto::TrainerState::Awaited,
                Presence::Active => proto::TrainerState::Active,
                Presence::Lost => proto::TrainerState::Lost,
                Presence::Left => proto::TrainerState::Left,
                Presence::Finished => proto::TrainerState::Finished,
            }
            .into(),
            step: member.steps,
            total_steps: member.total_steps,
            examples_per_second: member.rate,
            silent_seconds: now.saturating_duration_since(member.heard).as_secs_f64(),
            metrics: member.metrics.clone(),
            steps_per_second: member.own_pace().unwrap_or(0.0),
            batch: 0,
            spent: member.spent.filter(|_| member.presence == Presence::Active),
        });
        // A trainer that finished before this server started is counted with neither its steps nor their number.
        let is_known = |member: &&Member| member.total_steps > 0 || !member.ended;
        let totals = || self.members.iter().filter(is_known).map(|member| member.total_steps);
        let total_steps = match self.least {
            Some(_) => totals().max().unwrap_or(0), // Each reports the total of the job.
            None if totals().all(|total| total > 0) => totals().sum(),
            None => 0,
        };
        proto::StatusReply {
            phase: phase.into(),
            step: self.steps(),
            total_steps,
            examples_per_second: self.members.iter().map(|member| member.rate).sum(),
            metrics: self.metrics(),
            trainers: trainers.collect(),
            warnings: self.warnings(now),
            staleness: Vec::new(),
            checkpoint: None,
            stragglers: stragglers(&self.members.iter().map(Member::own_pace).collect::<Vec<_>>()),
        }
    }
}

pub(super) fn awaited(index: u32, waited: Duration) -> String {
    let waited = waited.as_secs();
    format!("trainer {index} has not joined after {waited} s; see whether it was started and can reach this server")
}

pub(super) fn lost(index: u32, member: &Member, quiet: Duration) -> String {
    format!(
        "trainer {index} has been silent for {} s, after step {}; it is taken for lost until it joins again",
        quiet.as_secs(),
        member.steps
    )
}
