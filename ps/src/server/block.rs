//! One block of parameters and the task that owns it: values, optimizer state, version, and the
//! gradients of the open round. Nobody else touches them, so nothing is locked.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use psjobs_api::training::NonFinite;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::command::{Command, Standing, Update};
use super::exchange::empty;
use super::metrics::Metrics;
use super::mirror::{Frames, Mirror};
use super::peer::{Answer, Gradient, Peer};
use super::recipe::Recipe;
use super::sum::{add, scale};
use crate::checkpoint::BlockState;
use crate::codec::Codec;
use crate::consistency::{Rule, Verdict};
use crate::optimizer::State;
use crate::proto;
use crate::wire::buffers::Buffer;
use crate::wire::frame;

/// What a block is made of.
pub struct Plan {
    /// Number of the block.
    pub block: u32,
    /// Its elements in the flat space.
    pub range: Range<usize>,
    /// Trainers of the job.
    pub trainers: u32,
    /// They come and go.
    pub elastic: bool,
    /// How the job trains.
    pub recipe: Arc<Recipe>,
    /// The server's epoch when the block was made.
    pub epoch: u64,
    /// Its part in replication when the block was made.
    pub standing: Standing,
    /// Counts what happens.
    pub metrics: Arc<Metrics>,
}

/// A snapshot that is due is taken when the block has had nothing to do for so long, so that other blocks' answers
/// need not wait for it; and in any case before the block changes.
const IDLE: Duration = Duration::from_millis(20);

/// Owns the block until every sender is gone.
pub async fn own(plan: Plan, mut commands: mpsc::Receiver<Command>) {
    let meter = plan.metrics.heat.meter(plan.block);
    let mut block = Block::new(plan);
    loop {
        let command = if block.due.is_empty() {
            commands.recv().await
        } else if let Ok(command) = tokio::time::timeout(IDLE, commands.recv()).await {
            command
        } else {
            block.take_due_snapshots();
            continue;
        };
        let Some(command) = command else { return };
        if command.changes() {
            block.take_due_snapshots();
        }
        meter.time(|| block.handle(command));
    }
}

struct Block {
    plan: Plan,
    rule: Rule,
    values: Vec<f32>,
    state: State,
    version: u64,
    /// Only trainers of this epoch are heard: the others' gradients belong to a state that is gone.
    epoch: u64,
    round: Round,
    standing: Standing,
    /// While it stands mirrored.
    mirror: Option<Mirror>,
    /// Trainers that have said with which step they begin, while its round is not open.
    entering: Vec<(Peer, u64)>,
    /// Applied, but its trainer is too far ahead to be answered.
    ahead: Vec<(Peer, u64)>,
    /// Snapshots of versions to come.
    snapshots: Vec<(u64, oneshot::Sender<Option<BlockState>>)>,
    /// Snapshots of the version that is there.
    due: Vec<oneshot::Sender<Option<BlockState>>>,
}

/// The gradients of a step whose round is open.
#[derive(Default)]
struct Round {
    /// Sum of the gradients added so far, in trainer order.
    sum: Option<Buffer>,
    /// How many those are.
    added: usize,
    /// Gradients that came before their turn; `None` for one that is left out.
    early: BTreeMap<u32, Option<Gradient>>,
    /// The highest step that was given.
    step: u64,
    /// Who is answered when the round closes.
    waiting: Vec<(Peer, u64)>,
}

impl Block {
    fn new(plan: Plan) -> Self {
        let consistency = plan.recipe.consistency.clone();
        let rule = if plan.elastic { Rule::elastic(consistency) } else { Rule::new(consistency, plan.trainers) };
        let (epoch, standing) = (plan.epoch, plan.standing);
        Self {
            standing,
            mirror: (standing == Standing::Mirrored).then(|| Mirror::new(0)),
            plan,
            rule,
            values: Vec::new(),
            state: State::default(),
            version: 0,
            epoch,
            round: Round::default(),
            entering: Vec::new(),
            ahead: Vec::new(),
            snapshots: Vec::new(),
            due: Vec::new(),
        }
    }

