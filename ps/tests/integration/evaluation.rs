//! Measuring the model from a server's process while it trains.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::{POLL, Server, UID, config, elements, listen, session_config, start_on, tensors, train, training};
use psjobs_api::Environment;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{Session, TensorSpec};
use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::proto::parameter_server_client::ParameterServerClient;
use psjobs_ps::proto::{PullRequest, StatusRequest};
use psjobs_ps::server::{Evaluation, Measurement, ServerConfig};
use tokio::sync::mpsc::Receiver;

/// Two servers, of which the first has the model measured all the time.
async fn start() -> (Vec<String>, Vec<Server>, Receiver<Measurement>) {
    let listeners = [listen().await, listen().await];
    let addresses: Vec<_> =
        listeners.iter().map(|listener| listener.local_addr().expect("bound").to_string()).collect();
    let environment = Environment::new(UID, UID, addresses.clone(), 1, training(ConsistencyMode::Async));
    let (evaluation, measurements) = Evaluation::new(&environment, tensors(), Duration::from_millis(5));
    let mut evaluation = Some(evaluation);
    let servers = listeners.into_iter().zip(0..).map(|(listener, index)| {
        let evaluation = evaluation.take();
        start_on(listener, ServerConfig { evaluation, ..config(index, 2, 1, ConsistencyMode::Async) })
    });
    (addresses, servers.collect(), measurements)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_parameters_of_all_servers_are_measured_while_a_trainer_goes_on() {
    let (addresses, servers, mut measurements) = start().await;
    let joining = session_config(0, addresses.clone());
    let training = tokio::task::spawn_blocking(move || {
        let session = Session::join(joining, &vec![0.5; elements()]).expect("both servers are up");
        train(session, 0, 3)
    });
    let (session, parameters) = training.await.expect("no panic");
    let perplexity = |value| BTreeMap::from([("perplexity".to_owned(), value)]);
    // Those before were read between the steps.
    loop {
        let Measurement { parameters: found, reply } = measurements.recv().await.expect("the server lives");
        let last = found == parameters;
        reply.send(perplexity(if last { 7.0 } else { 9.0 })).expect("the server waits for it");
        if last {
            break;
        }
    }
    let mut client = CoordinationClient::connect(format!("http://{}", addresses[0])).await.expect("connects");
    loop {
        let status = client.status(StatusRequest {}).await.expect("answers").into_inner();
        if status.metrics.get("perplexity") == Some(&7.0) {
            break;
        }
        tokio::time::sleep(POLL).await;
    }
    let leaving = tokio::task::spawn_blocking(move || session.leave(true, 10, BTreeMap::new()));
    leaving.await.expect("no panic").expect("both servers answer");
    assert!(measurements.recv().await.is_none(), "nothing has changed since, and the job is over");
    let mut results = Vec::new();
    for server in servers {
        results.push(server.ended.await.expect("no panic").expect("the trainer has left"));
    }
    assert_eq!((results[0].metrics.clone(), results[1].metrics.clone()), (perplexity(7.0), BTreeMap::new()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn training_goes_on_when_no_process_measures_any_more() {
    let (addresses, servers, mut measurements) = start().await;
    let joining = session_config(0, addresses);
    let training = tokio::task::spawn_blocking(move || {
        train(Session::join(joining, &vec![0.5; elements()]).expect("both servers are up"), 0, 1)
    });
    let (session, _) = training.await.expect("no panic");
    drop(measurements.recv().await.expect("the first step"));
    measurements.close();
    let leaving = tokio::task::spawn_blocking(move || {
        let (session, _) = train(session, 0, 4);
        session.leave(true, 10, BTreeMap::new())
    });
    leaving.await.expect("no panic").expect("both servers answer");
    for server in servers {
        server.ended.await.expect("no panic").expect("the trainer has left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_is_not_the_evaluated_one_is_refused_with_both_shapes() {
    let (addresses, servers, _measurements) = start().await;
    let mut other = session_config(0, addresses);
    other.tensors[1] = TensorSpec::new("fc.weight", vec![9]);
    let refused = tokio::task::spawn_blocking(move || Session::join(other, &[0.0; 16]).err().expect("another model"));
    let error = refused.await.expect("no panic").to_string();
    for want in ["the one that this server evaluates", "fc.weight [600000]", "fc.weight [9]", "serve evaluate"] {
        assert!(error.contains(want), "{want}: {error}");
    }
    servers.iter().for_each(|server| server.stop.cancel());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_of_another_job_reads_the_parameters() {
    let (addresses, servers, _measurements) = start().await;
    let mut client = ParameterServerClient::connect(format!("http://{}", addresses[0])).await.expect("connects");
    let request = PullRequest { job_uid: "another".into(), ..PullRequest::default() };
    let status = match client.pull(request).await {
        Ok(answer) => answer.into_inner().message().await.expect_err("it is of another job"),
        Err(status) => status,
    };
    assert!(status.message().contains("has no trainer"), "{status}");
    servers.iter().for_each(|server| server.stop.cancel());
}
