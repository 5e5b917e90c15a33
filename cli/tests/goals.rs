//! Every workload from its manifest in examples/ to the metric that it must reach, on real data. Takes minutes each,
//! so it is `make workloads` that runs them; `make test` has a short variant of each.

mod process;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use process::{Running, example, root};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(3600);

/// The worker to measure, which `make workloads` names.
fn worker() -> PathBuf {
    std::env::var_os("PSJOBS_WORKER").expect("PSJOBS_WORKER names a psjobs-worker; `make workloads` does").into()
}

/// The metrics of `psjobs run` with this manifest.
fn metrics(manifest: &str) -> Value {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("job.yaml");
    fs::write(&file, manifest).expect("written");
    let mut command = Command::new(std::env::var_os("PSJOBS").unwrap_or(env!("CARGO_BIN_EXE_psjobs").into()));
    command.args(["run", "--json", "--no-progress", "--worker"]).arg(worker()).arg(&file);
    let before = cpu_minutes();
    let output = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped())).output(DEADLINE);
    assert!(output.status.success(), "{}", output.status);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!((&summary["state"], &summary["restarts"]), (&"Succeeded".into(), &0.into()), "{summary}");
    let (name, metrics, seconds) = (summary["name"].as_str(), &summary["metrics"], &summary["total_seconds"]);
    let (name, minutes) = (name.unwrap_or_default(), cpu_minutes() - before);
    println!("{name}: {metrics}, {seconds} s, {minutes:.1} CPU minutes");
    metrics.clone()
}

/// A metric of an example.
fn reached(metric: &str, name: &str, changes: &[(&str, &str)]) -> f64 {
    number(&metrics(&example(name, changes)), metric)
}

fn number(metrics: &Value, name: &str) -> f64 {
    metrics[name].as_f64().unwrap_or_else(|| panic!("no {name} in {metrics}"))
}

/// CPU time of all processes that have ended under this one.
fn cpu_minutes() -> f64 {
    // Fields 16 and 17 of proc(5)'s stat, in the kernel's ticks of 10 ms; the name in brackets may hold blanks.
    let stat = fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("a name").1.split(' ').collect();
    let ticks = [13, 14].map(|place: usize| fields[place].parse::<f64>().expect("a number"));
    (ticks[0] + ticks[1]) / 100.0 / 60.0
}

#[test]
#[ignore = "make workloads"]
fn mnist_after_one_epoch() {
    for example in ["mnist.yaml", "mnist-sync.yaml"] {
        let accuracy = reached("accuracy", example, &[]);
        assert!(accuracy >= 0.975, "{accuracy} from {example}");
    }
}

#[test]
#[ignore = "make workloads"]
fn mnist_after_five_epochs() {
    // 5 x 60,000 examples, 32 in a step of both trainers; at one learning rate all the way it stays at .988.
    let changes = [
        (r#"--epochs, "1""#, r#"--epochs, "5""#),
        ("learningRate: 0.01", "learningRate: 0.02"),
        ("    seed: 1", "    seed: 1\n    schedule: {type: Cosine, totalSteps: 9375}"),
    ];
    let accuracy = reached("accuracy", "mnist-sync.yaml", &changes);
    assert!(accuracy >= 0.99, "{accuracy}");
}

#[test]
#[ignore = "make workloads"]
fn mnist_with_eight_asynchronous_trainers() {
    let accuracy = reached("accuracy", "mnist.yaml", &[("replicas: 2", "replicas: 8")]);
    assert!(accuracy >= 0.97, "{accuracy}");
}

#[test]
#[ignore = "make workloads"]
fn mnist_on_the_server() {
    for changes in [&[][..], &[("replicas: 1", "replicas: 2")]] {
        let accuracy = reached("accuracy", "mnist-remote.yaml", changes);
        assert!(accuracy >= 0.975, "{accuracy} with {changes:?}");
    }
}

#[test]
#[ignore = "make workloads"]
fn perceptron() {
    // Async keeps a noise of its learning rate: at one rate all the way it ends between .963 and .972.
    let asynchronous = ("{mode: Sync}", "{mode: Async}\n    schedule: {type: Cosine, totalSteps: 1874}");
    for changes in [&[][..], &[asynchronous]] {
        let accuracy = reached("accuracy", "mlp.yaml", changes);
        assert!(accuracy >= 0.97, "{accuracy} with {changes:?}");
    }
}

#[test]
#[ignore = "make workloads"]
fn cartpole() {
    let reward = reached("running_reward", "cartpole.yaml", &[]);
    assert!(reward > 475.0, "{reward}");
}

#[test]
#[ignore = "make workloads"]
fn language_model() {
    // What about ten minutes of CPU time are enough for, of the trainers and the server together.
    let found = metrics(&example("lm.yaml", &[(r#"--epochs, "3""#, r#"--epochs, "3", --max-steps, "700""#)]));
    let (perplexity, unigram) = (number(&found, "perplexity"), number(&found, "unigram_perplexity"));
    assert!(perplexity * 3.0 < unigram, "{perplexity}, of the frequencies alone {unigram}");
}

#[test]
#[ignore = "make workloads"]
fn language_model_in_three_pieces() {
    // One epoch of plain SGD; guessing among the vocabulary's words would give 5,000. That it learns as one process
    // does is a test of the worker's.
    let perplexity = reached("perplexity", "rnn-remote.yaml", &[]);
    assert!(perplexity < 500.0, "{perplexity}");
}

#[test]
#[ignore = "make workloads"]
fn clicks_as_well_as_one_process() {
    let together = reached("auc", "recsys.yaml", &[]);
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("result.json");
    // The batch of both trainers of the example, and its optimizer.
    let alone = "train recsys --local --keys 100000000 --examples 400000 --batch-size 512 --optimizer adagrad \
                 --learning-rate 0.05 --result-file";
    let mut command = Command::new(worker());
    let output = Running::start(command.args(alone.split_whitespace()).arg(&file)).output(DEADLINE);
    assert!(output.status.success(), "{}", output.status);
    let result: Value = serde_json::from_slice(&fs::read(&file).expect("a result")).expect("JSON");
    let alone = number(&result["metrics"], "auc");
    assert!((together - alone).abs() < 0.01, "{together}, in one process {alone}");
}

/// `make custom` builds it, beside the worker.
#[test]
#[ignore = "make workloads"]
fn custom() {
    let clothes = worker().with_file_name("clothes");
    assert!(clothes.exists(), "{} is not built; `make custom` does", clothes.display());
    let command = format!("command: [{}]", clothes.display());
    let accuracy = reached("accuracy", "custom.yaml", &[("command: [clothes]", &command)]);
    assert!(accuracy >= 0.84, "{accuracy}");
}

#[test]
#[ignore = "make workloads"]
fn torchscript() {
    let module = root().join("workloads/tests/torchscript/digits.pt");
    let args = format!("train, torchscript, --model, {}, --loss, nll, --dataset, mnist", module.display());
    let accuracy = reached("accuracy", "mlp.yaml", &[("train, mlp", &args)]);
    assert!(accuracy >= 0.95, "{accuracy}");
}
