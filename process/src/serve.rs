//! `psjobs-worker serve`: a parameter server until its job is over.

use std::future::ready;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use psjobs_api::env::{Checkpoint, DEFAULT_EXPERIMENT, Mlflow};
use psjobs_api::training::{ConsistencyMode, Local};
use psjobs_api::{Environment, METRICS_PORT, ReplicaResult, Role, Training};
use psjobs_object_store as object_store;
use psjobs_ps::network::Network;
use psjobs_ps::server::{self, Evaluation, ServerConfig, ServerError, Timeouts};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

use crate::identity::{self, IdentityArgs};
use crate::optimizer::OptimizerArgs;
use crate::signals::Signals;
use crate::tracking::Tracked;
use crate::{Failure, log_place, variable, variables};

/// Arguments of `serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Port to listen on, where it is not the one of this server's address
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Port of /metrics, /healthz and /readyz [default: 9464 in a job, none by hand]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    metrics_port: Option<u16>,
    /// When gradients take effect: sync, all trainers' at once; bounded, each on arrival, no trainer far
    /// ahead; or async, each on arrival [default: async]
    #[arg(long, value_name = "MODE")]
    consistency: Option<Mode>,
    /// Bounded: steps that a trainer may be ahead of the slowest [default: 8]
    #[arg(long, value_name = "STEPS")]
    staleness: Option<u32>,
    /// Sync: trainers that a step does not wait for [default: 0]
    #[arg(long, value_name = "N")]
    backup_trainers: Option<u32>,
    /// Trainers make so many steps alone between two exchanges; they need this flag too [default: the job's local.steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    local_steps: Option<u32>,
    /// Deal the examples of a step out by the trainers' measured speed; the trainers need this flag too
    /// [default: the job's batch.adaptive]
    #[arg(long)]
    adaptive_batch: bool,
    /// With --adaptive-batch: examples that a trainer reads in one step on average [default: the job's batch.base, 32]
    #[arg(long, value_name = "N")]
    batch_size: Option<u32>,
    /// Folder where the job's state is kept, the same for all servers, or the URL of one in an object store, as
    /// s3://BUCKET/FOLDER, gs:// or az:// [default: nothing is kept]
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<String>,
    /// Seconds between two checkpoints [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), requires = "checkpoint_dir")]
    checkpoint_interval: Option<u64>,
    /// Server 0: folder for the metrics over time, as event files of TensorBoard [default: beside the checkpoints, if there
    /// are any]
    #[arg(long, value_name = "DIR")]
    metrics_dir: Option<String>,
    /// Server 0: tracking server of MLflow, as http://HOST:PORT, that gets a run with the job's metrics, parameters and model;
    /// needs --job-id. MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN, are its credentials
    #[arg(long, value_name = "URL")]
    mlflow_uri: Option<String>,
    /// Experiment of MLflow that the run belongs to [default: Default]
    #[arg(long, value_name = "NAME", requires = "mlflow_uri")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    mlflow_experiment: Option<String>,
    /// Exchange blocks over TCP with trainers of this host too, as with those of others
    #[arg(long)]
    no_shared_memory: bool,
    /// Seconds after which a trainer that has not joined is named in the log and in Status
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    join_timeout: u64,
    /// Seconds without a sign of life after which a trainer counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    silence_timeout: u64,
    /// Seconds without any trainer after which this server gives up [default: 600; no limit where the operator or
    /// `psjobs run` has started it]
    #[arg(long, value_name = "SECONDS")]
    abandon_timeout: Option<u64>,
    #[command(flatten)]
    place: IdentityArgs,
    #[command(flatten, next_help_heading = "Optimizer")]
    optimizer: OptimizerArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    Sync,
    Bounded,
    Async,
}

/// Why a server cannot be given GPUs, where its job has no use for them.
pub const IDLE_GPUS: &str = "this server was given GPUs, and would leave them idle, because what it does for this job runs on \
                             CPUs; remove the limit of GPUs from spec.ps.template";

/// Time that a server which has ended gives to what it still writes.
const LEFT_OVERS: Duration = Duration::from_secs(2);

/// Serves blocks and tables, and nothing else, until every trainer has left, and returns what they did together.
///
/// # Errors
/// See [`Failure`].
pub fn run(args: &ServeArgs) -> Result<ReplicaResult, Failure> {
    let (environment, signals) = args.begin()?;
    refuse_gpus(environment.gpus)?;
    args.until_over(&environment, &signals, None, |_| ready(()))
}

/// Refuses the GPUs that a server was given, if any: it does nothing there.
///
/// # Errors
/// If there are some.
pub fn refuse_gpus(given: u32) -> Result<(), Failure> {
    if given > 0 { Err(Failure::Input(anyhow!(IDLE_GPUS))) } else { Ok(()) }
}

