//! Measures the cost of the definition's rules for the API server: a job created as a dry run under the definition,
//! against the same under a copy of it in another group that has no rules.

use std::time::Instant;

use anyhow::{Context as _, Result};
use http::{Method, Request, header};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use serde_json::{Value, json};

use crate::{DEFINITION, install};

/// Dry runs under each definition, in turn.
const RUNS: usize = 200;
const GROUP: &str = "without-rules.psjobs.dev";

/// Milliseconds of each dry run, with the rules and without.
pub async fn costs(client: &Client) -> Result<(Vec<f64>, Vec<f64>)> {
    install(client, without_rules()?).await?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        with.push(create(client, "psjobs.dev").await?);
        without.push(create(client, GROUP).await?);
    }
    Ok((with, without))
}

fn without_rules() -> Result<CustomResourceDefinition> {
    let mut definition: Value = serde_yaml::from_str(DEFINITION)?;
    definition["metadata"]["name"] = json!(format!("parameterserverjobs.{GROUP}"));
    definition["spec"]["group"] = json!(GROUP);
    for name in ["shortNames", "categories"] {
        definition["spec"]["names"].as_object_mut().context("a definition has names")?.remove(name);
    }
    strip(&mut definition);
    Ok(serde_json::from_value(definition)?)
}

fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("x-kubernetes-validations");
            fields.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

async fn create(client: &Client, group: &str) -> Result<f64> {
    let template = json!({"spec": {"containers": [{"name": "trainer", "image": "i", "args": ["train", "mnist"]}]}});
    let job = json!({
        "apiVersion": format!("{group}/v1alpha1"),
        "kind": "ParameterServerJob",
        "metadata": {"name": "mnist"},
        "spec": {"trainer": {"replicas": 4, "template": template}},
    });
    let request = Request::builder()
        .method(Method::POST)
        .uri(format!("/apis/{group}/v1alpha1/namespaces/default/parameterserverjobs?dryRun=All"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(job.to_string().into_bytes())?;
    let begin = Instant::now();
    client.request_text(request).await?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}
