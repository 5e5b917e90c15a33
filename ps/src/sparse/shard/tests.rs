use std::collections::HashMap;

use proptest::prelude::*;
use psjobs_api::Training;
use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer as Spec, OptimizerKind};
use psjobs_arithmetic::optimizer::{Optimizer, State};

use super::*;

const WIDTH: usize = 3;
const SEED: u64 = 11;

fn training(kind: OptimizerKind, mode: ConsistencyMode) -> Training {
    Training {
        consistency: Consistency { mode, ..Consistency::default() },
        optimizer: Spec { kind, learning_rate: 0.25, ..Spec::default() },
        ..Training::default()
    }
}

fn shard(training: &Training, trainers: u32, spec: TableSpec) -> Shard<u32> {
    Shard::new(&Plan {
        specs: vec![spec].into(),
        rules: Arc::new(TrainingRules::new(training, 1, &[])),
        trainers,
        seed: SEED,
        shards: 1,
    })
}

fn spec() -> TableSpec {
    TableSpec::new("t", WIDTH, 0.5)
}

fn gradients(rows: &[(u64, [f32; WIDTH])]) -> Option<Vec<Gradients>> {
    let mut all = Gradients::default();
    for (key, row) in rows {
        all.add_bytes(*key, &row.map(f32::to_le_bytes));
    }
    Some(vec![all])
}

fn begin(key: u64) -> Vec<f32> {
    let mut row = vec![0.0; WIDTH];
    key::initial(key::origin(SEED, 0), key, 0.5, &mut row);
    row
}

/// A table as one would write it without a thought for speed.
struct Model {
    optimizer: Optimizer,
    rows: HashMap<u64, (Vec<f32>, State)>,
    next: HashMap<u32, u64>,
}

impl Model {
    fn read(&self, key: u64) -> Vec<f32> {
        self.rows.get(&key).map_or_else(|| begin(key), |(values, _)| values.clone())
    }

    fn push(&mut self, trainer: u32, step: u64, rows: &[(u64, [f32; WIDTH])]) {
        let next = self.next.entry(trainer).or_default();
        if step < *next {
            return;
        }
        *next = step + 1;
        let mut sums: Vec<(u64, [f32; WIDTH])> = Vec::new();
        for (key, row) in rows {
            match sums.iter_mut().find(|(sum, _)| sum == key) {
                Some((_, sum)) => sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value),
                None => sums.push((*key, *row)),
            }
        }
        for (key, sum) in sums {
            let fresh = || (begin(key), self.optimizer.state(WIDTH));
            let (values, state) = self.rows.entry(key).or_insert_with(fresh);
            self.optimizer.apply(values, bytemuck::cast_slice(&sum), state, 1.0);
        }
    }
}

type Request = (u32, u64, Vec<(u64, [f32; WIDTH])>);

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let row = (0_u64..12, [-2.0_f32..2.0, -2.0..2.0, -2.0..2.0]);
    let request = (0_u32..3, 0_u64..6, prop::collection::vec(row, 0..8));
    prop::collection::vec(request, 0..30)
}

fn kinds() -> impl Strategy<Value = OptimizerKind> {
    use OptimizerKind::{Adagrad, Adam, AdamW, Ftrl, RmsProp, Sgd};
    prop::sample::select(vec![Sgd, Adam, AdamW, Adagrad, RmsProp, Ftrl])
}

