//! The trainers of a job and their progress: a state machine without I/O or clock. Every method takes the time; the
//! services call it under a short lock. Lost and finished trainers are in [`liveness`], reports in [`report`].

mod liveness;
mod model_difference;
mod refusal;
mod report;
mod stragglers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use self::model_difference::difference;
use self::stragglers::Pace;
use crate::checkpoint::Concluded;
use crate::clock::Checks;
use crate::layout::TensorSpec;
use crate::proto;
use crate::series::{LONGEST_NAME, MOST_METRICS};
use crate::server::config::Timeouts;
pub use liveness::CHECK_INTERVAL;
pub use refusal::Refusal;

/// A change of a trainer's liveness that is logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessEvent {
    /// Its index.
    pub trainer: u32,
    /// It was active before; otherwise it has never joined.
    pub is_lost: bool,
    /// Text for the log.
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

/// How far the last step of a trainer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LastStep {
    /// It was not sent.
    Ahead,
    /// The servers have it.
    Given,
    /// A lost server no longer costs any step of the trainer.
    Durable,
}

#[derive(Clone, Debug)]
struct Member {
    presence: Presence,
    /// The log says already that this trainer has not joined.
    missed: bool,
    /// It had finished before this server started, and no other process of it will come.
    ended: bool,
    last_step: LastStep,
    /// The error with which its last process ended.
    failure: Option<String>,
    incarnation: Option<u32>,
    heard: Instant,
    /// The time of its last report of examples; gradients do not report them.
    reported: Option<Instant>,
    steps: u64,
    /// Steps that this server received from it; in an elastic job its first step is not 0.
    given: u64,
    /// Steps that it has given as it says itself, since the servers last went to a checkpoint; 0 before its last one.
    claimed: u64,
    total_steps: u64,
    /// Examples read by earlier incarnations, and by this one.
    examples: (u64, u64),
    rate: f64,
    pace: Pace,
    /// Where the time of this incarnation has gone, as it last said.
    spent: Option<proto::TimeSpent>,
    metrics: BTreeMap<String, f64>,
    /// It reports more metrics than are kept, or longer names.
    has_more_metrics: bool,
}

impl Member {
    /// Returns its own pace if it is active.
    fn own_pace(&self) -> Option<f64> {
        self.pace.steps_per_second().filter(|_| self.presence == Presence::Active)
    }

    /// Keeps the newest value of each metric, of [`MOST_METRICS`] names that are short enough.
    fn keep_metrics(&mut self, metrics: impl IntoIterator<Item = (String, f64)>) {
        for (name, value) in metrics.into_iter().filter(|(_, value)| value.is_finite()) {
            let has_room = self.metrics.len() < MOST_METRICS || self.metrics.contains_key(&name);
            if has_room && name.len() <= LONGEST_NAME {
                self.metrics.insert(name, value);
            } else {
                self.has_more_metrics = true;
            }
        }
    }
}

/// The trainers of one job, as one server sees them.
#[derive(Debug)]
pub struct Membership {
    job_uid: String,
    /// Set in an elastic job: batches are assigned only while at least this many trainers are there.
    least: Option<u32>,
    /// New trainers are refused because the job is done.
    closed: bool,
    /// The trainers of a job that had come to its end were started again, to do more steps.
    does_more: bool,
    timeouts: Timeouts,
    members: Vec<Member>,
    tensors: Vec<TensorSpec>,
    /// The model that this server evaluates, if it does.
    expected: Vec<TensorSpec>,
    /// The metrics of its last evaluation, and their time.
    evaluation: (BTreeMap<String, f64>, Instant),
    started: Instant,
    /// The last time that a trainer was active.
    last_active: Instant,
    checks: Checks,
    training: Option<(Instant, Instant)>,
}

/// Returns the tensors as a model file has them.
fn without_groups(tensors: &[TensorSpec]) -> Vec<TensorSpec> {
    tensors.iter().map(|tensor| TensorSpec::new(tensor.name.clone(), tensor.shape.clone())).collect()
}

/// The longest description of a trainer's error that is kept, in characters.
const LONGEST_FAILURE: usize = 1000;

/// Seconds over which the rate of examples is smoothed.
const RATE_WINDOW: f64 = 10.0;

