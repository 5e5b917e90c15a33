//! A trainer's session with the servers of its job.

use std::collections::BTreeMap;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join;
use psjobs_arithmetic::parameter_group::ParameterGroup;
use psjobs_ps::batch::sharing::Work;
use psjobs_ps::client::{
    AsyncSession, ClientError, Ended, OverlapSession, RowGradients, SessionConfig, SessionTables, TensorSpec, TimeSpent,
};
use psjobs_ps::sparse::TableSpec;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use super::environment::Environment;
use super::errors::{Error, InputError, exception};
use super::memory::Memory;
use super::waiting::{Interrupt, attentive, check_handler};

/// A trainer's session. Its methods wait without the interpreter's lock. They raise [`Error`] after `leave` and `fail`,
/// in a handler of a signal that such a wait runs, and in a process that was forked from the trainer's.
#[pyclass(frozen, module = "psjobs._native")]
pub struct Session {
    live: Mutex<Option<Live>>,
    interrupt: Arc<AtomicBool>,
    /// The process that joined.
    process: u32,
}

struct Live {
    // Dropped before the runtime that its tasks run on.
    session: OverlapSession,
    /// The sparse tables, if the model has any.
    tables: Option<SessionTables>,
    /// The servers' epoch when the step under way began.
    epoch: u64,
    /// The step whose exchange was begun last, without waiting for its end.
    begun: u64,
    runtime: Runtime,
}