    fn handle(&mut self, command: Command) {
        // A caller that has gone away no longer wants its answer: failed sends are fine.
        match command {
            Command::Gradient { peer, step, version, gradient } => self.gradient(peer, step, version, gradient),
            Command::Enter(peer, step) => self.enter(peer, step),
            Command::Initialize(codec, payload, reply) => {
                let _ = reply.send(self.initialize(codec, &payload));
            }
            Command::Read(reply) => {
                let _ = reply.send(self.read());
            }
            Command::NextStep(trainer, reply) => {
                // What it gave to the open round is not in the values: a successor gives the same step again, and
                // waits for the round like everybody else.
                let _ = reply.send((self.rule.entry(trainer), !self.values.is_empty()));
            }
            Command::Finish(trainer) => {
                self.rule.finish(trainer);
                self.advance();
                self.begin();
                self.release();
            }
            Command::Snapshot(at, reply) => self.snapshot(at, reply),
            Command::Version(reply) => {
                let _ = reply.send((!self.values.is_empty()).then_some(self.version));
            }
            Command::Steps(reply) => {
                let _ = reply.send(self.settled_steps());
            }
            Command::Restore(epoch, state, reply) => {
                self.epoch = epoch;
                self.restore(state);
                self.mirror = (self.standing == Standing::Mirrored).then(|| Mirror::new(self.version));
                let _ = reply.send(());
            }
            Command::Stand(standing) => self.stand(standing),
            Command::Attach(held, backup, reply) => {
                let _ = reply.send(self.attach(held, backup));
            }
            Command::Acknowledged(version) => {
                let free = self.mirror.as_mut().map(|mirror| mirror.acknowledge(version));
                self.answer(free.unwrap_or_default());
            }
            Command::Install(state, primary) => {
                self.restore(Some(state));
                self.acknowledge(&primary);
            }
            Command::Mirror(update, primary) => self.follow(update, &primary),
        }
    }

    fn stand(&mut self, standing: Standing) {
        let before = std::mem::replace(&mut self.standing, standing);
        match standing {
            Standing::Mirrored if before != Standing::Mirrored => self.mirror = Some(Mirror::new(self.version)),
            Standing::Mirrored => {}
            Standing::Alone => {
                let waiting = self.mirror.take().map(Mirror::dissolve);
                self.answer(waiting.unwrap_or_default());
            }
            Standing::Backup => self.mirror = None,
        }
    }

    fn attach(&mut self, held: Option<u64>, backup: Frames) -> bool {
        if self.standing == Standing::Backup {
            return false;
        }
        self.standing = Standing::Mirrored;
        let mut mirror = self.mirror.take().unwrap_or_else(|| Mirror::new(0));
        let version = (!self.values.is_empty()).then_some(self.version);
        let copied = mirror.attach(backup, held, version, || self.contents());
        self.mirror = Some(mirror);
        copied
    }

    /// Takes an update of the primary, and says so before it is applied: from here on it is not lost.
    fn follow(&mut self, update: Update, primary: &Frames) {
        if self.standing != Standing::Backup || update.version != self.version + 1 {
            let text = format!(
                "block {} is at version {}, the update makes {}",
                self.plan.block, self.version, update.version
            );
            primary.send(Err(Status::data_loss(text)));
            return;
        }
        self.version = update.version;
        self.acknowledge(primary);
        for next in &update.next_steps {
            self.rule.advance(next.trainer, next.step);
        }
        self.apply(&update.gradient, update.factor);
        self.find_due_snapshots();
    }

    fn acknowledge(&self, primary: &Frames) {
        let message = proto::Acknowledgement { block: self.plan.block, version: self.version };
        let message = proto::follow_request::Message::Acknowledgement(message);
        // A primary that is gone needs no word.
        primary.send(Ok(frame::message(&proto::FollowRequest { message: Some(message) })));
    }

    /// The frame that makes a backup equal to this block.
    fn contents(&self) -> Bytes {
        let bytes = |values: &Vec<f32>| Bytes::copy_from_slice(bytemuck::cast_slice(values));
        let contents = proto::BlockContents {
            block: self.plan.block,
            version: self.version,
            updates: self.state.step(),
            next_steps: self.settled_steps(),
            values: bytes(&self.values),
            slots: self.state.slots().iter().map(bytes).collect(),
        };
        frame::message(&proto::Replica { contents: Some(contents), ..proto::Replica::default() })
    }

    fn read(&self) -> Option<Bytes> {
        let Self { plan, values, version, .. } = self;
        let answer = Answer { step: 0, block: plan.block, version: *version, start: plan.range.start, values };
        (!values.is_empty()).then(|| answer.encode(&plan.recipe))
    }

