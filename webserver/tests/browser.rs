//! Psjobs-web in Chromium, as its users see it. The script `web/browser/list.test.mjs` looks at it; this program makes the jobs,
//! and changes them when the script asks for it. Where node 20 or Chromium is missing, it says so and passes; with
//! PSJOBS_REQUIRE_BROWSER set it fails.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;
use kube::api::PostParams;
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};
use support::operator::{Team, api_server};
use support::{Page, create, rights_of_chart, token, write_status};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

/// The folder of the script.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../web/browser");

/// Jobs in the order of the list, those that are over at its end. Each began five minutes before the one above.
const JOBS: [(&str, &str); 10] = [
    ("resnet", "Running"),
    ("bert", "Running"),
    ("gpt-small", "Pending"),
    ("word2vec", "Restarting"),
    ("deepfm", "Stalled"),
    ("vae", "Completing"),
    ("dqn", "Suspended"),
    ("translation", "Running"),
    ("mnist", "Succeeded"),
    ("markup", "Failed"),
];
const APART: i64 = 300;
const STEPS: i64 = 20_000;

const MARKUP: &str = "<img src=x onerror=window.broken=1><script>window.broken=1</script>";

/// Time in which the script has seen all.
const DEADLINE: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_visitor_with_a_browser_logs_in_and_sees_the_jobs_of_their_namespace() {
    let Some(server) = api_server().await else { return };
    let Some(chromium) = browser().await else {
        // Written to standard error directly, because the test harness hides what a passing test prints.
        let _ = writeln!(std::io::stderr(), "SKIPPED: psjobs-web was not tested in a browser");
        return;
    };
    let (team, others) = (Team::on(server, "vision").await, Team::on(server, "speech").await);
    let config = rights_of_chart(server, format!("the-page-of-{}", team.namespace)).await;
    let jobs = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
    let reader = token(&team, "reader", &[jobs]).await;
    let without_rights = token(&team, "without-rights", &[]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let page = Page::start(&config, folder.path()).await;

    for name in ["secret", "other-secret"] {
        create(&others, name).await;
    }
    create_all(&team).await;
    let is_there =
        |seen: &Value| JOBS.iter().all(|(name, phase)| seen[format!("{}/{name}", team.namespace)]["phase"] == *phase);
    page.until("/events", &reader, is_there).await;

    let mut script = Command::new("node");
    script
        .arg("list.test.mjs")
        .current_dir(FOLDER)
        .env("ADDRESS", format!("http://{}/", page.address()))
        .env("TOKEN", &reader)
        .env("TOKEN_WITHOUT_RIGHTS", &without_rights)
        .env("NAMESPACE", &team.namespace)
        .env("JOBS", json!(JOBS).to_string())
        .env("OTHER_JOB", format!("{}/secret", others.namespace))
        .env("MARKUP", MARKUP)
        .env("CHROMIUM", chromium);
    tokio::time::timeout(DEADLINE, look(script, &team)).await.expect("the script ends in time");
    page.end().await;
}

/// Runs the script, and does what it asks for.
async fn look(mut script: Command, team: &Team) {
    script.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut script = script.spawn().expect("node starts");
    let mut lines = BufReader::new(script.stdout.take().expect("a pipe")).lines();
    while let Some(line) = lines.next_line().await.expect("it writes text") {
        match line.strip_prefix("please: ").map(|wish| wish.split_once(' ')) {
            Some(Some(("end", job))) => write_status(team, job, status("Succeeded", APART)).await,
            Some(Some(("create", job))) => create(team, job).await,
            Some(_) => panic!("the script asks for what this program cannot do: {line}"),
            None => println!("{line}"),
        }
    }
    let ended = script.wait().await.expect("it ends");
    assert!(ended.success(), "{ended}: the lines above say what the browser showed");
}

/// Creates the jobs with their phases.
async fn create_all(team: &Team) {
    for ((name, phase), age) in JOBS.into_iter().zip((1..).map(|place| place * APART)) {
        if name == "markup" {
            create_with_markup(team, name, age).await;
        } else {
            create(team, name).await;
            write_status(team, name, status(phase, age)).await;
        }
    }
}

/// Creates a job that failed, and whose manifest, event, message and log look like markup.
async fn create_with_markup(team: &Team, name: &str, age: i64) {
    let env = json!([{"name": "NOTE", "value": MARKUP}]);
    let template = json!({"spec": {"containers": [{"name": "trainer", "image": "psjobs-worker:0.1.0", "env": env}]}});
    let job = serde_json::from_value(json!({
        "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": name},
        "spec": {"trainer": {"replicas": 1, "template": template}},
    }));
    let job: ParameterServerJob = job.expect("a job");
    let created = Box::pin(team.api::<ParameterServerJob>().create(&PostParams::default(), &job)).await;
    created.expect("the job is accepted");

    let about = json!({
        "apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "name": name, "namespace": team.namespace,
    });
    let event = serde_json::from_value(json!({
        "metadata": {"generateName": format!("{name}-")}, "involvedObject": about, "type": "Warning",
        "reason": "Said", "message": MARKUP, "firstTimestamp": ago(60), "lastTimestamp": ago(60), "count": 1,
    }));
    let event: Event = event.expect("an event");
    team.api::<Event>().create(&PostParams::default(), &event).await.expect("the event is accepted");

    let mut failed = status("Failed", age);
    failed["conditions"] = json!([{
        "type": "Failed", "status": "True", "reason": "Failed", "message": format!("Trainer 0 said {MARKUP}."),
        "lastTransitionTime": ago(60),
    }]);
    failed["lastFailure"] = json!({
        "pod": format!("{name}-trainer-0"), "role": "trainer", "rank": 0, "exitCode": 1, "reason": "Error",
        "message": "it exited with code 1", "logTail": MARKUP,
    });
    write_status(team, name, failed).await;
}

/// Returns the status of a job that began so many seconds ago.
fn status(phase: &str, age: i64) -> Value {
    let step = match phase {
        "Pending" => 0,
        "Completing" | "Succeeded" => STEPS,
        _ => 2_000 + 5 * age,
    };
    let is_running = phase == "Running";
    let percent = step * 100 / STEPS;
    let progress = json!({
        "step": step, "totalSteps": STEPS, "percent": percent, "summary": format!("{percent}%"),
        "examplesPerSecond": is_running.then_some(640.5),
        "estimatedRemainingSeconds": is_running.then_some((STEPS - step) / 10),
        "metrics": [{"name": "loss", "value": 0.25}],
    });
    let ended = ["Succeeded", "Failed"].contains(&phase).then(|| ago(age / 2));
    json!({
        "phase": phase, "reason": phase, "startTime": ago(age), "completionTime": ended,
        "restarts": i32::from(phase == "Restarting"), "progress": progress,
    })
}

/// Returns a time in the past as Kubernetes writes it.
fn ago(seconds: i64) -> String {
    Timestamp::from_second(Timestamp::now().as_second() - seconds).expect("a time").to_string()
}

/// Returns the path of Chromium, after everything that the script needs is there; `None` if something is missing.
async fn browser() -> Option<String> {
    let mut script = Command::new("../scripts/browser.sh");
    script.current_dir(env!("CARGO_MANIFEST_DIR")).stderr(Stdio::inherit());
    let found = script.output().await.expect("the script starts");
    assert!(found.status.success(), "the browser that the lines above name is required, and missing");
    let chromium = String::from_utf8(found.stdout).expect("a path of text").trim().to_owned();
    (!chromium.is_empty()).then_some(chromium)
}
