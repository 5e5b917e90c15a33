//! One job from its start to its end: servers and trainers as processes that can be killed, somebody who starts them
//! again as the operator would, and the faults of the plan.

mod pods;
mod strike;
mod verdict;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use psjobs_api::ReplicaResult;
use psjobs_api::training::{StalenessPolicy, Training};
use psjobs_ps::checkpoint::{Disk as Storage, Folder, Runs};
use psjobs_ps::network::Network as Reached;
use psjobs_ps::server::{self, CheckpointConfig, ServerConfig, ServerError, Timeouts};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinError, JoinSet, LocalSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::disk::{Disk, DiskFault, FOLDER, Mount};
use super::end::Dialer;
use super::fault::Fault;
use super::model::Model;
use super::network::{Host, Network, address_of};
use super::plan::Plan;
use super::trainer::{self, Failure, Job};
use super::{backups, elastic, overlapped, rows_beside, tables};

pub const JOB: &str = "job";
/// Time without a fault after which a job counts as hanging. Servers give up after 10 minutes without trainers.
const LIMIT: Duration = Duration::from_secs(1200);
/// Time of the processes of a supervised job to end, as spec.runPolicy.serverDrainSeconds has it by default.
const DRAIN: Duration = Duration::from_secs(60);
/// Time of a trainer's process that was replaced, after others reach it again. Where somebody starts processes again, its node has
/// ended it by then.
const LIVES_ON: Duration = Duration::from_secs(300);
/// From then on the weather breaks no connections.
const STORM: Duration = Duration::from_secs(90);

/// How a run went.
#[derive(Debug)]
pub struct Outcome {
    /// Equal for equal runs.
    pub digest: u64,
    /// The violated invariant, if any.
    pub verdict: Result<(), String>,
    /// Names of the faults that happened.
    pub faults: BTreeSet<&'static str>,
    /// The steps of the complete checkpoints that are left of the first run.
    pub checkpoints: BTreeSet<u64>,
    /// The trainers' processes beyond the first.
    pub restarts: u32,
    /// A server was lost when training was over, and not started again.
    pub missed: bool,
    /// The longest time that a trainer waited for an answer to its gradients.
    pub longest_wait: Duration,
}

/// Runs the job of a plan; `echo` prints what happens.
pub fn run(plan: &Plan, echo: bool) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O");
    let _context = runtime.enter();
    let (disk, deaths) = Disk::new(plan.seed);
    let network = Network::new(plan.seed, plan.weather.clone(), echo);
    if plan.moves {
        network.forget_names();
    }
    let model = Model::new(plan);
    let complete = RefCell::new(vec![false; plan.trainers as usize]);
    let restarted = Cell::new(false);
    let sent = RefCell::new(vec![0; plan.steps as usize]);
    let longest_wait = Cell::default();
    let (plan, network) = (plan.clone(), network);
    let job = Rc::new(Job { plan, model, network: network.clone(), complete, sent, restarted, longest_wait });
    let mut supervisor = Supervisor::new(job.clone(), disk, deaths);
    let verdict = LocalSet::new().block_on(&runtime, supervisor.run());
    let restarts = supervisor.incarnations.iter().sum();
    let (faults, missed) = (std::mem::take(&mut supervisor.struck), supervisor.missed);
    let mount = Mount { disk: supervisor.disk.clone(), host: Host::Server(0, u32::MAX) };
    let folder = Folder::new(Storage::Other(Arc::new(mount)), FOLDER);
    let checkpoints = Runs::new(&folder).catalog(1).complete().unwrap_or_default();
    drop(supervisor);
    drop(runtime);
    let digest = network.wires().trace.digest();
    Outcome { restarts, missed, digest, verdict, faults, checkpoints, longest_wait: job.longest_wait.get() }
}

/// `host:port` of all servers.
pub fn addresses(plan: &Plan) -> Vec<String> {
    (0..plan.servers).map(|index| address_of(Host::Server(index, 0))).collect()
}

