//! A trainer's batches, step by step, read ahead. In most jobs all trainers read as many examples; where that
//! follows their speed, server 0 sends each its part of the steps to come, before they are read. In an elastic job it
//! deals whole batches, as many at a time as a trainer reads for one exchange.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use psjobs_ps::batch::sharing::Work;

use super::micro_batches::MicroBatches;
use super::plan::{Plan, Turn};
use super::updater::{UpdateError, Updater};
use crate::data::loader::{Loader, LoaderEnded};
use crate::data::sampler::{Part, Sampler, Split};
use crate::data::{Dataset, ReadingAhead};
use crate::workload::Workload;

/// Batches of an elastic job that are asked for before they are needed: as many as the loader reads ahead.
const AHEAD: usize = 3;
/// Steps for which a part is kept when server 0 does not answer.
const MEANWHILE: u64 = 4;

/// The batch of a step of this workload.
type Batch<W> = MicroBatches<<<W as Workload>::Data as Dataset>::Batch>;

/// The batches of one trainer.
pub struct BatchPrefetch<'a, W: Workload> {
    workload: &'a W,
    sampler: Sampler,
    plan: &'a Plan,
    total: u64,
    even: Part,
    /// The parts of a job where they follow the trainers' speed. Dropped before the loader, which may wait for the next.
    parts: Option<Parts>,
    /// The batches assigned in an elastic job; dropped before the loader as well.
    dealt: Option<Dealt>,
    loader: Loader<Batch<W>>,
}

/// The batches that server 0 has assigned, beginning with the current one.
struct Dealt {
    ahead: VecDeque<u64>,
    sender: Sender<u64>,
    /// How often the trainer had entered the job: what was dealt before is others' to read.
    entries: u64,
}

/// The parts that server 0 has given this trainer.
struct Parts {
    /// The parts of the current step and of later ones.
    spans: VecDeque<Span>,
    sender: Sender<Span>,
    work: Work,
    silent: bool,
}

#[derive(Clone, Debug)]
struct Span {
    steps: Range<u64>,
    part: Part,
}

impl<'a, W: Workload> BatchPrefetch<'a, W> {
    /// Prefetches the batches of `steps`.
    ///
    /// # Panics
    /// If the plan's trainer is not one of the split's.
    #[must_use]
    pub fn new(workload: &'a W, plan: &'a Plan, split: Split, sampler: Sampler, steps: Range<u64>) -> Self {
        let (total, even) = (steps.end, split.part(plan.reader()));
        if plan.elastic {
            let (dealt, loader) = deal(workload, plan, &sampler, 0);
            return Self { workload, sampler, plan, total, even, parts: None, dealt: Some(dealt), loader };
        }
        let (sender, parts) = mpsc::channel();
        let loader = load(workload, plan, plan.adaptive.then_some(parts), &sampler, steps);
        let parts =
            plan.adaptive.then(|| Parts { spans: VecDeque::new(), sender, work: Work::default(), silent: false });
        Self { workload, sampler, plan, total, even, parts, dealt: None, loader }
    }

    /// Makes ready for `step`, which is not the next one if the servers went back to a checkpoint, or in an elastic job
    /// for what is dealt; `None` when all is done.
    ///
    /// # Errors
    /// If server 0 cannot be reached or refuses, or the wait for it is interrupted.
    pub fn prepare(&mut self, step: u64, updater: &mut impl Updater) -> Result<Option<Turn>, UpdateError> {
        if self.dealt.is_some() {
            return self.prepare_dealt(updater);
        }
        if step >= self.total {
            return Ok(None);
        }
        self.prepare_part(step, updater)?;
        Ok(Some(Turn { step, number: step }))
    }

    fn prepare_dealt(&mut self, updater: &mut impl Updater) -> Result<Option<Turn>, UpdateError> {
        let Some(dealt) = &mut self.dealt else { return Ok(None) };
        loop {
            // Batches of an earlier entry are others' to read, however many are here: only server 0 knows what is left.
            let is_old = updater.entries() != dealt.entries;
            let next = if is_old || dealt.ahead.len() < AHEAD { updater.next_batch()? } else { None };
            if updater.entries() != dealt.entries {
                (*dealt, self.loader) = deal(self.workload, self.plan, &self.sampler, updater.entries());
            }
            let Some(unit) = next else { break };
            for batch in self.plan.batches_of(unit, self.total) {
                // A loader that has ended says so when it is asked for a batch.
                let _ = dealt.sender.send(batch);
                dealt.ahead.push_back(batch);
            }
        }
        Ok(dealt.ahead.pop_front().map(|number| Turn { step: updater.next_step(), number }))
    }