impl ServeArgs {
    /// Finds this server's place in its job, and begins to hear signals.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn begin(&self) -> Result<(Environment, Signals), Failure> {
        let signals = Signals::listen().map_err(Failure::work)?;
        let environment = self.environment()?;
        log_place(&environment);
        Ok((environment, signals))
    }

    /// Serves until every trainer has left. `add` adds services of its own to the server; what it returns is waited for
    /// at the end.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn until_over<H: Future>(
        &self,
        environment: &Environment,
        signals: &Signals,
        evaluation: Option<Evaluation>,
        add: impl FnOnce(&mut ServerConfig) -> H,
    ) -> Result<ReplicaResult, Failure> {
        let runtime = tokio::runtime::Runtime::new().map_err(Failure::work)?;
        let result = runtime.block_on(self.serve(environment, signals, evaluation, add));
        // Work on a disk that does not answer, or an upload that no process waits for, does not keep a server.
        runtime.shutdown_timeout(LEFT_OVERS);
        result
    }

    /// This server's job, with the flags' values over the job's.
    fn environment(&self) -> Result<Environment, Failure> {
        let mut environment = self.place.resolve(Role::Server, variable).map_err(Failure::input)?;
        let training = &mut environment.training;
        self.optimizer.apply(&mut training.optimizer);
        if let Some(mode) = self.consistency {
            training.consistency.mode = match mode {
                Mode::Sync => ConsistencyMode::Sync,
                Mode::Bounded => ConsistencyMode::Bounded,
                Mode::Async => ConsistencyMode::Async,
            };
        }
        training.consistency.staleness = self.staleness.unwrap_or(training.consistency.staleness);
        training.consistency.backup_trainers = self.backup_trainers.unwrap_or(training.consistency.backup_trainers);
        training.local = self.local_steps.map(Local::every).or(training.local.take());
        training.batch.adaptive |= self.adaptive_batch;
        training.batch.base = self.batch_size.unwrap_or(training.batch.base);
        training.validate().map_err(Failure::input)?;
        if let Some(why) = server::inelastic(training).filter(|_| environment.min_trainers.is_some()) {
            return Err(Failure::Input(anyhow!(why)));
        }
        if let Some(folder) = &self.checkpoint_dir {
            let mut policy = environment.checkpoint.take().map(|checkpoint| checkpoint.policy).unwrap_or_default();
            policy.interval_seconds = self.checkpoint_interval.unwrap_or(policy.interval_seconds);
            environment.checkpoint = Some(Checkpoint { folder: folder.clone(), policy });
        }
        environment.metrics_folder = self.metrics_dir.clone().or(environment.metrics_folder.take());
        if let Some(uri) = self.mlflow_uri.clone() {
            let experiment = self.mlflow_experiment.clone().unwrap_or_else(|| DEFAULT_EXPERIMENT.to_owned());
            environment.mlflow = Some(Mlflow { uri, experiment });
        }
        Ok(environment)
    }

    async fn serve<H: Future>(
        &self,
        environment: &Environment,
        signals: &Signals,
        evaluation: Option<Evaluation>,
        add: impl FnOnce(&mut ServerConfig) -> H,
    ) -> Result<ReplicaResult, Failure> {
        let (host, port) = identity::split(&environment.servers[environment.index as usize]);
        let port = match self.port {
            Some(port) => port,
            None => port.parse().map_err(Failure::input)?,
        };
        let listener = listen(host, port).await.map_err(|e| Failure::Work(cannot_listen(port, e, "--port")))?;
        if let Some(warning) = without_protection(host, port, environment.tls_folder.is_some()) {
            warn!("{warning}");
        }
        let seconds = Duration::from_secs;
        let defaults = Timeouts::new(environment.supervised);
        let mut config = ServerConfig {
            timeouts: Timeouts {
                join: seconds(self.join_timeout),
                silence: seconds(self.silence_timeout),
                abandon: self.abandon_timeout.map_or(defaults.abandon, seconds),
            },
            shared_memory: !self.no_shared_memory,
            metrics: self.metrics(host).await?,
            evaluation,
            network: Network::of(environment).map_err(Failure::input)?,
            ..ServerConfig::new(environment)
        };
        // The folders of the environment may be those of an object store.
        if let (Some(checkpoint), Some(kept)) = (&environment.checkpoint, &mut config.checkpoint) {
            kept.folder = object_store::folder(&checkpoint.folder, variables()).map_err(Failure::input)?;
        }
        if let Some(folder) = &environment.metrics_folder {
            config.series = Some(object_store::folder(folder, variables()).map_err(Failure::input)?);
        }
        let tracked = Tracked::begin(environment, &mut config)?;
        let ending = config.ending.clone();
        let added = add(&mut config);
        let Training { optimizer, consistency, .. } = &environment.training;
        info!(port, trainers = environment.trainers, %optimizer, consistency = ?consistency.mode, "serving");

        // Listened for first: a signal that came before would be deferred and never seen.
        let (shutdown, asked) = (next_signal()?, next_signal()?);
        signals.defer();
        let outcome = server::run(listener, config, shutdown).await;
        ending.cancel();
        drop(added.await);
        // A signal from here on ends the wait for MLflow and nothing else: the work is done, so that the result counts.
        let heard = signals.heard();
        tokio::select! {
            biased;
            () = tracked.end(&outcome) => {}
            () = asked, if heard.is_none() => warn!(
                "MLflow may lack the last metrics of the job, or its model, because this process was asked to end; \
                 `psjobs-worker track` sends those that are kept"
            ),
        }
        if let Some(signal) = heard {
            return Err(Failure::Signal(signal));
        }
        let classify = |error: ServerError| match error {
            // Another folder is to be given.
            ServerError::FolderInUse { .. } => Failure::input(error),
            error if error.is_peer_away() => Failure::peer_away(error),
            error => Failure::work(error),
        };
        let result = outcome.map_err(classify)?;
        info!(steps = result.steps, seconds = result.seconds, metrics = ?result.metrics, "every trainer has left");
        Ok(result)
    }

    async fn metrics(&self, host: &str) -> Result<Option<TcpListener>, Failure> {
        if let Some(port) = self.metrics_port {
            let listener = listen(host, port).await;
            return listener.map(Some).map_err(|e| Failure::Work(cannot_listen(port, e, "--metrics-port")));
        }
        if variable(psjobs_api::env::PSJOB_ROLE).is_none() {
            return Ok(None);
        }
        // In a pod the port is always free; on one machine only the first server of all has it.
        match listen(host, METRICS_PORT).await {
            Ok(listener) => Ok(Some(listener)),
            Err(error) => {
                warn!(port = METRICS_PORT, %error, "no metrics are served; --metrics-port chooses another port");
                Ok(None)
            }
        }
    }
}

