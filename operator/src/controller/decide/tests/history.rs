//! Random histories of pods, users and clocks. Whatever happens, the promises of `decide` hold.

use proptest::prelude::*;
use psjobs_policy::{Elastic, JobPolicy};

use super::*;
use crate::controller::observe::WaitingReason;

/// Something that happens to the job from outside.
#[derive(Clone, Debug)]
enum Happening {
    Run,
    Succeed(usize),
    Fail(usize, i32),
    Disrupt(usize),
    /// A user or an autoscaler deletes the pod; it takes its time.
    Delete(usize),
    Vanish(usize),
    /// Deleted pods are gone.
    Collect,
    DeleteService,
    Refuse(bool),
    Suspend(bool),
    /// The job gets another number of trainers, if it may.
    Scale(u32),
    /// Scales twice: the pods of the decision in between are made, but its status is not written.
    ScaleTwice(u32, u32),
    Pass(i64),
    Reconcile,
    /// Server 0 reports its step.
    Report(u64),
    /// The scheduler finds no node for a pod.
    Unschedulable(usize),
    /// The node of a pod goes silent.
    LoseNode(usize),
    /// A reconcile on a cache as it was before the last happenings.
    ReconcileOnOldCache,
}

fn happening() -> impl Strategy<Value = Happening> {
    let pod = 0_usize..5;
    prop_oneof![
        4 => Just(Happening::Run),
        2 => pod.clone().prop_map(Happening::Succeed),
        2 => (pod.clone(), prop_oneof![Just(1), Just(2), Just(42), Just(137)]).prop_map(|(pod, code)| Happening::Fail(pod, code)),
        1 => pod.clone().prop_map(Happening::Disrupt),
        1 => pod.clone().prop_map(Happening::Delete),
        1 => pod.prop_map(Happening::Vanish),
        3 => Just(Happening::Collect),
        1 => Just(Happening::DeleteService),
        1 => (0_u64..4).prop_map(Happening::Report),
        1 => (0_usize..5).prop_map(Happening::Unschedulable),
        1 => (0_usize..5).prop_map(Happening::LoseNode),
        1 => any::<bool>().prop_map(Happening::Refuse),
        1 => prop::bool::weighted(0.3).prop_map(Happening::Suspend),
        2 => (0_u32..4).prop_map(Happening::Scale),
        1 => (0_u32..4, 0_u32..4).prop_map(|(first, second)| Happening::ScaleTwice(first, second)),
        2 => (0_i64..100).prop_map(Happening::Pass),
        8 => Just(Happening::Reconcile),
        2 => Just(Happening::ReconcileOnOldCache),
    ]
}

/// The numbers of a job and its policies.
#[derive(Clone, Debug)]
struct Shape {
    servers: u32,
    trainers: u32,
    /// Trainers that it may lose, and get.
    elastic: Option<(u32, u32)>,
    restarts: u32,
    restart_policy: &'static str,
    clean: &'static str,
    strategy: &'static str,
    success: &'static str,
    startup: &'static str,
    rules: &'static str,
    /// Each trainer has a server in its pod.
    colocated: bool,
}

fn shape() -> impl Strategy<Value = Shape> {
    let one_of = |words: &'static [&'static str]| prop::sample::select(words);
    let rules = "[{name: a, action: FailJob, onExitCodes: [2]}, {name: b, action: Ignore, onExitCodes: [42]}, \
                 {name: c, action: RestartJob, onExitCodes: [137], targetRoles: [ps]}]";
    let policies = (
        one_of(&["OnFailure", "Never", "ExitCode"]),
        one_of(&["Running", "All", "None"]),
        one_of(&["FailedPod", "RecreateAll"]),
        one_of(&["{}", "{operator: Any}", "{operator: RankZero}"]),
        one_of(&["AnyOrder", "ServersReady"]),
        prop_oneof![Just("[]"), Just(rules)],
    );
    let elastic = prop::option::of((0_u32..3, 0_u32..3));
    let colocated = prop::bool::weighted(0.25);
    (1_u32..3, 1_u32..4, elastic, 0_u32..5, policies, colocated).prop_map(
        |(servers, trainers, elastic, restarts, policies, colocated)| {
            let (restart_policy, clean, strategy, success, startup, rules) = policies;
            let (servers, elastic, success) =
                if colocated { (trainers, None, "{}") } else { (servers, elastic, success) };
            Shape {
                servers,
                trainers,
                elastic,
                restarts,
                restart_policy,
                clean,
                strategy,
                success,
                startup,
                rules,
                colocated,
            }
        },
    )
}

