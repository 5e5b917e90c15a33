//! Jobs that are broken on purpose: `kubectl get psjobs` and `kubectl describe psjob` alone show the cause, and so does
//! `kubectl psjob why`.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::{Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{DeleteParams, PostParams};
use psjobs_api::crd::ParameterServerJob;
use psjobs_e2e::manifest::{example, with_trainer};
use psjobs_e2e::namespace::TestNamespace;
use psjobs_e2e::wait::{SHORT, until, until_ok};
use serde_json::json;

/// A fault: what is broken, the job, the reasons that `get --output wide` may show, and words of `describe`.
type Fault = (&'static str, ParameterServerJob, &'static [&'static str], &'static [&'static str]);

pub async fn causes_are_shown(namespace: &TestNamespace) -> Result<()> {
    let faults: [Fault; 3] = [
        (
            "an image that does not exist",
            with_trainer(|trainer| trainer.image = Some("psjobs-worker:of-next-year".into()))?,
            &["ErrImagePull", "ImagePullBackOff"],
            &["cannot start", "psjobs-worker:of-next-year"],
        ),
        (
            "more CPU than any node has",
            with_trainer(|trainer| limit(trainer.resources.get_or_insert_default(), "cpu", "1000"))?,
            &["Unschedulable"],
            &["cannot start", "Insufficient cpu"],
        ),
        (
            "less memory than training needs",
            {
                let mut job =
                    with_trainer(|trainer| limit(trainer.resources.get_or_insert_default(), "memory", "96Mi"))?;
                job.spec.failure_policy.max_restarts = 0;
                job
            },
            &["MaxRestartsExceeded"],
            // Not OOMKilled: containerd loses some of the kernel's reports, and the kubelet then says Error.
            &["the limit of 96Mi", "raise resources.limits.memory of container trainer"],
        ),
    ];
    for (fault, job, reasons, words) in faults {
        namespace.apply(&job).await?;
        shows_cause(namespace, fault, reasons, words).await?;
        delete(namespace).await?;
    }
    quota(namespace).await
}

/// Creates a quota that leaves no room for the job's pods, and then deletes it.
async fn quota(namespace: &TestNamespace) -> Result<()> {
    namespace.kubectl(&["create", "quota", "few", "--hard=pods=0"]).await?;
    // Admission learns of it from a watch, and its controller first has to count the pods.
    let trial: Pod = serde_json::from_value(json!({
        "metadata": {"name": "trial"},
        "spec": {
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "trial",
                "image": "trial",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    }))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    until_ok(SHORT, "pods to be refused", async || match namespace.pods().create(&dry_run, &trial).await {
        Err(error) if error.to_string().contains("exceeded quota: few") => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("a pod is admitted"),
    })
    .await?;
    namespace.apply(&example()?).await?;
    shows_cause(namespace, "a full quota", &["Refused"], &["exceeded quota: few", "tried again"]).await?;
    namespace.kubectl(&["delete", "quota", "few"]).await?;
    namespace.phase("mnist", psjobs_api::crd::Phase::Running, SHORT).await?;
    delete(namespace).await
}

async fn shows_cause(namespace: &TestNamespace, fault: &str, reasons: &[&str], words: &[&str]) -> Result<()> {
    let reason = |job: Option<&ParameterServerJob>| {
        let reason = job.and_then(|job| job.status.as_ref()?.reason.as_deref());
        reason.is_some_and(|reason| reasons.contains(&reason))
    };
    until(&namespace.jobs(), "mnist", SHORT, &format!("the reason of {fault}"), reason).await?;
    let row = namespace.kubectl(&["get", "psjobs", "--output", "wide"]).await?;
    ensure!(reasons.iter().any(|reason| row.contains(reason)), "{fault}: {row}");
    let described = namespace.kubectl(&["describe", "psjob", "mnist"]).await?;
    namespace.print(format_args!("{fault}:\n{row}\n{described}"));
    let missing: Vec<_> = words.iter().filter(|&&word| !described.contains(word)).collect();
    ensure!(missing.is_empty(), "{fault}: {missing:?} are not in\n{described}");
    let why = namespace.psjob(&["why", "mnist"]).await?;
    namespace.print(format_args!("kubectl psjob why mnist:\n{why}"));
    let missing: Vec<_> = words.iter().filter(|&&word| !why.contains(word)).collect();
    ensure!(missing.is_empty(), "{fault}: {missing:?} are not in\n{why}");
    ensure!(why.contains("Next:\n  kubectl "), "{fault}: no command is named in\n{why}");
    Ok(())
}

fn limit(resources: &mut ResourceRequirements, name: &str, most: &str) {
    for amounts in [&mut resources.limits, &mut resources.requests] {
        amounts.get_or_insert_default().insert(name.to_owned(), Quantity(most.to_owned()));
    }
}

async fn delete(namespace: &TestNamespace) -> Result<()> {
    namespace.jobs().delete("mnist", &DeleteParams::foreground()).await?;
    until(&namespace.jobs(), "mnist", SHORT, "the deleted job to go", |job| job.is_none()).await?;
    Ok(())
}
