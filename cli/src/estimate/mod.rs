//! `psjobs estimate`: the time of a training step before there is a cluster, and how many servers a model needs. [`model`] has
//! the formula, [`constants`] what is measured, [`table`] many sizes at once.

mod constants;
pub mod model;
mod payload;
mod report;
mod table;

use std::io::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use psjobs_api::Training;
use psjobs_api::crd::ParameterServerJobSpec;
use psjobs_api::training::{Codec, Compression, Consistency, ConsistencyMode, Local, Optimizer};
use psjobs_arithmetic::optimizer;

pub use self::constants::Constants;
use self::constants::{fraction, number, positive};
use self::model::{LocalSteps, Setup, enough_servers, estimate};
use self::report::Report;
use crate::bad_input::BadInput;
use crate::setting::Setting;
use crate::validate;

/// Estimate the time of a training step, what limits it, and how many servers are enough
///
/// Computes, without a cluster, from the size of the model, the time of a gradient and the network: docs/scaling.md explains
/// the formula. With --file the manifest says how many trainers and servers there are and how they train; flags come first.
///
/// Example: psjobs estimate --parameters 110M --compute 0.25 --trainers 64 --servers 8 --gbit 25
#[derive(Debug, Args)]
pub struct EstimateArgs {
    /// Parameters of the model, as 110M or 7B
    #[arg(long, value_name = "N", value_parser = count, required_unless_present = "bytes", conflicts_with = "bytes")]
    parameters: Option<u64>,
    /// Bytes of the model's parameters as f32, as 440MB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    bytes: Option<u64>,
    /// Seconds in which a trainer computes a gradient, without servers
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    compute: f64,
    /// Examples that a trainer reads in a step [default: batch.base of the manifest, 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    examples: Option<u32>,
    /// Manifest with one ParameterServerJob; - reads standard input
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Set a field of spec in the manifest, as ps.replicas=4; may be repeated
    #[arg(long = "set", value_name = "FIELD=VALUE", requires = "file")]
    settings: Vec<Setting>,
    /// Number of trainers [default: that of the manifest, 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    trainers: Option<u32>,
    /// Number of servers [default: that of the manifest, 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    servers: Option<u32>,
    /// Rate of the link of each machine, each way
    #[arg(long, value_name = "GBIT/S", default_value_t = 10.0, value_parser = positive)]
    gbit: f64,
    /// Rate of the servers' links, where it is another one
    #[arg(long, value_name = "GBIT/S", value_parser = positive)]
    server_gbit: Option<f64>,
    /// Milliseconds from a trainer to a server and back, as ping shows them
    #[arg(long, value_name = "MS", default_value_t = 0.1, value_parser = number)]
    latency: f64,
    /// Codec of gradients: F32, BF16, FP16, INT8, OneBit or TopK [default: that of the manifest, F32]
    #[arg(long, value_name = "CODEC", value_parser = codec)]
    codec: Option<Codec>,
    /// With TopK: share of the elements that is sent [default: 0.01]
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    density: Option<f64>,
    /// When gradients take effect; Local is Sync with --local-steps [default: that of the manifest, Sync]
    #[arg(long, value_name = "MODE", ignore_case = true)]
    mode: Option<Mode>,
    /// Steps that a trainer makes for one exchange [default: those of the manifest; with --mode Local 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    local_steps: Option<u32>,
    /// Servers that hold each parameter, 1 or 2 [default: as the manifest says, 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=2))]
    replication: Option<u32>,
    /// Processes talk TLS [default: as the manifest says, which has it unless it says otherwise; else false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tls: Option<bool>,
    /// Share of --compute during which gradients leave already; 0 with --no-overlap [default: 0.5, of the last micro-batch if the
    /// manifest has some; 1 if its consistency.overlap is true]
    #[arg(long, value_name = "SHARE", value_parser = fraction)]
    overlap: Option<f64>,
    /// Standard deviation of the time of a gradient, over that time
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = fraction)]
    spread: f64,
    /// Cores of each server
    #[arg(long, value_name = "N", default_value_t = 4.0, value_parser = positive)]
    server_cores: f64,
    /// Cores of each trainer that exchange: as many as it has connections to a server [default: 1, with TLS 2]
    #[arg(long, value_name = "N", value_parser = positive)]
    trainer_cores: Option<f64>,
    #[command(flatten)]
    constants: Constants,
    /// Print the efficiency with 8 to 4,096 trainers, 1 to 256 servers and 10, 25 and 100 Gbit/s as tables in Markdown
    #[arg(long, conflicts_with_all = ["json", "trainers", "servers", "server_gbit"])]
    table: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// How trainers train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "verbatim")]
