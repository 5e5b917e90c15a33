//! Workloads that users bring data or a model for, trained by a server and two trainers, one process each.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::ChildStderr;

use crate::process::{all_end_well, command, end, free_port, read, run, start};
use psjobs_api::ReplicaResult;
use psjobs_ps::checkpoint::Runs;
use psjobs_worker::tch::Device;
use psjobs_workloads::data::mnist;

/// Trains `workload` on the CPU.
fn train(workload: &str, serve: &str, folder: &Path) -> ReplicaResult {
    train_anywhere(&format!("{workload} --device cpu"), serve, folder)
}

/// Trains `workload` in two trainers and returns the first one's result.
fn train_anywhere(workload: &str, serve: &str, folder: &Path) -> ReplicaResult {
    train_logged(workload, serve, folder).0
}

/// As [`train_anywhere`], with the server's log.
fn train_logged(workload: &str, serve: &str, folder: &Path) -> (ReplicaResult, String) {
    let place = format!("--world-size 3 --master-port {}", free_port());
    let server = start(&format!("serve {place} {serve}"), &folder.join("server"));
    let trainers = [1, 2].map(|rank| {
        let args = format!("train {workload} {place} --rank {rank}");
        start(&args, &folder.join(format!("trainer-{rank}")))
    });
    let last = all_end_well(trainers.into_iter().chain([server])).pop();
    (read(&folder.join("trainer-1")), last.expect("the server's"))
}

fn module(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torchscript").join(name)
}

/// A real text that every checkout has: psjobs's own sources, one behind the other.
fn text(folder: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<PathBuf> = ["api/src", "ps/src", "operator/src", "worker/src"].map(|f| root.join(f)).into();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("readable").flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let text: String = files.iter().map(|file| fs::read_to_string(file).expect("UTF-8")).collect();
    let file = folder.join("text.txt");
    fs::write(&file, text).expect("written");
    file
}

/// Reads the perplexity from a line of a server's log.
fn perplexity(line: &str) -> Option<f64> {
    let (_, value) = line.split_once(" perplexity=").or_else(|| line.split_once("\"perplexity="))?;
    value.split(' ').next()?.parse().ok()
}

#[test]
fn a_language_model_learns_more_than_the_frequencies_of_words() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let vocabulary = folder.path().join("words.txt");
    let text = text(folder.path());
    let files = format!("--data {} --vocabulary {}", text.display(), vocabulary.display());
    let model = format!("lm {files} --words 1000 --embedding 32 --hidden 64 --held-out 4000");
    // Written before two trainers and the server could each build it.
    let (code, log) = end(start(&format!("train {model} --local --max-steps 1"), &folder.path().join("once")));
    assert_eq!(code, Some(0), "{log}");
    let serve = format!("--optimizer adam --learning-rate 0.005 evaluate {model} --every 1");
    let workload = format!("{model} --device cpu --epochs 2");
    let (result, log) = train_logged(&workload, &serve, folder.path());
    let evaluated: Vec<f64> = log.lines().filter(|line| line.contains("evaluated")).filter_map(perplexity).collect();
    let (found, unigram) = (result.metrics["perplexity"], result.metrics["unigram_perplexity"]);
    assert!(found < 0.5 * unigram, "perplexity {found}, of the frequencies alone {unigram}");
    assert!(result.metrics["loss"] < unigram.ln(), "the training loss too: {result:?}");
    // The server has measured it meanwhile, of its own parameters.
    let last = evaluated.last().unwrap_or_else(|| panic!("{log}"));
    assert!(*last < unigram && evaluated.is_sorted_by(|a, b| *b < a * 1.2), "{evaluated:?} until {found}");
    let at_the_end = read(&folder.path().join("server")).metrics["perplexity"];
    assert!(at_the_end == found || (at_the_end / last - 1.0).abs() < 1e-3, "{at_the_end}: {found} or {last}");

    let words = fs::read_to_string(&vocabulary).expect("the vocabulary is saved");
    assert_eq!((words.lines().count(), words.lines().next()), (1000, Some("<unk>")));
    let (code, said) = run(&mut command(&format!("train lm --local {files}")));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("has 1000 words, the model 10000; give --words 1000"), "{said}");
}

