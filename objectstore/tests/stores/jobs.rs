//! Real servers and trainers, whose checkpoints are in a bucket alone.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use psjobs_ps::checkpoint::Runs;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::checkpoints::{description, write_part};
use crate::store::{self, Kind, Store, free_port};
use crate::training::{Process, Trainer, end, said, status, worker};

const STEPS: u32 = 1000;
/// Times that the whole job is preempted, by SIGTERM.
const PREEMPTIONS: u32 = 20;
/// Times that its server is killed, after every second preemption.
const KILLS: u32 = PREEMPTIONS / 2;
/// Milliseconds that an example takes while the job is disturbed, so that it is not over before.
const SLOW: u32 = 4;

/// Trains for `STEPS` steps, through all preemptions and kills if it is `disturbed`. Returns the model, as bytes.
fn train(checkpoints: &str, variables: &[(String, String)], disturbed: bool, model: &Path) -> Option<Vec<u8>> {
    let port = free_port();
    let serve = format!(
        "serve --port {port} --master-port {port} --consistency sync --momentum 0.9 --checkpoint-interval 1 --checkpoint-dir {checkpoints}"
    );
    let disturbances = if disturbed { PREEMPTIONS + KILLS } else { 0 };
    let begin_training = |still_to_come: u32| {
        let pace = if still_to_come == 0 { 0 } else { SLOW };
        let train = format!("train mlp --device cpu --master-port {port} --max-steps {STEPS} --example-ms {pace}");
        Some(Trainer::watch(worker(&train, &[])?))
    };
    let mut trainer = begin_training(disturbances)?;
    for number in 0..disturbances {
        let mut server = Process(worker(&serve, variables)?.spawn().expect("starts"));
        // It has written a checkpoint, so that the job goes on with each process.
        said(&mut server.0, "wrote a checkpoint");
        if number % 3 == 2 {
            server.0.kill().expect("it runs");
            end(server);
            continue;
        }
        for process in [Pid::from_child(&server.0), trainer.process] {
            kill_process(process, Signal::TERM).expect("it runs");
        }
        let (code, log) = trainer.end();
        assert_eq!(code, Some(143), "{log}");
        let (code, log) = end(server);
        assert_eq!(code, Some(143), "{log}");
        trainer = begin_training(disturbances - number - 1)?;
    }
    let (code, log) = end(Process(worker(&serve, variables)?.spawn().expect("starts")));
    assert_eq!(code, Some(0), "{log}");
    let (code, log) = trainer.end();
    assert_eq!(code, Some(0), "{log}");
    Some(fs::read(model).expect("the model was exported"))
}

#[test]
fn a_job_with_its_state_in_a_bucket_alone_is_the_same_after_20_preemptions_and_10_kills() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().display().to_string();
    let Some(undisturbed) = train(&path, &[], false, &folder.path().join("model.safetensors")) else { return };
    let model = store.files("jobs/mnist/model.safetensors");
    let disturbed = train(&store.url("jobs/mnist"), &store.variables(), true, &model);
    assert!(disturbed.expect("a worker") == undisturbed, "the models differ");
    let metrics = store.files("jobs/mnist/run-00001/metrics/trainer-0");
    assert!(fs::read_dir(metrics).expect("the series are there").count() > 1);
}

#[test]
fn a_server_that_cannot_reach_its_bucket_says_why() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let port = free_port();
    let serve =
        |url: &str| format!("serve --port {port} --master-port {port} --consistency sync --checkpoint-dir {url}");
    for (url, code, words) in
        [("ftp://bucket/x", 2, "give s3://BUCKET/FOLDER"), ("az://container/x", 2, "AZURE_STORAGE_ACCOUNT_NAME")]
    {
        let Some(mut command) = worker(&serve(url), &store.variables()) else { return };
        let (found, log) = end(Process(command.spawn().expect("starts")));
        assert_eq!(found, Some(code), "{log}");
        assert!(log.contains(words), "{log}");
    }
    let metrics = free_port();
    let arguments = format!("{} --metrics-port {metrics}", serve("s3://missing/x"));
    let Some(mut command) = worker(&arguments, &store.variables()) else { return };
    let mut server = Process(command.spawn().expect("starts"));
    let line = said(&mut server.0, "missing");
    assert!(line.contains("create the bucket"), "{line}");
    let failed = status(metrics).failed_checkpoint.expect("it waits for the bucket");
    assert!(failed.message.contains("create the bucket"), "{failed:?}");
}

