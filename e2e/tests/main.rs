//! `make e2e`: prepares the cluster once, then runs the tests, each in a namespace of its own. Takes the arguments
//! of any test binary, for instance part of a name, and `--test-threads N` to run N tests at the same time.

mod cases;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use futures::future::{BoxFuture, FutureExt};
use libtest_mimic::{Arguments, Failed, Trial};
use psjobs_e2e::cluster::Cluster;
use psjobs_e2e::dump::dump;
use psjobs_e2e::namespace::TestNamespace;
use tokio::runtime::{self, Runtime};
use tokio::sync::RwLock;

use cases::{
    broken, colocated, elastic, failure, gpu, invalid, kubectl_psjob, kubelet, mnist, nodes, object_store, operators,
    pytorch, recovery, suspend, timing, tls, unschedulable, watched_in_chromium, web, workloads,
};

type Test = for<'a> fn(&'a TestNamespace) -> BoxFuture<'a, Result<()>>;

/// Variable with how many tests run at the same time, where `--test-threads` does not say it.
const THREADS: &str = "PSJOBS_E2E_THREADS";

/// Stack of the threads that run tests: without optimisation their futures need more than the usual 2 MiB.
const STACK: usize = 16 << 20;

/// A requirement of a test on the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// Nodes that are containers of this machine.
    Kind,
    /// A cluster of kind with two worker nodes.
    Workers,
    /// Kubernetes' own gang scheduling.
    Gangs,
}

use Needs::{Gangs, Kind, Nothing, Workers};

/// Tests that change nothing outside their namespace, except for a resource of a node that is named after the
/// namespace: any of them may run at the same time.
const SHARED: [(&str, Needs, Test); 22] = [
    ("mnist_trains_and_leaves_nothing_behind", Nothing, |ns| mnist::trains(ns).boxed()),
    ("a_failing_trainer_fails_the_job_with_its_cause", Nothing, |ns| failure::cause_is_reported(ns).boxed()),
    ("a_killed_trainer_is_replaced", Nothing, |ns| recovery::killed_trainer_is_replaced(ns).boxed()),
    ("a_killed_server_is_replaced", Nothing, |ns| recovery::killed_server_is_replaced(ns).boxed()),
    ("a_killed_replicated_server_is_replaced", Nothing, |ns| {
        recovery::killed_replicated_server_is_replaced(ns).boxed()
    }),
    ("a_colocated_pod_is_replaced_and_goes_on_from_its_checkpoint", Nothing, |ns| {
        colocated::lost_pod_is_replaced(ns).boxed()
    }),
    ("a_suspended_job_starts_again", Nothing, |ns| suspend::starts_again(ns).boxed()),
    ("a_resumed_job_goes_on_from_its_checkpoint", Nothing, |ns| suspend::resumes_from_a_checkpoint(ns).boxed()),
    ("a_job_in_an_object_store_outlives_its_deletion", Kind, |ns| object_store::job_outlives_its_deletion(ns).boxed()),
    ("a_job_grows_and_shrinks", Nothing, |ns| elastic::grows_and_shrinks(ns).boxed()),
    ("kubectl_psjob_submits_follows_and_changes_a_job", Nothing, |ns| {
        kubectl_psjob::a_job_from_begin_to_end(ns).boxed()
    }),
    ("tls_keeps_strangers_out", Nothing, |ns| tls::refuses_other_certificates(ns).boxed()),
    ("trainers_wait_for_gpus_and_say_so", Nothing, |ns| gpu::trainers_wait(ns).boxed()),
    ("a_gang_waits_for_gpus_as_one", Gangs, |ns| gpu::gang_waits(ns).boxed()),
    ("broken_jobs_report_why", Nothing, |ns| broken::causes_are_shown(ns).boxed()),
    ("mnist_remote_runs", Nothing, |ns| workloads::mnist_remote(ns).boxed()),
    ("cartpole_runs", Nothing, |ns| workloads::cartpole(ns).boxed()),
    ("lm_runs", Nothing, |ns| workloads::lm(ns).boxed()),
    ("a_submitted_pytorch_script_trains", Nothing, |ns| pytorch::submitted_script_trains(ns).boxed()),
    ("recsys_runs", Nothing, |ns| workloads::recsys(ns).boxed()),
    ("invalid_manifests_are_refused", Nothing, |ns| invalid::manifests_are_refused(ns).boxed()),
    ("a_running_job_keeps_its_spec", Nothing, |ns| invalid::changes_are_refused(ns).boxed()),
];

/// Tests that run alone: they measure or limit times, or disturb the operator, the API server or nodes.
const ALONE: [(&str, Needs, Test); 12] = [
    ("start_and_end_are_measured", Nothing, |ns| timing::start_and_end(ns).boxed()),
    ("a_job_deleted_in_the_foreground_ends_in_time", Nothing, |ns| mnist::is_deleted_in_the_foreground(ns).boxed()),
    ("an_upgrade_and_a_rollback_leave_a_running_job_alone", Nothing, |ns| {
        operators::upgraded_and_rolled_back(ns).boxed()
    }),
    ("the_page_shows_a_job_that_was_deleted", Nothing, |ns| web::a_job_is_shown_after_its_deletion(ns).boxed()),
    ("a_job_in_an_object_store_is_watched_in_chromium", Kind, |ns| watched_in_chromium::job_is_watched(ns).boxed()),
    ("of_two_operators_one_takes_over_in_seconds", Kind, |ns| operators::one_takes_over(ns).boxed()),
    ("an_operator_killed_twenty_times_loses_no_job", Kind, |ns| operators::killed_twenty_times(ns).boxed()),
    ("a_job_outlives_a_restart_of_the_api_server", Kind, |ns| operators::the_api_server_restarts(ns).boxed()),
    ("a_stopped_node_costs_its_pods_and_not_the_job", Workers, |ns| nodes::job_survives_a_killed_node(ns).boxed()),
    ("a_node_that_is_cut_off_costs_its_pods_and_not_the_job", Workers, |ns| {
        nodes::job_survives_a_disconnected_node(ns).boxed()
    }),
    ("a_node_without_kubelet_costs_no_step_of_a_replicated_job", Workers, |ns| {
        kubelet::job_survives_a_node_without_kubelet(ns).boxed()
    }),
    ("a_server_that_no_node_takes_is_waited_for", Workers, |ns| unschedulable::job_waits_for_a_node(ns).boxed()),
];