fn job_of(shape: &Shape) -> ValidJob {
    let &Shape {
        servers,
        trainers,
        elastic,
        restarts,
        restart_policy,
        clean,
        strategy,
        success,
        startup,
        rules,
        colocated,
    } = shape;
    let placement = if colocated { "Colocated" } else { "Separate" };
    let job = valid_job(&format!(
        "ps: {{placement: {placement}}}\n\
         runPolicy: {{cleanPodPolicy: {clean}, activeDeadlineSeconds: 900, progressDeadlineSeconds: 90}}\n\
         failurePolicy: {{maxRestarts: {restarts}, restartStrategy: {strategy}, rules: {rules}}}\n\
         successPolicy: {success}\nstartupPolicy: {startup}\nschedulingPolicy: {{scheduleTimeoutSeconds: 20}}"
    ));
    let trainer_restart_policy = serde_json::from_value(restart_policy.into()).expect("a policy");
    let elastic =
        elastic.map(|(fewer, more)| Elastic { min: trainers.saturating_sub(fewer).max(1), max: trainers + more });
    let policy = JobPolicy { elastic, trainer_restart_policy, ..job.policy.clone() };
    ValidJob { servers, trainers, policy, ..job }
}

/// Returns the counters that must never shrink.
fn counters(status: &ParameterServerJobStatus) -> [i32; 3] {
    [status.restarts, status.restarts_counted, status.first_incarnation]
}

/// To the `n`th of the numbers that it may have.
fn scale(cluster: &mut Cluster, n: u32) {
    if let Some(Elastic { min, max }) = cluster.job.policy.elastic {
        cluster.scale(min + n % (max - min + 1));
    }
}