#[test]
fn a_torchscript_module_with_a_batch_norm_learns_mnist() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let trained = folder.path().join("trained.pt");
    let (module, saved) = (module("digits.pt"), trained.display());
    let workload = format!("torchscript --model {} --loss nll --dataset mnist --max-steps 700", module.display());
    let serve = "--optimizer adam --learning-rate 0.002";
    let result = train(&format!("{workload} --save {saved}"), serve, folder.path());
    assert!(result.metrics["accuracy"] >= 0.93, "{result:?}");

    // What was saved is a module again, and knows what it learned.
    let again = format!("train torchscript --local --model {saved} --loss nll --dataset mnist --max-steps 1");
    let (code, log) = end(start(&format!("{again} --learning-rate 0"), &folder.path().join("again")));
    assert_eq!(code, Some(0), "{log}");
    let again = read(&folder.path().join("again"));
    // One more batch went through its batch norm.
    assert!((again.metrics["accuracy"] - result.metrics["accuracy"]).abs() < 0.02, "{again:?} after {result:?}");
}

#[test]
fn a_torchscript_module_fits_a_line_to_a_csv() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("line.csv");
    let row = |i: i32| {
        let (x, y) = (f64::from(i % 17) / 17.0, f64::from(i % 23) / 23.0);
        format!("{x},{y},{}\n", 3.0 * x - 2.0 * y + 1.0)
    };
    let rows: String = std::iter::once("x,y,z\n".to_owned()).chain((0..400).map(row)).collect();
    fs::write(&file, rows).expect("written");
    let module = module("line.pt");
    let workload =
        format!("torchscript --model {} --loss mse --data {} --epochs 100", module.display(), file.display());
    let result = train(&workload, "--optimizer adam --learning-rate 0.05 --consistency sync", folder.path());
    assert!(result.metrics["test_loss"] < 1e-3, "{result:?}");
    assert!(!result.metrics.contains_key("accuracy"), "{result:?}");
}

#[test]
fn a_torchscript_module_learns_classes_from_folders() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let data = folder.path().join("digits");
    let place = mnist::default_folder().expect("a cache folder");
    let test = mnist::Mnist::open(&place, Device::Cpu).expect("`make mnist` has fetched it").test;
    for example in 0..2000_i64 {
        let (image, label) = test.select(&[example]);
        let class = data.join(format!("digit-{}", label.int64_value(&[0])));
        fs::create_dir_all(&class).expect("made");
        let rows: Vec<Vec<f32>> = Vec::try_from(image.view([28, 28])).expect("pixels");
        let text = rows.iter().map(|row| row.iter().map(f32::to_string).collect::<Vec<_>>().join(",") + "\n");
        fs::write(class.join(format!("{example}.csv")), text.collect::<String>()).expect("written");
    }
    let (module, data) = (module("digits.pt"), data.display());
    let workload =
        format!("torchscript --model {} --loss nll --data {data} --input-shape 1,28,28 --epochs 8", module.display());
    let result = train(&workload, "--optimizer adam --learning-rate 0.005", folder.path());
    assert!(result.metrics["accuracy"] >= 0.8, "{result:?}");
}

const CLICKS: &str = "recsys --keys 100000 --examples 60000 --held-out 10000 --optimizer adagrad --learning-rate 0.05";

#[test]
fn clicks_are_predicted_as_well_by_two_trainers_as_by_one_process() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let serve = "--optimizer adagrad --learning-rate 0.05 --consistency sync";
    let together = train_anywhere(&format!("{CLICKS} --batch-size 64"), serve, folder.path()).metrics;
    let alone = format!("train {CLICKS} --local --batch-size 128");
    let (code, log) = end(start(&alone, &folder.path().join("alone")));
    assert_eq!(code, Some(0), "{log}");
    let alone = read(&folder.path().join("alone")).metrics;
    assert!((together["auc"] - alone["auc"]).abs() < 0.01, "{together:?}, alone {alone:?}");
    assert!(together["auc"] > 0.65 && together["auc"] < together["best_auc"], "{together:?}");
    assert_eq!(together["best_auc"], alone["best_auc"], "the same examples");
}