enum Action {
    Fault(Fault),
    Mend(Vec<(Host, Host)>),
    /// The firewall between two hosts is gone.
    Admit(Host, Host),
    /// The disk of a server, or of all, is whole again.
    MendDisk(Option<u32>, DiskFault),
    /// Connections between hosts that still do not hear each other are given up.
    TimeOut(Vec<(Host, Host)>),
    /// Unless one runs.
    StartServer(u32),
    /// Whatever the process before does.
    ReplaceServer(u32),
    StartTrainer {
        index: u32,
        incarnation: u32,
    },
    /// The node of a trainer that was replaced is back, and ends its process.
    EndReplaced(Host),
    ClearUp,
    /// Trainers have had their time to end after a server has said that training is over.
    StopTrainers,
    /// Servers have had their time to end after the last trainer.
    StopServers,
}

enum Ended {
    Server(Result<ReplicaResult, ServerError>),
    Trainer(Result<(), Failure>),
}

struct Process {
    abort: AbortHandle,
    stop: CancellationToken,
    /// Asks a trainer of an elastic job to leave.
    leave: Arc<AtomicBool>,
}

struct Supervisor {
    job: Rc<Job>,
    disk: Disk,
    /// Machines that have died in a file operation.
    deaths: mpsc::UnboundedReceiver<(Host, Duration)>,
    /// Until then the disk is to blame if something cannot be written.
    disk_ails_until: Instant,
    processes: JoinSet<(Host, Ended)>,
    running: BTreeMap<Host, Process>,
    agenda: BTreeMap<(Instant, u64), Action>,
    planned: u64,
    /// By trainer: the newest incarnation.
    incarnations: Vec<u32>,
    /// By server: processes so far.
    server_starts: Vec<u32>,
    /// By trainer that has left well, as a server says that has ended with a result: its incarnation then.
    left_as: BTreeMap<u32, u32>,
    /// A server was not started again, see [`Supervisor::is_not_missed`].
    missed: bool,
    /// Servers and trainers that need not run any more.
    servers_over: Vec<bool>,
    trainers_over: Vec<bool>,
    /// Trainers whose process has left well.
    finished: BTreeSet<u32>,
    stopping: Vec<bool>,
    /// The servers' time to end has begun.
    draining: bool,
    /// Names of the faults so far.
    struck: BTreeSet<&'static str>,
}

impl Supervisor {
    fn new(job: Rc<Job>, disk: Disk, deaths: mpsc::UnboundedReceiver<(Host, Duration)>) -> Self {
        let (servers, trainers) = (job.plan.servers as usize, job.plan.trainers as usize);
        Self {
            job,
            disk,
            deaths,
            disk_ails_until: Instant::now(),
            processes: JoinSet::new(),
            running: BTreeMap::new(),
            agenda: BTreeMap::new(),
            planned: 0,
            incarnations: vec![0; trainers],
            server_starts: vec![0; servers],
            left_as: BTreeMap::new(),
            missed: false,
            servers_over: vec![false; servers],
            trainers_over: vec![false; trainers],
            finished: BTreeSet::new(),
            stopping: vec![false; servers],
            draining: false,
            struck: BTreeSet::new(),
        }
    }