/// Gradients of rows that leave with a step, and by table the keys of rows that are wanted after it.
type Rows<'a> = (&'a [RowGradients<'a>], &'a [(usize, &'a [u64])]);

/// Rows that were wanted, of each table one behind the other; none if they have not come.
type Fetched = Option<Vec<Vec<f32>>>;

#[pymethods]
impl Session {
    /// Joins the job: `tensors` are names, shapes, factors on the learning rate, and weight decays where they are not the
    /// job's; `initial` their values, flat f32, for servers that have none yet.
    #[new]
    fn new(
        py: Python<'_>,
        environment: &Environment,
        tensors: Vec<(String, Vec<u64>, f64, Option<f64>)>,
        initial: PyBuffer<f32>,
        interrupt: &Interrupt,
    ) -> PyResult<Self> {
        check_handler()?;
        let job = environment.job.as_ref().ok_or_else(|| Error::new_err("this trainer is alone"))?;
        let tensors = tensors.into_iter().map(|(name, shape, learning_rate_factor, weight_decay)| {
            let group = ParameterGroup { learning_rate_factor, weight_decay };
            TensorSpec { name, shape, group }
        });
        let tensors = tensors.collect();
        let config = SessionConfig {
            network: environment.network.clone(),
            interrupt: Arc::clone(&interrupt.0),
            ..SessionConfig::new(job, tensors, SessionConfig::UNKNOWN_STEPS)
        };
        start_logging();
        let initial = initial.to_vec(py)?;
        let interrupt = Arc::clone(&interrupt.0);
        let live = py.detach(|| {
            let mut builder = Builder::new_multi_thread();
            // One more than connections: a step that leaves during backward encodes its blocks here.
            builder.worker_threads(config.connections.max(1) as usize + 1).thread_name("psjobs-net").enable_all();
            let runtime = builder.build().map_err(|error| exception(&ClientError::Runtime(error)))?;
            let session = runtime.block_on(attentive(AsyncSession::join(config, &initial), &interrupt))?;
            let session = OverlapSession::new(session, runtime.handle().clone());
            PyResult::Ok(Live { session, tables: None, epoch: 0, begun: 0, runtime })
        })?;
        Ok(Self { live: Mutex::new(Some(live)), interrupt, process: process::id() })
    }

    /// All parameters and all gradients.
    fn memory(&self, py: Python<'_>) -> PyResult<(Memory, Memory)> {
        let mapping = self.with(py, |session| session.map_memory())?;
        Ok(Memory::halves(mapping?))
    }

    /// Opens the sparse tables, beside the parameters.
    fn open_tables(&self, py: Python<'_>, tables: Vec<TableArguments>) -> PyResult<()> {
        self.check_caller()?;
        let specs = tables.into_iter().map(table_spec).collect();
        py.detach(|| {
            let mut live = self.live();
            let Live { session, tables, runtime, .. } = live.as_mut().ok_or_else(left)?;
            let opening = SessionTables::open(idle(session)?, specs);
            *tables = Some(runtime.block_on(attentive(opening, &self.interrupt))?);
            Ok(())
        })
    }

    /// Writes the rows of `keys` of a table to `rows`, one behind the other. False if the servers have gone to a checkpoint,
    /// so that the step under way does not count.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn pull(&self, py: Python<'_>, table: usize, keys: PyBuffer<i64>, rows: PyBuffer<f32>) -> PyResult<bool> {
        self.check_caller()?;
        let keys = unsigned(keys.to_vec(py)?);
        let pulled = py.detach(|| {
            let mut live = self.live();
            let Live { tables, runtime, .. } = live.as_mut().ok_or_else(left)?;
            let tables = tables.as_mut().ok_or_else(no_tables)?;
            runtime.block_on(attentive(tables.pull(&[(table, &keys)]), &self.interrupt))
        })?;
        let Some(pulled) = pulled else { return Ok(false) };
        rows.copy_from_slice(py, &pulled[0])?;
        Ok(true)
    }

    /// The first step that the servers do not have from this trainer; while an exchange is under way, the one after it.
    fn next_step(&self, py: Python<'_>) -> PyResult<u64> {
        self.of_live(py, |Live { session, tables, .. }| {
            let next = session.next_step();
            tables.as_ref().map_or(next, |tables| tables.next_step(next))
        })
    }

    /// Counts the times that this trainer has taken its place among the servers.
    fn entries(&self, py: Python<'_>) -> PyResult<u64> {
        self.of_live(py, |live| live.session.entries())
    }

    /// Seconds spent waiting for servers and other trainers.
    fn waiting(&self, py: Python<'_>) -> PyResult<f64> {
        self.of_live(py, |live| live.session.waiting().as_secs_f64())
    }

    /// Elements of a block: gradients leave in units of so many.
    fn block_elements(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| session.block_elements())
    }

    /// Lets the gradients of the elements from `first` on leave, which are those of `step`; the others may still be
    /// computed. `exchange` ends the step, `begin` says that all are there.
    fn offer(&self, py: Python<'_>, step: u64, first: usize) -> PyResult<()> {
        self.of_live(py, |live| {
            live.note_epoch();
            live.session.offer(step, first);
        })
    }

    /// Begins the exchange of `step`, whose gradients are all there; `end` waits for it. The gradients of its `rows` go up now,
    /// and the rows of `wanted` come as they are after that; returns whether they have come. See `exchange`.
    fn begin(
        &self,
        py: Python<'_>,
        step: u64,
        rows: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
        wanted: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
    ) -> PyResult<bool> {
        let begun = self.with_rows(py, rows, wanted, |live, rows| {
            let fetched = live.begin(step, rows, &self.interrupt)?;
            Ok(((), fetched))
        });
        begun.map(|((), has_come)| has_come)
    }

    /// Waits for the exchange that was begun, and returns the next step to do, and whether the servers went back to a
    /// checkpoint or on without this trainer, so that what it has computed meanwhile does not count. None if no exchange was
    /// begun. With `settles` the next gradient is computed with the parameters that have come; else it was computed meanwhile.
    fn end(&self, py: Python<'_>, settles: bool) -> PyResult<Option<(u64, bool)>> {
        self.check_caller()?;
        py.detach(|| self.live().as_mut().ok_or_else(left)?.end(settles, &self.interrupt))
    }

    /// Sends the gradients of `step`, those that have not left yet, with those of `rows` by table and key, and returns the
    /// next step to do when the parameters have come back. Writes the rows of `wanted`, by table and key, as they are after
    /// this step; returns whether they have come.
    fn exchange(
        &self,
        py: Python<'_>,
        step: u64,
        rows: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
        wanted: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
    ) -> PyResult<(u64, bool)> {
        self.with_rows(py, rows, wanted, |live, rows| live.exchange(step, rows, &self.interrupt))
    }

    /// The next batch of an elastic job, of `batches` that all trainers read; none if none is left for now. Waits for the
    /// exchange that was begun, unless a batch was assigned before it.
    fn next_batch(&self, py: Python<'_>, batches: u64) -> PyResult<Option<u64>> {
        self.wait(py, async |session| session.next_batch(Some(batches)).await)
    }

    /// This trainer's share of the examples of `step`, where that follows its speed: the step from which on it has to be
    /// asked for again, the first example and their number. None if server 0 does not answer now.
    fn share(
        &self,
        py: Python<'_>,
        step: u64,
        base: u32,
        examples: u64,
        busy_seconds: f64,
    ) -> PyResult<Option<(u64, u32, u32)>> {
        let work = Work { examples, busy: Duration::try_from_secs_f64(busy_seconds).unwrap_or_default() };
        let share = self.wait(py, async |session| session.share_batch(step, base, work).await)?;
        Ok(share.map(|share| (share.until, share.offset, share.examples)))
    }

    /// Sets what the next heartbeats report. `spent` are seconds: all of the trainer's, those in which it waited for its next
    /// batch, and those in which it computed.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn report(
        &self,
        py: Python<'_>,
        examples: u64,
        metrics: BTreeMap<String, f64>,
        spent: (f64, f64, f64),
    ) -> PyResult<()> {
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let (total, data, compute) = (seconds(spent.0), seconds(spent.1), seconds(spent.2));
        let spent = TimeSpent { total, data, compute, ..TimeSpent::default() };
        self.of_live(py, |live| live.session.report(examples, &metrics, Some(spent)))
    }

    /// Records values of metrics when `step` steps are done, for the series that server 0 keeps.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn record(&self, py: Python<'_>, step: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.of_live(py, |live| live.session.record(step, &metrics))
    }

    /// Makes the last step done this trainer's last one, and waits until the servers keep it. Returns the next step: an
    /// earlier one if they went back to a checkpoint.
    fn finish(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_caller()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { session, tables, runtime, .. } = live.as_mut().ok_or_else(left)?;
            let session = idle(session)?;
            let finishing = async {
                match tables {
                    Some(tables) => tables.finish(session).await,
                    None => session.finish().await,
                }
            };
            runtime.block_on(attentive(finishing, &self.interrupt))
        })
    }

    /// Leaves every server: `finished` says that the work is done.
    fn leave(&self, py: Python<'_>, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.finally(py, async |session| session.leave(finished, examples, metrics).await)
    }

    /// Leaves every server with an error of this trainer's own.
    fn fail(&self, py: Python<'_>, failure: String) -> PyResult<()> {
        self.finally(py, async |session| {
            session.fail(failure).await;
            Ok(())
        })
    }
}

