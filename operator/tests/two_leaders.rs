//! Two operators of one lease: one is cut off from the API server for a while, and writes nothing when it is back. An
//! operator that writes again first reads each job anew for which it would create pods.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::channel::mpsc;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Pod, Secret, Service};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Resource, ResourceExt as _};
use prometheus_client::registry::Registry;
use psjobs_api::Replica;
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase, names};
use psjobs_operator::controller::model::{Child, Deletion, NewPod, ObservedState};
use psjobs_operator::controller::shard::Shard;
use psjobs_operator::controller::validate::validate;
use psjobs_operator::controller::write::children::create_children;
use psjobs_operator::controller::write::delete::{delete_job, delete_pods};
use psjobs_operator::controller::write::events;
use psjobs_operator::controller::write::update_status::update_status;
use psjobs_operator::controller::write::write_priority::WritePriority;
use psjobs_operator::controller::write::writer::Writer;
use psjobs_operator::controller::{Context, ReconcileError, Watches, reconcile};
use psjobs_operator::lease::{DURATION, Tenure};
use psjobs_operator::metrics::Metrics;
use serde::de::DeserializeOwned;
use serde_json::json;
use support::{ApiServer, Operator, Team, install_definition, install_pod_groups};
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

/// Returns the state of an operator of this shard. No watch fills its caches, so they have no pod.
fn context(team: &Team, tenure: Arc<Tenure>, shard: Option<&str>) -> Arc<Context> {
    let (metrics, shard) = (Metrics::new(&mut Registry::default()), Shard(shard.map(str::to_owned)));
    // Dropped before they begin, so that no reconcile waits for them.
    let watches = Watches::new(&team.client, Some(&team.namespace), &shard, mpsc::channel(1).1);
    Arc::new(Context {
        writer: Writer::new(team.client.clone(), Arc::default(), metrics.clone(), tenure),
        children: watches.children(),
        jobs: Arc::default(),
        events: events::channel().0,
        metrics,
        shard,
        worker_image: "psjobs-worker:0.1.0".into(),
    })
}

/// Renews the lease for longer than a test takes.
fn renew(tenure: &Tenure) {
    tenure.renewed(Instant::now() + Duration::from_hours(1));
}

#[tokio::test]
async fn a_job_that_changed_while_requests_failed_gets_no_pods() {
    let Some(team) = Team::new("gap").await else { return };
    let tenure = Arc::new(Tenure::elected());
    tenure.renewed(Instant::now());
    // More than an interval later, as after requests that failed.
    renew(&tenure);
    let context = context(&team, tenure, None);
    let refused = async |cached: &ParameterServerJob, label: &str| {
        let refused = Box::pin(reconcile(Arc::new(cached.clone()), context.clone())).await.expect_err(label);
        assert!(matches!(refused, ReconcileError::OutOfDate), "{label}: {refused}");
        assert_eq!(team.pods().await, [""; 0], "{label}");
    };

    let new = team.apply("").await;
    team.patch(json!({"suspend": true})).await;
    refused(&new, "suspended").await;
    team.patch(json!({"suspend": false})).await;
    let resumed = team.job().await;
    let ended = ParameterServerJobStatus { phase: Some(Phase::Succeeded), ..ParameterServerJobStatus::default() };
    Box::pin(update_status(&team.client, &resumed, &ended)).await.expect("the status can be written");
    refused(&resumed, "ended").await;
    let jobs = team.api::<ParameterServerJob>();
    jobs.delete("mnist", &DeleteParams::default()).await.expect("the job can be deleted");
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
    refused(&resumed, "deleted").await;
    let again = team.apply("").await;
    refused(&resumed, "deleted, and another one has its name").await;

    Box::pin(reconcile(Arc::new(again), context.clone())).await.expect("the job has not changed");
    assert_eq!(team.pods().await, ["mnist-ps-0", "mnist-trainer-0", "mnist-trainer-1"]);
}

/// Fails unless a write was refused because another operator may lead.
fn assert_not_leading<T>(result: Result<T, ReconcileError>, label: &str) {
    match result {
        Err(ReconcileError::NotLeading) => {}
        Err(other) => panic!("{label}: {other}"),
        Ok(_) => panic!("{label}: it is not refused"),
    }
}

async fn count<K>(team: &Team) -> usize
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    team.api::<K>().list(&ListParams::default()).await.expect("objects can be listed").items.len()
}

/// Tries each kind of write for a suspended job with a pod `p`, except the job's deletion. Returns what became of them.
async fn try_all_writes(
    context: &Arc<Context>,
    job: &ParameterServerJob,
    pod: &Deletion,
) -> Vec<(String, Result<(), ReconcileError>)> {
    let Context { writer, children, jobs, .. } = &**context;
    let (namespace, uid) = (job.namespace().expect("stored"), job.uid().expect("stored"));
    let mut results = Vec::new();
    for priority in [WritePriority::Event, WritePriority::Status, WritePriority::Child, WritePriority::TerminalStatus] {
        results.push((format!("a permit for {priority:?}"), writer.permit(priority).await.map(drop)));
        results.push((format!("a permit at once for {priority:?}"), writer.try_permit(priority).map(drop)));
    }
    // Its pods are taken over from another shard first.
    jobs.set_disputed(&uid, true);
    let labelled = Box::pin(reconcile(Arc::new(job.clone()), context.clone())).await;
    results.push(("a pod's label".into(), labelled.map(drop)));
    jobs.set_disputed(&uid, false);
    let reconciled = Box::pin(reconcile(Arc::new(job.clone()), context.clone())).await;
    results.push(("a status".into(), reconciled.map(drop)));
    let deleted = delete_pods(writer, &namespace, std::slice::from_ref(pod)).await;
    results.push(("a deletion".into(), deleted));
    let trainer = NewPod::first(Replica::trainer(0));
    let rows = [
        ("certificates", true, Child::Service),
        ("a service", false, Child::Service),
        ("a pod", false, Child::Pod(trainer)),
    ];
    for (label, mutual_tls, child) in rows {
        let mut object = job.clone();
        object.spec.network.mutual_tls = mutual_tls;
        let (valid, wanted) = (validate(object.into()).expect("valid"), [child]);
        let mut observed = ObservedState::default();
        let creating = create_children(writer, (children, jobs), &valid, &wanted, "image", &mut observed);
        let created = Box::pin(creating).await.map(drop);
        assert!(observed.refused.is_empty(), "{label}: {:?}", observed.refused);
        results.push((label.into(), created));
    }
    results
}

