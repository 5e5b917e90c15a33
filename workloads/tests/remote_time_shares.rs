//! Trainers whose model is in other processes report to the servers where their time goes.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod job;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use job::Job;
use psjobs_api::training::{NonFinite, Optimizer};
use psjobs_api::{Environment, Training};
use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::proto::{StatusRequest, TimeSpent, TrainerStatus};
use psjobs_worker::train::Plan;
use psjobs_worker::train::throttle::Pace;
use psjobs_workloads::workload::{cartpole, rnn_remote};
use tch::Device;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two questions to the server, which leaves the cores to the trainers.
const POLL: Duration = Duration::from_millis(20);
/// Steps of a trainer after which each part of them has taken some time.
const STEPS: u64 = 30;

/// Runs `train` for each trainer of a job until all have reported at least a second of training; returns these reports.
fn reports<E: std::fmt::Debug>(
    trainers: u32,
    train: impl Fn(&Environment, &dyn Fn() -> bool) -> Result<(), E> + Sync,
) -> Vec<TimeSpent> {
    // Its servers wait for the trainers, which stop before their last step, and end with the process.
    let job = Job::start(1, trainers, Training::default());
    let (train, stopping) = (&train, &AtomicBool::new(false));
    let stop = || stopping.load(Ordering::Relaxed);
    thread::scope(|scope| {
        for index in 0..trainers {
            let environment = job.trainer(index);
            scope.spawn(move || {
                let ended = train(&environment, &stop);
                // When two stop, one may see that the other is gone.
                assert!(ended.is_ok() || stop(), "trainer {index}: {ended:?}");
            });
        }
        let found = watched(&job.trainer(0).servers[0]);
        stopping.store(true, Ordering::Relaxed);
        found
    })
    .expect("every trainer reports in time")
}

/// Asks a server until it knows where the time of every trainer goes.
fn watched(address: &str) -> Option<Vec<TimeSpent>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let deadline = Instant::now() + TIMEOUT;
    let spent = |trainer: &TrainerStatus| trainer.spent.filter(|spent| spent.total >= 1.0 && trainer.step >= STEPS);
    runtime.block_on(async {
        let mut client = CoordinationClient::connect(format!("http://{address}")).await.expect("it listens");
        while Instant::now() < deadline {
            let status = client.status(StatusRequest {}).await.expect("it answers").into_inner();
            let reports: Option<Vec<_>> = status.trainers.iter().map(spent).collect();
            if reports.is_some() {
                return reports;
            }
            tokio::time::sleep(POLL).await;
        }
        None
    })
}

/// Checks that the parts are disjoint, and that the trainer waits for a part of its time.
fn assert_shares(report: &TimeSpent) {
    let TimeSpent { total, data, forward, backward, compute, exchange } = *report;
    let parts = [data, forward, backward, compute, exchange];
    assert!(parts.iter().all(|part| *part >= 0.0), "{report:?}");
    // The sum of six numbers that were rounded.
    assert!(parts.iter().sum::<f64>() <= total * (1.0 + 1e-9), "{report:?}");
    assert!(exchange > 0.0 && exchange < total, "{report:?}");
}

#[test]
fn a_trainer_of_a_model_in_three_pieces_computes_and_waits() {
    let plan = Plan {
        epochs: 1_000_000,
        max_steps: None,
        batch: 4,
        micro_batches: 1,
        autocast: false,
        elastic: false,
        adaptive: false,
        steps_per_exchange: 1,
        non_finite: NonFinite::Refuse,
        seed: 1,
        trainer: 0,
        trainers: 1,
        device: Device::Cpu,
        log_every: 100,
        evaluate_every: None,
        pace: Pace::default(),
        save: None,
    };
    let size = rnn_remote::Size { words: 60, width: 12, hidden: 16, layers: 2 };
    let optimizer = Optimizer { learning_rate: 0.05, ..Optimizer::default() };
    let settings = rnn_remote::Settings { plan, size, length: 7, optimizer, connect_timeout: TIMEOUT };
    let words: Vec<i64> = (0..2000).map(|n| (n * n + n / 3) % size.words).collect();
    let reports =
        reports(1, |environment, stop| rnn_remote::train(environment, &words, &settings, || {}, stop).map(drop));
    let [report] = &reports[..] else { panic!("one trainer, found {reports:?}") };
    assert_shares(report);
    // Its LSTM computes here.
    let TimeSpent { data, forward, backward, compute, .. } = *report;
    assert!([data, forward, backward].iter().all(|part| *part > 0.0) && compute == 0.0, "{report:?}");
}

#[test]
fn an_agent_and_its_observer_compute_and_wait() {
    let settings = cartpole::Settings {
        seed: 1,
        learning_rate: 0.01,
        packed: false,
        max_rounds: u64::MAX,
        log_every: 100,
        measure_calls: None,
        connect_timeout: TIMEOUT,
    };
    let reports = reports(2, |environment, stop| cartpole::run(environment, &settings, || {}, stop).map(drop));
    assert_eq!(reports.len(), 2);
    for report in &reports {
        assert_shares(report);
        assert!(report.compute > 0.0, "{report:?}");
    }
}
