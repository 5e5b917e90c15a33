//! The share of all tables that one task owns: rows, the consistency rule, and the gradients of the
//! open round. Pure: the time comes from outside, and a trainer that waits for an answer is handed back
//! when it may go on.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::gradients::Gradients;
use super::idle::Idle;
use super::rows::{Row, Rows, Snapshot};
use super::{TableSpec, key};
use crate::aggregation::{Aggregation, Closed, Contribution, Outcome};
use crate::consistency::Rule;
use crate::training_rules::TrainingRules;

/// The settings that a shard is made from.
#[derive(Clone)]
pub struct Plan {
    pub specs: Arc<[TableSpec]>,
    pub rules: Arc<TrainingRules>,
    pub trainers: u32,
    pub seed: u64,
    /// Shards of the whole job, over which a table's limit of rows is spread.
    pub shards: u64,
}

/// A change of a shard, for the copy of it on another server.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// By table the gradients that were applied; empty if none were.
    pub gradients: Vec<Gradients>,
    /// Factor on the learning rate.
    pub factor: f64,
    /// The next step of each trainer whose gradients are in it.
    pub next_steps: Vec<(u32, u64)>,
    /// By table the keys of rows that were evicted, after the gradients were applied.
    pub evicted: Vec<(usize, Vec<u64>)>,
    /// Requests so far.
    pub requests: u64,
}

/// The rows and the open round of one task. `W` is a trainer that waits for the answer to a push.
pub struct Shard<W> {
    rules: Arc<TrainingRules>,
    trainers: u32,
    tables: Vec<Table>,
    /// Gradients by table.
    aggregation: Aggregation<Vec<Gradients>, Vec<Gradients>, W>,
    /// Updates so far, and what they were when a trainer pulled last.
    version: u64,
    pulled: BTreeMap<u32, u64>,
    /// The updates that trainers are taken to have seen that have not pulled here: those before this copy of the shard
    /// took over from another server's.
    seen: u64,
    /// The change since it was taken last.
    change: Option<Change>,
    /// Counts requests: when a row was used.
    requests: u64,
    step: u64,
}

struct Table {
    spec: TableSpec,
    rows: Rows,
    most: usize,
    origin: u64,
    idle_steps: Option<Idle>,
    idle_ms: Option<Idle>,
    evicted: u64,
}

/// Everything of a shard that outlives its server.
#[derive(Clone, Debug)]
pub struct ShardState {
    /// The rows of each table.
    pub tables: Vec<Snapshot>,
    pub clock: Clock,
}

impl ShardState {
    /// Bytes that the rows take at most.
    pub fn bytes(&self) -> u64 {
        self.tables.iter().map(Snapshot::bytes).sum()
    }
}

/// How far a shard is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// By trainer index: the first step whose gradients the rows do not contain.
    pub next_steps: Vec<u64>,
    /// Requests so far, by which rows remember when they were used.
    pub requests: u64,
}

/// The contents of a table of a shard, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    pub rows: u64,
    pub bytes: u64,
    pub evicted: u64,
}

impl<W> Shard<W> {
    pub fn new(plan: &Plan) -> Self {
        let slots = plan.rules.rows_optimizer.slots();
        let table = |(place, spec): (usize, &TableSpec)| Table {
            rows: Rows::new(spec.width, slots),
            most: usize::try_from(spec.max_rows.div_ceil(plan.shards)).unwrap_or(usize::MAX),
            origin: key::origin(plan.seed, place),
            idle_steps: Idle::new(spec.idle_steps),
            idle_ms: Idle::new(spec.idle_ms),
            evicted: 0,
            spec: spec.clone(),
        };
        Self {
            tables: plan.specs.iter().enumerate().map(table).collect(),
            trainers: plan.trainers,
            aggregation: Aggregation::new(plan.rules.rule(plan.trainers, false)),
            rules: plan.rules.clone(),
            version: 0,
            pulled: BTreeMap::new(),
            seen: 0,
            change: None,
            requests: 0,
            step: 0,
        }
    }

