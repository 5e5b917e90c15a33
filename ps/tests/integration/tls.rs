//! Jobs that talk mutual TLS: those with a certificate of the job's authority train, others are not heard, and a trainer
//! passes for no server.
#![expect(clippy::disallowed_methods, reason = "certificates hold by the wall clock")]

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::support::{self, *};
use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_api::training::ConsistencyMode;
use psjobs_api::{Role, TrainingStatus};
use psjobs_ps::client::{ClientError, Session};
use psjobs_ps::network::Network;
use psjobs_ps::proto::recovery_client::RecoveryClient;
use psjobs_ps::proto::replication_client::ReplicationClient;
use psjobs_ps::proto::{self, follow_request};
use psjobs_ps::server::CheckpointConfig;
use psjobs_ps::tls::Credentials;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// The credentials of the two roles of one job.
struct Job {
    server: Arc<Credentials>,
    trainer: Arc<Credentials>,
}

impl Job {
    fn new() -> Self {
        Self::of(SystemTime::now())
    }

    /// Certificates of an authority of their own, as of `then`.
    fn of(then: SystemTime) -> Self {
        let certificates = Certificates::make(&["*.mnist.team.svc".into()], then, LIFE).expect("a name");
        let load = |role| {
            let folder = tempfile::tempdir().expect("a folder");
            for (name, text) in certificates.files(role) {
                fs::write(folder.path().join(name), text).expect("written");
            }
            Arc::new(Credentials::load(folder.path()).expect("usable"))
        };
        Self { server: load(Role::Server), trainer: load(Role::Trainer) }
    }
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
    let (job, theirs) = (Job::new(), Network::Tls(Job::new().trainer));
    let (credentials, ours) = (job.server.clone(), Network::Tls(job.trainer));
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
            config.network = Network::Tls(job.server.clone());
            config.metrics = metrics.take();
            config.replicas = addresses.clone();
            start_on(listener, config)
        })
        .collect();
    let join = |network: Network, seconds: u64| {
        let mut config = session_config(0, addresses.clone());
        (config.network, config.replication_factor, config.connections) = (network, 2, 2);
        config.shared_memory = false;
        config.connect_timeout = Duration::from_secs(seconds);
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
    let ((trained, wait), (release, released)) = (oneshot::channel(), oneshot::channel());
    let training = tokio::task::spawn_blocking(move || {
        let (session, parameters) = train(session, 0, 5);
        let _ = trained.send(());
        let _ = released.blocking_recv();
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
        parameters
    });
    wait.await.expect("it trains");
    let answer = asked(&metrics_address, "/status").await;
    let status: TrainingStatus = serde_json::from_str(answer.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON");
    assert_eq!(status.step, 5);
    release.send(()).expect("it waits");
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
        let job = Job::of(made);
        let listener = listen().await;
        let addresses = vec![listener.local_addr().expect("bound").to_string()];
        let mut server = config(0, 1, 1, ConsistencyMode::Sync);
        server.network = Network::Tls(job.server);
        let _server = start_on(listener, server);
        let mut trainer = session_config(0, addresses);
        trainer.network = Network::Tls(job.trainer);
        trainer.connect_timeout = Duration::from_secs(if good { 20 } else { 1 });
        let joined = tokio::task::spawn_blocking(move || Session::join(trainer, &vec![1.0; elements()]).map(drop));
        let joined = joined.await.expect("no panic");
        assert_eq!(joined.is_ok(), good, "{joined:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_peers_of_one_address_keep_no_trainer_out() {
    // An address has 64 handshakes, all addresses together have 1024.
    const SILENT: usize = 1100;
    let job = Job::new();
    let listener = listen().await;
    let address = listener.local_addr().expect("bound");
    let mut server = config(0, 1, 1, ConsistencyMode::Sync);
    server.network = Network::Tls(job.server);
    let _server = start_on(listener, server);
    let began = Instant::now();
    let mut silent = JoinSet::new();
    for _ in 0..SILENT {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from(([127, 0, 0, 2], 0))).expect("a free port");
        let mut stream = socket.connect(address).await.expect("the kernel takes it");
        silent.spawn(async move {
            let mut answer = Vec::new();
            drop(stream.read_to_end(&mut answer).await);
            began.elapsed()
        });
    }
    let mut ended = Vec::new();
    while ended.len() < SILENT {
        let one = tokio::time::timeout(Duration::from_secs(30), silent.join_next()).await.expect("each ends by itself");
        ended.push(one.expect("there are more").expect("no panic"));
        if ended.len() == SILENT - 64 {
            let mut trainer = session_config(0, vec![address.to_string()]);
            trainer.network = Network::Tls(job.trainer.clone());
            trainer.connect_timeout = Duration::from_secs(8);
            let joined = tokio::task::spawn_blocking(move || Session::join(trainer, &vec![1.0; elements()]).map(drop));
            joined.await.expect("no panic").expect("it joins while others are silent");
        }
    }
    let (at_once, late): (Vec<_>, Vec<_>) = ended.into_iter().partition(|after| *after < Duration::from_secs(9));
    assert!((SILENT - 64..SILENT - 50).contains(&at_once.len()), "{} were refused at once", at_once.len());
    assert!(late.iter().all(|after| *after < Duration::from_secs(20)), "a handshake may take 10 s: {late:?}");
}

/// Connects as the process that `credentials` are of.
async fn channel(credentials: &Arc<Credentials>, address: &str) -> Channel {
    let network = Network::Tls(credentials.clone());
    let endpoint = network.endpoint(address, Some(Role::Server)).expect("an address");
    network.connect(&endpoint).await.expect("a certificate of the job")
}

/// Makes every call that servers make of each other, on a job that the caller belongs to; the answers.
async fn call_as_a_server(channel: Channel) -> Vec<(&'static str, Status)> {
    let (mut recovery, mut replication) =
        (RecoveryClient::new(channel.clone()), ReplicationClient::new(channel.clone()));
    let (job_uid, run, epoch) = (UID.to_owned(), 1, 2);
    let restore = proto::RestoreRequest { job_uid: job_uid.clone(), run, epoch, ..Default::default() };
    let snapshot = proto::SnapshotRequest {
        job_uid: job_uid.clone(),
        run,
        epoch: 1,
        last: true,
        done: true,
        ..Default::default()
    };
    let recover = proto::RecoverRequest { job_uid: job_uid.clone(), instance: 7, ..Default::default() };
    let holder = Some(proto::ShardHolder { instance: 7, incarnation: 9, ..Default::default() });
    let greet = proto::GreetRequest { job_uid: job_uid.clone(), holder: holder.clone() };
    let open = proto::OpenFollow { job_uid: job_uid.clone(), holder, ..Default::default() };
    let follow = proto::FollowRequest { message: Some(follow_request::Message::Open(open)) };
    let mut refused = Vec::new();
    let mut note = |call, answer: Result<(), Status>| refused.extend(answer.err().map(|status| (call, status)));
    note("Restore", recovery.restore(restore).await.map(drop));
    note("Snapshot", recovery.snapshot(snapshot).await.map(drop));
    note("Recover", recovery.recover(recover).await.map(drop));
    note("GetEpoch", recovery.get_epoch(proto::GetEpochRequest { job_uid, leader: 0 }).await.map(drop));
    note("Greet", replication.greet(greet).await.map(drop));
    note("Follow", replication.follow(tokio_stream::once(follow)).await.map(drop));
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_that_calls_as_a_server_is_refused_and_changes_nothing() {
    let (job, folder) = (Job::new(), tempfile::tempdir().expect("a folder"));
    let listener = listen().await;
    let address = listener.local_addr().expect("bound").to_string();
    let mut server = config(0, 1, 1, ConsistencyMode::Sync);
    server.network = Network::Tls(job.server.clone());
    server.checkpoint = Some(CheckpointConfig {
        job: "mnist".into(),
        incarnation: 0,
        folder: folder.path().into(),
        interval: Duration::from_secs(3600),
        keep: 2,
        resume: true,
        servers: vec![address.clone()],
    });
    let server = start_on(listener, server);
    let mut trainer = session_config(0, vec![address.clone()]);
    trainer.network = Network::Tls(job.trainer.clone());
    let trained = tokio::task::spawn_blocking(move || {
        train(Session::join(trainer, &vec![1.0; elements()]).expect("joins"), 0, 3)
    });
    let (session, before) = trained.await.expect("no panic");

    let refused = call_as_a_server(channel(&job.trainer, &address).await).await;
    assert_eq!(refused.len(), 6, "all are refused: {refused:?}");
    for (call, status) in refused {
        assert_eq!(status.code(), Code::PermissionDenied, "{call}: {status}");
        assert!(status.message().contains("needs the certificate of a server"), "{call}: {status}");
        assert!(status.message().contains("the caller's is a trainer's"), "{call}: {status}");
    }
    // A server's certificate is heard.
    let mut recovery = RecoveryClient::new(channel(&job.server, &address).await);
    let asked = recovery.get_epoch(proto::GetEpochRequest { job_uid: UID.into(), leader: 0 }).await;
    assert_eq!(asked.expect("a server may ask").into_inner().epoch, 1, "no other epoch has begun");

    let (parameters, undisturbed) = tokio::task::spawn_blocking(move || {
        let (session, parameters) = train(session, 0, 6);
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
        (parameters, support::job::Job::undisturbed(1, 6))
    })
    .await
    .expect("no panic");
    assert!(parameters != before && parameters == undisturbed, "training goes on as if nothing had been");
    server.ended.await.expect("no panic").expect("ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_joins_no_process_that_shows_a_trainers_certificate() {
    let job = Job::new();
    let listener = listen().await;
    let address = listener.local_addr().expect("bound").to_string();
    let mut server = config(0, 1, 1, ConsistencyMode::Sync);
    server.network = Network::Tls(job.trainer.clone());
    let _server = start_on(listener, server);
    let mut trainer = session_config(0, vec![address]);
    (trainer.network, trainer.connect_timeout) = (Network::Tls(job.trainer), Duration::from_secs(1));
    let joined = tokio::task::spawn_blocking(move || Session::join(trainer, &vec![1.0; elements()]).map(drop));
    let refused = joined.await.expect("no panic").expect_err("it is no server").to_string();
    assert!(refused.contains("not valid for name \"ps.psjob\""), "{refused}");
}
