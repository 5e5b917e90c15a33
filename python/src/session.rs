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
    AsyncSession, ClientError, GradualStep, Recorder, RowGradients, SessionConfig, SessionTables, TensorSpec,
};
use psjobs_ps::sparse::TableSpec;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use super::environment::Environment;
use super::errors::{Error, InputError, exception};
use super::memory::Memory;
use super::waiting::{Interrupt, attentive};

/// A trainer's session. Its methods wait without the interpreter's lock. They raise [`Error`] after `leave` and `fail`,
/// and in a process that was forked from the trainer's.
#[pyclass(frozen, module = "psjobs._native")]
pub struct Session {
    live: Mutex<Option<Live>>,
    /// Takes metrics also while a step is under way.
    recorder: Recorder,
    interrupt: Arc<AtomicBool>,
    /// The process that joined.
    process: u32,
}

struct Live {
    // Dropped before the runtime that its tasks run on.
    state: State,
    /// The sparse tables, if the model has any.
    tables: Option<SessionTables>,
    /// The servers' epoch when the step under way began.
    epoch: u64,
    /// A report that came during a step, until that ends.
    report: Option<(u64, BTreeMap<String, f64>)>,
    /// Seconds spent waiting before the step under way.
    waiting: f64,
    runtime: Runtime,
}