    async fn run(&mut self) -> Result<(), String> {
        let job = self.job.clone();
        (0..job.plan.servers).for_each(|index| self.start_server(index));
        let late: Vec<(u32, Duration)> = (job.plan.faults.iter())
            .filter_map(
                |(_, fault)| if let Fault::Late { trainer, away } = fault { Some((*trainer, *away)) } else { None },
            )
            .collect();
        for index in 0..job.plan.trainers {
            match late.iter().find(|(trainer, _)| *trainer == index) {
                Some((_, away)) => self.later(*away, Action::StartTrainer { index, incarnation: 0 }),
                None => self.start_trainer(index, 0),
            }
        }
        job.plan.faults.iter().for_each(|(at, fault)| self.later(*at, Action::Fault(fault.clone())));
        self.later(STORM, Action::ClearUp);
        let limit = Instant::now() + job.plan.calm().max(STORM) + LIMIT;
        while !self.servers_over.iter().chain(&self.trainers_over).all(|over| *over) {
            self.drain();
            let next = self.agenda.first_key_value().map_or(limit, |((at, _), _)| (*at).min(limit));
            tokio::select! {
                biased;
                Some((host, away)) = self.deaths.recv() => self.machine_died(host, away),
                Some(ended) = self.processes.join_next() => self.ended(ended)?,
                () = tokio::time::sleep_until(next) => {
                    if Instant::now() >= limit {
                        return Err(format!("it hangs: {:?} still run {LIMIT:?} after the last fault", self.running.keys()));
                    }
                    if let Some((_, action)) = self.agenda.pop_first() {
                        self.act(action);
                    }
                }
            }
        }
        self.disk.volume().violation()?;
        self.check_model()?;
        self.check_series()
    }

    /// Gives the servers of a supervised job some time to end when all trainers are done, as the operator does.
    fn drain(&mut self) {
        let done = self.trainers_over.iter().all(|over| *over);
        if done && self.job.plan.supervised && !std::mem::replace(&mut self.draining, true) {
            self.later(DRAIN, Action::StopServers);
        }
    }

    fn later(&mut self, after: Duration, action: Action) {
        self.planned += 1;
        self.agenda.insert((Instant::now() + after, self.planned), action);
    }

    fn start_server(&mut self, index: u32) {
        if !self.servers_over[index as usize] && self.is_not_missed(index) {
            (self.servers_over[index as usize], self.missed) = (true, true);
        }
        if self.servers_over[index as usize] {
            return;
        }
        let (network, life) = (&self.job.network, self.server_starts[index as usize]);
        let host = Host::Server(index, life);
        if life > 0 && !self.job.plan.moves {
            network.revive(self.newest_server(index));
        }
        network.wires().trace.log(format_args!("{host:?} starts"));
        let (incoming, stop) = (network.listen(host, &address_of(host)), CancellationToken::new());
        let serving = server::run_on(incoming, self.server_config(index, life), stop.clone().cancelled_owned());
        self.server_starts[index as usize] += 1;
        let abort = self.processes.spawn_local(async move { (host, Ended::Server(serving.await)) });
        self.running.insert(host, Process { abort, stop, leave: Arc::default() });
    }

    /// Returns whether the operator starts no other process of this server: another one has said that training is over, and no
    /// trainer has anything to do but to leave.
    fn is_not_missed(&self, server: u32) -> bool {
        let plan = &self.job.plan;
        let leaves = |trainer: u32| {
            let newest = self.incarnations[trainer as usize];
            let is_running = self.running.contains_key(&Host::Trainer(trainer, newest));
            self.trainers_over[trainer as usize] || is_running && !self.comes_after_the_end(trainer)
        };
        let may_be_missed = !plan.supervised || plan.least.is_some() || server == 0 && plan.checkpoint.is_some();
        !may_be_missed && !self.left_as.is_empty() && (0..plan.trainers).all(leaves)
    }

    /// Returns whether the newest process of a trainer has nobody to train with, because the one before it has left well.
    fn comes_after_the_end(&self, trainer: u32) -> bool {
        self.left_as.get(&trainer).is_some_and(|left_as| *left_as < self.incarnations[trainer as usize])
    }

