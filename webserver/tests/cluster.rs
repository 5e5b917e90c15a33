//! The page at a real API server: who sees what, and that a job looks the same before and after it was deleted. The server has the
//! rights that the chart gives it.

#[expect(dead_code, reason = "the other test programs use the rest")]
mod support;

use axum::Router;
use axum::routing::get;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use psjobs_api::trainers_report::TimeSpent;
use psjobs_api::{METRICS_PORT, SeriesCurve, SeriesReport, TrainerReport, TrainerState, TrainersReport};
use serde_json::{Value, json};
use support::operator::{Team, api_server, eventually};
use support::{Page, create, delete, progress, rights_of_chart, token, write_status};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_shown_to_those_who_may_list_it_and_looks_the_same_after_it_was_deleted() {
    let Some(server) = api_server().await else { return };
    let (team, others) = (Team::on(server, "page").await, Team::on(server, "page").await);
    let config = rights_of_chart(server, format!("the-page-of-{}", team.namespace)).await;
    let folder = tempfile::tempdir().expect("a folder");

    let jobs = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
    let logs = json!({"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]});
    let nobody = token(&team, "nobody", &[]).await;
    let reader = token(&team, "reader", std::slice::from_ref(&jobs)).await;
    let writer = token(&team, "writer", &[jobs, logs]).await;

    let page = Page::start(&config, folder.path()).await;
    create(&team, "mnist").await;
    create(&others, "secret").await;
    let mnist = format!("/events/{}/mnist", team.namespace);
    let secret = format!("/events/{}/secret", others.namespace);

    for path in ["/", "/events", mnist.as_str(), secret.as_str(), "/page.js", "/nothing"] {
        for token in [None, Some("wrong")] {
            let answer = page.get(path, token, "").await;
            assert!(answer.starts_with("HTTP/1.1 401 ") && answer.contains("kubectl create token"), "{path}: {answer}");
            assert!(answer.contains("content-security-policy: "), "{answer}");
        }
    }
    let form = page.get("/", None, "Accept: text/html\r\n").await;
    assert!(form.starts_with("HTTP/1.1 401 ") && form.contains("<form method=\"post\""), "{form}");
    let entered = page.login(&reader).await;
    let cookie = entered.lines().find_map(|line| line.strip_prefix("set-cookie: ")).expect("a cookie");
    let cookie = format!("Cookie: {}\r\n", cookie.split(';').next().expect("a value"));
    assert!(page.get("/", None, &cookie).await.starts_with("HTTP/1.1 200 "));
    assert!(page.login("wrong").await.starts_with("HTTP/1.1 401 "));

    write_status(&team, "mnist", json!({"phase": "Running", "reason": "Running", "progress": progress(10, 0.5)})).await;
    page.until(&mnist, &reader, |job| job["progress"]["step"] == 10).await;
    page.until("/events", &reader, |jobs| jobs[format!("{}/mnist", team.namespace)]["phase"] == "Running").await;

    // The cluster's answers say nothing of jobs that a visitor may not see.
    assert_eq!(page.first("/events", &nobody).await, json!({}));
    let seen = page.first("/events", &reader).await;
    assert_eq!(seen.as_object().expect("an object").len(), 1, "{seen}");
    let body = |answer: String| answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).expect("a body");
    let missing = page.get(&format!("/events/{}/missing", others.namespace), Some(&reader), "").await;
    for (path, token) in [(&mnist, &nobody), (&secret, &nobody), (&secret, &reader)] {
        let answer = page.get(path, Some(token), "").await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
        assert_eq!(body(answer), body(missing.clone()));
    }
    let log = format!("/logs/trainer-0/{}/mnist", team.namespace);
    assert!(page.get(&log, Some(&reader), "").await.starts_with("HTTP/1.1 403 "));
    assert!(page.get(&log, Some(&writer), "").await.ends_with("trainer-0 has no pod at the moment"));

    let ended = json!({"phase": "Succeeded", "reason": "Succeeded", "progress": progress(20, 0.25)});
    write_status(&team, "mnist", ended).await;
    eventually("a record", async || {
        let names = std::fs::read_dir(folder.path().join(&team.namespace)).ok()?;
        let is_record = |name: &str| name.starts_with("mnist_") && name.ends_with(".json");
        names.filter_map(Result::ok).find(|entry| entry.file_name().to_str().is_some_and(is_record))
    })
    .await;
    let before = page.until(&mnist, &reader, |job| job["isOver"] == true).await;
    let points = &before["curves"]["curves"];
    let loss = points.as_array().expect("curves").iter().find(|curve| curve["metric"] == "loss").expect("a loss");
    let steps: Vec<&Value> = loss["points"].as_array().expect("points").iter().step_by(3).collect();
    assert_eq!(steps, [&json!(10), &json!(20)]);
    assert!(before["manifest"].as_str().is_some_and(|manifest| manifest.contains("kind: ParameterServerJob")));

    delete(&team, "mnist").await;
    // The watch tells of a later job after the deletion.
    create(&team, "later").await;
    let later = format!("{}/later", team.namespace);
    let listed = page.until("/events", &reader, |jobs| !jobs[&later].is_null()).await;
    assert_eq!(listed[format!("{}/mnist", team.namespace)]["phase"], "Succeeded", "{listed}");
    assert_eq!(page.first(&mnist, &reader).await, before);
    page.end().await;

    let again = Page::start(&config, folder.path()).await;
    // The records are read while the jobs of the cluster are shown.
    let recorded = format!("{}/mnist", team.namespace);
    let listed = again.until("/events", &reader, |jobs| !jobs[&later].is_null() && !jobs[&recorded].is_null()).await;
    assert_eq!(listed[&recorded]["phase"], "Succeeded", "{listed}");
    assert_eq!(again.first(&mnist, &reader).await, before);
    assert!(again.get(&mnist, Some(&nobody), "").await.starts_with("HTTP/1.1 403 "));
    again.end().await;
}

/// An address of this machine that stands for that of a pod.
const POD: &str = "127.0.0.13";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_runs_already_is_shown_with_its_past_and_its_trainers() {
    let Some(server) = api_server().await else { return };
    let team = Team::on(server, "page").await;
    let config = rights_of_chart(server, format!("the-page-of-{}", team.namespace)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let jobs = json!({"apiGroups": ["psjobs.dev"], "resources": ["parameterserverjobs"], "verbs": ["list"]});
    let reader = token(&team, "reader", &[jobs]).await;

    let listener = tokio::net::TcpListener::bind((POD, METRICS_PORT)).await.expect("a free port");
    let began = std::time::Instant::now();
    let report = move || {
        let total = began.elapsed().as_secs_f64();
        let spent = TimeSpent { total, forward: total / 2.0, exchange: total / 4.0, ..TimeSpent::default() };
        let trainer = |index| TrainerReport {
            index,
            state: TrainerState::Active,
            step: 40,
            metrics: [("loss".to_owned(), f64::from(index))].into(),
            is_slow: index == 1,
            spent: Some(spent),
            ..TrainerReport::default()
        };
        TrainersReport { step: 80, trainers: (0..2).map(trainer).collect(), staleness: vec![70, 10] }
    };
    let loss = |trainer, values: [f64; 2]| SeriesCurve {
        metric: "loss".into(),
        trainer,
        values: [None].into_iter().chain(values.map(Some)).collect(),
    };
    let past = SeriesReport {
        steps: vec![2, 4, 6],
        times: vec![2_000, 4_000, 6_000],
        examples_per_second: vec![Some(1.5); 3],
        curves: vec![loss(None, [0.9, 0.8]), loss(Some(1), [0.7, 0.6])],
    };
    let router = Router::new()
        .route("/trainers", get(async move || serde_json::to_string(&report()).expect("JSON")))
        .route("/series", get(async move || past.clone().to_json().expect("JSON")));
    let serving = tokio::spawn(axum::serve(listener, router).into_future());

    create(&team, "mnist").await;
    let labels = json!({"psjobs.dev/job-name": "mnist", "psjobs.dev/role": "ps", "psjobs.dev/index": "0"});
    let spec = json!({"containers": [{"name": "ps", "image": "psjobs-worker:0.1.0"}]});
    let pod = json!({"metadata": {"name": "mnist-ps-0", "labels": labels}, "spec": spec});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let pods = team.api::<Pod>();
    eventually("the pod is accepted", async || pods.create(&PostParams::default(), &pod).await.ok()).await;
    let running = Patch::Merge(json!({"status": {"phase": "Running", "podIP": POD}}));
    pods.patch_status("mnist-ps-0", &PatchParams::default(), &running).await.expect("a pod status");
    write_status(&team, "mnist", json!({"phase": "Running", "reason": "Running", "progress": progress(10, 0.5)})).await;

    let page = Page::start(&config, folder.path()).await;
    let mnist = format!("/events/{}/mnist", team.namespace);
    let looking = page.look_at(&mnist, &reader).await;
    let points = |job: &Value, metric: &str, trainer: Value| -> Vec<Value> {
        let curves = job["curves"]["curves"].as_array().cloned().unwrap_or_default();
        let found =
            curves.into_iter().find(|curve| (&curve["metric"], &curve["trainer"]) == (&json!(metric), &trainer));
        found.and_then(|curve| Some(curve["points"].as_array()?.clone())).unwrap_or_default()
    };
    let is_whole = |job: &Value| {
        !job["trainers"][1]["time"].is_null() && points(job, "loss", Value::Null).first() == Some(&json!(4))
    };
    let job = page.until(&mnist, &reader, is_whole).await;
    let trainer = &job["trainers"][1];
    assert_eq!(
        (&trainer["name"], &trainer["state"], &trainer["isSlow"]),
        (&json!("trainer-1"), &json!("active"), &json!(true))
    );
    assert!((trainer["time"]["forward"].as_f64().expect("a share") - 0.5).abs() < 0.01, "{trainer}");
    assert_eq!(job["staleness"], json!([70, 10]));
    for (metric, trainer, wanted) in [
        ("loss", Value::Null, json!([[4, 0.9], [6, 0.8], [10, 0.5]])),
        ("loss", json!("trainer-1"), json!([[4, 0.7], [6, 0.6], [80, 1.0]])),
        ("examples/s", Value::Null, json!([[2, 1.5], [4, 1.5], [6, 1.5]])),
    ] {
        let found = points(&job, metric, trainer.clone());
        let found: Vec<Value> = found.chunks(3).map(|point| json!([point[0], point[2]])).collect();
        assert_eq!(json!(found), wanted, "{metric} of {trainer}");
    }

    // A server that does not answer is soon shown no more.
    serving.abort();
    page.until(&mnist, &reader, |job| job["trainers"] == json!([])).await;
    drop(looking);
    page.end().await;
}