enum State {
    Idle(Box<AsyncSession>),
    Stepping(GradualStep),
    /// Between the two others, and after a step that panicked.
    Gone,
}

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
        let (live, recorder) = py.detach(|| {
            let mut builder = Builder::new_multi_thread();
            // One more than connections: a step that leaves during backward encodes its blocks here.
            builder.worker_threads(config.connections.max(1) as usize + 1).thread_name("psjobs-net").enable_all();
            let runtime = builder.build().map_err(|error| exception(&ClientError::Runtime(error)))?;
            let session = runtime.block_on(attentive(AsyncSession::join(config, &initial), &interrupt))?;
            let recorder = session.recorder();
            let state = State::Idle(Box::new(session));
            PyResult::Ok((Live { state, tables: None, epoch: 0, report: None, waiting: 0.0, runtime }, recorder))
        })?;
        Ok(Self { live: Mutex::new(Some(live)), recorder, interrupt, process: process::id() })
    }

    /// All parameters and all gradients.
    fn memory(&self, py: Python<'_>) -> PyResult<(Memory, Memory)> {
        let mapping = self.with(py, |session| session.map_memory())?;
        Ok(Memory::halves(mapping?))
    }

    /// Opens the sparse tables, beside the parameters.
    fn open_tables(&self, py: Python<'_>, tables: Vec<TableArguments>) -> PyResult<()> {
        self.check_process()?;
        let specs = tables.into_iter().map(table_spec).collect();
        py.detach(|| {
            let mut live = self.live();
            let Live { state, tables, runtime, .. } = live.as_mut().ok_or_else(left)?;
            let opening = SessionTables::open(state.idle()?, specs);
            *tables = Some(runtime.block_on(attentive(opening, &self.interrupt))?);
            Ok(())
        })
    }

    /// Writes the rows of `keys` of a table to `rows`, one behind the other. False if the servers have gone to a checkpoint,
    /// so that the step under way does not count.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn pull(&self, py: Python<'_>, table: usize, keys: PyBuffer<i64>, rows: PyBuffer<f32>) -> PyResult<bool> {
        self.check_process()?;
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

    /// The first step that the servers do not have from this trainer.
    fn next_step(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_process()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { state, tables, .. } = live.as_mut().ok_or_else(left)?;
            let next = state.idle()?.next_step();
            Ok(tables.as_ref().map_or(next, |tables| tables.next_step(next)))
        })
    }

    /// Counts the times that this trainer has entered an elastic job.
    fn entries(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |session| session.entries())
    }

    /// Seconds spent waiting for servers and other trainers.
    fn waiting(&self, py: Python<'_>) -> PyResult<f64> {
        self.check_process()?;
        py.detach(|| match self.live().as_ref().ok_or_else(left)? {
            Live { state: State::Idle(session), .. } => Ok(session.waiting().as_secs_f64()),
            Live { waiting, .. } => Ok(*waiting),
        })
    }

    /// Elements of a block: gradients leave in units of so many.
    fn block_elements(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| session.block_elements())
    }

    /// Lets the gradients of the elements from `first` on leave, which are those of `step`; the others may still be
    /// computed. `exchange` ends the step.
    fn offer(&self, py: Python<'_>, step: u64, first: usize) -> PyResult<()> {
        self.check_process()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { state, runtime, waiting, epoch, .. } = live.as_mut().ok_or_else(left)?;
            match std::mem::replace(state, State::Gone) {
                State::Idle(session) => {
                    *epoch = session.epoch();
                    *waiting = session.waiting().as_secs_f64();
                    *state = State::Stepping(GradualStep::begin(*session, runtime.handle(), step, first));
                }
                State::Stepping(under_way) => {
                    under_way.offer(first);
                    *state = State::Stepping(under_way);
                }
                State::Gone => return Err(left()),
            }
            Ok(())
        })
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
        self.check_process()?;
        let rows = copied(py, rows)?;
        let mut room = Vec::with_capacity(wanted.len());
        let keys = wanted.into_iter().map(|(table, keys, values)| {
            room.push(values);
            Ok((table, unsigned(keys.to_vec(py)?)))
        });
        let wanted = keys.collect::<PyResult<Vec<_>>>()?;
        let (next, fetched) = py.detach(|| {
            let mut live = self.live();
            let live = live.as_mut().ok_or_else(left)?;
            let rows: Vec<RowGradients> =
                rows.iter().map(|(table, keys, values)| RowGradients { table: *table, keys, values }).collect();
            let wanted: Vec<(usize, &[u64])> = wanted.iter().map(|(table, keys)| (*table, keys.as_slice())).collect();
            live.exchange(step, (&rows, &wanted), &self.interrupt)
        })?;
        let Some(fetched) = fetched else { return Ok((next, false)) };
        room.iter().zip(&fetched).try_for_each(|(room, rows)| room.copy_from_slice(py, rows))?;
        Ok((next, true))
    }

    /// The next batch of an elastic job, of `batches` that all trainers read; none if none is left for now.
    fn next_batch(&self, py: Python<'_>, batches: u64) -> PyResult<Option<u64>> {
        self.wait(py, async |session| {
            session.set_total_steps(batches);
            session.next_batch().await
        })
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

    /// Sets what the next heartbeats report.
    fn report(&self, py: Python<'_>, examples: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.check_process()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { state, report, .. } = live.as_mut().ok_or_else(left)?;
            match state {
                State::Idle(session) => session.report(examples, &metrics),
                State::Stepping(_) => *report = Some((examples, metrics)),
                State::Gone => return Err(left()),
            }
            Ok(())
        })
    }

    /// Records values of metrics when `step` steps are done, for the series that server 0 keeps.
    #[allow(clippy::needless_pass_by_value, reason = "as Python passes it")]
    fn record(&self, step: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.check_process()?;
        self.recorder.record(step, &metrics);
        Ok(())
    }

    /// Makes the last step done this trainer's last one, and waits until the servers keep it. Returns the next step: an
    /// earlier one if they went back to a checkpoint.
    fn finish(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_process()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { state, tables, runtime, .. } = live.as_mut().ok_or_else(left)?;
            let session = state.idle()?;
            let finishing = async {
                let next = session.next_step();
                let following = session.finish().await?;
                match tables {
                    Some(tables) if next > 0 => tables.follow(session, next - 1, following).await,
                    _ => Ok(following),
                }
            };
            runtime.block_on(attentive(finishing, &self.interrupt))
        })
    }

    /// Leaves every server: `finished` says that the work is done.
    fn leave(&self, py: Python<'_>, finished: bool, examples: u64, metrics: BTreeMap<String, f64>) -> PyResult<()> {
        self.end(py, async |session| session.leave(finished, examples, metrics).await)
    }

    /// Leaves every server with an error of this trainer's own.
    fn fail(&self, py: Python<'_>, failure: String) -> PyResult<()> {
        self.end(py, async |session| {
            session.fail(failure).await;
            Ok(())
        })
    }
}