/// Two servers, which keep checkpoints, and two trainers.
struct TablesJob {
    folder: PathBuf,
    place: String,
}

impl TablesJob {
    fn new(folder: PathBuf) -> Self {
        fs::create_dir(&folder).expect("made");
        let addresses = [free_port(), free_port()].map(|port| format!("127.0.0.1:{port}"));
        Self { folder, place: format!("--world-size 4 --server-addrs {}", addresses.join(",")) }
    }

    fn kept(&self) -> PathBuf {
        self.folder.join("kept")
    }

    fn serve(&self, rank: u32) -> crate::process::Worker {
        let rule = "--optimizer adagrad --learning-rate 0.05 --consistency sync";
        let (place, kept) = (&self.place, self.kept());
        let keep = format!("--checkpoint-interval 1 --checkpoint-dir {}", kept.display());
        start(&format!("serve {place} --rank {rank} {rule} {keep}"), &self.folder.join(format!("server-{rank}")))
    }

    fn train(&self, rank: u32) -> crate::process::Worker {
        let args = format!("train {CLICKS} --epochs 4 --batch-size 64 --log-every 20 {} --rank {rank}", self.place);
        start(&args, &self.folder.join(format!("trainer-{rank}")))
    }

    /// Waits until all have ended well; what trainer 0 has measured.
    fn finish(&self, processes: impl IntoIterator<Item = crate::process::Worker>) -> BTreeMap<String, f64> {
        for mut process in processes {
            let mut said = String::new();
            if let Some(mut log) = process.0.stderr.take() {
                log.read_to_string(&mut said).expect("text");
            }
            assert_eq!(process.0.wait().expect("it ends").code(), Some(0), "{said}");
        }
        read(&self.folder.join("trainer-2")).metrics
    }
}

#[test]
fn killed_servers_cost_a_job_with_tables_no_bit() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let calm = TablesJob::new(folder.path().join("calm"));
    let want = calm.finish([calm.train(2), calm.train(3), calm.serve(0), calm.serve(1)]);

    let job = TablesJob::new(folder.path().join("restless"));
    let (mut servers, mut first, second) = ([job.serve(0), job.serve(1)], job.train(2), job.train(3));
    let mut log = trains(&mut first);
    let newest = || Runs::new(job.kept()).catalog(1).complete().expect("a folder").last().copied();
    for victim in [1, 0] {
        let (before, mut line) = (newest(), String::new());
        while newest() == before {
            assert_ne!(log.read_line(&mut line).expect("text"), 0, "it ended too early: {line}");
        }
        servers[victim].0.kill().expect("it runs");
        servers[victim].0.wait().expect("it ends");
        servers[victim] = job.serve(victim as u32);
    }
    let mut said = String::new();
    log.read_to_string(&mut said).expect("text");
    let got = job.finish([first, second].into_iter().chain(servers));
    assert!(said.contains("the servers have gone to a checkpoint"), "{said}");
    assert_eq!(got["auc"].to_bits(), want["auc"].to_bits(), "{got:?}, undisturbed {want:?}");
    for file in ["model.safetensors", "tables.safetensors"] {
        assert!(job.kept().join(file).exists(), "{file} is exported");
    }
}

