//! Trainers that do not behave: each costs the server little memory, is disconnected and receives the reason, and the
//! server goes on.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::support::*;
use http_body::Body as _;
use hyper_util::client::legacy::connect::HttpConnector;
use prost::Message as _;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::Session;
use psjobs_ps::proto::exchange_request::Message;
use psjobs_ps::proto::parameter_server_client::ParameterServerClient;
use psjobs_ps::proto::replication_client::ReplicationClient;
use psjobs_ps::proto::sparse_tables_client::SparseTablesClient;
use psjobs_ps::proto::{self, ExchangeRequest, ParameterBlock};
use psjobs_ps::server::Timeouts;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tower::Service as _;

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(30);

/// A server with the timeout `silence`, a trainer that has joined, and a client to misbehave with.
async fn joined(silence: Duration) -> (Server, Session, ParameterServerClient<Channel>) {
    let mut config = config(0, 1, 2, ConsistencyMode::Async);
    config.timeouts = Timeouts { silence, ..Timeouts::default() };
    let server = start(config).await;
    let session = session_config(1, vec![server.address.to_string()]);
    let session = tokio::task::spawn_blocking(move || Session::join(session, &vec![1.0; elements()]));
    let session = session.await.expect("no panic").expect("joins");
    let mut coordination =
        proto::coordination_client::CoordinationClient::connect(format!("http://{}", server.address))
            .await
            .expect("connects");
    coordination.join(join()).await.expect("joins");
    let client = ParameterServerClient::connect(format!("http://{}", server.address)).await.expect("connects");
    (server, session, client)
}

fn id() -> proto::TrainerId {
    proto::TrainerId { job_uid: UID.into(), index: 0, incarnation: 0 }
}

/// The first call of trainer 0.
fn join() -> proto::JoinRequest {
    let tensors = tensors().iter().map(proto::TensorSpec::from).collect();
    proto::JoinRequest { trainer: Some(id()), tensors, total_steps: 10, shard: None, ..Default::default() }
}

/// A new connection to a server.
async fn connect(server: SocketAddr) -> Channel {
    Channel::from_shared(format!("http://{server}")).expect("an address").connect().await.expect("connects")
}

fn open() -> ExchangeRequest {
    ExchangeRequest { message: Some(Message::Open(proto::Open { trainer: Some(id()), ..proto::Open::default() })) }
}

fn gradient() -> ExchangeRequest {
    let payload = vec![0; elements().min(262_144) * 4].into();
    let gradient = proto::GradientBlock { step: 0, block: 0, codec: 1, version: 0, payload };
    ExchangeRequest { message: Some(Message::Gradient(gradient)) }
}

/// Returns the status that a stream ends with.
async fn end(mut answers: Streaming<ParameterBlock>) -> Status {
    let end = async {
        loop {
            match answers.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ends as if all were well"),
                Err(status) => return status,
            }
        }
    };
    tokio::time::timeout(LIMIT, end).await.expect("it ends")
}

/// The other trainer goes on as if nothing had been.
async fn goes_on(mut session: Session) {
    let stepped = tokio::task::spawn_blocking(move || {
        let step = session.next_step();
        session.gradients_mut().fill(0.0);
        session.exchange(step).expect("answers")
    });
    assert_eq!(stepped.await.expect("no panic"), 1);
}

