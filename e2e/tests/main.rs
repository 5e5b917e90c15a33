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

use stories::{broken, elastic, failure, gpu, invalid, mnist, recovery, speed, suspend, tls, workloads};

type Story = for<'a> fn(&'a Site) -> BoxFuture<'a, Result<()>>;

const STORIES: [(&str, Story); 18] = [
    ("mnist_trains_and_leaves_nothing_behind", |site| mnist::trains(site).boxed()),
    ("start_and_end_are_measured", |site| speed::is_measured(site).boxed()),
    ("a_failing_trainer_fails_the_job_with_its_cause", |site| failure::is_told(site).boxed()),
    ("a_killed_trainer_is_replaced", |site| recovery::of_a_trainer(site).boxed()),
    ("a_killed_server_is_replaced", |site| recovery::of_a_server(site).boxed()),
    ("a_killed_replicated_server_is_replaced", |site| recovery::of_a_replicated_server(site).boxed()),
    ("a_suspended_job_starts_again", |site| suspend::and_resume(site).boxed()),
    ("a_resumed_job_goes_on_from_its_checkpoint", |site| suspend::and_resume_from_a_checkpoint(site).boxed()),
    ("a_job_grows_and_shrinks", |site| elastic::grows_and_shrinks(site).boxed()),
    ("tls_keeps_strangers_out", |site| tls::keeps_strangers_out(site).boxed()),
    ("trainers_wait_for_gpus_and_say_so", |site| gpu::is_waited_for(site).boxed()),
    ("broken_jobs_tell_why", |site| broken::jobs_tell_why(site).boxed()),
    ("mnist_remote_runs", |site| workloads::mnist_remote(site).boxed()),
    ("cartpole_runs", |site| workloads::cartpole(site).boxed()),
    ("lm_runs", |site| workloads::lm(site).boxed()),
    ("recsys_runs", |site| workloads::recsys(site).boxed()),
    ("invalid_manifests_are_refused", |site| invalid::manifests_are_refused(site).boxed()),
    ("a_running_job_keeps_its_spec", |site| invalid::changes_are_refused(site).boxed()),
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
        return libtest_mimic::run(&arguments, trials(&runtime, None)).exit_code();
    }
    let cluster = match runtime.block_on(Cluster::prepare()) {
        Ok(cluster) => Arc::new(cluster),
        Err(error) => return stop(&error),
    };
    let conclusion = libtest_mimic::run(&arguments, trials(&runtime, Some(&cluster)));
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

/// All stories; without a cluster only to list them.
fn trials(runtime: &Arc<Runtime>, cluster: Option<&Arc<Cluster>>) -> Vec<Trial> {
    let trial = |(name, story): (&'static str, Story)| {
        let (runtime, cluster) = (runtime.clone(), cluster.cloned());
        Trial::test(name, move || match cluster {
            Some(cluster) => runtime.block_on(tell(cluster, name, story)).map_err(|e| Failed::from(format!("{e:#}"))),
            None => Err("there is no cluster".into()),
        })
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
