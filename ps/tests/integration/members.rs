//! Trainers whose parameters live elsewhere.

use std::collections::BTreeMap;

use crate::support::job::Job;
use crate::support::{addresses, config, elements, session_config, start, start_all};
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{Member, Session, SessionConfig};

fn member(trainer: u32, servers: Vec<String>) -> SessionConfig {
    SessionConfig { tensors: Vec::new(), ..session_config(trainer, servers) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_without_parameters_reports_its_progress_and_ends_the_job() {
    let servers = start_all(2, 2, ConsistencyMode::Async).await;
    let addresses = addresses(&servers);
    let trainers: Vec<_> = (0..2)
        .map(|trainer| {
            let config = member(trainer, addresses.clone());
            tokio::task::spawn_blocking(move || {
                let member = Member::join(config).expect("both servers are up");
                member.report(7, 70, &BTreeMap::from([("loss".to_owned(), f64::from(trainer))]), None);
                member.leave(true).expect("both servers answer");
            })
        })
        .collect();
    for trainer in trainers {
        trainer.await.expect("no panic");
    }
    for server in servers {
        let result = server.ended.await.expect("no panic").expect("every trainer has left");
        assert_eq!((result.steps, result.examples), (14, 140));
        assert_eq!(result.metrics["loss"], 0.0, "the first trainer's counts");
    }
}

#[test]
fn a_server_that_starts_after_the_last_step_reports_the_steps() {
    let job = Job::plain(1, 1, ConsistencyMode::Sync);
    let server = job.start(0);
    let mut session = Session::join(job.session(0, 3), &vec![1.0; elements()]).expect("joins");
    for step in 0..3 {
        session.gradients_mut().fill(1.0);
        session.exchange(step).expect("answers");
    }
    server.kill();
    let server = job.start(0);
    session.leave(true, 30, BTreeMap::new()).expect("leaves");
    let result = server.outcome().expect("ends well");
    assert_eq!((result.steps, result.examples), (3, 30));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trainers_with_and_without_parameters_do_not_mix() {
    let server = start(config(0, 1, 2, ConsistencyMode::Async)).await;
    let address = vec![server.address.to_string()];
    tokio::task::spawn_blocking(move || {
        let tensors = session_config(0, address.clone());
        let elements = tensors.tensors.iter().map(|t| t.elements().expect("small")).sum();
        let session = Session::join(tensors, &vec![0.0; elements]).expect("the first one describes the model");
        let error = Member::join(member(1, address)).err().expect("another model").to_string();
        assert!(error.contains("trainer 1 has another model than the job"), "{error}");
        drop(session);
    })
    .await
    .expect("no panic");
    server.stop.cancel();
}

#[tokio::test]
async fn other_services_hear_that_the_server_ends() {
    let config = config(0, 1, 1, ConsistencyMode::Async);
    let ending = config.ending.clone();
    let server = start(config).await;
    assert!(!ending.is_cancelled());
    server.stop.cancel();
    ending.cancelled().await;
    assert!(server.ended.await.expect("no panic").is_err(), "no trainer had finished");
}
