//! A trainer of a job with a sparse table, and what it insists on: each of its pushes is in every row that it touched,
//! once, and what was there does not go unless the servers went back. Beside it the trainers train layers of their own,
//! which trainer 0 gives to the servers: those of a step follow from the step alone.

use std::rc::Rc;
use std::time::Duration;

use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{AsyncMember, AsyncTables, ClientError, Layers, RowGradients};
use psjobs_ps::sparse::TableSpec;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;
use tokio::time::Instant;

use super::model::{Counts, counted, moments};
use super::network::Host;
use super::plan::Plan;
use super::trainer::{Failure, Job, Witness, config, fail};

/// Numbers in a row: the marks of a trainer's gradients.
const WIDTH: usize = 3;
/// Rows of each trainer: enough that every task of every server has some.
const ROWS: u64 = 8;
/// A row that all trainers push: it counts.
const EVERYBODYS: u64 = 1 << 40;

pub fn specs() -> Vec<TableSpec> {
    vec![TableSpec::new("marks", WIDTH, 0.0)]
}

fn key(trainer: u32, row: u64) -> u64 {
    u64::from(trainer) * 1000 + row
}

/// All keys of a job: by row, then by trainer, and that of everybody.
pub fn keys(plan: &Plan) -> Vec<u64> {
    let own = (0..ROWS).flat_map(|row| (0..plan.trainers).map(move |trainer| key(trainer, row)));
    own.chain([EVERYBODYS]).collect()
}

/// Pushes by row and trainer, of rows in the order of [`keys`].
pub fn row_counts(plan: &Plan, rows: &[f32]) -> Result<Counts, String> {
    let count = |(place, marks): (usize, &[f32])| {
        let marks: Vec<f64> = marks.iter().map(|mark| f64::from(*mark)).collect();
        counted(&marks, plan.steps).ok_or_else(|| {
            format!("the row of key {} holds {marks:?}: not the first pushes once each", keys(plan)[place])
        })
    };
    let own = &rows[..rows.len() - WIDTH];
    let all: Vec<u64> = own.chunks(WIDTH).enumerate().map(count).collect::<Result<_, _>>()?;
    Ok(all.chunks(plan.trainers as usize).map(<[u64]>::to_vec).collect())
}

/// Returns the keys and gradients that a trainer pushes in a step.
pub fn marks(plan: &Plan, trainer: u32, step: u64) -> (Vec<u64>, Vec<f32>) {
    // In Sync a row gets the mean over the trainers.
    let scale = if plan.consistency.mode == ConsistencyMode::Sync { f64::from(plan.trainers) } else { 1.0 };
    let marks = moments(step).map(|moment| (-moment * scale) as f32);
    let own = (0..ROWS).map(|row| (key(trainer, row), marks));
    let all = own.chain([(EVERYBODYS, [-scale as f32, 0.0, 0.0])]);
    let (keys, values): (Vec<u64>, Vec<[f32; WIDTH]>) = all.unzip();
    (keys, values.concat())
}

/// Pushes of all trainers, in the row of everybody.
pub fn all_together(rows: &[f32]) -> f32 {
    rows[rows.len() - WIDTH]
}

/// The layers after `steps`.
fn layers(plan: &Plan, steps: u64) -> Vec<f32> {
    (0..plan.elements as u64).map(|i| (steps * 1000 + i % 1000) as f32).collect()
}

/// Why a trainer does not go on as it was.
enum Break {
    /// The servers have gone to a checkpoint.
    Back,
    Failed(Failure),
}

impl From<ClientError> for Break {
    fn from(error: ClientError) -> Self {
        if matches!(error, ClientError::TablesLost { .. }) { Self::Back } else { Self::Failed(fail(error)) }
    }
}

impl From<Failure> for Break {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Trains to the end.
pub async fn train(job: Rc<Job>, index: u32, incarnation: u32) -> Result<(), Failure> {
    let seed = job.plan.seed ^ (u64::from(index) << 32) ^ (u64::from(incarnation) << 40);
    let config = config(&job, index, incarnation);
    let member = AsyncMember::join(config.clone()).await.map_err(fail)?;
    let tables = AsyncTables::open(config, specs()).await.map_err(fail)?;
    job.begins().await;
    let (chance, witness) = (ChaCha8Rng::seed_from_u64(seed), Witness::new(&job, index));
    let mut trainer = Trainer { job: &job, host: Host::Trainer(index, incarnation), index, tables, chance, witness };
    while let Err(broken) = trainer.train().await {
        match broken {
            Break::Failed(failure) => return Err(failure),
            Break::Back => trainer.tables.reopen().await.map_err(fail)?,
        }
        job.complete.borrow_mut()[index as usize] = false;
    }
    member.report(job.plan.steps, job.plan.steps, &Default::default(), None);
    member.leave(true).await.map_err(fail)
}

struct Trainer<'a> {
    job: &'a Job,
    host: Host,
    index: u32,
    tables: AsyncTables,
    chance: ChaCha8Rng,
    witness: Witness<'a>,
}