/// Messages without end; how many were taken, and a ring at each.
fn flood() -> (impl Stream<Item = ExchangeRequest>, Arc<(AtomicUsize, Notify)>) {
    let taken = Arc::new((AtomicUsize::new(0), Notify::new()));
    let counted = taken.clone();
    let flood = tokio_stream::iter(std::iter::repeat_with(move || {
        counted.0.fetch_add(1, Relaxed);
        counted.1.notify_one();
        gradient()
    }));
    (tokio_stream::once(open()).chain(flood), taken)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_floods_and_reads_nothing_is_cut_off() {
    let (_server, session, mut client) = joined(Duration::from_secs(30)).await;
    let (requests, taken) = flood();
    let answers = client.exchange(requests).await.expect("opens").into_inner();
    // Nothing is read until no more is taken.
    while tokio::time::timeout(Duration::from_millis(500), taken.1.notified()).await.is_ok() {}
    let blocks = taken.0.load(Relaxed);
    let status = end(answers).await;
    assert!(status.message().contains("trainer 0 sends gradients but reads no answers"), "{status}");
    assert!(blocks < 100, "{blocks} blocks of 1 MB were taken");
    goes_on(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_says_nothing_is_disconnected() {
    let (_server, session, mut client) = joined(Duration::from_secs(1)).await;
    let silent = tokio_stream::once(open()).chain(tokio_stream::pending());
    let status = end(client.exchange(silent).await.expect("opens").into_inner()).await;
    assert!(status.message().contains("trainer 0 has been silent for"), "{status}");
    let unopened = client.exchange(tokio_stream::pending()).await.expect("opens").into_inner();
    let status = end(unopened).await;
    assert!(status.message().contains("no message came in 1 s"), "{status}");
    goes_on(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_pulls_and_reads_nothing_has_one_pull() {
    let (server, session, _) = joined(Duration::from_secs(30)).await;
    let pull = proto::PullRequest { trainer: Some(id()), blocks: vec![0; 100], ..Default::default() };
    let mut unread = Vec::new();
    for _ in 0..3 {
        // One that is not read holds up the others of its connection.
        let url = format!("http://{}", server.address);
        let mut client = ParameterServerClient::connect(url).await.expect("connects");
        unread.push(client.pull(pull.clone()).await.expect("opens").into_inner());
    }
    let newest = unread.pop();
    for answers in unread {
        let status = end(answers).await;
        assert!(status.message().contains("a newer stream of trainer 0"), "{status}");
    }
    drop(newest);
    goes_on(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_gives_values_and_stops_is_cut_off_and_has_one_stream() {
    let give = |client: &ParameterServerClient<Channel>| {
        let mut client = client.clone();
        let first = proto::InitializeBlocksRequest { trainer: Some(id()), ..Default::default() };
        let silent = tokio_stream::once(first).chain(tokio_stream::pending());
        async move { client.initialize_blocks(silent).await.map(drop).expect_err("no values came") }
    };
    let (_server, session, client) = joined(Duration::from_secs(1)).await;
    let status = tokio::time::timeout(LIMIT, give(&client)).await.expect("it ends");
    // A server that hears nothing of a trainer ends its streams, too.
    let reasons = ["no values of a block came in 1 s", "trainer 0 has been silent for"];
    assert!(reasons.iter().any(|reason| status.message().contains(reason)), "{status}");
    goes_on(session).await;

    let (_server, session, client) = joined(Duration::from_secs(30)).await;
    let mut streams = JoinSet::new();
    for _ in 0..3 {
        streams.spawn(give(&client));
    }
    for _ in 0..2 {
        let ended = tokio::time::timeout(LIMIT, streams.join_next()).await.expect("it ends");
        let status = ended.expect("there are three").expect("no panic");
        assert!(status.message().contains("a newer stream of trainer 0"), "{status}");
    }
    goes_on(session).await;
}

/// Opens a stream to `method` that sends `bytes` and then nothing more; the status that it ends with.
async fn unknown(mut channel: Channel, method: &str, bytes: &'static [u8]) -> Status {
    let pieces = tokio_stream::once(Ok::<_, Status>(http_body::Frame::data(bytes::Bytes::from_static(bytes))));
    let body = tonic::body::Body::new(Pieces(Box::pin(pieces.chain(tokio_stream::pending()))));
    let request = http::Request::post(format!("http://any{method}"))
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(body)
        .expect("a request");
    std::future::poll_fn(|context| channel.poll_ready(context)).await.expect("connected");
    let response = channel.call(request).await.expect("answered");
    if let Some(status) = Status::from_header_map(response.headers()) {
        return status;
    }
    let mut body = response.into_body();
    loop {
        match std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            Some(Ok(frame)) if frame.is_trailers() => {
                return Status::from_header_map(&frame.into_trailers().expect("trailers")).expect("a status");
            }
            Some(Ok(_)) => {}
            Some(Err(status)) => return status,
            None => panic!("it ends as if all were well"),
        }
    }
}

/// A body of pieces as they come.
struct Pieces(Pin<Box<dyn Stream<Item = Result<http_body::Frame<bytes::Bytes>, Status>> + Send>>);

impl http_body::Body for Pieces {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Status>>> {
        self.0.as_mut().poll_next(context)
    }
}

/// Streams whose first message names the caller.
const FIRST: [&str; 5] = [
    "/psjobs.v1.ParameterServer/Exchange",
    "/psjobs.v1.ParameterServer/Pull",
    "/psjobs.v1.ParameterServer/InitializeBlocks",
    "/psjobs.v1.Replication/Greet",
    "/psjobs.v1.Replication/Follow",
];

/// Calls of one message.
const UNARY: [&str; 4] = [
    "/psjobs.v1.Coordination/Join",
    "/psjobs.v1.SparseTables/PushRows",
    "/psjobs.v1.Recovery/Restore",
    "/grpc.health.v1.Health/Check",
];

/// The beginning of a message of 3 MiB that names no job.
static LONG: [u8; 128] = {
    let mut bytes = [0; 128];
    bytes[2] = 0x30;
    bytes
};

#[tokio::test(flavor = "multi_thread")]
async fn a_first_call_is_short_or_begins_with_the_uid_of_the_job() {
    let server = start(config(0, 1, 1, ConsistencyMode::Async)).await;
    let stranger = connect(server.address).await;
    for method in UNARY {
        let refused = tokio::time::timeout(LIMIT, unknown(stranger.clone(), method, &LONG)).await;
        let status = refused.expect("it is refused before the rest comes");
        assert!(status.message().contains("the first call of a connection has 3145728 bytes"), "{method}: {status}");
    }
    // Trainers of large models begin with a long call.
    let name = |n: u32| format!("layers.{n}.attention.output.dense.weight");
    let tensors: Vec<_> = (0..3000).map(|n| proto::TensorSpec { name: name(n), shape: vec![1], group: None }).collect();
    for (uid, is_member) in [("job-2", false), (UID, true)] {
        let trainer = Some(proto::TrainerId { job_uid: uid.into(), ..id() });
        let join = proto::JoinRequest { trainer, tensors: tensors.clone(), ..join() };
        assert!(join.encoded_len() > 64 * 1024, "it is long");
        let mut coordination = proto::coordination_client::CoordinationClient::new(connect(server.address).await);
        let joined = coordination.join(join).await;
        assert_eq!(joined.is_ok(), is_member, "{uid}: {joined:?}");
        if let Err(status) = joined {
            assert!(status.message().contains("the caller belongs to another job"), "{status}");
            assert!(!status.message().contains(UID), "{status}");
        }
    }
    // One whose connection broke may push as its first call.
    let gradients = bytes::Bytes::from(vec![0_u8; 5 << 20]);
    let tables = vec![proto::TableGradients { table: 0, keys: Vec::new(), gradients }];
    let push = proto::PushRowsRequest { trainer: Some(id()), tables, ..Default::default() };
    let heard = SparseTablesClient::new(connect(server.address).await).push_rows(push).await;
    let heard = heard.expect_err("the job has no tables");
    assert!(heard.message().contains("call OpenTables first"), "{heard}");
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_streams_of_one_address_keep_no_other_out() {
    let (server, session, mut client) = joined(Duration::from_secs(30)).await;
    let mut silent = JoinSet::new();
    for _ in 0..8 {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_local_address(Some(IpAddr::from([127, 0, 0, 2])));
        let endpoint = Channel::from_shared(format!("http://{}", server.address)).expect("an address");
        let channel = endpoint.connect_with_connector(connector).await.expect("connects");
        for method in FIRST.iter().chain(&UNARY).cycle().take(150) {
            let (channel, method) = (channel.clone(), *method);
            silent.spawn(async move { unknown(channel, method, &[0, 0, 1, 0, 0]).await });
        }
    }
    // There are 1200, and an address has 512 of the 1024 places.
    for _ in 512..1200 {
        let refused = tokio::time::timeout(LIMIT, silent.join_next()).await.expect("at once");
        let status = refused.expect("there are more").expect("no panic");
        assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    }
    let mut coordination = proto::coordination_client::CoordinationClient::new(connect(server.address).await);
    coordination.join(join()).await.expect("joins again");
    let pull = proto::PullRequest { trainer: Some(id()), blocks: vec![0], ..Default::default() };
    let block = client.pull(pull).await.expect("opens").into_inner().message().await.expect("is heard");
    assert!(block.is_some_and(|block| block.block == 0));
    let greet = proto::GreetRequest { job_uid: UID.into(), holder: None };
    let heard = ReplicationClient::new(connect(server.address).await).greet(greet).await;
    let heard = heard.expect_err("there is one server");
    assert!(heard.message().contains("this server replicates nothing"), "{heard}");
    goes_on(session).await;
}

/// Returns true in a process that runs `test` alone, as its memory is measured; else runs it in one.
fn is_alone(test: &str) -> bool {
    if std::env::var_os("PSJOBS_TEST_ALONE").is_some() {
        return true;
    }
    let own = std::env::current_exe().expect("this program");
    let mut alone = std::process::Command::new(own);
    let output = alone.args(["--exact", test, "--nocapture"]).env("PSJOBS_TEST_ALONE", "1").output().expect("starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    false
}

/// Memory of this process, in MiB.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096 / (1 << 20)
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_callers_that_announce_much_cost_little() {
    if !is_alone("hostile::unknown_callers_that_announce_much_cost_little") {
        return;
    }
    let (server, session, _) = joined(Duration::from_secs(2)).await;
    let channel = || connect(server.address);
    let before = resident();
    // Five bytes each, which announce 8 MiB.
    let long = channel().await;
    for method in FIRST.iter().cycle().take(200) {
        let status = unknown(long.clone(), method, &[0, 0, 128, 0, 0]).await;
        assert!(status.message().contains("the first message has 8388608 bytes"), "{method}: {status}");
    }
    // As many as a connection takes announce what is allowed, and send nothing of it.
    let mut waiting = Vec::new();
    for _ in 0..10 {
        let channel = channel().await;
        for method in FIRST.iter().cycle().take(150) {
            let (channel, method) = (channel.clone(), *method);
            waiting.push(tokio::spawn(async move { unknown(channel, method, &[0, 0, 1, 0, 0]).await }));
        }
    }
    let mut refused = 0;
    for ended in waiting {
        let status = tokio::time::timeout(LIMIT, ended).await.expect("it ends").expect("no panic");
        let late = status.message().contains("no message came in 2 s");
        refused += u32::from(status.message().contains("1024 streams have yet to say whose they are"));
        assert!(late || status.code() == tonic::Code::ResourceExhausted, "{status}");
    }
    assert!(refused >= 1500 - 1024, "{refused} of 1500 were refused");
    let more = resident().saturating_sub(before);
    assert!(more < 200, "{more} MiB more than before, for callers that are not known");
    goes_on(session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_say_nothing_are_few_and_end() {
    let (server, session, _) = joined(Duration::from_secs(30)).await;
    let mut session = Some(session);
    let began = Instant::now();
    let mut silent = JoinSet::new();
    for _ in 0..700 {
        let mut stream = TcpStream::connect(server.address).await.expect("the kernel takes it");
        silent.spawn(async move {
            let mut answer = Vec::new();
            drop(stream.read_to_end(&mut answer).await);
            began.elapsed()
        });
    }
    // All are of one address, which has 512 places.
    let mut ended = Vec::new();
    while ended.len() < 700 {
        let one = tokio::time::timeout(LIMIT, silent.join_next()).await.expect("each ends by itself");
        ended.push(one.expect("there are 700").expect("no panic"));
        if ended.len() == 700 - 512 {
            // A trainer that is known goes on meanwhile.
            let session = session.take();
            goes_on(session.expect("once")).await;
        }
    }
    let refused = ended.iter().filter(|after| **after < Duration::from_secs(9)).count();
    assert!((700 - 512..700 - 500).contains(&refused), "{refused} of 700 were refused at once");
    let url = format!("http://{}", server.address);
    let mut coordination =
        proto::coordination_client::CoordinationClient::connect(url).await.expect("there is room again");
    coordination.status(proto::StatusRequest {}).await.expect("it answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_no_server_can_hold_is_refused_and_leaves_nothing() {
    if !is_alone("hostile::a_model_that_no_server_can_hold_is_refused_and_leaves_nothing") {
        return;
    }
    let server = start(config(0, 1, 2, ConsistencyMode::Async)).await;
    let url = format!("http://{}", server.address);
    let mut coordination = proto::coordination_client::CoordinationClient::connect(url).await.expect("connects");
    let before = resident();
    for shape in [vec![1 << 47], vec![1 << 30, 1 << 17], vec![(1 << 35) + 1]] {
        let tensors = vec![proto::TensorSpec { name: "w".into(), shape, group: None }];
        let join =
            proto::JoinRequest { trainer: Some(id()), tensors, total_steps: 10, shard: None, ..Default::default() };
        let refused = coordination.join(join).await.expect_err("no server has so much memory");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("the job's servers (1) hold 34359738368 at most"), "{refused}");
    }
    let more = resident().saturating_sub(before);
    assert!(more < 50, "{more} MiB more than before, for models that were refused");
    let session = session_config(1, vec![server.address.to_string()]);
    let session = tokio::task::spawn_blocking(move || Session::join(session, &vec![1.0; elements()]));
    goes_on(session.await.expect("no panic").expect("the model of the job is not that of the refused one")).await;
}