proptest! {
    /// Pushes of all kinds, with repeats of steps and of keys, empty ones and new keys.
    #[test]
    fn a_shard_is_a_hash_map_of_rows(kind in kinds(), requests in requests()) {
        let training = training(kind, ConsistencyMode::Async);
        let mut shard = shard(&training, 3, spec());
        let optimizer = Optimizer::new(&training.optimizer);
        let mut model = Model { optimizer, rows: HashMap::new(), next: HashMap::new() };
        for (trainer, step, rows) in requests {
            prop_assert_eq!(shard.push(trainer, step, gradients(&rows), 1), vec![1], "answered at once");
            model.push(trainer, step, &rows);
            let keys: Vec<u64> = (0..12).collect();
            let want: Vec<f32> = keys.iter().flat_map(|key| model.read(*key)).collect();
            prop_assert_eq!(shard.pull(0, 0, &keys), want);
        }
        prop_assert_eq!(shard.holdings().next().map(|held| held.rows), Some(model.rows.len() as u64));
    }

    /// Whatever order they come in, Sync gives the bits that one process gets that adds in trainer order.
    #[test]
    fn a_round_adds_in_the_order_of_the_trainers(
        rows in prop::collection::vec(prop::collection::vec((0_u64..6, [-2.0_f32..2.0, -2.0..2.0, -2.0..2.0]), 0..6), 3),
        order in Just([0_usize, 1, 2]).prop_shuffle(),
    ) {
        let training = training(OptimizerKind::Sgd, ConsistencyMode::Sync);
        let mut shard = shard(&training, 3, spec());
        let mut answered = Vec::new();
        for trainer in order {
            let given = shard.push(trainer as u32, 0, gradients(&rows[trainer]), trainer as u32);
            prop_assert!(given.is_empty() || given.len() == 3);
            answered.extend(given);
        }
        answered.sort_unstable();
        prop_assert_eq!(answered, vec![0, 1, 2]);
        let mut sum = Gradients::default();
        for rows in &rows {
            sum.add(&gradients(rows).expect("given")[0], WIDTH);
        }
        sum.divide(3);
        for (key, sum) in sum.rows(WIDTH) {
            let want: Vec<f32> = begin(key).iter().zip(sum).map(|(w, g)| w - 0.25 * g).collect();
            prop_assert_eq!(shard.pull(0, 0, &[key]), want);
        }
    }
}

#[test]
fn a_repeat_during_a_round_waits_and_counts_once() {
    let mut shard = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Sync), 2, spec());
    let row = [(5, [1.0; WIDTH])];
    assert!(shard.push(0, 0, gradients(&row), 10).is_empty());
    assert!(shard.push(0, 0, gradients(&row), 11).is_empty(), "its connection broke, so it sent it again");
    assert_eq!(shard.push(1, 0, gradients(&[]), 20), [10, 11, 20], "an empty push is a contribution");
    let want: Vec<f32> = begin(5).iter().map(|w| w - 0.25 * 0.5).collect();
    assert_eq!(shard.pull(0, 0, &[5]), want, "the mean of a gradient and nothing");
    assert_eq!(shard.push(1, 0, gradients(&row), 21), [21], "of a round that is over");
    assert_eq!(shard.pull(0, 0, &[5]), want);
    assert_eq!((shard.next_step(0), shard.next_step(1)), (1, 1));
}

#[test]
fn a_round_does_not_wait_for_a_trainer_that_has_finished() {
    let mut shard = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Sync), 2, spec());
    assert!(shard.push(0, 0, gradients(&[(1, [1.0; WIDTH])]), 10).is_empty());
    assert_eq!(shard.finish(1), [10]);
    assert_eq!(shard.push(0, 1, gradients(&[]), 11), [11]);
}

#[test]
fn a_trainer_that_has_finished_holds_back_no_step_of_the_others() {
    let mut shard = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Sync), 2, spec());
    shard.push(0, 0, gradients(&[]), 10);
    shard.push(1, 0, gradients(&[]), 20);
    assert_eq!(shard.settled_by_members(), 1);
    shard.finish(1);
    for step in 1..4 {
        assert_eq!(shard.push(0, step, gradients(&[]), 11), [11]);
        assert_eq!(shard.settled_by_members(), step + 1);
    }
    shard.finish(0);
    assert_eq!(shard.settled_by_members(), 4, "it goes back for no trainer");
}

#[test]
fn a_shard_goes_on_with_another_number_of_trainers() {
    let clock = |next_steps: &[u64]| Clock { next_steps: next_steps.to_vec(), requests: 1 };
    for (label, trainers, clocks, want) in [
        ("as many", 2, vec![clock(&[9, 8])], vec![9, 8]),
        ("more", 4, vec![clock(&[9, 8]), clock(&[7, 9])], vec![9, 9, 9, 9]),
        ("fewer", 1, vec![clock(&[9, 8])], vec![9]),
        ("a new job", 2, vec![], vec![0, 0]),
    ] {
        let mut shard = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Sync), trainers, spec());
        shard.resume(&clocks);
        assert_eq!(shard.settled(), want, "{label}");
    }
}

