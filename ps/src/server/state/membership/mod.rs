//! Who takes part in the job and how far everybody is: a state machine without I/O or clock. Every
//! method takes the time; the services call it under a short lock. What it tells is in [`report`].

mod liveness;
mod refusal;
mod report;
mod stragglers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use self::stragglers::Pace;
use crate::layout::TensorSpec;
use crate::proto;
use crate::server::config::Timeouts;
pub use refusal::Refusal;

/// What is new about a trainer that is missed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessEvent {
    /// Its index.
    pub trainer: u32,
    /// It was there; otherwise it has never come.
    pub is_lost: bool,
    /// For the log.
    pub sentence: String,
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
    /// Steps that it gave here; in an elastic job its first one is not step 0.
    given: u64,
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
    /// Trainers come and go; nothing is dealt to them while fewer are there.
    least: Option<u32>,
    /// Nobody is let in any more who was not there before.
    closed: bool,
    timeouts: Timeouts,
    members: Vec<Member>,
    tensors: Vec<TensorSpec>,
    /// The model that this server can evaluate, if that is told.
    expected: Vec<TensorSpec>,
    /// What its last evaluation gave, and when.
    evaluation: (BTreeMap<String, f64>, Instant),
    started: Instant,
    /// Last time that anybody was active.
    last_active: Instant,
    training: Option<(Instant, Instant)>,
}

/// Seconds over which the rate of examples is smoothed.
const RATE_WINDOW: f64 = 10.0;

impl Membership {
    /// A job of `trainers` trainers, all awaited.
    #[must_use]
    pub fn new(job_uid: String, trainers: u32, least: Option<u32>, timeouts: Timeouts, now: Instant) -> Self {
        let member = Member {
            presence: Presence::Awaited,
            missed: false,
            concluded: false,
            incarnation: None,
            heard: now,
            reported: None,
            steps: 0,
            given: 0,
            total_steps: 0,
            examples: (0, 0),
            rate: 0.0,
            pace: Pace::new(now),
            metrics: BTreeMap::new(),
        };
        let members = vec![member; trainers as usize];
        Self {
            job_uid,
            least,
            closed: false,
            timeouts,
            members,
            tensors: Vec::new(),
            expected: Vec::new(),
            evaluation: (BTreeMap::new(), now),
            started: now,
            last_active: now,
            training: None,
        }
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
        if !self.expected.is_empty()
            && let Some(difference) = difference(&self.expected, &tensors)
        {
            return Err(Refusal::NotEvaluated { trainer: id.index, difference });
        }
        let member = &mut self.members[id.index as usize];
        if let Some(current) = member.incarnation.filter(|current| *current > id.incarnation) {
            return Err(Refusal::Replaced { trainer: id.index, found: id.incarnation, current });
        }
        if self.closed && member.incarnation != Some(id.incarnation) {
            return Err(Refusal::Over { trainer: id.index });
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
        member.concluded &= self.least.is_some() || total_steps <= member.steps;
        self.last_active = now;
        self.tensors = tensors;
        Ok(())
    }

    /// Lets in only trainers of this model, which the server evaluates.
    pub fn expect_model(&mut self, tensors: &[TensorSpec]) {
        self.expected = tensors.to_vec();
    }

    /// The server has measured the model.
    pub fn evaluated(&mut self, metrics: BTreeMap<String, f64>, now: Instant) {
        self.evaluation = (metrics, now);
    }

    /// An elastic job is done, whoever comes now.
    pub fn close(&mut self) {
        self.closed = self.least.is_some();
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
    pub fn rewind(&mut self, steps: &[u64], concluded: &[u32], now: Instant) {
        for (member, step) in self.members.iter_mut().zip(steps) {
            member.steps = *step;
        }
        for (index, member) in (0..).zip(&mut self.members) {
            member.concluded = concluded.contains(&index);
            // In an elastic job the first who counts as finished ends it, so that the others need time to come.
            member.heard = if self.least.is_some() { now } else { member.heard };
        }
    }

    /// Trainers at work, and of an elastic job whether those and the ones that have finished are enough to go on.
    #[must_use]
    pub fn present(&self) -> (usize, bool) {
        let count = |presence| self.members.iter().filter(|member| member.presence == presence).count();
        let active = count(Presence::Active);
        (active, active + count(Presence::Finished) >= self.least.unwrap_or(0) as usize)
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
            self.last_active = now;
        }
        Ok(())
    }

    /// A member gave its gradient of `step`.
    pub fn gave(&mut self, trainer: u32, step: u64, now: Instant) {
        let Some(member) = self.members.get_mut(trainer as usize) else { return };
        let next = step.saturating_add(1);
        member.given += u64::from(next > member.steps);
        // Of an elastic job that was started again, to do more.
        member.concluded &= self.least.is_none() || next <= member.steps;
        member.steps = next.max(member.steps);
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
        if matches!(member.presence, Presence::Left | Presence::Finished) {
            return Ok(()); // A heartbeat that its last words have overtaken.
        }
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

fn difference(want: &[TensorSpec], found: &[TensorSpec]) -> Option<String> {
    let show = |tensor: Option<&TensorSpec>| {
        tensor.map_or_else(|| "nothing".to_owned(), |tensor| format!("{} {:?}", tensor.name, tensor.shape))
    };
    (0..want.len().max(found.len()))
        .find(|i| want.get(*i) != found.get(*i))
        .map(|i| format!("tensor {i} is {} in the job and {} in the trainer", show(want.get(i)), show(found.get(i))))
}

#[cfg(test)]
mod tests;
