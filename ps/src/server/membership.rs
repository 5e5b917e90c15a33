//! Who takes part in the job and how far everybody is: a state machine without I/O or clock. Every
//! method takes the time; the services call it under a short lock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::pace::{Pace, stragglers};
use crate::layout::TensorSpec;
use crate::proto;

/// When silence becomes worth a word.
#[derive(Clone, Debug)]
pub struct Patience {
    /// A trainer that has not joined after this long is named.
    pub join: Duration,
    /// A trainer that has been silent for this long is taken for lost, and named.
    pub silence: Duration,
    /// The server gives up when no trainer has been active for this long.
    pub abandon: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { join: Duration::from_secs(60), silence: Duration::from_secs(30), abandon: Duration::from_secs(600) }
    }
}

/// Why a trainer is not let in, or no longer. None of these passes by waiting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A process of another job, most likely an old one at a reused address.
    #[error(
        "this server belongs to job {want}, the trainer to job {found}; check the address and start both from one job"
    )]
    OtherJob {
        /// Uid of the server's job.
        want: String,
        /// Uid that the trainer named.
        found: String,
    },
    /// A rank beyond the job's size.
    #[error("trainer {found} is beyond this job's {trainers} trainers; check rank and world size")]
    NoSuchTrainer {
        /// Index that the trainer named.
        found: u32,
        /// Number of trainers of the job.
        trainers: u32,
    },
    /// Its successor has joined.
    #[error("trainer {trainer} incarnation {found} was replaced by incarnation {current}; this process can end")]
    Replaced {
        /// Index of the trainer.
        trainer: u32,
        /// Incarnation that asks.
        found: u32,
        /// Incarnation that has joined.
        current: u32,
    },
    /// It must join before anything else.
    #[error("trainer {trainer} incarnation {incarnation} has not joined; call Join first")]
    NotJoined {
        /// Index of the trainer.
        trainer: u32,
        /// Incarnation that asks.
        incarnation: u32,
    },
    /// The trainers do not train the same model.
    #[error(
        "trainer {trainer} has another model than the job: {difference}; start all trainers with the same arguments"
    )]
    OtherModel {
        /// Index of the trainer.
        trainer: u32,
        /// The first tensor that differs, with both shapes.
        difference: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Awaited,
    Active,
    Lost,
    Left,
    Finished,
}

#[derive(Clone, Debug)]
struct Member {
    presence: Presence,
    /// It was said that this trainer has not come.
    missed: bool,
    /// All its steps are where losing a server does not cost them.
    concluded: bool,
    incarnation: Option<u32>,
    heard: Instant,
    /// When it last said how many examples it has read; gradients in between say nothing about that.
    reported: Option<Instant>,
    steps: u64,
    total_steps: u64,
    /// Examples of earlier incarnations, and of this one.
    examples: (u64, u64),
    rate: f64,
    pace: Pace,
    metrics: BTreeMap<String, f64>,
}

impl Member {
    /// Of those at work.
    fn own_pace(&self) -> Option<f64> {
        self.pace.steps_per_second().filter(|_| self.presence == Presence::Active)
    }
}

/// The trainers of one job, as one server sees them.
#[derive(Debug)]
pub struct Membership {
    job_uid: String,
    patience: Patience,
    members: Vec<Member>,
    tensors: Vec<TensorSpec>,
    started: Instant,
    /// Last time that anybody was active.
    company: Instant,
    training: Option<(Instant, Instant)>,
}

/// Seconds over which the rate of examples is smoothed.
const RATE_WINDOW: f64 = 10.0;

impl Membership {
    /// A job of `trainers` trainers, all awaited.
    #[must_use]
    pub fn new(job_uid: String, trainers: u32, patience: Patience, now: Instant) -> Self {
        let member = Member {
            presence: Presence::Awaited,
            missed: false,
            concluded: false,
            incarnation: None,
            heard: now,
            reported: None,
            steps: 0,
            total_steps: 0,
            examples: (0, 0),
            rate: 0.0,
            pace: Pace::new(now),
            metrics: BTreeMap::new(),
        };
        let members = vec![member; trainers as usize];
        Self { job_uid, patience, members, tensors: Vec::new(), started: now, company: now, training: None }
    }