impl Membership {
    /// A job of `trainers` trainers, all awaited.
    #[must_use]
    pub fn new(job_uid: String, trainers: u32, least: Option<u32>, timeouts: Timeouts, now: Instant) -> Self {
        let member = Member {
            presence: Presence::Awaited,
            missed: false,
            ended: false,
            last_step: LastStep::Ahead,
            failure: None,
            incarnation: None,
            heard: now,
            reported: None,
            steps: 0,
            given: 0,
            claimed: 0,
            total_steps: 0,
            examples: (0, 0),
            rate: 0.0,
            pace: Pace::new(now),
            spent: None,
            metrics: BTreeMap::new(),
            has_more_metrics: false,
        };
        let members = vec![member; trainers as usize];
        Self {
            job_uid,
            least,
            closed: false,
            does_more: false,
            timeouts,
            members,
            tensors: Vec::new(),
            expected: Vec::new(),
            evaluation: (BTreeMap::new(), now),
            started: now,
            last_active: now,
            checks: Checks::default(),
            training: None,
        }
    }

    /// Records the trainers that had finished before this server started.
    pub fn expect_no_more_of(&mut self, finished: &[u32]) {
        for trainer in finished {
            if let Some(member) = self.members.get_mut(*trainer as usize) {
                member.ended = true;
            }
        }
    }

