//! One job of the soak: applied, watched step by step until it has ended, judged, deleted.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Request};
use kube::{Resource, ResourceExt};
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobStatus, Phase, RoleStatus, names};
use psjobs_api::{METRICS_PORT, Role, TrainingStatus};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::board::Board;
use super::disk::CLAIM;
use super::kind::{Kind, Repeats};
use super::result::ModelResult;
use super::series::{Sample, falls_back};
use crate::dump::dump;
use crate::leftovers;
use crate::namespace::{TestNamespace, phase_of};
use crate::wait::until_ok;

/// Deadline of a job's end, from its manifest on, or from when it fell back, unless it lives on two servers: a job without a
/// checkpoint begins anew when its server is lost, and servers are lost again and again.
const LIMIT: Duration = Duration::from_secs(15 * 60);
/// Deadline of requests that wait for the API server or a node to come back.
const RETURN: Duration = Duration::from_secs(240);
/// Time between two readings of a job's step.
const PERIOD: Duration = Duration::from_secs(1);
/// Deadline of one reading: a node that is away does not answer.
const READING: Duration = Duration::from_secs(2);
/// Time in which a server hears each trainer that it is not cut off from, which sends a heartbeat every second.
const HEARD: Duration = Duration::from_secs(4);

/// Runs one job, and returns its result if it has succeeded. Everything that is wrong with it goes to the board.
///
/// # Errors
/// If the job cannot be applied or deleted.
pub async fn run_job(
    board: &Board,
    namespace: &TestNamespace,
    kind: Kind,
    number: u32,
    undisturbed: Option<&ModelResult>,
) -> Result<Option<ModelResult>> {
    let job = kind.job(number)?;
    let name = job.name_any();
    until_ok(RETURN, &format!("{name} to be applied"), || namespace.apply(&job)).await?;
    board.begin(kind, &name);
    let begin = board.now();
    let ended = watch(board, namespace, kind, &name).await;
    board.update(&name, |job| job.end = Some(board.now()));
    let mut result = None;
    match ended.and_then(|status| judge(&name, &status).map(|()| status)) {
        Err(error) => {
            board.problem(format!("{error:#}; {}", state(namespace, &name).await));
            dump(namespace).await;
        }
        Ok(status) => {
            let seconds = (board.now() - begin).as_secs_f64();
            match ModelResult::read(namespace, kind, &name, &status, RETURN).await {
                Err(error) => board.problem(format!("{error:#}")),
                Ok(read) => {
                    let equal = compare(board, kind, &name, &status, &read, undisturbed);
                    board.update(&name, |job| (job.succeeded, job.equal) = (true, equal));
                    result = Some(read);
                }
            }
            let replaced = status.restarts.unsigned_abs();
            board.update(&name, |job| job.replaced = replaced);
            board.say(format_args!("{name} succeeded after {seconds:.0} s, {replaced} pods replaced"));
        }
    }
    delete(board, namespace, &name).await?;
    Ok(result)
}

/// Reads the job's step every second until it has ended, and returns its last status. An API server that does not answer
/// is asked again. Fails when the job's deadline is over.
async fn watch(board: &Board, namespace: &TestNamespace, kind: Kind, name: &str) -> Result<ParameterServerJobStatus> {
    let mut readings = interval(PERIOD);
    readings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let jobs = namespace.jobs();
    let (mut last, mut since) = (None, Instant::now());
    let trainers = u64::from(kind.replicas(Role::Trainer));
    loop {
        readings.tick().await;
        ensure!(since.elapsed() < LIMIT, "waited {} s in vain for {name} to end", LIMIT.as_secs());
        let (mut steps, job) = tokio::join!(steps(namespace, kind, name), timeout(READING, jobs.get(name)));
        let falls = |steps: &[Option<u64>]| {
            let step = steps.iter().flatten().copied().max();
            last.zip(step).is_some_and(|(before, step)| falls_back(before, step, trainers))
        };
        if kind.lives_on_two_servers() && falls(&steps) {
            for (index, step) in (0..).zip(&mut steps) {
                if step.is_some() && !hears_trainers(namespace, name, index).await {
                    *step = None;
                }
            }
        }
        if let Some(step) = steps.iter().flatten().copied().max() {
            let at = board.now();
            if let Some(before) = last.replace(step).filter(|before| falls_back(*before, step, trainers)) {
                if kind.lives_on_two_servers() {
                    board.say(format_args!("{name} fell from step {before}: its servers answer {steps:?}"));
                } else {
                    since = Instant::now();
                }
            }
            board.update(name, |job| job.samples.push(Sample { at, step }));
        }
        let ended = |job: &ParameterServerJob| job.status.as_ref()?.phase.filter(|phase| phase.is_final());
        if let Ok(Ok(job)) = job
            && ended(&job).is_some()
        {
            return job.status.context("a job in a phase has a status");
        }
    }
}

/// Returns whether a server has heard a trainer lately. One that was cut off, while the other server had all steps and ended,
/// knows none of those since then.
async fn hears_trainers(namespace: &TestNamespace, name: &str, index: u32) -> bool {
    page(namespace, name, index, "metrics").await.is_some_and(|metrics| is_heard(&metrics))
}