    /// Asks for parts some steps before they are read.
    fn prepare_part(&mut self, step: u64, updater: &impl Updater) -> Result<(), UpdateError> {
        if self.loader.next_step() != step {
            let (sender, parts) = mpsc::channel();
            let adaptive = self.parts.as_mut().map(|known| {
                known.spans.clear();
                known.sender = sender;
                parts
            });
            self.loader = load(self.workload, self.plan, adaptive, &self.sampler, step..self.total);
        }
        let Some(parts) = &mut self.parts else { return Ok(()) };
        while parts.spans.front().is_some_and(|span| span.steps.end <= step) {
            parts.spans.pop_front();
        }
        // The loader is at most as far ahead as the shortest span is long.
        while let from = parts.spans.back().map_or(step, |span| span.steps.end)
            && from < self.total
            && parts.spans.back().is_none_or(|span| span.steps.start <= step)
        {
            parts.ask(from, self.plan, self.even, updater)?;
        }
        Ok(())
    }

    /// The batch of the turn that was made ready.
    ///
    /// # Errors
    /// If reading has failed.
    pub fn next_batch(&mut self) -> Result<Batch<W>, LoaderEnded> {
        self.loader.next_batch()
    }

    /// Examples of `step`.
    #[must_use]
    pub fn examples(&self, step: u64) -> usize {
        let span = self.parts.iter().flat_map(|parts| &parts.spans).find(|span| span.steps.contains(&step));
        span.map_or(self.even, |span| span.part).examples
    }

    /// So many examples were read and computed with.
    pub fn worked(&mut self, examples: usize, busy: Duration) {
        if let Some(Parts { work, .. }) = &mut self.parts {
            work.examples += examples as u64;
            work.busy += busy;
        }
    }
}

impl Parts {
    fn ask(&mut self, from: u64, plan: &Plan, even: Part, updater: &impl Updater) -> Result<(), UpdateError> {
        let share = updater.share(from, plan.batch as u32, self.work)?;
        if share.is_none() && !self.silent {
            tracing::warn!("server 0 does not send this trainer's part of the steps; it goes on with the last one");
        }
        self.silent = share.is_none();
        let last = self.spans.back().map_or(even, |span| span.part);
        let (until, part) = match share {
            Some(share) => (share.until, Part { offset: share.offset as usize, examples: share.examples as usize }),
            None => (from + MEANWHILE, last),
        };
        if part != last {
            tracing::info!(step = from, examples = part.examples, "reads another part of each step");
        }
        let span = Span { steps: from..until, part };
        // A loader that has ended says so when it is asked for a batch.
        let _ = self.sender.send(span.clone());
        self.spans.push_back(span);
        Ok(())
    }
}

/// Begins to read what will be dealt.
fn deal<W: Workload>(workload: &W, plan: &Plan, sampler: &Sampler, entries: u64) -> (Dealt, Loader<Batch<W>>) {
    let (sender, batches) = mpsc::channel();
    let (data, mut sampler, most) = (workload.training_set(), sampler.clone(), plan.micro_batch());
    let mut known = VecDeque::new();
    let loader = Loader::read(0..u64::MAX, move |_| {
        if known.is_empty() {
            known.push_back(batches.recv().ok()?);
        }
        let batch = MicroBatches::read(&data, sampler.batch(known.pop_front()?), most);
        let first = known.len();
        known.extend(batches.try_iter());
        if data.ahead() > 0 {
            let part = sampler.even();
            let next = known.iter().skip(first).filter_map(|number| sampler.ahead(*number, part));
            next.for_each(|examples| data.will_read(examples));
        }
        Some(batch)
    });
    (Dealt { ahead: VecDeque::new(), sender, entries }, loader)
}

/// Begins to read. With `parts` it waits for the one of each step.
fn load<W: Workload>(
    workload: &W,
    plan: &Plan,
    parts: Option<Receiver<Span>>,
    sampler: &Sampler,
    steps: Range<u64>,
) -> Loader<Batch<W>> {
    let (data, mut sampler, most) = (workload.training_set(), sampler.clone(), plan.micro_batch());
    let mut ahead = ReadingAhead::default();
    let Some(parts) = parts else {
        let part = sampler.even();
        return Loader::read(steps, move |step| {
            let batch = MicroBatches::read(&data, sampler.batch(step), most);
            ahead.announce(&data, &sampler, step, part);
            Some(batch)
        });
    };
    let mut span = Span { steps: 0..0, part: Part { offset: 0, examples: 0 } };
    Loader::read(steps, move |step| {
        while span.steps.end <= step {
            span = parts.recv().ok()?;
        }
        let batch = MicroBatches::read(&data, sampler.part(step, span.part), most);
        // Later parts are about where this one is.
        ahead.announce(&data, &sampler, step, span.part);
        Some(batch)
    })
}