    /// The rows of `keys`, one behind the other.
    pub fn pull(&mut self, trainer: u32, table: usize, keys: &[u64]) -> Vec<f32> {
        self.requests += 1;
        self.pulled.insert(trainer, self.version);
        let Table { spec, rows, origin, .. } = &mut self.tables[table];
        let mut values = vec![0.0; keys.len() * spec.width];
        for (key, values) in keys.iter().zip(values.chunks_exact_mut(spec.width)) {
            match rows.read(*key, self.requests) {
                Some(row) => values.copy_from_slice(row),
                None => key::initial(*origin, *key, spec.initial_bound, values),
            }
        }
        values
    }

    /// Takes a trainer's gradients of `step`, by table; `None` counts as given and changes nothing.
    /// Returns those who may go on.
    pub fn push(&mut self, trainer: u32, step: u64, gradients: Option<Vec<Gradients>>, who: W) -> Vec<W> {
        self.requests += 1;
        let pulled = self.pulled.get(&trainer).copied().unwrap_or(self.seen);
        let staleness = self.version - pulled;
        let contribution = Contribution { trainer, step, stale: staleness > 0, gradient: gradients, waiting: who };
        match self.aggregation.offer(contribution) {
            Outcome::Apply(gradients) => {
                let gradients = gradients.unwrap_or_default();
                self.update(gradients, self.rules.rows_factor(step, staleness), |_| {
                    vec![(trainer, step.saturating_add(1))]
                });
                self.step = self.step.max(step);
                self.aggregation.released()
            }
            Outcome::Release => self.aggregation.released(),
            Outcome::Advance => self.advance(),
            Outcome::Wait => Vec::new(),
            // No elastic job has tables.
            Outcome::Drop(who) | Outcome::Late(who) => vec![who],
        }
    }

    /// Records that the trainer has finished: no round waits for it any more.
    pub fn finish(&mut self, trainer: u32) -> Vec<W> {
        self.aggregation.rule.finish(trainer);
        let mut free = self.advance();
        free.append(&mut self.aggregation.released());
        free
    }

    /// The first step that the rows do not contain of the trainer. What it gave to the open round is not in them: a
    /// successor gives that step again, and waits for the round like everybody else.
    pub fn next_step(&self, trainer: u32) -> u64 {
        self.aggregation.rule.entry(trainer)
    }

    /// By trainer: the first step that the rows do not contain.
    pub fn settled(&self) -> Vec<u64> {
        (0..self.trainers).map(|trainer| self.aggregation.rule.settled(trainer)).collect()
    }

    /// Steps that the rows contain of every trainer that has not finished.
    pub fn settled_by_members(&self) -> u64 {
        self.aggregation.rule.settled_by_members()
    }

    /// Returns whether it is as it was made: it has no rows, has had no request and contains no step.
    pub fn is_blank(&self) -> bool {
        let no_rows = self.tables.iter().all(|table| table.rows.len() == 0);
        no_rows && self.requests == 0 && self.settled().iter().all(|step| *step == 0)
    }

    /// Everything as it is, without the round that is open.
    pub fn state(&self) -> ShardState {
        let tables = self.tables.iter().map(|table| table.rows.snapshot()).collect();
        ShardState { tables, clock: Clock { next_steps: self.settled(), requests: self.requests } }
    }

    /// Puts back a row of a table.
    pub fn insert(&mut self, table: usize, row: Row) {
        self.tables[table].rows.insert(row);
    }