/// Returns whether a server's metrics have a trainer that was heard lately.
fn is_heard(metrics: &str) -> bool {
    let silences = metrics.lines().filter_map(|line| line.strip_prefix("psjobs_ps_trainer_silent_seconds{"));
    let mut seconds = silences.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
    seconds.any(|seconds| seconds < HEARD.as_secs_f64())
}

/// Returns a page of a server, by way of the API server; `None` if it does not answer.
async fn page(namespace: &TestNamespace, name: &str, index: u32, page: &str) -> Option<String> {
    let pod = format!("{}:{METRICS_PORT}", names::pod(name, Role::Server, index));
    let pods = Pod::url_path(&(), Some(&namespace.name));
    let request = Request::new(pods).get_subresource(&format!("proxy/{page}"), &pod).ok()?;
    timeout(READING, namespace.cluster.client.request_text(request)).await.ok()?.ok()
}

/// Returns the job's step as each of its servers reports it. The greatest counts: a server that has just started may know less.
async fn steps(namespace: &TestNamespace, kind: Kind, name: &str) -> Vec<Option<u64>> {
    let servers = (0..kind.replicas(Role::Server)).map(|index| async move {
        let answer = page(namespace, name, index, "status").await?;
        let status: TrainingStatus = serde_json::from_str(&answer).ok()?;
        Some(status.step).filter(|_| status.total_steps > 0)
    });
    futures::future::join_all(servers).await
}

/// Describes a job and its pods in one line.
async fn state(namespace: &TestNamespace, name: &str) -> String {
    let job = namespace.jobs().get(name).await.ok().and_then(|job| job.status).unwrap_or_default();
    let pods = namespace.pods().list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
    let pod = |pod: &Pod| format!("{} {}", pod.name_any(), phase_of(pod).unwrap_or("in no phase"));
    let pods = pods.iter().map(pod).collect::<Vec<_>>().join(", ");
    let phase = job.phase.map_or_else(|| "in no phase".to_owned(), |phase| format!("{phase:?}"));
    format!("now it is {phase} ({}), its pods: {pods}", job.reason.as_deref().unwrap_or("no reason"))
}

/// Checks that the job has succeeded, and no process of it failed by its own fault.
fn judge(name: &str, status: &ParameterServerJobStatus) -> Result<()> {
    let cause = status.last_failure.as_ref().map_or("no cause is reported", |failure| &failure.message);
    let phase = status.phase;
    ensure!(phase == Some(Phase::Succeeded), "{name} ended as {phase:?}: {cause}");
    ensure!(status.restarts_counted == 0, "{name} counts {} failures of its own: {cause}", status.restarts_counted);
    Ok(())
}

/// Returns whether the result is that of an undisturbed job, `None` for a kind whose results never repeat. A difference is
/// a problem if nothing was lost that may cause it.
fn compare(
    board: &Board,
    kind: Kind,
    name: &str,
    status: &ParameterServerJobStatus,
    result: &ModelResult,
    undisturbed: Option<&ModelResult>,
) -> Option<bool> {
    let difference = undisturbed.map(|undisturbed| result.difference(undisturbed))?;
    let lost = |role: &Option<RoleStatus>| role.as_ref().map_or(0, |role| role.restarts);
    let must = match kind.repeats() {
        Repeats::Never => false,
        Repeats::WithoutLostServers => lost(&status.ps) == 0,
        Repeats::WithoutLostTrainers => lost(&status.trainer) == 0,
        Repeats::Always => true,
    };
    match &difference {
        Some(difference) if must => board.problem(format!("{name} ended with another model: {difference}")),
        Some(difference) => board.say(format_args!("{name} ended with another model, as it may: {difference}")),
        None => {}
    }
    Some(difference.is_none())
}

/// Deletes the job, and waits until nothing of it is left.
async fn delete(board: &Board, namespace: &TestNamespace, name: &str) -> Result<()> {
    let delete = || async {
        match namespace.jobs().delete(name, &DeleteParams::foreground()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            done => done.map(drop).context("it cannot be deleted"),
        }
    };
    until_ok(RETURN, &format!("{name} to be deleted"), delete).await?;
    let gone = || async {
        let mut left = leftovers::of(namespace).await?;
        left.retain(|name| !name.ends_with(CLAIM));
        let job = namespace.jobs().get_opt(name).await?;
        ensure!(left.is_empty() && job.is_none(), "there are still {left:?}");
        Ok(())
    };
    if let Err(error) = until_ok(RETURN, &format!("{name} to leave nothing"), gone).await {
        board.problem(format!("{error:#}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::is_heard;

    #[test]
    fn a_server_that_is_cut_off_hears_no_trainer() {
        let silent = |trainer: u32, seconds: f64| {
            format!("psjobs_ps_trainer_silent_seconds{{trainer=\"{trainer}\"}} {seconds}\n")
        };
        let help = "# TYPE psjobs_ps_trainer_silent_seconds gauge\n";
        for (label, metrics, want) in [
            ("all trainers are lost", String::new(), false),
            ("none was heard lately", silent(0, 20.25) + &silent(1, 19.5), false),
            ("one was", silent(0, 20.25) + &silent(1, 0.5), true),
        ] {
            assert_eq!(is_heard(&format!("{help}{metrics}psjobs_ps_blocks 1\n")), want, "{label}");
        }
    }
}