    /// Lets a trainer in. The first one's tensors become the job's.
    ///
    /// # Errors
    /// If it belongs elsewhere, was replaced, or has another model.
    pub fn join(
        &mut self,
        id: &proto::TrainerId,
        tensors: Vec<TensorSpec>,
        total_steps: u64,
        now: Instant,
    ) -> Result<(), Refusal> {
        self.place(id)?;
        if !self.tensors.is_empty()
            && let Some(difference) = difference(&self.tensors, &tensors)
        {
            return Err(Refusal::OtherModel { trainer: id.index, difference });
        }
        let member = &mut self.members[id.index as usize];
        if let Some(current) = member.incarnation.filter(|current| *current > id.incarnation) {
            return Err(Refusal::Replaced { trainer: id.index, found: id.incarnation, current });
        }
        if member.incarnation != Some(id.incarnation) {
            member.examples = (member.examples.0 + member.examples.1, 0);
            member.rate = 0.0;
            member.reported = None;
            member.pace = Pace::new(now);
        }
        member.incarnation = Some(id.incarnation);
        member.presence = Presence::Active;
        member.heard = now;
        member.total_steps = total_steps;
        // The job was started again, to do more.
        member.concluded &= total_steps <= member.steps;
        self.company = now;
        self.tensors = tensors;
        Ok(())
    }

    /// The model's tensors; none before the first trainer has told them.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Takes the model from a checkpoint.
    ///
    /// # Errors
    /// The first tensor that is another one in the job.
    pub fn adopt(&mut self, tensors: &[TensorSpec]) -> Result<(), String> {
        if self.tensors.is_empty() {
            self.tensors = tensors.to_vec();
        }
        match difference(&self.tensors, tensors) {
            Some(difference) => Err(difference.replace("the trainer", "the checkpoint")),
            None => Ok(()),
        }
    }

    /// What another server is told: the model, and who takes part.
    #[must_use]
    pub fn told(&self) -> (Vec<proto::TensorSpec>, Vec<proto::RosterEntry>) {
        let tensors = self.tensors.iter().map(|t| proto::TensorSpec { name: t.name.clone(), shape: t.shape.clone() });
        let roster = (0..).zip(&self.members).filter_map(|(index, member)| {
            let trainer = proto::TrainerId { job_uid: self.job_uid.clone(), index, incarnation: member.incarnation? };
            Some(proto::RosterEntry {
                trainer: Some(trainer),
                finished: member.presence == Presence::Finished,
                step: member.steps,
                total_steps: member.total_steps,
                examples: member.examples.0,
            })
        });
        (tensors.collect(), roster.collect())
    }

    /// Takes what another server knows of trainers that were never heard here.
    pub fn adopt_roster(&mut self, roster: &[proto::RosterEntry], now: Instant) {
        for entry in roster {
            let Some(id) = &entry.trainer else { continue };
            let Some(member) = self.members.get_mut(id.index as usize).filter(|m| m.incarnation.is_none()) else {
                continue;
            };
            member.incarnation = Some(id.incarnation);
            member.presence = if entry.finished { Presence::Finished } else { Presence::Active };
            member.heard = now;
            (member.steps, member.total_steps, member.examples.0) = (entry.step, entry.total_steps, entry.examples);
        }
    }

    /// The job goes back, or on, to where each trainer's next step is the one in `steps`, and those who have
    /// `concluded` have given all.
    pub fn rewind(&mut self, steps: &[u64], concluded: &[u32]) {
        for (member, step) in self.members.iter_mut().zip(steps) {
            member.steps = *step;
        }
        for (index, member) in (0..).zip(&mut self.members) {
            member.concluded = concluded.contains(&index);
        }
    }

    /// A trainer has given all its steps.
    pub fn conclude(&mut self, trainer: u32) {
        self.members[trainer as usize].concluded = true;
    }