#[test]
fn a_trainer_that_dies_after_its_last_step_is_replaced_when_the_others_have_finished() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let job = TablesJob::new(folder.path().join("job"));
    let (servers, mut first, mut second) = ([job.serve(0), job.serve(1)], job.train(2), job.train(3));
    let said_by = |worker: &mut crate::process::Worker| BufReader::new(worker.0.stderr.take().expect("piped"));
    let (mut log, mut log_of_first) = (said_by(&mut second), said_by(&mut first));
    let mut line = String::new();
    // The last checkpoint, for which both wait at their end, cannot be written while a file has the name of its folder.
    let in_the_way = loop {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("text"), 0, "it ended before it trained");
        if let Some(total) = line.split("total_steps=").nth(1).and_then(|rest| rest.split(' ').next()) {
            let run = fs::read_dir(job.kept()).expect("a folder").filter_map(Result::ok);
            let run = run.map(|entry| entry.path()).find(|path| path.is_dir()).expect("the folder of the run");
            let file = run.join(format!("step-{:012}", total.parse::<u64>().expect("a number")));
            fs::write(&file, "").expect("written");
            break file;
        }
    };
    let name = in_the_way.to_string_lossy().into_owned();
    let last = format!("training step={} ", name.rsplit('-').next().expect("a step").trim_start_matches('0'));
    // Both have made it: one that is killed earlier may still have sums to send to the other.
    for log in [&mut log, &mut log_of_first] {
        line.clear();
        while !line.contains(&last) {
            line.clear();
            assert_ne!(log.read_line(&mut line).expect("text"), 0, "it ended before its last step");
        }
    }
    second.0.kill().expect("it waits for the checkpoint");
    second.0.wait().expect("it ends");
    fs::remove_file(in_the_way).expect("it is there");
    let mut said = String::new();
    log_of_first.read_to_string(&mut said).expect("text");
    assert_eq!(first.0.wait().expect("it ends").code(), Some(0), "{said}");
    let (code, said) = end(job.train(3));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("trainer 0 has finished; this one ends without the others"), "{said}");
    job.finish(servers);
}

#[test]
fn a_trainer_with_bad_data_ends_and_the_others_wait_for_a_better_one() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = |name: &str, rows: &str| {
        let file = folder.path().join(name);
        fs::write(&file, rows).expect("written");
        file.display().to_string()
    };
    let rows = "0,1,-1\n1,0,4\n1,1,2\n0,0,1\n".repeat(50);
    let (good, bad) = (file("good.csv", &rows), file("bad.csv", &format!("{rows}1,2\n")));
    let place = format!("--world-size 3 --master-port {}", free_port());
    let server = start(&format!("serve {place} --consistency sync"), &folder.path().join("server"));
    let module = module("line.pt");
    let begin = |rank: u32, data: &str| {
        let args = format!(
            "train torchscript --model {} --loss mse --data {data} --epochs 5 {place} --rank {rank}",
            module.display()
        );
        start(&args, &folder.path().join(format!("trainer-{rank}")))
    };
    let (first, second) = (begin(1, &good), begin(2, &bad));
    let (code, said) = end(second);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("bad.csv, line 201: it has 2 columns, the first line has 3"), "{said}");
    all_end_well([begin(2, &good), first, server]);
}

/// Reads a trainer's log until it trains.
fn trains(worker: &mut crate::process::Worker) -> BufReader<ChildStderr> {
    let mut log = BufReader::new(worker.0.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("training") {
        line.clear();
        assert_ne!(log.read_line(&mut line).expect("text"), 0, "it ended before it trained");
    }
    log
}

#[test]
fn a_trainer_that_dies_is_named_by_those_that_wait_in_vain() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 3 --master-port {}", free_port());
    let _server = start(&format!("serve {place} --consistency sync"), &folder.path().join("server"));
    let [mut left, mut dead] = [1, 2].map(|rank| {
        let args =
            format!("train recsys --keys 1000 --epochs 1000 --log-every 5 --connect-timeout 15 {place} --rank {rank}");
        start(&args, &folder.path().join(format!("trainer-{rank}")))
    });
    let mut log = trains(&mut left);
    dead.0.kill().expect("it runs");
    let mut said = String::new();
    log.read_to_string(&mut said).expect("text");
    assert_eq!(left.0.wait().expect("it ends").code(), Some(75), "{said}");
    assert!(said.contains("trainer 1 is gone") && said.contains("waiting for its replacement"), "{said}");
    assert!(said.contains("trainer 1 did not come within 15 s"), "{said}");
}

