//! Peers that have not said who they are cost little.

use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::*;
use crate::proto;
use crate::proto::frame::Kind;
use crate::proto::remote_objects_client::RemoteObjectsClient;

#[test]
fn a_first_frame_that_is_too_long_is_refused_and_later_ones_may_be_longer() {
    let (job, _server, client) = pair();
    let address = job.serve(&client);
    // 5 MiB, from somebody who belongs to no job.
    let held = vec![proto::Held { object: u64::MAX, count: 1 }; (5 << 20) / 13];
    let hello = proto::Hello { job_uid: "another".into(), name: "trainer-7".into(), held, ..Default::default() };
    let frame = proto::Frame { kind: Some(Kind::Hello(hello)) };
    let refused = job.runtime.block_on(async {
        let mut stranger = RemoteObjectsClient::connect(format!("http://{address}")).await.expect("connects");
        match stranger.attach(tokio_stream::once(frame)).await {
            Ok(answer) => answer.into_inner().message().await.expect_err("it is refused"),
            Err(status) => status,
        }
    });
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("4194304 are allowed before a peer has said who it is"), "{refused}");
    // One that has said who it is may send more.
    let Values(back) = client.peer("ps-0").rpc_sync("echo", "x".repeat(5 << 20)).expect("a long frame of a known peer");
    assert_eq!(back.len(), 1);
}

/// Attaches and says nothing, until the other side ends it.
async fn say_nothing(mut client: RemoteObjectsClient<Channel>) -> Status {
    let end = match client.attach(tokio_stream::pending()).await {
        Ok(answer) => answer.into_inner().message().await.map(drop),
        Err(status) => Err(status),
    };
    end.expect_err("it has said nothing")
}

#[test]
fn peers_that_do_not_say_who_they_are_are_few_and_end() {
    let mut job = Job::new();
    let (_server, address) = job.server("ps-0");
    job.runtime.block_on(async {
        let connect = || RemoteObjectsClient::connect(format!("http://{address}"));
        let (stranger, mut member) = (connect().await.expect("connects"), connect().await.expect("connects"));
        let hello = proto::Hello { job_uid: "test".into(), name: "trainer-7".into(), session: 7, ..Default::default() };
        let hello = proto::Frame { kind: Some(Kind::Hello(hello)) };
        // The connection of a member stays, and its streams have the same time.
        let attached =
            member.attach(tokio_stream::once(hello).chain(tokio_stream::pending())).await.expect("is let in");
        let of_member = tokio::spawn(say_nothing(member));
        let mut silent = JoinSet::new();
        for _ in 0..40 {
            silent.spawn(say_nothing(stranger.clone()));
        }
        let mut next = async || {
            let ended = tokio::time::timeout(3 * TIMEOUT, silent.join_next()).await.expect("each ends by itself");
            ended.expect("there are 40").expect("no panic")
        };
        // An address has 32 of the 64 places.
        for _ in 32..40 {
            let refused = next().await;
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
            assert!(refused.message().contains("64 streams have yet to say whose they are, or 32"), "{refused}");
        }
        assert!(!of_member.is_finished(), "the others have 10 s");
        for _ in 0..32 {
            next().await;
        }
        let late = tokio::time::timeout(TIMEOUT, of_member).await.expect("it ends").expect("no panic");
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        assert!(late.message().contains("no frame came in 10 s"), "{late}");
        drop(attached);
    });
    // The places are free again.
    job.client("trainer-0", &[("ps-0", &address)]);
}
