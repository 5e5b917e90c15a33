//! Runs jobs on this machine for benchmarks, and one process that trains alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use psjobs_api::ReplicaResult;
use psjobs_api::crd::ParameterServerJob;
use psjobs_api::env::PSJOB_RESULT_FILE;
use serde_json::{Value, json};

use psjobs::BadInput;
use psjobs::run::{self, Options, Progress, State, Summary, Wish, machine};
use psjobs::setting::Setting;

use crate::report::say;

const THREADS: &str = "OMP_NUM_THREADS";

/// The worker to measure.
pub fn worker(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(machine::find_worker(named)?.ok_or_else(|| {
        BadInput::new(
            "psjobs-worker is neither beside psjobs nor on PATH; build it with `make build`, or name it with --worker",
        )
    })?)
}

/// A job of one server and `trainers` trainers with `args`; one thread in each process.
pub fn job(name: &str, training: Value, trainers: u32, args: &[&str]) -> anyhow::Result<ParameterServerJob> {
    let template = |container: &str, args: &[&str]| {
        let env = json!([{"name": THREADS, "value": "1"}]);
        json!({"spec": {"containers": [{"name": container, "image": "psjobs-worker", "args": args, "env": env}]}})
    };
    let manifest = json!({
        "apiVersion": "psjobs.dev/v1alpha1",
        "kind": "ParameterServerJob",
        "metadata": {"name": name},
        "spec": {
            "training": training,
            "ps": {"template": template("ps", &["serve"])},
            "trainer": {"replicas": trainers, "template": template("trainer", args)},
        },
    });
    serde_json::from_value(manifest).context("the benchmark's own manifest")
}

/// Sets fields of a job.
///
/// # Errors
/// If there is no such field, or the job cannot train so.
pub fn set(job: &ParameterServerJob, settings: &[Setting]) -> anyhow::Result<ParameterServerJob> {
    let mut document = serde_json::to_value(job).context("the benchmark's own manifest")?;
    settings.iter().for_each(|setting| setting.apply(&mut document));
    let job: ParameterServerJob = serde_json::from_value(document).map_err(|error| BadInput::new(error.to_string()))?;
    job.spec.training.validate().map_err(|error| BadInput::new(error.to_string()))?;
    Ok(job)
}

/// Runs a job to its end.
pub fn run(job: &ParameterServerJob, worker: &Path) -> anyhow::Result<Summary> {
    let wish = Wish { progress: Progress::None, output: false };
    let mut options = Options {
        worker: Some(worker.to_owned()),
        data: None,
        log_dir: None,
        checkpoint_dir: run::CHECKPOINTS.into(),
        door: None,
        wish,
    };
    let (summary, signal) = run::execute(job, &mut options, &mut |_| {})?;
    ensure!(signal.is_none() && summary.state == State::Succeeded, "the job did not succeed; nothing was measured");
    Ok(summary)
}

/// A job, and one process that does the same alone.
pub struct Pair {
    pub job: ParameterServerJob,
    trainers: u32,
    alone: Vec<String>,
}

impl Pair {
    /// A job of one server and `trainers` trainers. Alone, the optimizer of `training` is that of the process.
    pub fn new(name: &str, training: Value, trainers: u32, train: &str) -> anyhow::Result<Self> {
        let args: Vec<&str> = train.split_whitespace().collect();
        let mut alone: Vec<String> = args.iter().chain(&["--local"]).map(|arg| (*arg).to_owned()).collect();
        alone.extend(flags(&training["optimizer"]));
        Ok(Self { job: job(name, training, trainers, &args)?, trainers, alone })
    }

    /// Steps/s of all trainers of the job, and of the process alone, which alternate: of each, one a run.
    pub fn measure(&self, worker: &Path, runs: u32) -> anyhow::Result<[Vec<f64>; 2]> {
        let [mut together, mut by_itself] = [const { Vec::new() }; 2];
        for turn in 1..=runs {
            self.say(turn, runs);
            by_itself.push(self.loops(worker, 1)?);
            together.push(self.together(worker)?);
        }
        Ok([together, by_itself])
    }

