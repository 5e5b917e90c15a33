//! Jobs that talk mutual TLS: those with a certificate of the job's authority train, others are not heard.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::support::*;
use psjobs_api::TrainingStatus;
use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{ClientError, Session};
use psjobs_ps::network::Network;
use psjobs_ps::tls::Credentials;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// Certificates of an authority of their own.
fn certificates(folder: &Path) -> Arc<Credentials> {
    certificates_of(folder, SystemTime::now())
}

/// Makes certificates in `folder` as of `then`.
fn certificates_of(folder: &Path, then: SystemTime) -> Arc<Credentials> {
    for (name, text) in Certificates::make(&["*.mnist.team.svc".into()], then, LIFE).expect("a name").files() {
        fs::write(folder.join(name), text).expect("written");
    }
    Arc::new(Credentials::load(folder).expect("usable"))
}

/// Asks the metrics port, which needs no certificate.
async fn asked(metrics: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(metrics).await.expect("it is there");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_with_a_certificate_of_the_jobs_authority_train() {
    let (ours, theirs) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (credentials, theirs) = (certificates(ours.path()), Network::Tls(certificates(theirs.path())));
    let ours = Network::Tls(credentials.clone());
    let metrics = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let metrics_address = metrics.local_addr().expect("bound").to_string();
    let mut metrics = Some(metrics);
    // Both servers talk TLS with each other too.
    let listeners = [listen().await, listen().await];
    let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().expect("bound").to_string()).collect();
    let servers: Vec<_> = (0..)
        .zip(listeners)
        .map(|(index, listener)| {
            let mut config = config(index, 2, 1, ConsistencyMode::Sync);
            config.network = ours.clone();
            config.metrics = metrics.take();
            config.replicas = addresses.clone();
            start_on(listener, config)
        })
        .collect();
    let join = |network: Network, patience: u64| {
        let mut config = session_config(0, addresses.clone());
        (config.network, config.replication_factor, config.connections) = (network, 2, 2);
        config.shared_memory = false;
        config.connect_timeout = Duration::from_secs(patience);
        tokio::task::spawn_blocking(move || Session::join(config, &vec![1.0; elements()]))
    };
    for (label, network) in [("another authority", theirs), ("no certificate", Network::Tcp)] {
        let refused = join(network, 1).await.expect("no panic").map(drop).expect_err(label);
        assert!(matches!(refused, ClientError::Unreachable { .. }), "{label}: {refused}");
    }
    assert!(asked(&metrics_address, "/readyz").await.contains("200 OK"));
    let refused = credentials.refused();
    assert!(refused >= 2, "{refused} peers were refused");
    let counted = asked(&metrics_address, "/metrics").await;
    assert!(counted.contains("\npsjobs_ps_refused_peers_total "), "{counted}");

    let session = join(ours, 20).await.expect("no panic").expect("joins");
    let ((trained, wait), (tell, told)) = (oneshot::channel(), oneshot::channel());
    let training = tokio::task::spawn_blocking(move || {
        let (session, parameters) = train(session, 0, 5);
        let _ = trained.send(());
        let _ = told.blocking_recv();
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
        parameters
    });
    wait.await.expect("it trains");
    let answer = asked(&metrics_address, "/status").await;
    let status: TrainingStatus = serde_json::from_str(answer.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON");
    assert_eq!(status.step, 5);
    tell.send(()).expect("it waits");
    let parameters = training.await.expect("no panic");
    assert!(parameters.iter().all(|value| value.is_finite()) && parameters[0] != 1.0, "it has learnt something");
    for server in servers {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_hold_for_their_time_and_no_longer() {
    let now = SystemTime::now();
    for (made, good) in [(now - LIFE + Duration::from_secs(600), true), (now - LIFE - Duration::from_secs(600), false)]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let credentials = certificates_of(folder.path(), made);
        let listener = listen().await;
        let addresses = vec![listener.local_addr().expect("bound").to_string()];
        let mut server = config(0, 1, 1, ConsistencyMode::Sync);
        server.network = Network::Tls(credentials.clone());
        let _server = start_on(listener, server);
        let mut trainer = session_config(0, addresses);
        trainer.network = Network::Tls(credentials.clone());
        trainer.connect_timeout = Duration::from_secs(if good { 20 } else { 1 });
        let joined = tokio::task::spawn_blocking(move || Session::join(trainer, &vec![1.0; elements()]).map(drop));
        let joined = joined.await.expect("no panic");
        assert_eq!(joined.is_ok(), good, "{joined:?}");
    }
}