#[tokio::test]
async fn a_writer_whose_lease_ran_out_writes_nothing() {
    let Some(team) = Team::new("lapsed").await else { return };
    team.apply("suspend: true").await;
    let label = Patch::Merge(json!({"metadata": {"labels": {names::LABEL_SHARD: "a"}}}));
    let jobs = team.api::<ParameterServerJob>();
    let job = jobs.patch("mnist", &PatchParams::default(), &label).await.expect("the job can be labelled");
    let owner = job.controller_owner_ref(&()).expect("stored");
    let pod = json!({
        "metadata": {"name": "p", "labels": {names::LABEL_JOB: "mnist"}, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    });
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let pod = team.api::<Pod>().create(&PostParams::default(), &pod).await.expect("a pod can be made");
    let deletion = Deletion { name: "p".into(), uid: pod.uid().expect("stored"), force: true };
    let tenure = Arc::new(Tenure::elected());
    let context = context(&team, tenure.clone(), Some("a"));
    for (renewed, when) in [(None, "never held"), (Instant::now().checked_sub(DURATION), "ran out")] {
        renewed.into_iter().for_each(|renewed| tenure.renewed(renewed));
        for (write, result) in Box::pin(try_all_writes(&context, &job, &deletion)).await {
            assert_not_leading(result, &format!("{when}: {write}"));
        }
        assert_not_leading(delete_job(&context.writer, &job).await, &format!("{when}: the job's deletion"));
    }
    assert_eq!(team.pods().await, ["p"]);
    let unchanged = team.api::<Pod>().get("p").await.expect("the pod exists");
    assert_eq!(unchanged.labels(), pod.labels());
    assert_eq!(team.job().await.resource_version(), job.resource_version());
    assert_eq!((count::<Secret>(&team).await, count::<Service>(&team).await), (0, 0));

    renew(&tenure);
    for (write, result) in Box::pin(try_all_writes(&context, &job, &deletion)).await {
        result.expect(&write);
    }
    team.phase(Phase::Suspended).await;
    team.until::<Pod>("p", |pod| pod.is_none()).await;
    assert_eq!(team.pods().await, ["mnist-trainer-0"]);
    assert_eq!((count::<Secret>(&team).await, count::<Service>(&team).await), (1, 1));
    delete_job(&context.writer, &job).await.expect("the lease is renewed");
    team.until("mnist", |job: Option<&ParameterServerJob>| job.is_none()).await;
}

#[tokio::test]
async fn a_writer_whose_lease_ran_out_deletes_no_group_of_earlier_pods() {
    // One of its own, because a definition is for the whole cluster.
    let Some(server) = ApiServer::start().await else { return };
    install_definition(&server.client()).await;
    install_pod_groups(&server.client(), "scheduling.volcano.sh", "v1beta1").await;
    let team = Team::on(&server, "groups").await;
    let mut job = team.apply("schedulingPolicy: {backend: Volcano}\nnetwork: {mutualTLS: false}").await;
    // All pods start for the second time.
    job.status.get_or_insert_default().first_incarnation = 1;
    let job = validate(job.into()).expect("valid");
    let kind = ApiResource {
        group: "scheduling.volcano.sh".into(),
        version: "v1beta1".into(),
        api_version: "scheduling.volcano.sh/v1beta1".into(),
        kind: "PodGroup".into(),
        plural: "podgroups".into(),
    };
    let groups = Api::<DynamicObject>::namespaced_with(team.client.clone(), &team.namespace, &kind);
    let mut earlier = DynamicObject::new("mnist-0", &kind).data(json!({"spec": {"minMember": 3}}));
    earlier.metadata.labels = Some([(names::LABEL_JOB.to_owned(), "mnist".to_owned())].into());
    groups.create(&PostParams::default(), &earlier).await.expect("a group can be made");
    let groups = async || {
        let groups = groups.list(&ListParams::default()).await.expect("groups can be listed");
        groups.iter().map(|group| group.name_any()).collect::<Vec<_>>()
    };

    let tenure = Arc::new(Tenure::elected());
    let context = context(&team, tenure.clone(), None);
    let create = async || {
        let Context { writer, children, jobs, .. } = &*context;
        let mut observed = ObservedState::default();
        Box::pin(create_children(writer, (children, jobs), &job, &[Child::Service], "image", &mut observed)).await
    };
    assert_not_leading(create().await, "a group");
    assert_eq!(groups().await, ["mnist-0"]);
    renew(&tenure);
    create().await.expect("the lease is renewed");
    assert_eq!(groups().await, ["mnist-1"]);
}