impl Session {
    fn with<T: Send>(&self, py: Python<'_>, read: impl FnOnce(&mut AsyncSession) -> T + Send) -> PyResult<T> {
        self.check_process()?;
        py.detach(|| Ok(read(self.live().as_mut().ok_or_else(left)?.state.idle()?)))
    }

    fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl AsyncFnOnce(&mut AsyncSession) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        self.check_process()?;
        py.detach(|| {
            let mut live = self.live();
            let Live { state, runtime, .. } = live.as_mut().ok_or_else(left)?;
            runtime.block_on(attentive(work(state.idle()?), &self.interrupt))
        })
    }

    fn end(
        &self,
        py: Python<'_>,
        work: impl AsyncFnOnce(AsyncSession) -> Result<(), ClientError> + Send,
    ) -> PyResult<()> {
        self.check_process()?;
        py.detach(|| {
            let Live { state, runtime, .. } = self.live().take().ok_or_else(left)?;
            let session = match state {
                State::Idle(session) => *session,
                State::Stepping(mut under_way) => {
                    under_way.give_up();
                    // It may be waiting for a server.
                    self.interrupt.store(true, Ordering::Relaxed);
                    runtime.block_on(under_way.end()).0
                }
                State::Gone => return Err(left()),
            };
            let ended = runtime.block_on(attentive(work(session), &self.interrupt));
            runtime.shutdown_background();
            ended
        })
    }

    fn live(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process that was forked has the connections of the one that joined, and none of its threads.
    fn check_process(&self) -> PyResult<()> {
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
        if let Some(Live { state, runtime, .. }) = live.take() {
            if process::id() == self.process {
                drop(state);
                runtime.shutdown_background();
            } else {
                // Closing a connection of TLS would end the trainer's, and the threads of the runtime are not here.
                std::mem::forget((state, runtime));
            }
        }
    }
}

impl Live {
    /// Ends a step, whose gradients may have left in part, with the gradients of its rows, and pulls the rows that are wanted
    /// for the next one when the servers have those gradients. Returns the next step, and the rows if they are of its state.
    fn exchange(
        &mut self,
        step: u64,
        (rows, wanted): (&[RowGradients<'_>], &[(usize, &[u64])]),
        interrupt: &AtomicBool,
    ) -> PyResult<(u64, Option<Vec<Vec<f32>>>)> {
        let Self { state, tables, epoch, report, runtime, .. } = self;
        if let State::Idle(session) = state {
            *epoch = session.epoch();
        }
        let (epoch, mut pushing) = (*epoch, tables.as_mut());
        let push = async {
            let Some(tables) = &mut pushing else { return Ok(None) };
            tables.push(epoch, step, rows).await?;
            if wanted.is_empty() { Ok(None) } else { tables.pull(wanted).await }
        };
        let (pushed, following) = match state {
            State::Idle(session) => {
                runtime.block_on(attentive(async { Ok(join(push, session.exchange(step)).await) }, interrupt))?
            }
            State::Stepping(under_way) => {
                let ending = async { Ok(join(push, under_way.end()).await) };
                let (pushed, (session, outcome)) = runtime.block_on(attentive(ending, interrupt))?;
                if let Some((examples, metrics)) = report.take() {
                    session.report(examples, &metrics);
                }
                *state = State::Idle(Box::new(session));
                (pushed, outcome)
            }
            State::Gone => return Err(left()),
        };
        let (fetched, following) = pushed.and_then(|rows| Ok((rows, following?))).map_err(|error| exception(&error))?;
        let Some(tables) = tables else { return Ok((following, None)) };
        let next = runtime.block_on(attentive(tables.follow(state.idle()?, step, following), interrupt))?;
        // After a step that is done again, rows may be of a state that the servers have discarded.
        Ok((next, fetched.filter(|_| next == step + 1)))
    }
}

impl State {
    /// Returns the session while no step is under way.
    fn idle(&mut self) -> PyResult<&mut AsyncSession> {
        match self {
            Self::Idle(session) => Ok(session),
            Self::Stepping(_) => Err(InputError::new_err(
                "gradients of this step have left for the servers already; call opt.step() after each backward(), or \
                 job.attach(..., overlap=False) if not every backward() is followed by a step",
            )),
            Self::Gone => Err(left()),
        }
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