    /// Goes on from where a shard was, or several of which this one has rows: the furthest decides, so that nothing is
    /// applied twice.
    pub fn resume<'a>(&mut self, clocks: impl IntoIterator<Item = &'a Clock>) {
        // The job may have had fewer trainers, or more.
        let mut steps: Vec<u64> = Vec::new();
        for Clock { next_steps, requests } in clocks {
            steps.resize(next_steps.len().max(steps.len()), 0);
            steps.iter_mut().zip(next_steps).for_each(|(step, other)| *step = (*step).max(*other));
            self.requests = self.requests.max(*requests);
        }
        self.step = steps.iter().copied().max().unwrap_or(0).saturating_sub(1);
        self.aggregation.rule.restore(&steps);
    }

    /// Lets rows go that are too many, or were unused for too long by `now_ms`.
    pub fn evict(&mut self, now_ms: u64) {
        for (place, table) in self.tables.iter_mut().enumerate() {
            let by_step = table.idle_steps.as_mut().and_then(|idle| idle.observe(self.step, self.requests));
            let by_time = table.idle_ms.as_mut().and_then(|idle| idle.observe(now_ms, self.requests));
            let mut gone = Vec::new();
            if let Some(until) = by_step.max(by_time) {
                gone.append(&mut table.rows.evict_unused(until));
            }
            if table.spec.max_rows > 0 {
                gone.append(&mut table.rows.evict_down_to(table.most));
            }
            table.evicted += gone.len() as u64;
            if !gone.is_empty() {
                let change = self.change.get_or_insert_with(|| Change { requests: self.requests, ..Change::default() });
                change.evicted.push((place, gone));
            }
        }
    }

    /// The change since this was asked last, if there was one. A push with what it evicts is one change.
    pub fn take_change(&mut self) -> Option<Change> {
        self.change.take()
    }

    /// Makes the change that another copy of this shard has made.
    pub fn follow(&mut self, change: &Change) {
        self.requests = change.requests;
        if !change.gradients.is_empty() {
            self.apply(&change.gradients, change.factor);
        }
        for (trainer, step) in &change.next_steps {
            self.aggregation.rule.advance(*trainer, *step);
            self.step = self.step.max(step.saturating_sub(1));
        }
        for (table, keys) in &change.evicted {
            let table = &mut self.tables[*table];
            keys.iter().for_each(|key| table.rows.evict(*key));
            table.evicted += keys.len() as u64;
        }
    }

    /// Takes over from another copy, whose trainers have seen all updates as far as this one knows.
    pub fn take_over(&mut self) {
        self.seen = self.version;
    }

    /// Returns whether rows expire by time alone.
    pub fn watches_time(&self) -> bool {
        self.tables.iter().any(|table| table.idle_ms.is_some())
    }

    /// Returns what each table holds here.
    pub fn holdings(&self) -> impl Iterator<Item = Holding> {
        self.tables.iter().map(|table| Holding {
            rows: table.rows.len() as u64,
            bytes: table.rows.bytes() as u64,
            evicted: table.evicted,
        })
    }

    /// Adds the early gradients whose turn in trainer order has come; applies their mean if that closes the round.
    fn advance(&mut self) -> Vec<W> {
        let tables = &self.tables;
        let add = |sum: &mut Option<Vec<Gradients>>, gradients: Vec<Gradients>| match sum {
            Some(sum) => {
                for ((sum, gradients), table) in sum.iter_mut().zip(&gradients).zip(tables) {
                    sum.add(gradients, table.spec.width);
                }
            }
            None => *sum = Some(gradients),
        };
        let closed = self.aggregation.advance(add);
        let Some(Closed { sum, step, contributors, waiting }) = closed else { return Vec::new() };
        let (mut sum, added) = sum.unwrap_or_default();
        sum.iter_mut().for_each(|gradients| gradients.divide(added));
        self.update(sum, self.rules.rows_factor(step, 0), |rule| {
            contributors.into_iter().map(|trainer| (trainer, rule.next_step(trainer))).collect()
        });
        self.step = self.step.max(step);
        waiting
    }

    /// Applies gradients by table, none if they were left out, and records them with the next steps of their trainers.
    fn update(&mut self, gradients: Vec<Gradients>, factor: f64, next_steps: impl FnOnce(&Rule) -> Vec<(u32, u64)>) {
        if !gradients.is_empty() {
            self.apply(&gradients, factor);
        }
        let (next_steps, requests) = (next_steps(&self.aggregation.rule), self.requests);
        self.change = Some(Change { gradients, factor, next_steps, evicted: Vec::new(), requests });
    }

    fn apply(&mut self, gradients: &[Gradients], factor: f64) {
        let optimizer = &self.rules.rows_optimizer;
        for (table, gradients) in self.tables.iter_mut().zip(gradients) {
            let Table { spec, rows, origin, .. } = table;
            for (key, gradient) in gradients.rows(spec.width) {
                let begin = |row: &mut [f32]| key::initial(*origin, key, spec.initial_bound, row);
                rows.update(key, gradient, (optimizer, factor), self.requests, begin);
            }
        }
        self.version += 1;
    }
}

#[cfg(test)]
mod tests;
