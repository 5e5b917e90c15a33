//! From a job to the processes of this machine: pure, so that every translation of a pod template is a
//! row in a table of tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodTemplateSpec};
pub use psjobs_api::Replica;
use psjobs_api::crd::{MlflowSpec, ParameterServerJob};
use psjobs_api::env::{Checkpoint, Mlflow, PSJOB_RESULT_FILE};
use psjobs_api::{Environment, Role, Training};
use psjobs_policy::JobPolicy;
use psjobs_policy::deadlines::LAST_CHECKPOINT_SECONDS;

use super::cluster_only;
use super::expand::expand;
use super::lifecycle::{Rules, TrainerEnds};

/// Names the folder of a data set to `psjobs-worker`. A user may set it for `psjobs run`, too.
pub(super) const DATA_VARIABLE: &str = "PSJOB_DATA";
const THREADS_VARIABLE: &str = "OMP_NUM_THREADS";
/// Sets what idle threads of libtorch do. Read before `main`: a worker without it starts itself once more.
const WAITING_VARIABLE: &str = "OMP_WAIT_POLICY";
const GPUS_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// Time to end after SIGTERM where the template sets none. Servers that keep checkpoints have [`LAST_CHECKPOINT_SECONDS`].
const GRACE: Duration = Duration::from_secs(10);

/// The resources that a job gets from the machine that runs it.
#[derive(Clone, Debug)]
pub struct Machine {
    pub cores: u32,
    /// Names of the GPUs, as `CUDA_VISIBLE_DEVICES` takes them.
    pub gpus: Vec<String>,
    /// The program of containers that name no command.
    pub worker: Option<PathBuf>,
    /// Folder of the data set, if the user names one.
    pub data: Option<PathBuf>,
    /// The user has set `OMP_NUM_THREADS`.
    pub threads_are_set: bool,
    /// The user has set `OMP_WAIT_POLICY`.
    pub waiting_is_set: bool,
    /// One address for each server.
    pub servers: Vec<String>,
    /// Takes the result files.
    pub results: PathBuf,
    /// Takes the job's checkpoints, if it keeps any.
    pub checkpoints: PathBuf,
    /// Takes the metrics over time, if the user wants to keep them.
    pub metrics: Option<PathBuf>,
    /// Random and unique to this run.
    pub uid: String,
}

/// How to start one process.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Variables beside the inherited ones.
    pub env: BTreeMap<String, String>,
    pub result_file: PathBuf,
}

impl Launch {
    /// The entry `NAME=VALUE` of its environment that only it has, and the processes that it starts.
    pub fn entry(&self) -> String {
        format!("{PSJOB_RESULT_FILE}={}", text(&self.result_file))
    }
}

/// A job, ready to be started here.
#[derive(Clone, Debug)]
pub struct Plan {
    pub name: String,
    pub rules: Rules,
    pub servers: u32,
    pub trainers: u32,
    /// Places for trainers, of an elastic job more than there are.
    places: u32,
    replication_factor: u32,
    connections: Option<u32>,
    server: Program,
    trainer: Program,
    training: Training,
    checkpoint: Option<Checkpoint>,
    mlflow: Option<Mlflow>,
    namespace: String,
    machine: Machine,
    /// Notes for the user before the job starts.
    pub notes: Vec<String>,
    /// Notes about a possible error; shown with --quiet, too.
    pub warnings: Vec<String>,
}

/// The first container of a role.
#[derive(Clone, Debug)]
struct Program {
    program: PathBuf,
    /// The arguments after the program's name, before references are expanded.
    args: Vec<String>,
    env: Vec<(String, String)>,
    gpus: u32,
    grace: Duration,
}

/// Why a valid job cannot run here.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error("job {0} is suspended, so nothing was started; set spec.suspend to false to run it")]
    Suspended(String),
    #[error(
        "spec.{0} names no command, so it needs psjobs-worker, which was not found beside psjobs or on PATH; \
         build it with `make build`, or name it with --worker"
    )]
    NoWorker(&'static str),
}