    /// The trainers that have given all their steps, in order.
    #[must_use]
    pub fn concluded(&self) -> Vec<u32> {
        let over = |member: &Member| member.concluded || member.presence == Presence::Finished;
        (0..).zip(&self.members).filter(|(_, member)| over(member)).map(|(index, _)| index).collect()
    }

    /// Takes trainers that have given all and then were silent for finished: their last words got lost, or
    /// were said to a process before this one. Which those are.
    pub fn presume_finished(&mut self, now: Instant) -> Vec<u32> {
        let mut finished = Vec::new();
        for (index, member) in (0..).zip(&mut self.members) {
            let quiet = now.saturating_duration_since(member.heard) >= self.patience.silence;
            if member.concluded && quiet && member.presence != Presence::Finished {
                member.presence = Presence::Finished;
                member.rate = 0.0;
                finished.push(index);
            }
        }
        finished
    }

    /// Whether a trainer is at work.
    #[must_use]
    pub fn active(&self) -> bool {
        self.members.iter().any(|member| member.presence == Presence::Active)
    }

    /// A member spoke.
    ///
    /// # Errors
    /// If it is not, or no longer, a member.
    pub fn hear(&mut self, id: &proto::TrainerId, now: Instant) -> Result<(), Refusal> {
        self.place(id)?;
        let member = &mut self.members[id.index as usize];
        match member.incarnation {
            Some(current) if current == id.incarnation => {}
            Some(current) if current > id.incarnation => {
                return Err(Refusal::Replaced { trainer: id.index, found: id.incarnation, current });
            }
            _ => return Err(Refusal::NotJoined { trainer: id.index, incarnation: id.incarnation }),
        }
        member.heard = now;
        if member.presence == Presence::Lost {
            member.presence = Presence::Active;
        }
        if member.presence == Presence::Active {
            self.company = now;
        }
        Ok(())
    }

    /// A member gave its gradient of `step`.
    pub fn gave(&mut self, trainer: u32, step: u64, now: Instant) {
        let Some(member) = self.members.get_mut(trainer as usize) else { return };
        member.steps = member.steps.max(step.saturating_add(1));
        self.training = Some((self.training.map_or(now, |(first, _)| first), now));
    }

    /// A member reports examples read so far and its metrics.
    ///
    /// # Errors
    /// As [`Membership::hear`].
    pub fn report(
        &mut self,
        id: &proto::TrainerId,
        examples: u64,
        metrics: BTreeMap<String, f64>,
        now: Instant,
    ) -> Result<(), Refusal> {
        self.hear(id, now)?;
        let member = &mut self.members[id.index as usize];
        // The first report counts from before this server was there.
        let before = member.reported.replace(now).unwrap_or(now);
        let seconds = now.saturating_duration_since(before).as_secs_f64();
        if seconds > 0.0 && examples >= member.examples.1 {
            let rate = (examples - member.examples.1) as f64 / seconds;
            let weight = if member.rate == 0.0 { 1.0 } else { 1.0 - (-seconds / RATE_WINDOW).exp() };
            member.rate += weight * (rate - member.rate);
        }
        member.examples.1 = examples;
        member.metrics.extend(metrics.into_iter().filter(|(_, value)| value.is_finite()));
        Ok(())
    }

    /// A member has waited for others for so long in all, in this incarnation.
    pub fn waited(&mut self, trainer: u32, waiting: Duration, now: Instant) {
        let member = &mut self.members[trainer as usize];
        member.pace.observe(member.steps, waiting, now);
    }

    /// A member goes, its work done (`finished`) or expecting to be replaced.
    ///
    /// # Errors
    /// As [`Membership::hear`].
    pub fn leave(&mut self, request: &proto::LeaveRequest, id: &proto::TrainerId, now: Instant) -> Result<(), Refusal> {
        self.report(id, request.examples, request.metrics.clone(), now)?;
        if request.step > 0 {
            self.gave(id.index, request.step - 1, now);
        }
        let member = &mut self.members[id.index as usize];
        member.rate = 0.0;
        member.presence = if request.finished { Presence::Finished } else { Presence::Left };
        Ok(())
    }

