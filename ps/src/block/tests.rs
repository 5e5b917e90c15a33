use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, NonFinite, Optimizer};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::*;
use crate::layout::{Layout, TensorSpec};
use crate::owner_tasks::OwnerTasks;
use crate::parameter_group::stretches;
use crate::proto;
use crate::replication_log::{FrameSender, ReplicaRole};
use crate::shm::Mapping;
use crate::training_rules::TrainingRules;
use crate::wire::StreamAbort;

const ELEMENTS: u64 = 8;

/// Two blocks of a job of one trainer in Sync, and the trainer's stream.
struct Blocks {
    store: Store,
    peer: Peer,
    answers: mpsc::Receiver<Result<Bytes, Status>>,
}

impl Blocks {
    /// The blocks without values, in this role.
    fn empty(exact_recovery: Option<bool>, role: ReplicaRole) -> Store {
        let training = Training {
            consistency: Consistency { mode: ConsistencyMode::Sync, exact_recovery, ..Consistency::default() },
            optimizer: Optimizer { learning_rate: 0.5, ..Optimizer::default() },
            non_finite: NonFinite::Skip,
            ..Training::default()
        };
        let tensors = [TensorSpec::new("weight", vec![ELEMENTS])];
        let layout = Layout::new(&tensors, 2).expect("a layout");
        Store::start(Start {
            layout,
            stretches: &stretches(&tensors),
            shards: BTreeMap::from([(0, role), (1, role)]),
            trainers: 1,
            elastic: false,
            epoch: 0,
            rules: &Arc::new(TrainingRules::new(&training, 1, &[])),
            metrics: &Arc::default(),
            tasks: &OwnerTasks::new(TaskTracker::new()),
        })
    }

    async fn new(exact_recovery: Option<bool>) -> Self {
        let store = Self::empty(exact_recovery, ReplicaRole::Alone);
        for block in 0..2 {
            let values = bytes(1.0, store.layout().range(block).len());
            assert!(store.initialize(block, 1, values).await.expect("it has no values yet"));
        }
        let (sender, answers) = mpsc::channel(8);
        Self { store, peer: Peer::new(0, 0, sender, None, StreamAbort::default()), answers }
    }

    /// Gives `step` to one block, all elements alike.
    async fn send(&self, block: u32, step: u64, gradient: f32) {
        let payload = bytes(gradient, self.store.layout().range(block).len());
        let frame = proto::GradientBlock { step, version: step, block, codec: 1, payload };
        self.store.gradient(&self.peer, frame).await.expect("it is taken");
    }

    /// As [`Blocks::send`], and waits for the answer.
    async fn give(&mut self, block: u32, step: u64, gradient: f32) {
        self.send(block, step, gradient).await;
        self.answers.recv().await.expect("an answer").expect("no refusal");
    }

    /// Returns version and first value of a block, as the successor of a trainer reads it to compute `step`, or somebody
    /// who computes nothing.
    async fn read(&self, block: u32, step: Option<u64>) -> (u64, f32) {
        let reader = step.map(|step| BeforeStep { trainer: 0, step });
        let frame = self.store.read(block, reader, None).await.expect("it answers").expect("it has values");
        // Behind the five bytes with which gRPC begins a message.
        let message = proto::ParameterBlock::decode(&frame[5..]).expect("a message");
        (message.version, f32::from_le_bytes(*message.payload.first_chunk().expect("a value")))
    }
}

fn bytes(value: f32, elements: usize) -> Bytes {
    value.to_le_bytes().repeat(elements).into()
}

#[tokio::test]
async fn a_successor_in_mid_step_computes_it_from_the_values_before_it() {
    let mut blocks = Blocks::new(None).await;
    blocks.give(1, 0, 1.0).await;
    // The trainer died before it gave block 0. Its successor begins with the step again.
    assert_eq!((blocks.read(0, Some(0)).await, blocks.read(1, Some(0)).await), ((0, 1.0), (0, 1.0)));
    assert_eq!(blocks.read(1, None).await, (1, 0.5), "who takes no part reads what is new");
    assert_eq!(blocks.read(1, Some(u64::MAX)).await, (1, 0.5), "a step that no trainer can have");
    assert_eq!(blocks.store.next_step(0, 0).await.expect("it answers").0, 0);
    // It gives both blocks: one is answered and not applied again.
    for block in [1, 0] {
        blocks.give(block, 0, 1.0).await;
    }
    for block in 0..2 {
        assert_eq!(blocks.read(block, Some(1)).await, (1, 0.5), "block {block}");
    }
    // In the next step it is the same; the values are always those of one step.
    blocks.give(0, 1, -3.0).await;
    assert_eq!((blocks.read(0, Some(1)).await, blocks.read(1, Some(1)).await), ((1, 0.5), (1, 0.5)));
}