    fn initialize(&mut self, codec: Codec, payload: &[u8]) -> bool {
        if !self.values.is_empty() {
            return false;
        }
        self.values.resize(self.plan.range.len(), 0.0);
        codec.decode(payload, &mut self.values).expect("the payload was checked when it came in");
        self.state = self.plan.recipe.optimizer.state(self.values.len());
        if let Some(mut mirror) = self.mirror.take() {
            mirror.send(self.contents());
            self.mirror = Some(mirror);
        }
        true
    }

    /// Whether what `peer` brought is to be heard.
    fn hears(&self, peer: &Peer) -> bool {
        // One that was ended brought what its trainer does not know of: it has left, or comes again.
        if peer.epoch() != self.epoch || self.standing == Standing::Backup || peer.has_ended() {
            return false;
        }
        if self.values.is_empty() {
            peer.refuse(empty(self.plan.block));
        }
        !self.values.is_empty()
    }

    fn enter(&mut self, peer: Peer, step: u64) {
        if !self.hears(&peer) {
            return;
        }
        let entered = self.rule.enter(peer.trainer(), step);
        // Of an earlier try; its stream may be this one.
        self.entering.retain(|(earlier, _)| earlier.trainer() != peer.trainer());
        match entered {
            Ok(()) => self.entering.push((peer, step)),
            Err(round) => {
                let Self { plan, version, .. } = self;
                let refusal =
                    Answer { step: round, block: plan.block, version: *version, start: plan.range.start, values: &[] };
                peer.answer(&refusal, &plan.recipe, &mut None);
            }
        }
        self.advance();
        self.begin();
        self.release();
    }

    /// Answers those whose first round is open.
    fn begin(&mut self) {
        let begin = self.entering.extract_if(.., |(_, step)| self.rule.may_begin(*step)).collect::<Vec<_>>();
        self.answer(begin);
    }