impl Session {
    /// Returns what `read` says of the session while no step is under way.
    fn with<T: Send>(&self, py: Python<'_>, read: impl FnOnce(&mut AsyncSession) -> T + Send) -> PyResult<T> {
        self.check_caller()?;
        py.detach(|| Ok(read(idle(&mut self.live().as_mut().ok_or_else(left)?.session)?)))
    }

    /// Returns what `work` says, also while an exchange is under way.
    fn of_live<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Live) -> T + Send) -> PyResult<T> {
        self.check_caller()?;
        py.detach(|| {
            let mut live = self.live();
            let live = live.as_mut().ok_or_else(left)?;
            live.check_panic()?;
            Ok(work(live))
        })
    }

    /// Waits for `work`. It may wait for an exchange that was begun, but not for gradients that are still computed.
    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl AsyncFnOnce(&mut OverlapSession) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        self.check_caller()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { session, runtime, .. } = live.as_mut().ok_or_else(left)?;
            if session.is_in_part() || !session.is_exchanging() {
                idle(session)?;
            }
            runtime.block_on(attentive(work(session), &self.interrupt))
        })
    }

    /// Copies the gradients of rows, and the keys of those that are wanted, for `work`, which returns what it wants and the rows.
    /// Writes these to their room; returns whether they have come.
    fn with_rows<T: Send>(
        &self,
        py: Python<'_>,
        rows: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
        wanted: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>,
        work: impl FnOnce(&mut Live, Rows<'_>) -> PyResult<(T, Fetched)> + Send,
    ) -> PyResult<(T, bool)> {
        self.check_caller()?;
        let rows = copied(py, rows)?;
        let mut room = Vec::with_capacity(wanted.len());
        let keys = wanted.into_iter().map(|(table, keys, values)| {
            room.push(values);
            Ok((table, unsigned(keys.to_vec(py)?)))
        });
        let wanted = keys.collect::<PyResult<Vec<_>>>()?;
        let (done, fetched) = py.detach(|| {
            let mut live = self.live();
            let live = live.as_mut().ok_or_else(left)?;
            live.check_panic()?;
            let rows: Vec<RowGradients> =
                rows.iter().map(|(table, keys, values)| RowGradients { table: *table, keys, values }).collect();
            let wanted: Vec<(usize, &[u64])> = wanted.iter().map(|(table, keys)| (*table, keys.as_slice())).collect();
            let rows: Rows<'_> = (&rows, &wanted);
            work(live, rows)
        })?;
        let Some(fetched) = fetched else { return Ok((done, false)) };
        room.iter().zip(&fetched).try_for_each(|(room, rows)| room.copy_from_slice(py, rows))?;
        Ok((done, true))
    }

    fn finally(
        &self,
        py: Python<'_>,
        work: impl AsyncFnOnce(AsyncSession) -> Result<(), ClientError> + Send,
    ) -> PyResult<()> {
        self.check_caller()?;
        py.detach(|| {
            let Live { session, runtime, .. } = self.live().take().ok_or_else(left)?;
            if session.is_exchanging() {
                session.give_up();
                // It may be waiting for a server.
                self.interrupt.store(true, Ordering::Relaxed);
            }
            let session = runtime.block_on(session.into_session()).ok_or_else(left)?;
            let ended = runtime.block_on(attentive(work(session), &self.interrupt));
            runtime.shutdown_background();
            ended
        })
    }

    fn live(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a handler of a signal that a wait runs, and a process that was forked: it has the connections of the one
    /// that joined, and none of its threads.
    fn check_caller(&self) -> PyResult<()> {
        check_handler()?;
        if process::id() == self.process {
            return Ok(());
        }
        let text =
            "this process was forked from the trainer's, which alone may talk to the servers; call psjobs in that one";
        Err(PyRuntimeError::new_err(text))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Not by `live`: a thread that held the lock when the process was forked is not here to give it back.
        let live = self.live.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(Live { session, runtime, .. }) = live.take() {
            if process::id() == self.process {
                drop(session);
                runtime.shutdown_background();
            } else {
                // Closing a connection of TLS would end the trainer's, and the threads of the runtime are not here.
                std::mem::forget((session, runtime));
            }
        }
    }
}

impl Live {
    /// Raises an error after a panic in an exchange, which has taken the session along.
    fn check_panic(&self) -> PyResult<()> {
        if self.session.is_exchanging() || self.session.idle().is_some() { Ok(()) } else { Err(left()) }
    }

    /// Notes the servers' epoch with which a step begins, unless it has begun.
    fn note_epoch(&mut self) {
        if let Some(session) = self.session.idle() {
            self.epoch = session.epoch();
        }
    }

    /// Ends a step, whose gradients may have left in part, with the gradients of its rows, and pulls the rows that are wanted
    /// for the next one when the servers have those gradients. Returns the next step, and the rows if they are of its state.
    fn exchange(&mut self, step: u64, rows: Rows<'_>, interrupt: &AtomicBool) -> PyResult<(u64, Fetched)> {
        self.note_epoch();
        let Self { session, tables, epoch, runtime, .. } = self;
        let push = push(tables.as_mut(), (*epoch, step), rows);
        let stepping = async { Ok(join(push, session.exchange(step)).await) };
        let (pushed, following) = runtime.block_on(attentive(stepping, interrupt))?;
        let (fetched, following) = pushed.and_then(|rows| Ok((rows, following?))).map_err(|error| exception(&error))?;
        let Some(tables) = tables else { return Ok((following, None)) };
        let next = runtime.block_on(attentive(tables.follow(idle(session)?, step, following), interrupt))?;
        // After a step that is done again, rows may be of a state that the servers have discarded.
        Ok((next, fetched.filter(|_| next == step + 1)))
    }

    /// Begins the exchange of a step, and pushes the gradients of its rows. Returns the rows that are wanted for the next one.
    fn begin(&mut self, step: u64, rows: Rows<'_>, interrupt: &AtomicBool) -> PyResult<Fetched> {
        if self.session.is_exchanging() && !self.session.is_in_part() {
            return Err(InputError::new_err("the exchange of another step is under way"));
        }
        self.note_epoch();
        self.session.begin_exchange(step);
        self.begun = step;
        let Self { tables, epoch, runtime, .. } = self;
        runtime.block_on(attentive(push(tables.as_mut(), (*epoch, step), rows), interrupt))
    }

    /// See `Session::end`.
    fn end(&mut self, settles: bool, interrupt: &AtomicBool) -> PyResult<Option<(u64, bool)>> {
        if self.session.is_in_part() || !self.session.is_exchanging() {
            idle(&mut self.session)?;
        }
        let Self { session, tables, begun, runtime, .. } = self;
        let ending = async {
            let ended = if settles { session.settle().await } else { session.end_exchange().await };
            ended.transpose()
        };
        let Some(Ended { next, has_gone_back }) = runtime.block_on(attentive(ending, interrupt))? else {
            return Ok(None);
        };
        let Some(tables) = tables else { return Ok(Some((next, has_gone_back))) };
        let session = idle(session)?;
        let next = runtime.block_on(attentive(tables.follow(session, *begun, next), interrupt))?;
        let has_gone_back = has_gone_back || next != *begun + 1;
        if has_gone_back {
            // The rows alone may have gone back: the step is computed again with the parameters that are here.
            session.take_parameters();
        }
        Ok(Some((next, has_gone_back)))
    }
}

/// Pushes the gradients of a step's rows, which began in an epoch, and pulls the rows that are wanted then.
async fn push(
    tables: Option<&mut SessionTables>,
    (epoch, step): (u64, u64),
    (rows, wanted): Rows<'_>,
) -> Result<Fetched, ClientError> {
    let Some(tables) = tables else { return Ok(None) };
    tables.push(epoch, step, rows).await?;
    if wanted.is_empty() { Ok(None) } else { tables.pull(wanted).await }
}

/// Returns the session while no step is under way.
fn idle(session: &mut OverlapSession) -> PyResult<&mut AsyncSession> {
    let is_exchanging = session.is_exchanging();
    match session.idle_mut() {
        Some(session) => Ok(session),
        None if is_exchanging => Err(InputError::new_err(
            "gradients of this step have left for the servers already; call opt.step() after each backward(), or \
             job.attach(..., overlap=False) if not every backward() is followed by a step",
        )),
        None => Err(left()),
    }
}

/// Name, width, bound of the first values, rows at most, and steps after which an unused row goes.
pub type TableArguments = (String, usize, f32, u64, u64);

pub fn table_spec((name, width, bound, max_rows, idle_steps): TableArguments) -> TableSpec {
    TableSpec { max_rows, idle_steps, ..TableSpec::new(name, width, bound) }
}

/// A table, keys, and a gradient for each.
pub type CopiedRows = (usize, Vec<u64>, Vec<f32>);

/// Copies gradients of rows, each with its table and its keys.
pub fn copied(py: Python<'_>, rows: Vec<(usize, PyBuffer<i64>, PyBuffer<f32>)>) -> PyResult<Vec<CopiedRows>> {
    let copy = |(table, keys, values): (usize, PyBuffer<i64>, PyBuffer<f32>)| {
        Ok((table, unsigned(keys.to_vec(py)?), values.to_vec(py)?))
    };
    rows.into_iter().map(copy).collect()
}

/// Keys of Python's, which has no unsigned integers in torch.
pub fn unsigned(keys: Vec<i64>) -> Vec<u64> {
    keys.into_iter().map(i64::cast_unsigned).collect()
}

fn no_tables() -> PyErr {
    InputError::new_err("the model has no sparse tables")
}

fn left() -> PyErr {
    Error::new_err("this trainer has left its job")
}

/// Shows what happens to connections on standard error.
fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    // A process that joins twice logs already.
    drop(logs.with_ansi(false).try_init());
}