/// Everything that all tests use.
struct Environment {
    runtime: Runtime,
    /// `None` where the tests are only listed.
    cluster: Option<Arc<Cluster>>,
    /// Capabilities of the cluster.
    offers: Vec<Needs>,
    /// Held for reading by each test of [`SHARED`], for writing by each of [`ALONE`].
    isolation: RwLock<()>,
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let runtime = runtime::Builder::new_multi_thread().enable_all().thread_stack_size(STACK).build();
    let code = runtime.context("cannot start a runtime").and_then(|runtime| run(runtime, arguments));
    code.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(runtime: Runtime, mut arguments: Arguments) -> Result<ExitCode> {
    if arguments.test_threads.is_none() {
        arguments.test_threads = Some(threads()?);
    }
    let (cluster, offers) = if arguments.list {
        (None, vec![Kind, Workers, Gangs])
    } else {
        let cluster = Arc::new(runtime.block_on(Cluster::prepare(0, &["psjobs-torch"]))?);
        let offers = runtime.block_on(offers(&cluster))?;
        (Some(cluster), offers)
    };
    let environment = Arc::new(Environment { runtime, cluster, offers, isolation: RwLock::new(()) });
    let conclusion = libtest_mimic::run(&arguments, trials(&environment));
    if let Some(cluster) = &environment.cluster
        && !conclusion.has_failed()
    {
        environment.runtime.block_on(cluster.clean_up())?;
    }
    Ok(conclusion.exit_code())
}

/// Returns how many tests run at the same time: one unless [`THREADS`] says otherwise. On a node of 2 cores, pods of
/// two jobs do not find the CPUs that they request.
fn threads() -> Result<usize> {
    let threads = env::var(THREADS).ok().filter(|threads| !threads.is_empty());
    let threads = threads.map_or(Ok(1), |threads| threads.parse());
    threads.with_context(|| format!("{THREADS} must be a number of tests to run at the same time"))
}

/// Returns what the cluster offers to tests.
async fn offers(cluster: &Cluster) -> Result<Vec<Needs>> {
    let workers = psjobs_e2e::nodes::workers(cluster).await?.len();
    let groups = cluster.client.list_api_groups().await?.groups;
    let own = groups.iter().filter(|group| group.name == "scheduling.k8s.io");
    let gangs = own.flat_map(|group| &group.versions).any(|version| version.version == "v1beta1");
    let offers = [(Kind, cluster.is_of_kind()), (Workers, cluster.is_of_kind() && workers >= 2), (Gangs, gangs)];
    Ok(offers.into_iter().filter(|offer| offer.1).map(|offer| offer.0).collect())
}

/// Returns all tests, first those that may run at the same time; ignored are those that the cluster cannot run.
fn trials(environment: &Arc<Environment>) -> Vec<Trial> {
    let shared = SHARED.into_iter().map(|test| trial(environment, test, false));
    shared.chain(ALONE.into_iter().map(|test| trial(environment, test, true))).collect()
}

fn trial(environment: &Arc<Environment>, (name, needs, test): (&'static str, Needs, Test), alone: bool) -> Trial {
    let lacks = match needs {
        Nothing => None,
        needs if environment.offers.contains(&needs) => None,
        Kind => Some("a cluster of kind"),
        Workers => Some("a cluster of kind with two workers besides the control plane"),
        Gangs => Some("Kubernetes 1.37 with the feature GenericWorkload and scheduling.k8s.io/v1beta1"),
    };
    if let Some(lacks) = lacks {
        println!("SKIPPED: {name} needs {lacks}");
    }
    let environment = environment.clone();
    let trial = Trial::test(name, move || {
        let running = environment.runtime.spawn(run_test(environment.clone(), name, test, alone));
        let result = environment.runtime.block_on(running).context("the test panicked").flatten();
        result.map_err(|error| Failed::from(format!("{error:#}")))
    });
    trial.with_ignored_flag(lacks.is_some())
}

async fn run_test(environment: Arc<Environment>, name: &'static str, test: Test, alone: bool) -> Result<()> {
    // The lock is fair: while a test waits to run alone, no other one begins.
    let _shared = if alone { None } else { Some(environment.isolation.read().await) };
    let _alone = if alone { Some(environment.isolation.write().await) } else { None };
    let begin = Instant::now();
    let cluster = environment.cluster.clone().context("there is no cluster")?;
    let namespace = TestNamespace::prepare(cluster, name).await?;
    let result = test(&namespace).await;
    if result.is_err() {
        dump(&namespace).await;
    }
    namespace.print(format_args!("{:.0} s", begin.elapsed().as_secs_f64()));
    namespace.remove().await?;
    result
}
