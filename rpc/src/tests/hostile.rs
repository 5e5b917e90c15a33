//! Peers that have not said who they are cost little.

use tonic::Code;

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