    /// As [`Pair::measure`], and last the steps/s of as many such processes at once as the job has trainers.
    pub fn measure_with_loops(&self, worker: &Path, runs: u32) -> anyhow::Result<[Vec<f64>; 3]> {
        let [mut together, mut by_itself, mut at_once] = [const { Vec::new() }; 3];
        for turn in 1..=runs {
            self.say(turn, runs);
            by_itself.push(self.loops(worker, 1)?);
            together.push(self.together(worker)?);
            at_once.push(self.loops(worker, self.trainers)?);
        }
        Ok([together, by_itself, at_once])
    }

    fn say(&self, turn: u32, runs: u32) {
        let name = self.job.metadata.name.as_deref().unwrap_or_default();
        say(&format!("{name}: run {turn} of {runs}"));
    }

    fn together(&self, worker: &Path) -> anyhow::Result<f64> {
        run(&self.job, worker)?.steps_per_second.context("the trainers left no result")
    }

    fn loops(&self, worker: &Path, count: u32) -> anyhow::Result<f64> {
        let args: Vec<&str> = self.alone.iter().map(String::as_str).collect();
        loops_at_once(worker, &args, count)
    }
}

/// Returns `spec.training.optimizer` as flags of psjobs-worker; it has no switches.
fn flags(optimizer: &Value) -> Vec<String> {
    let fields = optimizer.as_object().into_iter().flatten();
    let flag = |(field, value): (&String, &Value)| match value {
        Value::String(kind) => ["--optimizer".to_owned(), kind.to_lowercase()],
        number => [format!("--{}", kebab(field)), number.to_string()],
    };
    fields.flat_map(flag).collect()
}

/// `learning-rate` for `learningRate`.
fn kebab(field: &str) -> String {
    field.chars().fold(String::new(), |mut flag, letter| {
        if letter.is_ascii_uppercase() {
            flag.push('-');
        }
        flag.push(letter.to_ascii_lowercase());
        flag
    })
}

/// Steps/s of `count` processes at once that train MNIST's convolutional net, each in one thread with its own optimizer.
pub fn mnist_loops(worker: &Path, steps: u32, count: u32) -> anyhow::Result<f64> {
    let steps = steps.to_string();
    loops_at_once(worker, &["train", "mnist", "--local", "--threads", "1", "--max-steps", &steps], count)
}

/// Steps/s of `count` processes together that train alone at the same time, each as `args` say.
pub fn loops_at_once(worker: &Path, args: &[&str], count: u32) -> anyhow::Result<f64> {
    std::thread::scope(|scope| {
        let loops: Vec<_> = (0..count).map(|_| scope.spawn(|| alone(worker, args))).collect();
        loops.into_iter().map(|running| running.join().expect("a loop does not panic")).sum()
    })
}

/// Steps/s of one process that trains alone, as `args` say.
pub fn alone(worker: &Path, args: &[&str]) -> anyhow::Result<f64> {
    steps_per_second(Command::new(worker).args(args))
}

/// Steps/s of the trainer that `command` starts, in one thread.
pub fn steps_per_second(command: &mut Command) -> anyhow::Result<f64> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let file = folder.path().join("result.json");
    let output = command.env(THREADS, "1").env(PSJOB_RESULT_FILE, &file).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "a trainer failed: {}", log.lines().last().unwrap_or_default());
    let result = fs::read_to_string(&file).ok().as_deref().and_then(ReplicaResult::parse);
    let result = result.with_context(|| format!("a trainer left no result in {}", file.display()))?;
    Ok(result.steps as f64 / result.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_have_the_same_arguments_and_the_same_optimizer() {
        let rows = [
            (json!({"learningRate": 0.01, "momentum": 0.9}), "--learning-rate 0.01 --momentum 0.9"),
            (json!({"learningRate": 0.05, "type": "Adagrad"}), "--learning-rate 0.05 --optimizer adagrad"),
            (Value::Null, ""),
        ];
        for (optimizer, flags) in rows {
            let mut training = json!({"consistency": {"mode": "Sync"}});
            if !optimizer.is_null() {
                training["optimizer"] = optimizer;
            }
            let pair = Pair::new("bench", training, 2, "train mlp --max-steps 7").expect("a job");
            assert_eq!(pair.alone.join(" "), format!("train mlp --max-steps 7 --local {flags}").trim());
            let trainer = &pair.job.spec.trainer.template.spec.as_ref().expect("a pod").containers[0];
            assert_eq!(trainer.args.as_deref().expect("arguments").join(" "), "train mlp --max-steps 7");
        }
    }
}