#[test]
fn bounded_holds_a_trainer_that_is_too_far_ahead() {
    let mut training = training(OptimizerKind::Sgd, ConsistencyMode::Bounded);
    training.consistency.staleness = 1;
    let mut shard = shard(&training, 2, spec());
    assert_eq!(shard.push(0, 0, gradients(&[(1, [1.0; WIDTH])]), 10), [10]);
    assert!(shard.push(0, 1, gradients(&[]), 11).is_empty(), "two ahead");
    assert_eq!(shard.push(1, 0, gradients(&[]), 20), [11, 20]);
}

#[test]
fn a_skipped_gradient_closes_the_round_without_counting() {
    let mut shard = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Sync), 2, spec());
    assert!(shard.push(0, 0, None, 10).is_empty());
    assert_eq!(shard.push(1, 0, gradients(&[(1, [1.0; WIDTH])]), 20), [10, 20]);
    let want: Vec<f32> = begin(1).iter().map(|w| w - 0.25).collect();
    assert_eq!(shard.pull(0, 0, &[1]), want, "one gradient, so its own mean");
}

#[test]
fn an_old_gradient_is_damped_by_what_came_since_its_pull() {
    let mut training = training(OptimizerKind::Sgd, ConsistencyMode::Async);
    training.staleness.policy = Some(psjobs_api::training::StalenessPolicy::Inverse);
    let mut shard = shard(&training, 2, spec());
    shard.pull(1, 0, &[1]);
    for step in 0..4 {
        shard.push(0, step, gradients(&[(2, [1.0; WIDTH])]), 0);
    }
    shard.push(1, 0, gradients(&[(1, [1.0; WIDTH])]), 0);
    let want: Vec<f32> = begin(1).iter().map(|w| w - 0.25 / 4.0).collect();
    assert_eq!(shard.pull(0, 0, &[1]), want);
}

#[test]
fn rows_beyond_the_limit_go_the_longest_unused_first_and_begin_anew() {
    let mut shard =
        shard(&training(OptimizerKind::Sgd, ConsistencyMode::Async), 1, TableSpec { max_rows: 16, ..spec() });
    for key in 0..16 {
        shard.push(0, key, gradients(&[(key, [1.0; WIDTH])]), 0);
        shard.evict(0);
    }
    let trained = shard.pull(0, 0, &[0]);
    assert_ne!(trained, begin(0));
    shard.push(0, 16, gradients(&[(16, [1.0; WIDTH])]), 0);
    shard.evict(0);
    let held = shard.holdings().next().expect("a table");
    assert_eq!((held.rows, held.evicted), (15, 2));
    assert_eq!(shard.pull(0, 0, &[0]), trained, "used of late");
    assert_eq!(shard.pull(0, 0, &[1]), begin(1), "gone");
    shard.push(0, 17, gradients(&[(1, [1.0; WIDTH])]), 0);
    let want: Vec<f32> = begin(1).iter().map(|w| w - 0.25).collect();
    assert_eq!(shard.pull(0, 0, &[1]), want, "a push of a row that is gone begins it anew");
}

#[test]
fn unused_rows_go_by_steps_and_by_time() {
    let by_steps = TableSpec { idle_steps: 8, ..spec() };
    let mut first = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Async), 1, by_steps);
    first.push(0, 0, gradients(&[(1, [1.0; WIDTH]), (2, [1.0; WIDTH])]), 0);
    for step in 1..12 {
        first.pull(0, 0, &[2]);
        first.push(0, step, gradients(&[]), 0);
        first.evict(0);
    }
    assert_eq!(first.holdings().next().map(|held| (held.rows, held.evicted)), Some((1, 1)));
    assert_eq!(first.pull(0, 0, &[1]), begin(1));

    let by_time = TableSpec { idle_ms: 1_000, ..spec() };
    let mut second = shard(&training(OptimizerKind::Sgd, ConsistencyMode::Async), 1, by_time);
    assert!(second.watches_time() && !first.watches_time());
    second.push(0, 0, gradients(&[(1, [1.0; WIDTH])]), 0);
    for (now, rows) in [(0, 1), (999, 1), (1_000, 0)] {
        second.evict(now);
        assert_eq!(second.holdings().next().map(|held| held.rows), Some(rows), "at {now} ms");
    }
}