    fn gradient(&mut self, peer: Peer, step: u64, version: u64, gradient: Gradient) {
        let block = self.plan.block;
        if !self.hears(&peer) {
            return;
        }
        let mut gradient = Some(gradient);
        if self.plan.recipe.non_finite != NonFinite::Pass
            && !gradient.as_ref().is_some_and(|gradient| gradient.is_finite(self.values.len()))
        {
            self.plan.metrics.not_finite();
            if self.plan.recipe.non_finite == NonFinite::Refuse {
                return peer.refuse(not_finite(peer.trainer(), step, block));
            }
            gradient = None;
        }
        match self.rule.offer(peer.trainer(), step, version < self.version) {
            Verdict::Apply => {
                let staleness = self.version.saturating_sub(version);
                self.plan.metrics.staleness(staleness);
                if let Some(gradient) = gradient {
                    let next = proto::NextStep { trainer: peer.trainer(), step: step.saturating_add(1) };
                    self.update(&gradient, self.plan.recipe.factor(step, staleness), |_| vec![next]);
                }
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Answer => {
                self.ahead.push((peer, step));
                self.release();
            }
            Verdict::Drop => {
                self.plan.metrics.late();
                self.answer(vec![(peer, step)]);
            }
            Verdict::Late => {
                self.plan.metrics.late();
                peer.refuse(Status::out_of_range(format!(
                    "step {step} of block {block} was done without trainer {}; enter again",
                    peer.trainer()
                )));
            }
            Verdict::Join => self.round.waiting.push((peer, step)),
            Verdict::Hold => {
                self.round.early.insert(peer.trainer(), gradient);
                self.round.step = self.round.step.max(step);
                self.round.waiting.push((peer, step));
                self.advance();
            }
        }
    }

    /// Adds what is in its turn; closes the round if it is complete.
    fn advance(&mut self) {
        while let Some(first) = self.round.early.first_entry().filter(|first| self.rule.in_turn(*first.key())) {
            let gradient = first.remove();
            self.add(gradient);
        }
        let Some(contributors) = self.rule.close_round() else { return };
        while let Some((_, gradient)) = self.round.early.pop_first() {
            self.add(gradient);
        }
        let Round { sum, added, step, waiting, .. } = std::mem::take(&mut self.round);
        if let Some(mut sum) = sum {
            scale(sum.bytes_mut().as_chunks_mut().0, added as f32);
            let (gradient, factor) = (Gradient::Wire(Codec::F32, sum.freeze()), self.plan.recipe.factor(step, 0));
            self.update(&gradient, factor, |rule| {
                let next = |trainer| proto::NextStep { trainer, step: rule.next_step(trainer) };
                contributors.into_iter().map(next).collect()
            });
        }
        self.answer(waiting);
        self.begin();
        self.find_due_snapshots();
    }

    /// `sum += gradient`; the first gradient is the sum, so that no zero is added to it.
    fn add(&mut self, gradient: Option<Gradient>) {
        let Some(gradient) = gradient else { return };
        let elements = self.values.len();
        let Round { sum, added, .. } = &mut self.round;
        gradient.with_values(elements, |gradient| match sum {
            Some(sum) => add(sum.bytes_mut().as_chunks_mut().0, gradient),
            None => {
                let mut first = self.plan.recipe.buffers.take(elements * 4);
                first.bytes_mut().copy_from_slice(gradient.as_flattened());
                *sum = Some(first);
            }
        });
        *added += 1;
    }

    /// Applies a gradient, after it has left for the backup with the steps that trainers go on with.
    fn update(&mut self, gradient: &Gradient, factor: f64, next_steps: impl FnOnce(&Rule) -> Vec<proto::NextStep>) {
        self.version += 1;
        if let Some(mirror) = &mut self.mirror {
            let (codec, payload) = gradient.as_sent();
            let (block, version, codec) = (self.plan.block, self.version, codec.number());
            let next_steps = next_steps(&self.rule);
            let head = proto::Replica { block, version, factor, next_steps, codec, ..proto::Replica::default() };
            let fill = |target: &mut [u8]| target.copy_from_slice(payload);
            mirror.update(version, frame::replica(&self.plan.recipe.buffers, &head, payload.len(), fill));
        }
        self.apply(gradient, factor);
    }

    fn apply(&mut self, gradient: &Gradient, factor: f64) {
        let Self { plan, values, state, .. } = self;
        let elements = values.len();
        gradient.with_values(elements, |gradient| plan.recipe.optimizer.apply(values, gradient, state, factor));
    }

    /// Answers those of whom nobody is too far behind.
    fn release(&mut self) {
        let may = self.ahead.extract_if(.., |(_, step)| self.rule.may_go_on(*step)).collect::<Vec<_>>();
        self.answer(may);
    }

    /// Sends the current values, when the backup has them; those who wait for the same step share one copy.
    fn answer(&mut self, peers: Vec<(Peer, u64)>) {
        let Self { plan, values, version, mirror, .. } = self;
        if let Some(mirror) = mirror.as_mut().filter(|mirror| mirror.owes(*version)) {
            return mirror.hold(*version, peers);
        }
        let mut last = None;
        for (peer, step) in peers {
            let answer = Answer { step, block: plan.block, version: *version, start: plan.range.start, values };
            peer.answer(&answer, &plan.recipe, &mut last);
        }
    }

    fn snapshot(&mut self, at: Option<u64>, reply: oneshot::Sender<Option<BlockState>>) {
        match at {
            Some(at) if at > self.version && !self.values.is_empty() => self.snapshots.push((at, reply)),
            Some(at) if at < self.version => drop(reply.send(None)),
            _ => self.due.push(reply),
        }
    }

    /// The block has a new version.
    fn find_due_snapshots(&mut self) {
        let version = self.version;
        self.due.extend(self.snapshots.extract_if(.., |(at, _)| *at <= version).map(|(_, reply)| reply));
    }

    fn take_due_snapshots(&mut self) {
        for reply in std::mem::take(&mut self.due) {
            // Whoever asked may be gone.
            drop(reply.send(self.capture()));
        }
    }

    fn capture(&self) -> Option<BlockState> {
        if self.values.is_empty() {
            return None;
        }
        Some(BlockState {
            values: self.values.clone(),
            slots: self.state.slots().to_vec(),
            updates: self.state.step(),
            version: self.version,
            next_steps: self.settled_steps(),
        })
    }

    /// By trainer: the first step that the values do not have.
    fn settled_steps(&self) -> Vec<u64> {
        (0..self.plan.trainers).map(|trainer| self.rule.settled(trainer)).collect()
    }

    fn restore(&mut self, state: Option<BlockState>) {
        let BlockState { values, slots, updates, version, next_steps } = state.unwrap_or_default();
        self.values = values;
        self.state = State::restored(slots, updates);
        self.version = version;
        self.rule.restore(&next_steps);
        self.round = Round::default();
        self.entering.clear();
        self.ahead.clear();
        self.snapshots.clear();
    }
}

fn not_finite(trainer: u32, step: u64, block: u32) -> Status {
    Status::invalid_argument(format!(
        "the gradient of trainer {trainer}, step {step}, block {block} holds NaN or infinity; nothing of it was \
         applied: lower the learning rate or look at the loss"
    ))
}
