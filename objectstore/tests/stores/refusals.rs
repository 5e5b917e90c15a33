//! A store that refuses all requests of a running job for a while.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use psjobs_api::TrainingStatus;
use rustix::process::{Pid, Signal, kill_process};

use crate::between::{Between, SLOW_DOWN};
use crate::store::{Kind, Store, free_port};
use crate::training::{DEADLINE, Process, Trainer, end, said, status, worker};

#[test]
fn a_job_trains_on_while_its_store_throttles_and_its_status_says_so() {
    survive(SLOW_DOWN, "the store refuses requests for now");
}

#[test]
fn a_job_trains_on_while_its_credentials_are_expired_and_its_status_says_so() {
    survive("403 Forbidden", "check the credentials");
}

/// Trains while the store answers all requests with `refusal`, until the status has `words`, and then until a checkpoint is
/// written.
fn survive(refusal: &'static str, words: &str) {
    let Some(store) = Store::start(Kind::S3) else { return };
    let between = Between::refusing(store.address, refusal);
    let (port, metrics) = (free_port(), free_port());
    let serve = format!(
        "serve --port {port} --master-port {port} --metrics-port {metrics} --checkpoint-interval 1 --checkpoint-dir {}",
        store.url("jobs/mnist")
    );
    let Some(mut server) = worker(&serve, &store.variables_at(between.address)) else { return };
    let mut server = Process(server.spawn().expect("starts"));
    let train = format!("train mlp --device cpu --master-port {port} --epochs 1000 --example-ms 1");
    let trainer = Trainer::watch(worker(&train, &[]).expect("there is a worker"));
    said(&mut server.0, "wrote a checkpoint");

    between.active.store(true, Ordering::SeqCst);
    let before = status(metrics);
    assert_eq!(before.failed_checkpoint, None);
    let refused = until(metrics, |status| status.failed_checkpoint.is_some());
    let failed = refused.failed_checkpoint.expect("it has failed");
    assert!(failed.message.contains(words), "{failed:?}");
    until(metrics, |status| status.step > refused.step);
    assert!(refused.step > before.step, "{} steps before, {} when it had failed", before.step, refused.step);

    between.active.store(false, Ordering::SeqCst);
    let healed = until(metrics, |status| status.failed_checkpoint.is_none());
    let newest = |status: &TrainingStatus| status.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    assert!(newest(&healed) > newest(&before), "{:?} and {:?}", healed.checkpoint, before.checkpoint);
    for process in [Pid::from_child(&server.0), trainer.process] {
        kill_process(process, Signal::TERM).expect("it runs");
    }
    assert_eq!((trainer.end().0, end(server).0), (Some(143), Some(143)));
}

/// Asks the server until its status is as wanted.
fn until(metrics: u16, wanted: impl Fn(&TrainingStatus) -> bool) -> TrainingStatus {
    let latest = Instant::now() + DEADLINE;
    loop {
        let now = status(metrics);
        if wanted(&now) {
            return now;
        }
        assert!(Instant::now() < latest, "the status stays at {now:?}");
        thread::sleep(Duration::from_millis(100));
    }
}