    /// Whether every trainer has left well.
    #[must_use]
    pub fn done(&self) -> bool {
        self.members.iter().all(|member| member.presence == Presence::Finished)
    }

    /// Marks who has been silent too long as lost; sentences about what is new since the last call.
    pub fn look(&mut self, now: Instant) -> Vec<String> {
        let waited = now.saturating_duration_since(self.started);
        let mut news = Vec::new();
        for (index, member) in self.members.iter_mut().enumerate() {
            let quiet = now.saturating_duration_since(member.heard);
            match member.presence {
                Presence::Active if quiet >= self.patience.silence => {
                    member.presence = Presence::Lost;
                    member.rate = 0.0;
                    news.push(lost(index, member, quiet));
                }
                Presence::Awaited if waited >= self.patience.join && !member.missed => {
                    member.missed = true;
                    news.push(awaited(index, waited));
                }
                _ => {}
            }
        }
        news
    }

    /// What is wrong right now, in sentences.
    #[must_use]
    pub fn warnings(&self, now: Instant) -> Vec<String> {
        let waited = now.saturating_duration_since(self.started);
        let describe = |(index, member): (usize, &Member)| match member.presence {
            Presence::Awaited if waited >= self.patience.join => Some(awaited(index, waited)),
            Presence::Lost => Some(lost(index, member, now.saturating_duration_since(member.heard))),
            _ => None,
        };
        self.members.iter().enumerate().filter_map(describe).collect()
    }

    /// Says why the server should give up, once nobody has been active for too long.
    #[must_use]
    pub fn abandoned(&self, now: Instant) -> Option<String> {
        let alone = now.saturating_duration_since(self.company);
        if self.active() || self.done() || alone < self.patience.abandon {
            return None;
        }
        let missing: Vec<String> = (self.members.iter().enumerate())
            .filter(|(_, member)| member.presence != Presence::Finished)
            .map(|(index, member)| match member.presence {
                Presence::Awaited => format!("{index} (never joined)"),
                Presence::Left => format!("{index} (left to be replaced)"),
                _ => format!("{index} (lost)"),
            })
            .collect();
        Some(format!("no trainer was active for {} s; missing: trainer {}", alone.as_secs(), missing.join(", ")))
    }

    /// Metrics of all trainers; of those that report the same name the one of lowest index counts.
    #[must_use]
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        self.members.iter().rev().flat_map(|member| member.metrics.clone()).collect()
    }

    /// What this server leaves behind.
    #[must_use]
    pub fn result(&self) -> psjobs_api::ReplicaResult {
        psjobs_api::ReplicaResult {
            steps: self.members.iter().map(|member| member.steps).sum(),
            examples: self.members.iter().map(|member| member.examples.0 + member.examples.1).sum(),
            seconds: self.training.map_or(0.0, |(first, last)| (last - first).as_secs_f64()),
            metrics: self.metrics(),
            ..psjobs_api::ReplicaResult::default()
        }
    }

    /// The answer to `Status`.
    #[must_use]
    pub fn status(&self, now: Instant) -> proto::StatusReply {
        let phase = match () {
            () if self.done() => proto::JobPhase::Done,
            () if self.members.iter().any(|member| member.presence == Presence::Awaited) => proto::JobPhase::Waiting,
            () => proto::JobPhase::Training,
        };
        let trainers = self.members.iter().enumerate().map(|(index, member)| proto::TrainerStatus {
            index: index as u32,
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
        });
        let total = |steps: fn(&Member) -> u64| self.members.iter().map(steps).sum();
        let known = self.members.iter().all(|member| member.total_steps > 0);
        proto::StatusReply {
            phase: phase.into(),
            step: total(|member| member.steps),
            total_steps: if known { total(|member| member.total_steps) } else { 0 },
            examples_per_second: self.members.iter().map(|member| member.rate).sum(),
            metrics: self.metrics(),
            trainers: trainers.collect(),
            warnings: self.warnings(now),
            staleness: Vec::new(),
            checkpoint: None,
            stragglers: stragglers(&self.members.iter().map(Member::own_pace).collect::<Vec<_>>()),
        }
    }

    fn place(&self, id: &proto::TrainerId) -> Result<(), Refusal> {
        if id.job_uid != self.job_uid {
            return Err(Refusal::OtherJob { want: self.job_uid.clone(), found: id.job_uid.clone() });
        }
        if id.index as usize >= self.members.len() {
            return Err(Refusal::NoSuchTrainer { found: id.index, trainers: self.members.len() as u32 });
        }
        Ok(())
    }
}

