//! `make e2e`: prepares the cluster once, then runs one story after the other, each in a namespace of
//! its own. Takes the arguments of any test binary, for instance part of a name.

mod stories;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use futures::future::{BoxFuture, FutureExt};
use libtest_mimic::{Arguments, Failed, Trial};
use psjobs_e2e::cluster::Cluster;
use psjobs_e2e::dump::dump;
use psjobs_e2e::site::Site;
use tokio::runtime::Runtime;

use stories::{
    broken, elastic, failure, gpu, invalid, mnist, nodes, operators, recovery, speed, suspend, tls, workloads,
};

type Story = for<'a> fn(&'a Site) -> BoxFuture<'a, Result<()>>;

/// What a story needs of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// Nodes that are containers here.
    Kind,
    /// Two of them for jobs alone.
    Workers,
    /// Kubernetes' own scheduling of gangs.
    Gangs,
}

use Needs::{Gangs, Kind, Nothing, Workers};

const STORIES: [(&str, Needs, Story); 26] = [
    ("mnist_trains_and_leaves_nothing_behind", Nothing, |site| mnist::trains(site).boxed()),
    ("start_and_end_are_measured", Nothing, |site| speed::is_measured(site).boxed()),
    ("a_failing_trainer_fails_the_job_with_its_cause", Nothing, |site| failure::is_told(site).boxed()),
    ("a_killed_trainer_is_replaced", Nothing, |site| recovery::of_a_trainer(site).boxed()),
    ("a_killed_server_is_replaced", Nothing, |site| recovery::of_a_server(site).boxed()),
    ("a_killed_replicated_server_is_replaced", Nothing, |site| recovery::of_a_replicated_server(site).boxed()),
    ("a_suspended_job_starts_again", Nothing, |site| suspend::and_resume(site).boxed()),
    ("a_resumed_job_goes_on_from_its_checkpoint", Nothing, |site| suspend::and_resume_from_a_checkpoint(site).boxed()),
    ("a_job_grows_and_shrinks", Nothing, |site| elastic::grows_and_shrinks(site).boxed()),
    ("tls_keeps_strangers_out", Nothing, |site| tls::keeps_strangers_out(site).boxed()),
    ("trainers_wait_for_gpus_and_say_so", Nothing, |site| gpu::is_waited_for(site).boxed()),
    ("a_gang_waits_for_gpus_as_one", Gangs, |site| gpu::is_waited_for_by_all(site).boxed()),
    ("broken_jobs_tell_why", Nothing, |site| broken::jobs_tell_why(site).boxed()),
    ("mnist_remote_runs", Nothing, |site| workloads::mnist_remote(site).boxed()),
    ("cartpole_runs", Nothing, |site| workloads::cartpole(site).boxed()),
    ("lm_runs", Nothing, |site| workloads::lm(site).boxed()),
    ("recsys_runs", Nothing, |site| workloads::recsys(site).boxed()),
    ("invalid_manifests_are_refused", Nothing, |site| invalid::manifests_are_refused(site).boxed()),
    ("a_running_job_keeps_its_spec", Nothing, |site| invalid::changes_are_refused(site).boxed()),
    ("a_job_deleted_in_the_foreground_ends_in_time", Nothing, |site| mnist::ends_in_the_foreground(site).boxed()),
    ("an_upgrade_and_a_rollback_leave_a_running_job_alone", Nothing, |site| {
        operators::upgraded_and_rolled_back(site).boxed()
    }),
    ("of_two_operators_one_takes_over_in_seconds", Kind, |site| operators::one_takes_over(site).boxed()),
    ("an_operator_killed_twenty_times_loses_no_job", Kind, |site| operators::killed_twenty_times(site).boxed()),
    ("a_job_outlives_a_restart_of_the_api_server", Kind, |site| operators::the_api_server_restarts(site).boxed()),
    ("a_stopped_node_costs_its_pods_and_not_the_job", Workers, |site| nodes::is_stopped(site).boxed()),
    ("a_node_that_is_cut_off_costs_its_pods_and_not_the_job", Workers, |site| nodes::is_cut_off(site).boxed()),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Side by side, the jobs would only take each other's cores, and the figures would say little.
    arguments.test_threads.get_or_insert(1);
    let runtime = match Runtime::new() {
        Ok(runtime) => Arc::new(runtime),
        Err(error) => return stop(&error.into()),
    };
    if arguments.list {
        return libtest_mimic::run(&arguments, trials(&runtime, None, &[Kind, Workers, Gangs])).exit_code();
    }
    let cluster = match runtime.block_on(Cluster::prepare()) {
        Ok(cluster) => Arc::new(cluster),
        Err(error) => return stop(&error),
    };
    let offers = match runtime.block_on(offers(&cluster)) {
        Ok(offers) => offers,
        Err(error) => return stop(&error),
    };
    let conclusion = libtest_mimic::run(&arguments, trials(&runtime, Some(&cluster), &offers));
    if !conclusion.has_failed()
        && let Err(error) = runtime.block_on(cluster.clean_up())
    {
        return stop(&error);
    }
    conclusion.exit_code()
}

fn stop(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}

/// What the cluster has for stories.
async fn offers(cluster: &Cluster) -> Result<Vec<Needs>> {
    let workers = psjobs_e2e::nodes::workers(cluster).await?.len();
    let groups = cluster.client.list_api_groups().await?.groups;
    let own = groups.iter().filter(|group| group.name == "scheduling.k8s.io");
    let gangs = own.flat_map(|group| &group.versions).any(|version| version.version == "v1beta1");
    let offers = [(Kind, cluster.is_of_kind()), (Workers, cluster.is_of_kind() && workers >= 2), (Gangs, gangs)];
    Ok(offers.into_iter().filter(|offer| offer.1).map(|offer| offer.0).collect())
}

/// All stories, those that the cluster cannot tell marked as ignored; without a cluster only to list them.
fn trials(runtime: &Arc<Runtime>, cluster: Option<&Arc<Cluster>>, offers: &[Needs]) -> Vec<Trial> {
    let trial = |(name, needs, story): (&'static str, Needs, Story)| {
        let (runtime, cluster) = (runtime.clone(), cluster.cloned());
        let lacks = match needs {
            Nothing => None,
            needs if offers.contains(&needs) => None,
            Kind => Some("a cluster of kind"),
            Workers => Some("a cluster of kind with two workers besides the control plane"),
            Gangs => Some("Kubernetes 1.37 with the feature GenericWorkload and scheduling.k8s.io/v1beta1"),
        };
        if let Some(lacks) = lacks {
            println!("SKIPPED: {name} needs {lacks}");
        }
        let trial = Trial::test(name, move || match cluster {
            Some(cluster) => runtime.block_on(tell(cluster, name, story)).map_err(|e| Failed::from(format!("{e:#}"))),
            None => Err("there is no cluster".into()),
        });
        trial.with_ignored_flag(lacks.is_some())
    };
    STORIES.into_iter().map(trial).collect()
}

async fn tell(cluster: Arc<Cluster>, name: &str, story: Story) -> Result<()> {
    let begin = Instant::now();
    let site = Site::prepare(cluster, name).await?;
    let told = story(&site).await;
    if told.is_err() {
        dump(&site).await;
    }
    println!("    {name}: {:.0} s", begin.elapsed().as_secs_f64());
    site.remove().await?;
    told
}