impl Plan {
    /// # Errors
    /// If the job is suspended or needs a program that is not there.
    pub fn new(job: &ParameterServerJob, machine: Machine) -> Result<Self, PlanError> {
        let spec = &job.spec;
        let name = job.metadata.name.clone().unwrap_or_default();
        if spec.suspend {
            return Err(PlanError::Suspended(name));
        }
        let (gpus, of_server) = (spec.gpus(Role::Trainer), spec.gpus(Role::Server));
        let keeping = Duration::from_secs(LAST_CHECKPOINT_SECONDS.into());
        let server_grace = if spec.checkpoint.is_some() { keeping } else { GRACE };
        let server = Program::new("ps", spec.ps.template.as_ref(), of_server, server_grace, &machine)?;
        let trainer = Program::new("trainer", Some(&spec.trainer.template), gpus, GRACE, &machine)?;
        let trainers = spec.trainer.replicas.unsigned_abs();
        let elastic = spec.elastic_policy.as_ref();
        let (servers, there) = (machine.servers.len() as u32, machine.gpus.len() as u32);
        let each = [
            note_on_gpus(Role::Trainer, gpus * trainers, there),
            note_on_gpus(Role::Server, of_server * servers, there),
        ];
        let notes = each.into_iter().flatten().collect();
        let checkpoint = spec.checkpoint.as_ref().map(|checkpoint| Checkpoint {
            folder: (checkpoint.object_store_folder(&name))
                .unwrap_or_else(|| text(&machine.checkpoints.join(checkpoint.folder(&name)))),
            policy: checkpoint.policy(),
        });
        Ok(Self {
            name,
            rules: Rules {
                policy: JobPolicy::new(spec),
                server_drain: Duration::from_secs(spec.run_policy.server_drain_seconds.unsigned_abs()),
                writes_model: spec.checkpoint.is_some(),
                servers_are_probed: spec.ps.template.as_ref().is_none_or(has_readiness_probe),
            },
            servers: machine.servers.len() as u32,
            trainers,
            places: elastic.map_or(trainers, |elastic| elastic.max_replicas.unsigned_abs()),
            replication_factor: spec.ps.replication_factor.unsigned_abs(),
            connections: spec.ps.connections.map(i32::unsigned_abs),
            server,
            trainer,
            training: spec.training.clone(),
            checkpoint,
            mlflow: spec.tracking.as_ref().and_then(|tracking| tracking.mlflow.as_ref()).map(MlflowSpec::server),
            namespace: job.metadata.namespace.clone().unwrap_or_else(|| "default".into()),
            machine,
            notes,
            warnings: cluster_only::warning(spec).into_iter().collect(),
        })
    }

    /// All members in the order of their ranks.
    pub fn replicas(&self) -> impl Iterator<Item = Replica> + use<> {
        let of = |role, count| (0..count).map(move |index| Replica { role, index });
        of(Role::Server, self.servers).chain(of(Role::Trainer, self.trainers))
    }

    pub fn rank(&self, replica: Replica) -> u32 {
        replica.rank(self.servers)
    }

    /// Address of server 0, which knows the whole job.
    pub fn coordinator(&self) -> &str {
        &self.machine.servers[0]
    }

    /// Returns the address of a server.
    pub fn address(&self, server: Replica) -> Option<&str> {
        self.machine.servers.get(server.index as usize).map(String::as_str)
    }

    /// How long a process may take to end when it is asked to.
    pub fn grace(&self, replica: Replica) -> Duration {
        self.program(replica).grace
    }

    fn program(&self, replica: Replica) -> &Program {
        if replica.role == Role::Server { &self.server } else { &self.trainer }
    }