/// Runs `psjobs-worker store`. Returns its exit code, what it printed, and what it said.
fn print(arguments: &str, variables: &[(String, String)]) -> Option<(Option<i32>, Vec<u8>, String)> {
    let output = worker(arguments, variables)?.stdout(Stdio::piped()).output().expect("starts");
    Some((output.status.code(), output.stdout, String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// Returns the bytes of an object, as the servers read it.
fn object(store: &Store, name: &str) -> Vec<u8> {
    let place = store.folder(name);
    let file = place.disk().open(&place).expect("an object");
    let mut bytes = vec![0; file.bytes().expect("a length") as usize];
    file.read_at(&mut bytes, 0).expect("reads");
    bytes
}

#[test]
fn what_a_job_keeps_in_a_bucket_is_listed_and_read_as_it_is() {
    for store in store::all() {
        let (kind, port, url) = (store.kind, free_port(), store.url("jobs/mnist"));
        let serve = format!("serve --port {port} --master-port {port} --checkpoint-interval 1 --checkpoint-dir {url}");
        let train = format!("train mlp --device cpu --master-port {port} --max-steps 100");
        let Some(trainer) = worker(&train, &[]).map(Trainer::watch) else { return };
        let Some(mut server) = worker(&serve, &store.variables()) else { return };
        let (code, log) = end(Process(server.spawn().expect("starts")));
        assert_eq!(code, Some(0), "{kind:?}: {log}");
        let (code, log) = trainer.end();
        assert_eq!(code, Some(0), "{kind:?}: {log}");

        // A part without a manifest is no checkpoint.
        let catalog = Runs::new(store.folder("jobs/mnist")).newest().expect("reads").expect("the job's run");
        write_part(&catalog.path(999_999), &description(999_999, 1000, 0, 1)).expect("writes");
        let complete = catalog.complete().expect("lists");
        let Some((code, listed, said)) = print(&format!("store list {url}"), &store.variables()) else { return };
        assert_eq!(code, Some(0), "{kind:?}: {said}");
        let listed: Value = serde_json::from_slice(&listed).expect("JSON");
        let files = listed["files"].as_array().expect("a list");
        let manifests = files.iter().filter(|file| file["contents"]["parts"].is_array());
        let steps: Vec<_> = manifests.clone().filter_map(|file| file["contents"]["step"].as_u64()).collect();
        assert!(!steps.is_empty() && complete.iter().eq(&steps), "{kind:?}: {complete:?} and {steps:?}");
        assert_eq!(files[0]["path"], "run-00001/run.json", "{kind:?}");
        assert_eq!(files[0]["contents"]["uid"], "manual", "{kind:?}: that of jobs started by hand");

        let mut names = vec!["model.safetensors".to_owned()];
        names.extend(files.iter().filter_map(|file| file["path"].as_str().map(str::to_owned)));
        for manifest in manifests {
            let (folder, _) = manifest["path"].as_str().and_then(|path| path.rsplit_once('/')).expect("a folder");
            let parts = manifest["contents"]["parts"].as_array().into_iter().flatten();
            names.extend(parts.filter_map(|part| Some(format!("{folder}/{}", part["file"].as_str()?))));
        }
        for name in names {
            let read = print(&format!("store read {url}/{name}"), &store.variables());
            let (code, sent, said) = read.expect("there is a worker");
            assert_eq!(code, Some(0), "{kind:?}: {said}");
            let bytes = object(&store, &format!("jobs/mnist/{name}"));
            let head = format!("{}\n", bytes.len());
            let rest = sent.strip_prefix(head.as_bytes()).expect("its length");
            let (data, checksum) = rest.split_at(bytes.len());
            assert!(data == bytes, "{kind:?}: {name} is not what is in the bucket");
            assert_eq!((checksum.len(), checksum.last()), (9, Some(&b'\n')), "{kind:?}: {name}");
        }
    }
}

#[test]
fn a_bucket_that_is_not_there_is_to_be_created() {
    for store in store::all() {
        let url = store.url("jobs/mnist").replacen(store::BUCKET, "missing", 1);
        let Some((code, printed, said)) = print(&format!("store list {url}"), &store.variables()) else { return };
        assert_eq!((code, printed.len()), (Some(1), 0), "{url}: {said}");
        assert!(said.contains("create the bucket") && said.contains("://missing"), "{url}: {said}");
    }
}

#[test]
fn what_cannot_be_fetched_is_said_in_the_words_of_the_store() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let mut denied = store.variables();
    for (name, value) in &mut denied {
        if name == "AWS_SECRET_ACCESS_KEY" {
            *value = "expired".to_owned();
        }
    }
    let known = store.variables();
    let url = store.url("jobs/mnist");
    for (arguments, variables, code, words) in [
        (format!("store list {url}"), &denied, 1, "check the credentials"),
        (format!("store read {url}/model.safetensors"), &denied, 1, "check the credentials"),
        (
            format!("store read {url}/model.safetensors"),
            &known,
            1,
            "cannot read s3://bucket/jobs/mnist/model.safetensors",
        ),
        ("store list az://container/x".to_owned(), &known, 2, "AZURE_STORAGE_ACCOUNT_NAME"),
    ] {
        let Some((found, printed, said)) = print(&arguments, variables) else { return };
        assert_eq!(found, Some(code), "{arguments}: {said}");
        assert!(said.contains(words) && printed.is_empty(), "{arguments}: {said}");
    }
    let (code, printed, said) = print(&format!("store list {url}"), &known).expect("there is a worker");
    assert_eq!((code, printed.as_slice()), (Some(0), &b"{\"files\":[]}\n"[..]), "{said}");
}