impl Trainer<'_> {
    /// From where the servers are.
    async fn train(&mut self) -> Result<(), Break> {
        let plan = &self.job.plan;
        let next = self.look_at_layers().await?;
        self.log(format_args!("goes on with {next}"));
        self.keep(next, true).await?;
        let rows = self.rows().await?;
        self.witness.entered(next, row_counts(plan, &rows))?;
        for step in next..plan.steps {
            tokio::time::sleep(Duration::from_millis(self.chance.random_range(0..=plan.compute))).await;
            self.push(step).await?;
            self.log(format_args!("did step {step}"));
            self.keep(step + 1, false).await?;
            let rows = self.rows().await?;
            self.witness.answered(step, row_counts(plan, &rows))?;
        }
        self.keep(plan.steps, true).await?;
        if self.tables.epoch() > 0 && !self.tables.conclude().await? {
            return Err(Break::Back);
        }
        self.job.complete.borrow_mut()[self.index as usize] = true;
        if self.job.complete.borrow().iter().all(|complete| *complete) {
            let since = Instant::now();
            let rows = loop {
                let rows = self.rows().await?;
                match self.witness.all_there(row_counts(plan, &rows)) {
                    Err(_) if self.witness.may_look_again(since).await => {}
                    found => break found.map(|()| rows)?,
                }
            };
            let (found, want) = (all_together(&rows), (plan.steps * u64::from(plan.trainers)) as f32);
            if found != want {
                return self.witness.violation(format!("finds {found} pushes of everybody, not {want}"))?;
            }
        }
        Ok(())
    }

    async fn push(&self, step: u64) -> Result<(), Break> {
        let (keys, values) = marks(&self.job.plan, self.index, step);
        let gradients = RowGradients { table: 0, keys: &keys, values: &values };
        Ok(self.tables.push(step, &[gradients]).await?)
    }

    async fn rows(&self) -> Result<Vec<f32>, Break> {
        Ok(self.tables.pull(&[(0, &keys(&self.job.plan))]).await?.remove(0))
    }

    async fn keep(&self, steps: u64, now: bool) -> Result<(), Break> {
        if self.index == 0 && (now || self.tables.wants_layers(steps)) {
            let state = layers(&self.job.plan, steps);
            self.tables.keep(&Layers { steps, updates: steps, state }).await?;
        }
        Ok(())
    }

    /// Checks that the layers which the servers keep are whole, and no newer than the rows. Returns the next step.
    async fn look_at_layers(&mut self) -> Result<u64, Break> {
        let kept = self.tables.kept().await?;
        let next = self.tables.next_step();
        let Some(kept) = kept else { return Ok(next) };
        let known = self.index == 0 || self.job.plan.consistency.mode == ConsistencyMode::Sync;
        if kept.state != layers(&self.job.plan, kept.steps) || (known && kept.steps > next) {
            let steps = kept.steps;
            self.witness.violation(format!("finds layers said to be of step {steps}, goes on with {next}"))?;
        }
        Ok(next)
    }

    fn log(&self, what: std::fmt::Arguments) {
        self.job.network.wires().trace.log(format_args!("{:?} {what}", self.host));
    }
}

/// Checks the files of a job: the layers of the last step, and rows with every push once.
pub fn check_exported(plan: &Plan, parameters: &[f32], file: &[u8]) -> Result<(), String> {
    if parameters != layers(plan, plan.steps) {
        return Err(format!("the model's layers are {parameters:?}, not those of step {}", plan.steps));
    }
    check_exported_rows(plan, file)
}

/// Checks the file of rows: every push is there once.
pub fn check_exported_rows(plan: &Plan, file: &[u8]) -> Result<(), String> {
    let exported = SafeTensors::deserialize(file).map_err(|error| format!("the tables: {error}"))?;
    let tensor = |name: &str| exported.tensor(name).map(|tensor| tensor.data()).map_err(|error| error.to_string());
    let found = tensor("marks.keys")?.as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key)).collect::<Vec<_>>();
    let values: Vec<f32> = tensor("marks.values")?.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
    let row = |key: &u64| {
        let place = found.iter().position(|found| found == key).ok_or_else(|| format!("no row of key {key}"))?;
        Ok(&values[place * WIDTH..][..WIDTH])
    };
    let rows = keys(plan).iter().map(row).collect::<Result<Vec<_>, String>>()?.concat();
    let counts = row_counts(plan, &rows)?;
    let together = all_together(&rows);
    let want = plan.steps * u64::from(plan.trainers);
    if counts.iter().flatten().all(|count| *count == plan.steps) && together == want as f32 {
        return Ok(());
    }
    Err(format!("the tables hold {counts:?} of {} pushes of each trainer, {together} of everybody", plan.steps))
}