    fn server_config(&self, index: u32, life: u32) -> ServerConfig {
        let plan = &self.job.plan;
        let host = Host::Server(index, life);
        let dialer = Dialer { network: self.job.network.clone(), from: host };
        let mount = Mount { disk: self.disk.clone(), host };
        let mut training = Training { consistency: plan.consistency.clone(), ..Training::default() };
        // Marks are counted: each gradient counts in full.
        training.staleness.policy = Some(StalenessPolicy::None);
        training.optimizer = self.job.model.optimizer();
        training.local = self.job.model.local_steps();
        training.compression = plan.compression.clone();
        let checkpoint = plan.checkpoint.map(|interval| CheckpointConfig {
            job: "job".into(),
            incarnation: life,
            folder: Folder::new(Storage::Other(Arc::new(mount)), FOLDER),
            interval,
            keep: plan.keep,
            resume: plan.resume,
            servers: addresses(plan),
        });
        ServerConfig {
            job_uid: JOB.into(),
            index,
            incarnation: life,
            servers: plan.servers,
            trainers: plan.trainers,
            min_trainers: plan.least,
            // Without an operator a server that is started again has to find that out.
            finished_trainers: if plan.supervised && plan.least.is_none() {
                self.finished.iter().copied().collect()
            } else {
                Vec::new()
            },
            training,
            timeouts: Timeouts::new(plan.supervised),
            supervised: plan.supervised,
            address: Some(addresses(plan).swap_remove(index as usize)),
            shared_memory: false,
            replicas: if plan.replicated { addresses(plan) } else { Vec::new() },
            checkpoint,
            series: None,
            metrics: None,
            evaluation: None,
            refuses_parameters: None,
            network: Reached::Other(Arc::new(dialer)),
            services: Routes::default(),
            ending: CancellationToken::new(),
        }
    }

    fn start_trainer(&mut self, index: u32, incarnation: u32) {
        if self.trainers_over[index as usize] {
            return;
        }
        let host = Host::Trainer(index, incarnation);
        self.job.network.wires().trace.log(format_args!("{host:?} starts"));
        self.incarnations[index as usize] = incarnation;
        let (job, leave) = (self.job.clone(), Arc::<AtomicBool>::default());
        let asked = leave.clone();
        let abort = self.processes.spawn_local(async move {
            let trained = if job.plan.least.is_some() {
                elastic::train(job, index, incarnation, asked).await
            } else if job.plan.consistency.backup_trainers > 0 {
                backups::train(job, index, incarnation).await
            } else if job.plan.tables {
                tables::train(job, index, incarnation).await
            } else if job.plan.beside {
                rows_beside::train(job, index, incarnation).await
            } else if job.plan.overlap {
                overlapped::train(job, index, incarnation).await
            } else {
                trainer::train(job, index, incarnation).await
            };
            (host, Ended::Trainer(trained))
        });
        self.running.insert(host, Process { abort, stop: CancellationToken::new(), leave });
    }

    fn kill(&mut self, host: Host, silently: bool) -> bool {
        let Some(process) = self.running.remove(&host) else { return false };
        self.job.network.wires().trace.log(format_args!("{host:?} dies, silently: {silently}"));
        process.abort.abort();
        self.job.network.kill(host, silently);
        self.disk.volume().kill(host);
        if silently {
            let pairs = self.running.keys().map(|other| (host, *other)).collect();
            self.time_out_later(pairs);
        }
        true
    }

    /// The process of a server that was started last.
    fn newest_server(&self, index: u32) -> Host {
        Host::Server(index, self.server_starts[index as usize].saturating_sub(1))
    }

    fn newest(&self, trainer: u32) -> Host {
        Host::Trainer(trainer, self.incarnations[trainer as usize])
    }

    fn ended(&mut self, ended: Result<(Host, Ended), JoinError>) -> Result<(), String> {
        let (host, ended) = match ended {
            Ok(ended) => ended,
            Err(error) if error.is_cancelled() => return Ok(()), // It was killed.
            Err(error) => return Err(format!("a process panicked: {error}")),
        };
        self.running.remove(&host);
        self.disk.volume().end(host);
        match (host, ended) {
            (Host::Server(index, life), Ended::Server(result)) => self.server_ended(index as usize, life, result),
            (Host::Trainer(index, incarnation), Ended::Trainer(result)) => {
                self.trainer_ended(index, incarnation, result)
            }
            _ => unreachable!("servers end as servers"),
        }
    }
}