/// Lets it happen. Whether it left the observed as the last decision saw it.
fn happen(cluster: &mut Cluster, happening: &Happening, old: &mut ObservedState) -> bool {
    let nth = |cluster: &Cluster, n: usize| {
        let pods = cluster.pods();
        (!pods.is_empty()).then(|| pods[n % pods.len()].clone())
    };
    let running = |cluster: &Cluster, n: usize| {
        nth(cluster, n).filter(|who| cluster.observed.pods[&replica(who)].phase == PodPhase::Running)
    };
    match *happening {
        Happening::Run => cluster.run_all(),
        Happening::Succeed(n) => running(cluster, n).iter().for_each(|who| cluster.succeed(who)),
        Happening::Fail(n, code) => running(cluster, n).iter().for_each(|who| cluster.fail(who, code)),
        Happening::Disrupt(n) => {
            let second = cluster.now.duration_since(at(0)).as_secs();
            nth(cluster, n).iter().for_each(|who| cluster.edit_pod(who, |pod| pod.disrupted(second)));
        }
        Happening::Delete(n) => {
            let second = cluster.now.duration_since(at(0)).as_secs() + 30;
            nth(cluster, n).iter().for_each(|who| cluster.edit_pod(who, |pod| pod.deleted(second)));
        }
        Happening::Vanish(n) => nth(cluster, n).iter().for_each(|who| cluster.vanish(who)),
        Happening::Collect => cluster.observed.pods.retain(|_, pod| pod.deletion_deadline.is_none()),
        Happening::DeleteService => cluster.observed.service = false,
        Happening::Refuse(refuse) => cluster.refuse = refuse.then(|| "exceeded quota".to_owned()),
        Happening::Suspend(suspend) => cluster.suspend(suspend),
        Happening::Scale(n) => scale(cluster, n),
        Happening::ScaleTwice(first, second) => {
            scale(cluster, first);
            cluster.reconcile_in_vain();
            scale(cluster, second);
            cluster.reconcile();
        }
        Happening::Pass(seconds) => cluster.pass(seconds),
        Happening::Report(step) => {
            let at = Some(cluster.now);
            cluster.observed.progress = Some(ProgressReport { step, total_steps: 4, at, ..ProgressReport::default() });
        }
        Happening::Unschedulable(n) => {
            let waiting_reason = WaitingReason {
                reason: "Unschedulable".into(),
                message: "no node".into(),
                unschedulable_since: Some(cluster.now),
            };
            let pending = nth(cluster, n).filter(|who| cluster.observed.pods[&replica(who)].phase == PodPhase::Pending);
            pending.iter().for_each(|who| {
                cluster.edit_pod(who, |pod| ObservedPod { waiting_reason: Some(waiting_reason.clone()), ..pod });
            });
        }
        Happening::LoseNode(n) => {
            let now = cluster.now;
            nth(cluster, n).iter().for_each(|who| cluster.edit_pod(who, |pod| pod.on_lost_node(now)));
        }
        Happening::Reconcile => {
            let decision = cluster.reconcile();
            *old = cluster.observed.clone();
            let is_rest = decision.requeue != Some(SignedDuration::ZERO);
            return is_rest && cluster.refuse.is_none() && decision.delete.iter().all(|deletion| !deletion.force);
        }
        Happening::ReconcileOnOldCache => {
            // Caches are per watch and never go back behind what the status was decided on.
            cluster.reconcile_on(old.clone());
        }
    }
    false
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    #[test]
    fn promises_hold_in_every_history(shape in shape(), history in prop::collection::vec(happening(), 1..120)) {
        let mut cluster = Cluster::of(job_of(&shape));
        let mut old = ObservedState::default();
        for happening in &history {
            let before = (cluster.status.clone(), cluster.history.len());
            let decided = happen(&mut cluster, happening, &mut old);
            let created = &cluster.history[before.1..];

            let was_final = before.0.phase.is_some_and(Phase::is_final);
            prop_assert!(!was_final || created.is_empty(), "created after the end: {created:?}");
            prop_assert!(!was_final || cluster.status.phase == before.0.phase, "the end is not final");
            for (i, (replica, incarnation)) in created.iter().enumerate() {
                let earlier = cluster.history[..before.1 + i].iter();
                let highest = earlier.filter(|(other, _)| other == replica).map(|(_, incarnation)| incarnation).max();
                prop_assert!(highest < Some(incarnation), "{replica}: incarnation {incarnation} after {highest:?}");
            }
            let (now, then) = (counters(&cluster.status), counters(&before.0));
            prop_assert!(now.iter().zip(then).all(|(now, then)| *now >= then), "{then:?} became {now:?}");
            prop_assert!(cluster.status.restarts_counted.unsigned_abs() <= cluster.job.policy.max_restarts);
            let lost = ReplicaHistory::read(&cluster.status).lost().collect::<Vec<_>>();
            let spare = |lost: &Replica| cluster.job.policy.elastic.is_some() && lost.role == Role::Trainer && lost.index > 0;
            prop_assert!(lost.iter().all(spare), "given up: {lost:?}");

            if decided {
                let again = decide(&cluster.job, &cluster.status, &cluster.observed, cluster.now);
                prop_assert_eq!((again.create, again.delete, again.events), (vec![], vec![], vec![]));
            }
        }
        // Left alone with pods that run, the job comes to rest, and a decision on that does nothing.
        cluster.refuse = None;
        cluster.suspend(false);
        for _ in 0..8 {
            cluster.pass(70);
            cluster.settle();
            cluster.run_all();
        }
        cluster.settle();
        let rest = decide(&cluster.job, &cluster.status, &cluster.observed, cluster.now);
        prop_assert_eq!(&rest.status, &cluster.status);
        prop_assert!(rest.create.is_empty() && rest.delete.is_empty() && rest.events.is_empty());
    }
}
