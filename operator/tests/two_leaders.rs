//! Two operators of one lease: one is cut off from the API server for a while, and writes nothing when it is back.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt as _;
use kube::api::{ListParams, PostParams};
use prometheus_client::registry::Registry;
use psjobs_api::crd::Phase;
use psjobs_operator::controller::model::Deletion;
use psjobs_operator::controller::write::delete::delete_pods;
use psjobs_operator::controller::write::writer::Writer;
use psjobs_operator::lease::{DURATION, Tenure};
use psjobs_operator::metrics::Metrics;
use serde_json::json;
use support::{Operator, Team};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A way to the API server that can be cut: nothing passes then, and no connection ends.
struct Way {
    port: u16,
    open: watch::Sender<bool>,
}

impl Way {
    async fn to(server: (String, u16)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().map(|address: SocketAddr| address.port()).expect("bound");
        let (open, is_open) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (server, is_open) = (server.clone(), is_open.clone());
                tokio::spawn(async move {
                    let Ok(far) = TcpStream::connect(server).await else { return };
                    let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                    tokio::join!(
                        carry(near_read, far_write, is_open.clone()),
                        carry(far_read, near_write, is_open.clone())
                    );
                });
            }
        });
        Self { port, open }
    }

    fn set_open(&self, open: bool) {
        self.open.send_replace(open);
    }
}

async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut is_open: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if is_open.wait_for(|open| *open).await.is_err() || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

fn flags<'a>(team: &'a Team, identity: &'a str) -> [&'a str; 5] {
    ["--leader-elect", "--lease-namespace", &team.namespace, "--identity", identity]
}

async fn until_held_by(team: &Team, holder: &str) -> Lease {
    let held = |lease: Option<&Lease>| {
        lease.and_then(|lease| lease.spec.as_ref()?.holder_identity.as_deref()).unwrap_or_default() == holder
    };
    team.until("psjobs-operator", held).await.expect("a lease")
}

#[tokio::test]
async fn an_operator_that_was_cut_off_finds_another_one_leading_and_writes_nothing() {
    let Some(team) = Team::new("two").await else { return };
    let way = Way::to(team.server()).await;
    let _one = team.operator_through(way.port, &flags(&team, "one"));
    until_held_by(&team, "one").await;
    let other: Operator = team.operator_with(&flags(&team, "other"));
    team.apply("").await;
    team.run_all().await;

    way.set_open(false);
    let cut = Instant::now();
    until_held_by(&team, "other").await;
    println!("another one leads {:?} after the cut", cut.elapsed());
    team.patch(json!({"suspend": true})).await;
    team.phase(Phase::Suspended).await;
    for pod in team.pods().await {
        team.until::<Pod>(&pod, |pod| pod.is_none()).await;
    }
    // Its watches deliver all that has happened, and the answers to what it had asked.
    way.set_open(true);
    let back = Instant::now();
    let mut looks = tokio::time::interval(Duration::from_millis(200));
    while back.elapsed() < DURATION {
        looks.tick().await;
        assert_eq!(team.pods().await, [""; 0], "a suspended job has no pods");
    }
    let lease = until_held_by(&team, "other").await;
    assert_eq!(lease.spec.and_then(|spec| spec.lease_transitions), Some(1));
    let suspensions = team.api::<Event>().list(&ListParams::default().fields("reason=Suspended")).await;
    let tellers = suspensions.expect("events can be listed").into_iter().filter_map(|event| event.reporting_instance);
    assert_eq!(tellers.collect::<Vec<_>>(), ["other"]);

    // The other one gives the lease back, and the first leads again.
    other.terminate().await;
    until_held_by(&team, "one").await;
    team.patch(json!({"suspend": false})).await;
    team.pod("mnist-ps-0", 1).await;
}

#[tokio::test]
async fn a_writer_whose_lease_ran_out_deletes_nothing() {
    let Some(team) = Team::new("lapsed").await else { return };
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let pod = team.api::<Pod>().create(&PostParams::default(), &pod).await.expect("a pod can be made");
    let tenure = Arc::new(Tenure::elected());
    let metrics = Metrics::new(&mut Registry::default());
    let writer = Writer::new(team.client.clone(), Arc::default(), metrics, tenure.clone());
    let deletions = [Deletion { name: "p".into(), uid: pod.uid().expect("stored"), force: true }];
    let now = Instant::now();
    for (renewed, label) in [(None, "never held"), (now.checked_sub(DURATION), "ran out")] {
        renewed.into_iter().for_each(|renewed| tenure.renewed(renewed));
        let refused = delete_pods(&writer, &team.namespace, &deletions).await.expect_err(label);
        assert!(refused.to_string().contains("the lease could not be renewed in time"), "{label}: {refused}");
    }
    assert_eq!(team.pods().await, ["p"]);
    tenure.renewed(Instant::now());
    delete_pods(&writer, &team.namespace, &deletions).await.expect("the lease is renewed");
    team.until::<Pod>("p", |pod| pod.is_none()).await;
}