#[test]
fn a_replaced_trainer_takes_over_the_dense_layers_and_the_job_goes_on() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let place = format!("--world-size 3 --master-port {}", free_port());
    let rule = "--optimizer adagrad --learning-rate 0.05";
    let server = start(&format!("serve {place} --consistency sync {rule}"), &folder.path().join("server"));
    let begin = |rank: u32| {
        let args = format!("train {CLICKS} --epochs 3 --batch-size 64 --log-every 20 {place} --rank {rank}");
        start(&args, &folder.path().join(format!("trainer-{rank}")))
    };
    let (mut first, mut dead) = (begin(1), begin(2));
    let mut log = trains(&mut first);
    dead.0.kill().expect("it runs");
    dead.0.wait().expect("it ends");
    let (code, said) = end(begin(2));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("took over the dense layers"), "{said}");
    let mut said = String::new();
    log.read_to_string(&mut said).expect("text");
    assert_eq!(first.0.wait().expect("it ends").code(), Some(0), "{said}");
    assert!(said.contains("all trainers are there again"), "{said}");
    let metrics = read(&folder.path().join("trainer-1")).metrics;
    assert!(metrics["auc"] > 0.65, "{metrics:?}");
    let (code, said) = end(server);
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn modules_and_data_that_do_not_fit_are_one_sentence() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().expect("below the folder")).expect("made");
        fs::write(&file, text).expect("written");
        format!("--data {}", file.display())
    };
    let good = file("good.csv", "1,2,0\n3,4,1\n5,6,1\n");
    let wide = file("wide.csv", "1,2,3,0\n").replace("--data", "--test-data");
    let text = file("short.txt", "in the beginning");
    let rows = [
        ("digits.pt", "nll --dataset mnist --batch-size 40000 --world-size 3 --rank 1".to_owned(), "80000"),
        ("none.pt", format!("mse {good}"), "cannot read"),
        ("state_dict.pt", format!("mse {good}"), "torch.jit.script(model).save"),
        ("export.py", format!("mse {good}"), "no TorchScript module"),
        ("frozen.pt", "nll --dataset mnist".into(), "no parameters"),
        ("half.pt", format!("mse {good}"), "export model.float()"),
        ("line.pt", format!("nll {good}"), "at least 2"),
        ("line.pt", "nll --dataset mnist".into(), "fails on inputs of the shape [4, 1, 28, 28]"),
        ("line.pt", "mse --dataset mnist".into(), "nll or cross-entropy"),
        ("line.pt", "mse".into(), "--data PATH"),
        ("line.pt", "mse --data /no/such.csv".into(), "cannot read /no/such.csv"),
        (
            "line.pt",
            format!("nll {}", file("classes/a/1.csv", "1,2\n1,y\n").replace("/a/1.csv", "")),
            "a/1.csv, line 2",
        ),
        ("line.pt", format!("mse {good} --input-shape 5"), "--input-shape [5] does not fit"),
        ("line.pt", format!("mse {good} {wide}"), "the test set does not fit the module: "),
        ("line.pt", format!("mse {}", file("bad.csv", "a,b\n1,2\n1,x\n")), "bad.csv, line 3: column 2 is \"x\""),
        ("line.pt", format!("nll {}", file("half.csv", "1,2,0.5\n1,2,1\n")), "a target is no class"),
        ("line.pt", format!("mse {}", file("one.csv", "1,2,3\n")), "holds one example"),
    ];
    let clicks = file("clicks.tsv", "1\t3\ta\n0\tx\tb\n");
    let rows = rows.map(|(name, loss, want)| {
        (format!("train torchscript --local --model {} --loss {loss}", module(name).display()), want)
    });
    let texts = [
        (format!("train lm --local {text}"), "3 words, too few"),
        ("train lm --local --data /no/such/text".into(), "scripts/text.sh"),
        ("serve evaluate lm --data /no/such/text".into(), "there is no text at /no/such/text"),
        (format!("serve evaluate lm {text}"), "3 words, too few"),
        (
            format!("train recsys --local {clicks} --numbers 1 --categories 1"),
            "clicks.tsv, line 2: field 2 is \"x\", expected a number",
        ),
        (format!("train recsys --local {clicks}"), "line 1: it has 3 fields, expected 40"),
        (format!("train mnist --dataset fashion --local --data {}", folder.path().display()), "make fashion"),
    ];
    for (args, want) in rows.into_iter().chain(texts) {
        let args = if args.contains("--rank") { args.replace("--local ", "") } else { args };
        let (code, said) = run(&mut command(&args));
        assert_eq!(code, Some(2), "{args}: {said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("psjobs-worker: ")).count(), 1, "{args}: {said}");
        assert!(said.contains(want) && !said.contains("panicked"), "{args}: {said}");
    }
}