    /// Admits a trainer. The first one's tensors become the job's.
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
            && let Some(difference) = difference(&self.tensors, &tensors, "the trainer")
        {
            return Err(Refusal::OtherModel { trainer: id.index, difference });
        }
        if !self.expected.is_empty()
            && let Some(difference) = difference(&self.expected, &without_groups(&tensors), "the trainer")
        {
            return Err(Refusal::NotEvaluated { trainer: id.index, difference });
        }
        let goes_on_without_it = self.goes_on_without(id.index);
        let member = &mut self.members[id.index as usize];
        if let Some(current) = member.incarnation.filter(|current| *current > id.incarnation) {
            return Err(Refusal::Replaced { trainer: id.index, found: id.incarnation, current });
        }
        // Whoever starts the processes again says that its work is done: this one has lived on, and its servers may be gone.
        if member.ended && self.least.is_none() {
            return Err(Refusal::Over { trainer: id.index });
        }
        if self.closed && (member.incarnation != Some(id.incarnation) || goes_on_without_it) {
            return Err(Refusal::Over { trainer: id.index });
        }
        if member.incarnation != Some(id.incarnation) {
            member.examples = (member.examples.0 + member.examples.1, 0);
            member.rate = 0.0;
            member.reported = None;
            member.pace = Pace::new(now);
            member.spent = None;
        }
        member.incarnation = Some(id.incarnation);
        member.presence = Presence::Active;
        member.ended = false;
        member.failure = None;
        member.heard = now;
        member.total_steps = total_steps;
        if self.least.is_none() && total_steps > member.steps {
            // The job was started again, to do more. So were the other trainers, however late they come.
            self.does_more |= member.last_step == LastStep::Durable;
            member.last_step = LastStep::Ahead;
        }
        if self.does_more {
            let awaited = self.members.iter_mut().filter(|member| member.presence == Presence::Awaited);
            awaited.for_each(|member| member.last_step = LastStep::Ahead);
        }
        self.last_active = now;
        self.tensors = tensors;
        Ok(())
    }

    /// Admits only trainers of this model, which the server evaluates.
    pub fn expect_model(&mut self, tensors: &[TensorSpec]) {
        self.expected = tensors.to_vec();
    }

    /// Records the metrics of an evaluation on this server.
    pub fn evaluated(&mut self, metrics: BTreeMap<String, f64>, now: Instant) {
        self.evaluation = (metrics, now);
    }

    /// Returns the metrics of the last evaluation on this server, and their time.
    #[must_use]
    pub fn evaluation(&self) -> (BTreeMap<String, f64>, Instant) {
        self.evaluation.clone()
    }

    /// Refuses new trainers, because the job is done: this server is about to end.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Returns whether an elastic job goes on, or ends, without a trainer that has taken part.
    fn goes_on_without(&self, trainer: u32) -> bool {
        let presence = self.members[trainer as usize].presence;
        self.least.is_some() && matches!(presence, Presence::Lost | Presence::Left)
    }

    /// Returns the model's tensors; none before the first trainer has joined.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Takes the model from a checkpoint.
    ///
    /// # Errors
    /// If a tensor differs from those of the job; the text names the first.
    pub fn adopt(&mut self, tensors: &[TensorSpec]) -> Result<(), String> {
        if self.tensors.is_empty() {
            self.tensors = tensors.to_vec();
        }
        match difference(&self.tensors, tensors, "the checkpoint") {
            Some(difference) => Err(difference),
            None => Ok(()),
        }
    }

    /// Takes over what another server knows of trainers that have never contacted this one, or have finished since they
    /// did. A trainer that is new here once the job is done changes nothing: it would be missing in the last checkpoint. Of a
    /// trainer that has contacted this server, which was started anew, the steps count if they are of the `same_epoch`.
    pub fn adopt_roster(&mut self, roster: &[proto::RosterEntry], same_epoch: bool, now: Instant) {
        for entry in roster.iter().filter(|entry| entry.finished || !self.closed) {
            let Some(id) = &entry.trainer else { continue };
            let Some(member) = self.members.get_mut(id.index as usize) else { continue };
            let is_finished = member.presence == Presence::Finished;
            let is_known = member.incarnation == Some(id.incarnation);
            let finishes = |known| entry.finished && known <= id.incarnation && !is_finished;
            if !member.incarnation.is_none_or(finishes) {
                if same_epoch {
                    member.steps = member.steps.max(entry.step);
                }
                continue;
            }
            member.incarnation = Some(id.incarnation);
            member.presence = if entry.finished || is_finished { Presence::Finished } else { Presence::Active };
            member.heard = now;
            member.steps = if same_epoch { member.steps.max(entry.step) } else { entry.step };
            member.total_steps = entry.total_steps;
            let (before, own) = if is_known { member.examples } else { (0, 0) };
            member.examples = (before.max(entry.examples), own.max(entry.own_examples));
            member.keep_metrics(entry.metrics.clone());
        }
    }

    /// Takes over the next step of each trainer, where it is later than what is known.
    pub fn adopt_steps(&mut self, steps: &[u64]) {
        for (member, step) in self.members.iter_mut().zip(steps) {
            member.steps = member.steps.max(*step);
        }
    }

    /// Takes over that a checkpoint of this epoch has all steps of the trainers in `concluded`, unless they are going to do more.
    pub fn adopt_concluded(&mut self, concluded: &Concluded) {
        for (index, member) in (0..).zip(&mut self.members) {
            let all = concluded.get(&index).copied();
            if all.is_some_and(|all| member.total_steps <= all && member.steps <= all) {
                member.last_step = LastStep::Durable;
            }
        }
    }

    /// Sets the next step of each trainer to that in `steps`; those that are not in it begin as in [`Rule::restore`]. Marks the
    /// trainers in `concluded` as having sent their last step.
    ///
    /// [`Rule::restore`]: crate::consistency::Rule::restore
    pub fn rewind(&mut self, steps: &[u64], concluded: &Concluded, now: Instant) {
        let first = steps.iter().copied().min().filter(|_| self.least.is_none()).unwrap_or(0);
        let steps = steps.iter().copied().chain(std::iter::repeat(first));
        for ((index, member), step) in (0..).zip(&mut self.members).zip(steps) {
            let all_steps = concluded.get(&index);
            let goes_on = if member.presence == Presence::Awaited {
                self.does_more
            } else {
                self.least.is_none() && all_steps.is_some_and(|all| member.total_steps > *all)
            };
            member.last_step = if all_steps.is_some() && !goes_on { LastStep::Durable } else { LastStep::Ahead };
            member.claimed = 0;
            // With backup trainers the state may have come about without its last gradients.
            member.steps = all_steps.copied().unwrap_or(0).max(step);
            // In an elastic job the first finished trainer may end the job, so the others need time to reconnect.
            member.heard = if self.least.is_some() { now } else { member.heard };
        }
    }

    /// Returns the number of active trainers, and whether an elastic job has enough active and finished ones to continue. When
    /// one has finished, because all batches were assigned, no others come: those that are there do what is given back.
    #[must_use]
    pub fn present(&self) -> (usize, bool) {
        let count = |presence| self.members.iter().filter(|member| member.presence == presence).count();
        let active = count(Presence::Active);
        (active, count(Presence::Finished) > 0 || active >= self.least.unwrap_or(0) as usize)
    }

    /// Returns whether any trainer is active.
    #[must_use]
    pub fn active(&self) -> bool {
        self.members.iter().any(|member| member.presence == Presence::Active)
    }

    /// Records a message of a member.
    ///
    /// # Errors
    /// If it is not, or no longer, a member.
    pub fn hear(&mut self, id: &proto::TrainerId, now: Instant) -> Result<(), Refusal> {
        self.recognize(id)?;
        if self.closed && self.goes_on_without(id.index) {
            return Err(Refusal::Over { trainer: id.index });
        }
        let member = &mut self.members[id.index as usize];
        member.heard = now;
        if member.presence == Presence::Lost {
            member.presence = Presence::Active;
        }
        if member.presence == Presence::Active {
            self.last_active = now;
        }
        Ok(())
    }

    /// Checks that a message comes from the newest process of a member.
    fn recognize(&self, id: &proto::TrainerId) -> Result<(), Refusal> {
        self.place(id)?;
        match self.members[id.index as usize].incarnation {
            Some(current) if current == id.incarnation => Ok(()),
            Some(current) if current > id.incarnation => {
                Err(Refusal::Replaced { trainer: id.index, found: id.incarnation, current })
            }
            _ => Err(Refusal::NotJoined { trainer: id.index, incarnation: id.incarnation }),
        }
    }

    /// Records that a member sent its gradient of `step`.
    pub fn gave(&mut self, trainer: u32, step: u64, now: Instant) {
        let Some(member) = self.members.get_mut(trainer as usize) else { return };
        let next = step.saturating_add(1);
        member.given += u64::from(next > member.steps);
        if self.least.is_some() && next > member.steps {
            // An elastic job may be started again, with more steps.
            member.last_step = LastStep::Ahead;
        }
        member.steps = next.max(member.steps);
        self.training = Some((self.training.map_or(now, |(first, _)| first), now));
    }

    /// Records the examples that a member has read so far and its metrics.
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
            return Ok(()); // Its Leave has overtaken this heartbeat.
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
        member.keep_metrics(metrics);
        Ok(())
    }

    /// Records the total time that this incarnation of a member has waited for others.
    pub fn waited(&mut self, trainer: u32, waiting: Duration, now: Instant) {
        let member = &mut self.members[trainer as usize];
        member.pace.observe(member.steps, waiting, now);
    }

    /// Records where the time of this incarnation of a member has gone, as it says.
    pub fn spent(&mut self, trainer: u32, spent: Option<proto::TimeSpent>) {
        self.members[trainer as usize].spent = spent;
    }

    /// Records that a member leaves: its work done (`finished`), expecting to be replaced, or with an error.
    ///
    /// # Errors
    /// As [`Membership::hear`].
    pub fn leave(&mut self, request: &proto::LeaveRequest, id: &proto::TrainerId, now: Instant) -> Result<(), Refusal> {
        self.recognize(id)?;
        // Another server may have reported its end before, without its last metrics.
        let member = &mut self.members[id.index as usize];
        member.examples.1 = request.examples;
        member.keep_metrics(request.metrics.clone());
        // One that this process has not seen train says so now.
        if request.step > self.members[id.index as usize].steps {
            self.gave(id.index, request.step - 1, now);
        }
        let member = &mut self.members[id.index as usize];
        (member.rate, member.heard, self.last_active) = (0.0, now, now);
        member.presence = if request.finished { Presence::Finished } else { Presence::Left };
        let failed = !request.finished && !request.failure.is_empty();
        member.failure = failed.then(|| request.failure.chars().take(LONGEST_FAILURE).collect());
        Ok(())
    }

    /// Checks that this job has a place for a trainer.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn place(&self, id: &proto::TrainerId) -> Result<(), Refusal> {
        if id.job_uid != self.job_uid {
            return Err(Refusal::OtherJob { found: id.job_uid.clone() });
        }
        if id.index as usize >= self.members.len() {
            return Err(Refusal::NoSuchTrainer { found: id.index, trainers: self.members.len() as u32 });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
