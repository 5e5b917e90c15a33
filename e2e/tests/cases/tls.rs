//! A job's pods talk TLS, and its server refuses peers without a certificate or with one of another authority.

use std::time::SystemTime;

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Api, ObjectMeta, PostParams};
use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_api::crd::{ParameterServerJob, Phase, names};
use psjobs_api::{METRICS_PORT, Role};
use psjobs_e2e::logs::line;
use psjobs_e2e::manifest::training;
use psjobs_e2e::namespace::{TestNamespace, phase_of};
use psjobs_e2e::wait::{SHORT, TRAINING, until};
use serde_json::json;

/// Name of the Secret with another job's certificates.
const FOREIGN: &str = "foreign";
const REFUSED: &str = "psjobs_ps_refused_peers_total ";

pub async fn refuses_other_certificates(namespace: &TestNamespace) -> Result<()> {
    // Two strangers come and go meanwhile.
    let job = training(&["train", "mlp", "--epochs", "2", "--max-steps", "1800", "--example-ms", "1"])?;
    namespace.apply(&job).await?;
    let status = namespace.phase("mnist", Phase::Running, SHORT).await?;
    let secret = status.certificates.context("a job reports where its certificates are")?;
    ensure!(secret.starts_with("mnist-tls-"), "the certificates are in {secret}");
    ensure!(refused(namespace).await? == 0, "somebody was refused before a stranger came");

    let certificates = Certificates::make(&[names::hosts("mnist", &namespace.name)], SystemTime::now(), LIFE)?;
    let data = certificates.files(Role::Trainer).map(|(name, text)| (name.to_owned(), ByteString(text.into())));
    let metadata = ObjectMeta { name: Some(FOREIGN.into()), ..ObjectMeta::default() };
    let foreign = Secret { metadata, data: Some(data.into()), ..Secret::default() };
    let secrets: Api<Secret> = Api::namespaced(namespace.cluster.client.clone(), &namespace.name);
    secrets.create(&PostParams::default(), &foreign).await?;
    let mut before = 0;
    for (name, secret) in [("without", None), ("another", Some(FOREIGN))] {
        namespace.pods().create(&PostParams::default(), &stranger(namespace, &job, name, secret)?).await?;
        let ended = |pod: Option<&Pod>| pod.and_then(phase_of) == Some("Failed");
        until(&namespace.pods(), name, SHORT, &format!("the stranger {name} to give up"), ended).await?;
        let now = refused(namespace).await?;
        namespace.print(format_args!("the stranger {name}: {} handshakes refused", now - before));
        ensure!(now > before, "the server counts no refused peer after the stranger {name} came");
        before = now;
    }
    line(&namespace.pods(), "mnist-ps-0", &["refused a peer without a certificate of this job"], SHORT).await?;

    let status = namespace.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts == 0, "{} pods were replaced though nothing happened to them", status.restarts);
    Ok(())
}

/// Returns a pod outside the job that tries to train with its server.
fn stranger(namespace: &TestNamespace, job: &ParameterServerJob, name: &str, secret: Option<&str>) -> Result<Pod> {
    let template = job.spec.trainer.template.spec.as_ref().context("the example's template has a spec")?;
    let server = names::host("mnist", &namespace.name, Role::Server, 0);
    let mut args = vec!["train", "mnist", "--master-addr", &server, "--connect-timeout", "3"];
    let (mut mounts, mut volumes) = (vec![], vec![]);
    if let Some(secret) = secret {
        args.extend(["--tls-dir", "/tls"]);
        mounts.push(json!({"name": "tls", "mountPath": "/tls"}));
        volumes.push(json!({"name": "tls", "secret": {"secretName": secret}}));
    }
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "stranger",
                "image": template.containers[0].image,
                "args": args,
                "volumeMounts": mounts,
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
            "volumes": volumes,
        },
    }))?)
}

/// Reads from server 0's metrics how many peers it has refused.
async fn refused(namespace: &TestNamespace) -> Result<u64> {
    let path = format!("/api/v1/namespaces/{}/pods/mnist-ps-0:{METRICS_PORT}/proxy/metrics", namespace.name);
    let metrics = namespace.kubectl(&["get", "--raw", &path]).await?;
    let count = metrics.lines().find_map(|line| line.strip_prefix(REFUSED));
    Ok(count.with_context(|| format!("no {REFUSED}in {metrics}"))?.parse()?)
}