enum Mode {
    Sync,
    Bounded,
    Async,
    Local,
}

/// Share of a gradient's time during which gradients leave already, unless a flag or the manifest says otherwise.
const OVERLAP: f64 = 0.5;
/// Parameters up to which servers keep previous values unless the job says otherwise.
const EXACT_BY_DEFAULT: u64 = 1 << 24;
/// Local steps of --mode Local without --local-steps: those of docs/local-steps.md.
const LOCAL_STEPS: u32 = 50;
/// Servers beyond which none are counted.
const MOST_SERVERS: u32 = 256;

impl EstimateArgs {
    pub fn run(self) -> anyhow::Result<u8> {
        let spec = match &self.file {
            Some(file) => Some(validate::only_job(file, &self.settings)?.spec),
            None => None,
        };
        let setup = self.setup(spec.as_ref());
        let text = if self.table {
            table::tables(&setup, &self.constants).map_err(BadInput::new)?
        } else {
            let estimate = estimate(&setup, &self.constants).map_err(BadInput::new)?;
            let most = MOST_SERVERS.max(setup.servers);
            let enough = enough_servers(&setup, &self.constants, most).map_err(BadInput::new)?;
            let report = Report { estimate, enough_servers: enough };
            if self.json { serde_json::to_string(&report)? } else { report.to_string() }
        };
        // A reader that has gone away wants no report.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(0)
    }

    /// Returns the job that the flags and the manifest describe.
    fn setup(&self, spec: Option<&ParameterServerJobSpec>) -> Setup {
        let training = self.training(spec);
        let parameters = self.parameters.or(self.bytes.map(|bytes| bytes / 4)).unwrap_or_default();
        let compression = Compression {
            codec: self.codec.unwrap_or(training.compression.codec),
            density: self.density.unwrap_or(training.compression.density),
        };
        let has_tls = self.tls.unwrap_or(spec.is_some_and(|spec| spec.network.mutual_tls));
        let replicas = |replicas: i32| replicas.unsigned_abs().max(1);
        let copies = self.replication.unwrap_or(spec.map_or(1, |spec| replicas(spec.ps.replication_factor)));
        let bytes_per_second = |gbit: f64| gbit * 1e9 / 8.0;
        Setup {
            parameters,
            compute: self.compute,
            examples: self.examples.unwrap_or(training.batch.base).into(),
            trainers: self.trainers.unwrap_or(spec.map_or(8, |spec| replicas(spec.trainer.replicas))),
            servers: self.servers.unwrap_or(spec.map_or(1, |spec| replicas(spec.servers()))),
            trainer_link: bytes_per_second(self.gbit),
            server_link: bytes_per_second(self.server_gbit.unwrap_or(self.gbit)),
            round_trip: self.latency / 1e3,
            compression,
            mode: training.consistency.mode,
            backup_trainers: training.consistency.backup_trainers,
            local: training.local.as_ref().map(|&Local { steps, overlap, .. }| LocalSteps { steps, overlap }),
            is_replicated: copies > 1,
            has_tls,
            overlap: self.overlap.unwrap_or_else(|| hidden_share(&training)),
            spread: self.spread,
            server_cores: self.server_cores,
            trainer_cores: self.trainer_cores.unwrap_or(if has_tls { 2.0 } else { 1.0 }),
            slots: slots(&training),
            keeps_previous: keeps_previous(&training, parameters)
                && spec.is_none_or(|spec| spec.elastic_policy.is_none()),
        }
    }