#[cfg(test)]
mod tests {
    use psjobs_api::training::NonFinite;
    use psjobs_ps::batch::sharing::Share;
    use psjobs_ps::client::TimeSpent;
    use tch::{Device, Tensor, nn};

    use super::*;
    use crate::train::throttle::Pace;
    use crate::workload::Metrics;

    const BATCHES: u64 = 12;

    /// Gives the numbers of the examples.
    struct Numbers;

    impl Dataset for Numbers {
        type Batch = Vec<i64>;

        fn examples(&self) -> usize {
            BATCHES as usize
        }

        fn batch(&self, examples: &[i64]) -> Vec<i64> {
            examples.to_vec()
        }
    }

    /// Has data and no model.
    struct OnlyData;

    impl Workload for OnlyData {
        type Model = ();
        type Data = Numbers;

        fn training_set(&self) -> Numbers {
            Numbers
        }

        fn model(&self, _path: &nn::Path) {}

        fn loss(&self, _model: &(), _batch: Vec<i64>) -> Tensor {
            Tensor::new()
        }

        fn evaluate(&self, _model: &()) -> Metrics {
            Metrics::new()
        }
    }

    /// Deals the batches of some exchanges.
    struct Dealer {
        exchanges: Range<u64>,
        entries: u64,
    }

    impl Updater for Dealer {
        fn next_step(&self) -> u64 {
            0
        }

        fn accumulate(&mut self, _loss: &Tensor) -> Result<(), UpdateError> {
            Ok(())
        }

        fn update(&mut self, turn: Turn, _loss: &Tensor) -> Result<u64, UpdateError> {
            Ok(turn.step + 1)
        }

        fn settle(&mut self) -> Result<Option<u64>, UpdateError> {
            Ok(None)
        }

        fn share(&self, _step: u64, _base: u32, _work: Work) -> Result<Option<Share>, UpdateError> {
            Ok(None)
        }

        fn next_batch(&mut self) -> Result<Option<u64>, UpdateError> {
            Ok(self.exchanges.next())
        }

        fn entries(&self) -> u64 {
            self.entries
        }

        fn report(&mut self, _examples: u64, _metrics: &Metrics, _spent: TimeSpent) {}

        fn record(&mut self, _step: u64, _metrics: &Metrics) {}

        fn waiting(&self) -> Duration {
            Duration::ZERO
        }

        fn leave(self, _finished: bool, _examples: u64, _metrics: &Metrics) -> Result<(), UpdateError> {
            Ok(())
        }

        fn fail(self, _failure: String) {}
    }

    fn plan(steps_per_exchange: u64) -> Plan {
        Plan {
            epochs: 1,
            max_steps: None,
            batch: 1,
            micro_batches: 1,
            autocast: false,
            elastic: true,
            adaptive: false,
            steps_per_exchange,
            non_finite: NonFinite::Refuse,
            seed: 1,
            trainer: 0,
            trainers: 2,
            device: Device::Cpu,
            log_every: 100,
            evaluate_every: None,
            pace: Pace::default(),
            save: None,
        }
    }

    #[test]
    fn when_the_servers_have_gone_back_all_that_they_deal_is_read() {
        let split = Split { examples: BATCHES as usize, batch: 1, trainers: 1, seed: 1 };
        for steps in 1..=5 {
            let (plan, mut sampler) = (plan(steps), split.sampler(0).expect("enough"));
            let mut dealer = Dealer { exchanges: 0..plan.exchanges(BATCHES), entries: 1 };
            let mut feed = BatchPrefetch::new(&OnlyData, &plan, split, sampler.clone(), 0..BATCHES);
            let mut read = Vec::new();
            while let Some(turn) = feed.prepare(0, &mut dealer).expect("it deals") {
                let batch = feed.next_batch().expect("it reads");
                assert_eq!(batch.last.batch, sampler.batch(turn.number), "batch {}", turn.number);
                read.push(turn.number);
                // The first exchange is undone with the batch that ends it, and dealt once more.
                if read.len() as u64 == steps {
                    dealer = Dealer { exchanges: 0..plan.exchanges(BATCHES), entries: 2 };
                }
            }
            assert_eq!(read, (0..steps).chain(0..BATCHES).collect::<Vec<_>>(), "{steps} steps for an exchange");
        }
    }
}