/// Listens for SIGTERM and SIGINT from now on. Resolves with the first of them.
fn next_signal() -> Result<impl Future<Output = ()> + Send + 'static, Failure> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::work)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::work)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Listens for other machines, unless `host`, by which this server is known, is this machine only.
async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    if is_loopback(host) {
        return TcpListener::bind((bare(host), port)).await;
    }
    match TcpListener::bind(("::", port)).await {
        // Both versions through one socket, where the machine has both.
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => TcpListener::bind(("0.0.0.0", port)).await,
        listener => listener,
    }
}

fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_loopback(host: &str) -> bool {
    bare(host) == "localhost" || bare(host).parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Returns the warning about a server that other machines can talk to without showing a certificate.
fn without_protection(host: &str, port: u16, has_tls: bool) -> Option<String> {
    (!has_tls && !is_loopback(host)).then(|| {
        format!(
            "whoever reaches port {port} of this machine and knows the job's id can read and change the model and end the \
             job, because this server takes connections from other machines without TLS; give --tls-dir, or at least \
             --job-id with one that cannot be guessed, in a manifest network.mutualTLS: true"
        )
    })
}

/// Says why a port cannot be had. The process that has it may end, so that this is no bad input.
fn cannot_listen(port: u16, error: io::Error, flag: &str) -> anyhow::Error {
    if error.kind() == io::ErrorKind::AddrInUse {
        return anyhow!("port {port} is in use; end the process that has it, or choose another port with {flag}");
    }
    anyhow::Error::new(error).context(format!("cannot listen on port {port}; choose another port with {flag}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_a_server_would_leave_idle_are_refused_as_input() {
        assert!(refuse_gpus(0).is_ok());
        let failure = refuse_gpus(1).expect_err("it is idle");
        assert!(matches!(&failure, Failure::Input(why) if why.to_string().contains("spec.ps.template")), "{failure:?}");
    }

    #[test]
    fn a_server_that_other_machines_reach_without_tls_warns() {
        for (host, has_tls, warns) in [
            ("localhost", false, false),
            ("127.0.0.1", false, false),
            ("[::1]", false, false),
            ("0.0.0.0", false, true),
            ("server.example", false, true),
            ("mnist-ps-0.mnist.default.svc", false, true),
            ("server.example", true, false),
        ] {
            let warning = without_protection(host, 29500, has_tls);
            assert_eq!(warning.is_some_and(|warning| warning.contains("port 29500")), warns, "{host}, TLS {has_tls}");
        }
    }
}
