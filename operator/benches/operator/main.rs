//! How fast the operator is, and the page of its jobs: release binaries against a real API server, with pods played by
//! this program. Prints one JSON object a line. `make bench-operator` runs it; the first argument that is a
//! case's name runs only the scenario of that case.

#[path = "../../tests/support/apiserver.rs"]
mod apiserver;
mod bare;
mod cost;
mod fleet;
mod page;
#[path = "../../tests/support/process.rs"]
mod process;
mod report;
mod rules;
mod scenarios;
mod statuses;
mod watching;

use std::time::Duration;

use anyhow::{Context as _, Result};
use http::Request;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams};
use kube::config::Kubeconfig;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client};

use crate::apiserver::ApiServer;
use crate::process::Operator;

/// Longer than any scenario takes on a machine that can run it at all.
pub const DEADLINE: Duration = Duration::from_secs(600);

const DEFINITION: &str = include_str!("../../../crds/parameterserverjobs.psjobs.dev.yaml");

/// Where the scenarios take place.
pub struct Site {
    pub client: Client,
    pub operator: Operator,
    /// For other programs that connect to the API server.
    pub kubeconfig: Kubeconfig,
}

fn main() -> Result<()> {
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let server = ApiServer::find().await.context(
            "there is no API server to measure against; set PSJOBS_TEST_KUBECONFIG, or put etcd and kube-apiserver on PATH",
        )?;
        let client = server.client();
        install(&client, serde_yaml::from_str(DEFINITION)?).await?;
        let operator = Operator::start(&server.kubeconfig, &["--log=warn"], &[]);
        let site = Site { client, operator, kubeconfig: server.kubeconfig.clone() };
        scenarios::all(&site, only.as_deref()).await
    })
}

/// Reads the metrics of the API server.
async fn metrics(client: &Client) -> Result<String> {
    Ok(client.request_text(Request::get("/metrics").body(Vec::new())?).await?)
}

async fn install(client: &Client, definition: CustomResourceDefinition) -> Result<()> {
    let definitions = Api::<CustomResourceDefinition>::all(client.clone());
    let name = definition.metadata.name.clone().context("the definition has a name")?;
    let params = PatchParams::apply("psjobs-bench").force();
    definitions.patch(&name, &params, &Patch::Apply(definition)).await.context("the definition is refused")?;
    let established = await_condition(definitions, &name, conditions::is_crd_established());
    tokio::time::timeout(DEADLINE, established).await.context("the definition is not served")??;
    Ok(())
}