    /// Where the servers keep the job's state, if they do.
    pub fn checkpoint_folder(&self) -> Option<&str> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.folder.as_str())
    }

    /// Where TensorBoard finds the metrics over time, if they are kept: those of this run and of others beside it.
    pub fn metrics_folder(&self) -> Option<PathBuf> {
        let here = self.machine.metrics.as_ref().and_then(|run| run.parent()).map(Path::to_owned);
        here.or_else(|| self.checkpoint_folder().map(PathBuf::from))
    }

    /// Where server 0 writes the metrics over time, if not beside the checkpoints: those for a tracking server outlive it, too.
    fn series_folder(&self) -> Option<PathBuf> {
        let for_mlflow = self.mlflow.is_some() && self.checkpoint.is_none();
        let unkept = || for_mlflow.then(|| self.machine.results.join("metrics"));
        self.machine.metrics.clone().or_else(unkept)
    }

    pub fn result_file(&self, replica: Replica) -> PathBuf {
        self.machine.results.join(format!("{}-{}.json", replica.role, replica.index))
    }

    /// Returns how to start a member for the `incarnation`th time, when trainers have ended as `ends` says.
    pub fn launch(&self, replica: Replica, incarnation: u32, ends: TrainerEnds) -> Launch {
        let TrainerEnds { finished, closing } = ends;
        let program = self.program(replica);
        let gpus = self.gpus_of(replica, program);
        // A process that sees only its own GPUs is, as in a pod, the first one there.
        let local_rank = if gpus.as_deref().is_some_and(|gpus| !gpus.is_empty()) { 0 } else { self.rank(replica) };
        let result_file = self.result_file(replica);
        let machine = &self.machine;
        let job =
            Environment::new(&self.name, &machine.uid, machine.servers.clone(), self.places, self.training.clone());
        let contract = Environment {
            namespace: self.namespace.clone(),
            role: replica.role,
            index: replica.index,
            replication_factor: self.replication_factor,
            connections: self.connections,
            min_trainers: self.rules.policy.elastic.map(|elastic| elastic.awaited(closing)),
            finished_trainers: if replica.role == Role::Server { finished } else { Vec::new() },
            incarnation,
            supervised: true,
            local_rank,
            gpus: gpus.as_deref().map_or(0, count),
            result_file: Some(text(&result_file)),
            checkpoint: self.checkpoint.clone().filter(|_| replica.role == Role::Server),
            metrics_folder: self.series_folder().as_deref().map(text).filter(|_| replica.role == Role::Server),
            mlflow: self.mlflow.clone().filter(|_| replica.role == Role::Server),
            ..job
        };
        let contract: BTreeMap<_, _> =
            contract.to_vars().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();

        let mut env = contract.clone();
        env.extend(gpus.map(|gpus| (GPUS_VARIABLE.to_owned(), gpus)));
        if replica.role == Role::Trainer && !self.machine.threads_are_set {
            let threads = (self.machine.cores / self.trainers).max(1);
            env.insert(THREADS_VARIABLE.into(), threads.to_string());
        }
        if !self.machine.waiting_is_set {
            env.insert(WAITING_VARIABLE.into(), "passive".into());
        }
        env.extend(self.machine.data.as_deref().map(|data| (DATA_VARIABLE.to_owned(), text(data))));
        // In the order written: each may refer to those before it. The contract is not theirs to change.
        for (name, value) in &program.env {
            if !contract.contains_key(name) {
                let value = expand(value, &env);
                env.insert(name.clone(), value);
            }
        }
        let expanded = |argument: &String| expand(argument, &env);
        Launch {
            program: expand(&text(&program.program), &env).into(),
            args: program.args.iter().map(expanded).collect(),
            env,
            result_file,
        }
    }

    /// The GPUs that a process may see: its share, or none. `None` where there is none to hide. Servers and trainers count
    /// from the first GPU each.
    fn gpus_of(&self, replica: Replica, program: &Program) -> Option<String> {
        let all = &self.machine.gpus;
        if all.is_empty() {
            return None;
        }
        let share = (0..program.gpus).map(|nth| (replica.index * program.gpus + nth) as usize % all.len());
        let mut share: Vec<_> = share.collect();
        share.dedup();
        Some(share.into_iter().take(all.len()).map(|gpu| all[gpu].as_str()).collect::<Vec<_>>().join(","))
    }
}

impl Program {
    fn new(
        role: &'static str,
        template: Option<&PodTemplateSpec>,
        gpus: u32,
        grace: Duration,
        machine: &Machine,
    ) -> Result<Self, PlanError> {
        let pod = template.and_then(|template| template.spec.as_ref());
        let container = pod.and_then(|pod| pod.containers.first());
        let given =
            |list: fn(&Container) -> &Option<Vec<String>>| container.and_then(|c| list(c).clone()).unwrap_or_default();
        let (command, mut args) = (given(|c| &c.command), given(|c| &c.args));
        if command.is_empty() && container.is_none() {
            args = vec!["serve".into()];
        }
        let (program, args) = match command.split_first() {
            Some((program, rest)) => (program.into(), rest.iter().cloned().chain(args).collect()),
            None => (machine.worker.clone().ok_or(PlanError::NoWorker(role))?, args),
        };
        let variables = container.and_then(|container| container.env.as_deref()).unwrap_or_default();
        let env = variables.iter().filter(|variable| variable.value_from.is_none());
        Ok(Self {
            program,
            args,
            env: env.map(|variable| (variable.name.clone(), variable.value.clone().unwrap_or_default())).collect(),
            gpus,
            grace: pod
                .and_then(|pod| pod.termination_grace_period_seconds)
                .map_or(grace, |seconds| Duration::from_secs(seconds.unsigned_abs())),
        })
    }
}

/// The number of GPUs in a list of their names.
fn count(names: &str) -> u32 {
    names.split(',').filter(|name| !name.is_empty()).count() as u32
}

/// Returns true if Kubernetes asks the template's program whether it is ready; else it is when it runs.
fn has_readiness_probe(template: &PodTemplateSpec) -> bool {
    let main = template.spec.as_ref().and_then(|pod| pod.containers.first());
    main.is_some_and(|main| main.readiness_probe.is_some())
}

/// Says what becomes of the GPUs that the replicas of a role ask for together, if there are fewer.
fn note_on_gpus(role: Role, asked: u32, there: u32) -> Option<String> {
    let who = if role == Role::Trainer { "trainers" } else { "servers" };
    match (asked, there) {
        (0, _) => None,
        (_, 0) => Some(format!("the {who} ask for {asked} GPUs and none was found, so they choose for themselves")),
        _ if asked > there => Some(format!("the {who} ask for {asked} GPUs and there are {there}, so they share them")),
        _ => None,
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests;