    /// Returns how the job trains: as the manifest says, with mode and local steps of the flags.
    fn training(&self, spec: Option<&ParameterServerJobSpec>) -> Training {
        let mut training = spec.map(|spec| spec.training.clone()).unwrap_or_else(|| {
            let mut training = Training::default();
            training.consistency.mode = ConsistencyMode::Sync;
            training
        });
        match self.mode {
            None => {}
            Some(Mode::Sync | Mode::Local) => training.consistency.mode = ConsistencyMode::Sync,
            Some(Mode::Bounded) => training.consistency.mode = ConsistencyMode::Bounded,
            Some(Mode::Async) => training.consistency.mode = ConsistencyMode::Async,
        }
        let without = self.mode == Some(Mode::Local) && training.local.is_none();
        if let Some(steps) = self.local_steps.or(without.then_some(LOCAL_STEPS)) {
            training.local.get_or_insert_with(|| Local::every(steps)).steps = steps;
        }
        training
    }
}

/// Returns the share of a gradient's time during which an exchange is under way already.
fn hidden_share(training: &Training) -> f64 {
    let is_sync = training.consistency.mode == ConsistencyMode::Sync;
    match training.consistency.overlaps_exchanges() && !is_sync {
        // The exchange of the gradient before lasts as long as it must.
        true => 1.0,
        // Gradients leave while the last micro-batch is computed.
        false => OVERLAP / f64::from(training.batch.micro_batches().max(1)),
    }
}

/// Returns if the servers keep the value of each parameter from before the last update, unless trainers come and go.
fn keeps_previous(training: &Training, parameters: u64) -> bool {
    let Consistency { mode, backup_trainers, exact_recovery, .. } = training.consistency;
    let has_one_result = mode == ConsistencyMode::Sync && backup_trainers == 0;
    has_one_result && exact_recovery.unwrap_or(parameters <= EXACT_BY_DEFAULT)
}

/// Returns the slots of optimizer state that the servers keep for a parameter.
fn slots(training: &Training) -> f64 {
    let optimizer = match &training.local {
        // Trainers that make steps alone have the optimizer; the servers move along the difference.
        Some(local) => Optimizer { momentum: local.momentum(training.consistency.mode), ..Optimizer::default() },
        None => training.optimizer.clone(),
    };
    let rule = if training.local.is_none() && training.has_momentum_per_trainer() {
        optimizer::Optimizer::descent(&optimizer)
    } else {
        optimizer::Optimizer::new(&optimizer)
    };
    rule.slots() as f64
}

/// Reads a number with one of the letters K, M, G or B, and T: 110M.
fn count(text: &str) -> Result<u64, String> {
    let form = || "expected a number above 0, as 110M or 7B".to_owned();
    let (digits, factor) = match text.char_indices().next_back() {
        Some((end, 'K' | 'k')) => (&text[..end], 1e3),
        Some((end, 'M')) => (&text[..end], 1e6),
        Some((end, 'G' | 'B')) => (&text[..end], 1e9),
        Some((end, 'T')) => (&text[..end], 1e12),
        _ => (text, 1.0),
    };
    let number = positive(digits).map_err(|_| form())? * factor;
    if (1.0..1e15).contains(&number) { Ok(number.round() as u64) } else { Err(form()) }
}

/// Reads a number of bytes: 440MB, or 440M.
fn bytes(text: &str) -> Result<u64, String> {
    let form = || "expected a number of bytes, at least 4, as 440MB".to_owned();
    count(text.strip_suffix('B').unwrap_or(text)).ok().filter(|bytes| *bytes >= 4).ok_or_else(form)
}

/// Reads the name of a codec.
fn codec(text: &str) -> Result<Codec, String> {
    let named = [
        ("F32", Codec::F32),
        ("BF16", Codec::BF16),
        ("FP16", Codec::FP16),
        ("INT8", Codec::INT8),
        ("OneBit", Codec::OneBit),
        ("TopK", Codec::TopK),
    ];
    let found = named.iter().find(|(name, _)| name.eq_ignore_ascii_case(text)).map(|(_, codec)| *codec);
    found.ok_or_else(|| "expected F32, BF16, FP16, INT8, OneBit or TopK".to_owned())
}

#[cfg(test)]
mod tests;
