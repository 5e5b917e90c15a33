//! Requests that do not belong are refused in a sentence, and the server lives.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{Member, Session, SessionConfig};
use psjobs_ps::proto::coordination_client::CoordinationClient;
use psjobs_ps::proto::exchange_request::Message;
use psjobs_ps::proto::parameter_server_client::ParameterServerClient;
use psjobs_ps::proto::recovery_client::RecoveryClient;
use psjobs_ps::proto::replication_client::ReplicationClient;
use psjobs_ps::proto::{self, TrainerState, follow_request};
use psjobs_ps::server::{ServerConfig, Timeouts};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::transport::Channel;

async fn join(config: SessionConfig) -> Result<Session, String> {
    let initial = vec![1.0; config.tensors.iter().map(|t| t.elements().expect("small")).sum()];
    tokio::task::spawn_blocking(move || Session::join(config, &initial).map_err(|e| e.to_string()))
        .await
        .expect("no panic")
}

/// Sessions own a runtime, which must not be dropped on an async thread.
async fn drop_session(session: Session) {
    tokio::task::spawn_blocking(move || drop(session)).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_that_does_not_belong_learns_why() {
    let servers = start_all(1, 2, ConsistencyMode::Async).await;
    let first = join(session_config(0, addresses(&servers))).await.expect("joins");
    type Change = fn(&mut SessionConfig);
    let rows: [(&str, Change, &[&str]); 4] = [
        ("other job", |c| c.job_uid = "job-2".into(), &["another job than job-2"]),
        ("rank too high", |c| c.trainer = 5, &["trainer 5", "2 trainers"]),
        ("other model", |c| c.tensors[1].shape = vec![10, 10], &["[600000]", "[10, 10]", "fc.weight"]),
        ("no port", |c| c.servers = vec!["no port given".into()], &["host:port"]),
    ];
    for (label, change, wanted) in rows {
        let mut config = session_config(1, addresses(&servers));
        change(&mut config);
        let error = join(config).await.err().expect(label);
        for want in wanted {
            assert!(error.contains(want), "{label}: {error}");
        }
        assert!(!error.contains(UID), "{label}: without certificates the uid is a secret of the job: {error}");
    }
    drop_session(first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_to_hold_no_parameters_takes_trainers_without_any() {
    let config = config(0, 1, 1, ConsistencyMode::Async);
    let server = start(ServerConfig { refuses_parameters: Some("remove the GPU"), ..config }).await;
    let servers = vec![server.address.to_string()];
    let error = join(session_config(0, servers.clone())).await.err().expect("it has parameters");
    assert!(error.contains("remove the GPU"), "{error}");
    let without = SessionConfig { tensors: Vec::new(), ..session_config(0, servers) };
    let member = tokio::task::spawn_blocking(move || Member::join(without).map(drop));
    member.await.expect("no panic").expect("it joins");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_refusal_contains_the_uid_of_the_job() {
    let server = start(config(0, 1, 1, ConsistencyMode::Async)).await;
    let endpoint = Channel::from_shared(format!("http://{}", server.address)).expect("an address");
    let channel = endpoint.connect().await.expect("connects");
    let (mut recovery, mut replication) =
        (RecoveryClient::new(channel.clone()), ReplicationClient::new(channel.clone()));
    let job_uid = "job-2".to_owned();
    let trainer = Some(proto::TrainerId { job_uid: job_uid.clone(), index: 0, incarnation: 0 });
    let join = proto::JoinRequest { trainer, ..Default::default() };
    let recover = proto::RecoverRequest { job_uid: job_uid.clone(), ..Default::default() };
    let greet = proto::GreetRequest { job_uid: job_uid.clone(), holder: None };
    let open = proto::OpenFollow { job_uid, ..Default::default() };
    let follow = proto::FollowRequest { message: Some(follow_request::Message::Open(open)) };
    let followed = match replication.follow(tokio_stream::once(follow)).await {
        Ok(answers) => answers.into_inner().message().await.map(drop),
        Err(status) => Err(status),
    };
    let answers = [
        ("Join", CoordinationClient::new(channel).join(join).await.map(drop)),
        ("Recover", recovery.recover(recover).await.map(drop)),
        ("Greet", replication.greet(greet).await.map(drop)),
        ("Follow", followed),
    ];
    for (call, answer) in answers {
        let status = answer.expect_err(call);
        assert!(status.message().contains("this server belongs to another job than job-2"), "{call}: {status}");
        assert!(!format!("{status:?}").contains(UID), "{call}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_named() {
    let address = listen().await.local_addr().expect("bound").to_string();
    let mut config = session_config(0, vec![address.clone()]);
    config.connect_timeout = Duration::from_millis(200);
    let error = join(config).await.err().expect("no process listens");
    assert!(error.contains(&address) && error.contains("did not answer"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_closes_its_connection_and_nothing_else() {
    let servers = start_all(1, 1, ConsistencyMode::Async).await;
    for garbage in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 4096], b""] {
        let mut stream = tokio::net::TcpStream::connect(servers[0].address).await.expect("connects");
        stream.write_all(garbage).await.expect("is read");
        stream.shutdown().await.expect("closes");
        let mut rest = Vec::new();
        // The server closes, politely or not.
        let _ = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await.expect("closes");
    }
    let session = join(session_config(0, addresses(&servers))).await.expect("the server lives");
    drop_session(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_frames_end_the_stream_with_a_reason_and_change_nothing() {
    let servers = start_all(2, 1, ConsistencyMode::Async).await;
    let session = join(session_config(0, addresses(&servers))).await.expect("joins");
    let url = format!("http://{}", servers[0].address);
    let mut client = ParameterServerClient::connect(url).await.expect("connects");
    let id = proto::TrainerId { job_uid: UID.into(), index: 0, incarnation: 0 };
    let first = proto::Open { trainer: Some(id.clone()), ..proto::Open::default() };
    let shared = Message::Open(proto::Open { shared_memory_token: 77, ..first.clone() });
    let elsewhere = Message::Open(proto::Open { shard: Some(1), ..first.clone() });
    let many = Message::Open(proto::Open { lane: 2, lanes: 2, ..first.clone() });
    let open = Message::Open(first);
    let gradient = |block, codec: i32, payload: Vec<u8>| {
        Message::Gradient(proto::GradientBlock { step: 0, block, codec, version: 0, payload: payload.into() })
    };
    let full = 262_144 * 4;
    let mut nan = vec![0; full];
    nan[400..404].copy_from_slice(&f32::NAN.to_le_bytes());
    let rows = [
        ("another server", vec![elsewhere], "blocks of server 1 are not here"),
        ("no open", vec![gradient(0, 1, vec![0; 12])], "must be Open"),
        ("a long message before it", vec![gradient(0, 1, vec![0; full])], "the first message has"),
        ("unknown block", vec![open.clone(), gradient(99, 1, vec![])], "block 99 does not exist"),
        ("another server's block", vec![open.clone(), gradient(1, 1, vec![])], "belongs to server 1"),
        ("cut", vec![open.clone(), gradient(0, 1, vec![0; 12])], "found 12"),
        ("unknown codec", vec![open.clone(), gradient(0, 77, vec![0; full])], "codec 77"),
        ("not finite", vec![open.clone(), gradient(0, 1, nan)], "NaN or infinity"),
        ("unknown shared memory", vec![shared, gradient(0, 1, vec![])], "token is not known"),
        ("a stream too many", vec![many], "stream 2 of 2: a trainer has up to 16"),
        ("opened twice", vec![open.clone(), open.clone()], "Open comes once"),
    ];
    for (label, messages, want) in rows {
        let messages = messages.into_iter().map(|message| proto::ExchangeRequest { message: Some(message) });
        // The request stays open, as a trainer's would: the server is the one to end it.
        let requests = tokio_stream::StreamExt::chain(tokio_stream::iter(messages), tokio_stream::pending());
        let mut answers = client.exchange(requests).await.expect(label).into_inner();
        let status =
            tokio::time::timeout(Duration::from_secs(10), answers.message()).await.expect(label).expect_err(label);
        assert!(status.message().contains(want), "{label}: {status}");
    }
    let request = proto::PullRequest { trainer: Some(id), blocks: vec![0], ..Default::default() };
    let block =
        client.pull(request).await.expect("lives").into_inner().message().await.expect("reads").expect("a block");
    assert_eq!(block.version, 0, "nothing was applied");
    drop_session(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_trainers_are_named_and_then_given_up() {
    let mut config = config(0, 1, 2, ConsistencyMode::Async);
    config.timeouts = Timeouts {
        join: Duration::from_millis(100),
        silence: Duration::from_millis(1500),
        abandon: Duration::from_secs(10),
    };
    let server = start(config).await;
    let session = join(session_config(0, vec![server.address.to_string()])).await.expect("joins");
    drop_session(session).await;
    let mut client = CoordinationClient::connect(format!("http://{}", server.address)).await.expect("connects");
    let status = loop {
        let status = client.status(proto::StatusRequest {}).await.expect("answers").into_inner();
        if status.trainers[0].state() == TrainerState::Lost {
            break status;
        }
        tokio::time::sleep(POLL).await;
    };
    assert_eq!(status.trainers[1].state(), TrainerState::Awaited);
    assert!(status.warnings[0].contains("trainer 0 has been silent"), "{:?}", status.warnings);
    assert!(status.warnings[1].contains("trainer 1 has not joined"), "{:?}", status.warnings);
    let error = server.ended.await.expect("no panic").expect_err("gives up").to_string();
    assert!(error.contains("0 (lost)") && error.contains("1 (never joined)"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_that_dies_after_its_last_step_finds_the_parameters_when_it_is_started_again() {
    let silence = Duration::from_millis(1500);
    for supervised in [true, false] {
        let mut config = config(0, 1, 1, ConsistencyMode::Async);
        config.supervised = supervised;
        config.timeouts.silence = silence;
        let server = start(config).await;
        let address = server.address.to_string();
        let session = join(session_config(0, vec![address.clone()])).await.expect("joins");
        let (session, trained) = tokio::task::spawn_blocking(move || train(session, 0, 10)).await.expect("no panic");
        drop_session(session).await;
        if !supervised {
            let result = server.ended.await.expect("no panic").expect("ends well: no other process of it will come");
            assert_eq!(result.steps, 10);
            continue;
        }
        let mut client = CoordinationClient::connect(format!("http://{address}")).await.expect("connects");
        while client.status(proto::StatusRequest {}).await.expect("lives").into_inner().trainers[0].state()
            != TrainerState::Lost
        {
            tokio::time::sleep(POLL).await;
        }
        let mut again = session_config(0, vec![address]);
        again.incarnation = 1;
        let session = join(again).await.expect("joins");
        assert_eq!(session.next_step(), 10, "nothing is left to do");
        assert_eq!(session.parameters(), trained);
        tokio::task::spawn_blocking(move || session.leave(true, 0, BTreeMap::new()).expect("leaves"))
            .await
            .expect("no panic");
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trainers_that_leave_to_be_replaced_do_not_end_the_server() {
    let server = start(config(0, 1, 1, ConsistencyMode::Async)).await;
    let address = server.address.to_string();
    let leave = |incarnation, finished| {
        let mut config = session_config(0, vec![address.clone()]);
        config.incarnation = incarnation;
        tokio::task::spawn_blocking(move || {
            Session::join(config, &vec![1.0; elements()])
                .expect("joins")
                .leave(finished, 5, BTreeMap::new())
                .expect("leaves");
        })
    };
    leave(0, false).await.expect("no panic");
    assert!(!server.ended.is_finished());
    leave(1, true).await.expect("no panic");
    let result = server.ended.await.expect("no panic").expect("ends well");
    assert_eq!(result.examples, 10, "both incarnations count");
}