fn awaited(index: usize, waited: Duration) -> String {
    let waited = waited.as_secs();
    format!("trainer {index} has not joined after {waited} s; see whether it was started and can reach this server")
}

fn lost(index: usize, member: &Member, quiet: Duration) -> String {
    format!(
        "trainer {index} has been silent for {} s, after step {}; it is taken for lost until it joins again",
        quiet.as_secs(),
        member.steps
    )
}

fn difference(want: &[TensorSpec], found: &[TensorSpec]) -> Option<String> {
    let show = |tensor: Option<&TensorSpec>| {
        tensor.map_or_else(|| "nothing".to_owned(), |tensor| format!("{} {:?}", tensor.name, tensor.shape))
    };
    (0..want.len().max(found.len()))
        .find(|i| want.get(*i) != found.get(*i))
        .map(|i| format!("tensor {i} is {} in the job and {} in the trainer", show(want.get(i)), show(found.get(i))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trainer_that_never_came_is_news_once_and_a_warning_for_good() {
        let start = Instant::now();
        let mut members = Membership::new("job".into(), 1, Patience::default(), start);
        for (second, news, warnings) in [(59, 0, 0), (60, 1, 1), (61, 0, 1)] {
            let now = start + Duration::from_secs(second);
            assert_eq!(members.look(now).len(), news, "news at {second} s");
            assert_eq!(members.warnings(now).len(), warnings, "warnings at {second} s");
        }
    }

    #[test]
    fn the_rate_is_that_of_the_reports_whatever_comes_in_between() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let id = proto::TrainerId { job_uid: "job".into(), index: 0, incarnation: 0 };
        let mut members = Membership::new("job".into(), 1, Patience::default(), start);
        members.join(&id, Vec::new(), 100, start).expect("joins");
        for (now, examples, want) in [(0.5, 100_000, 0.0), (2.5, 100_640, 320.0), (4.5, 101_280, 320.0)] {
            members.hear(&id, at(now - 0.001)).expect("a gradient just before the heartbeat");
            members.report(&id, examples, BTreeMap::new(), at(now)).expect("reports");
            let rate = members.status(at(now)).examples_per_second;
            assert!((rate - want).abs() < 1e-6, "{rate} examples/s at {now} s");
        }
    }

    #[test]
    fn a_slow_trainer_is_named_although_all_go_in_step() {
        let start = Instant::now();
        let id = |index| proto::TrainerId { job_uid: "job".into(), index, incarnation: 0 };
        let mut members = Membership::new("job".into(), 3, Patience::default(), start);
        (0..3).for_each(|index| members.join(&id(index), Vec::new(), 100, start).expect("joins"));
        for second in 1..=20 {
            let now = start + Duration::from_secs(second);
            for index in 0..3 {
                // One step a second; trainers 0 and 2 wait for trainer 1 for most of it.
                members.gave(index, second - 1, now);
                let waiting = if index == 1 { Duration::ZERO } else { Duration::from_millis(700 * second) };
                members.waited(index, waiting, now);
            }
        }
        let status = members.status(start + Duration::from_secs(20));
        assert_eq!(status.stragglers, [1]);
        assert!((status.trainers[1].steps_per_second - 1.0).abs() < 1e-6, "{:?}", status.trainers[1]);
        let leave = proto::LeaveRequest { trainer: Some(id(1)), finished: true, ..Default::default() };
        members.leave(&leave, &id(1), start + Duration::from_secs(21)).expect("leaves");
        assert_eq!(members.status(start + Duration::from_secs(21)).stragglers, [0; 0], "who has left holds nobody up");
    }
}