#[tokio::test]
async fn a_step_that_changed_nothing_has_no_values_before_it() {
    let mut blocks = Blocks::new(None).await;
    blocks.give(0, 0, 1.0).await;
    blocks.give(0, 1, f32::NAN).await;
    assert_eq!(blocks.read(0, Some(1)).await, (2, 0.5), "a gradient that was left out");
}

#[tokio::test]
async fn a_round_that_changed_nothing_is_a_version_for_checkpoints_and_the_backup() {
    let mut blocks = Blocks::new(None).await;
    let (primary, mut sent) = FrameSender::new(1);
    let (acknowledgements, _acknowledged) = FrameSender::new(1);
    let backup = Blocks::empty(None, ReplicaRole::Backup);
    blocks.give(1, 0, f32::NAN).await;
    assert!(blocks.store.attach(1, None, &primary).await.expect("it answers"), "it is sent a copy");
    blocks.send(1, 1, f32::NAN).await;
    for _ in 0..2 {
        let frame = sent.recv().await.expect("a frame").expect("no refusal");
        let replica = proto::Replica::decode(&frame[5..]).expect("a message");
        backup.follow(replica, &acknowledgements).await.expect("it is taken");
    }
    assert_eq!(backup.held(1).await, [proto::BlockVersion { block: 1, version: 2 }]);
    for step in 0..2 {
        blocks.give(0, step, 1.0).await;
    }
    for (store, block) in [(&blocks.store, 0), (&blocks.store, 1), (&backup, 1)] {
        let state = store.snapshot(block, Some(2)).await.expect("it is at this version");
        assert_eq!((state.version, state.next_steps), (2, vec![2]), "block {block}");
    }
}

#[tokio::test]
async fn a_pull_that_was_given_up_leaves_the_memory_alone() {
    let blocks = Blocks::new(None).await;
    let memory = Arc::new(Mapping::new(ELEMENTS as usize).expect("a memory file"));
    let into = || PulledInto { memory: memory.clone(), abort: StreamAbort::default() };
    let aborted = into();
    aborted.abort.abort(Status::aborted("a newer pull came"));
    assert!(blocks.store.read(0, None, Some(aborted)).await.is_err(), "it has no answer");
    // The caller goes away while its command is in the queue. The block is past it when it answers the next one.
    let mut waiting = Box::pin(blocks.store.read(0, None, Some(into())));
    assert!(futures::poll!(&mut waiting).is_pending());
    drop(waiting);
    assert_eq!(blocks.read(0, None).await, (0, 1.0));
    assert_eq!(memory.parameters(), [0.0; ELEMENTS as usize], "nothing was written");
    let message = blocks.store.read(0, None, Some(into())).await.expect("it answers").expect("it has values");
    assert!(proto::ParameterBlock::decode(&message[5..]).expect("a message").payload.is_empty());
    let range = blocks.store.layout().range(0);
    assert_eq!(memory.parameters()[range.clone()], vec![1.0; range.len()]);
    assert!(memory.parameters()[range.end..].iter().all(|value| *value == 0.0), "the other block was not pulled");
}

#[tokio::test]
async fn previous_values_are_kept_where_the_job_says_so_or_the_model_is_small() {
    // The largest model of which they are kept by default, and one element more.
    const SMALL: u64 = 16 << 20;
    let rows = [
        (ConsistencyMode::Sync, None, SMALL, true),
        (ConsistencyMode::Sync, None, SMALL + 1, false),
        (ConsistencyMode::Sync, Some(true), SMALL + 1, true),
        (ConsistencyMode::Sync, Some(false), ELEMENTS, false),
        (ConsistencyMode::Async, None, ELEMENTS, false),
        (ConsistencyMode::Bounded, None, ELEMENTS, false),
    ];
    for (mode, exact_recovery, elements, want) in rows {
        let layout = Layout::new(&[TensorSpec::new("weight", vec![elements])], 2).expect("a layout");
        let training = Training {
            consistency: Consistency { mode, exact_recovery, ..Consistency::default() },
            ..Training::default()
        };
        let kept = TrainingRules::new(&training, 1, &[]).keeps_previous(false, &layout);
        assert_eq!(kept, want, "{mode:?} {exact_recovery:?} {elements}");
    }
    let mut blocks = Blocks::new(Some(false)).await;
    blocks.give(0, 0, 1.0).await;
    assert_eq!(blocks.read(0, Some(0)).await, (1, 0.5));
}

#[tokio::test]
async fn a_block_that_becomes_a_backup_makes_its_checkpoint_wait_no_longer() {
    let blocks = Blocks::new(None).await;
    let waiting = blocks.store.snapshot(0, Some(7));
    // The part of a step to come is asked for before the role changes.
    let (state, ()) = futures::future::join(waiting, blocks.store.set_role(0, ReplicaRole::Backup)).await;
    assert!(state.is_none());
    assert!(blocks.store.snapshot(1, Some(0)).await.is_some(), "the other block leads on");
}
