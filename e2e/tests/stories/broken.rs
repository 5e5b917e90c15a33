//! Jobs that are broken on purpose: `kubectl get psjobs` and `kubectl describe psjob` alone tell the cause.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::DeleteParams;
use psjobs_api::crd::ParameterServerJob;
use psjobs_e2e::manifest::{example, with_trainer};
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, until};

/// What is broken, the job, the reason that `get --output wide` shows, and words that `describe` has.
type Fault = (&'static str, ParameterServerJob, &'static [&'static str], &'static [&'static str]);

pub async fn jobs_tell_why(site: &Site) -> Result<()> {
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
            &["OOMKilled", "needed more memory than the limit of 96Mi", "raise resources.limits.memory"],
        ),
    ];
    for (fault, job, reasons, words) in faults {
        site.apply(&job).await?;
        tells(site, fault, reasons, words).await?;
        delete(site).await?;
    }
    quota(site).await
}

/// A quota that leaves no room for the job's pods, and then does.
async fn quota(site: &Site) -> Result<()> {
    site.kubectl(&["create", "quota", "few", "--hard=pods=1"]).await?;
    site.apply(&example()?).await?;
    tells(site, "a full quota", &["Refused"], &["exceeded quota: few", "tried again"]).await?;
    site.kubectl(&["delete", "quota", "few"]).await?;
    site.phase("mnist", psjobs_api::crd::Phase::Running, SHORT).await?;
    delete(site).await
}

async fn tells(site: &Site, fault: &str, reasons: &[&str], words: &[&str]) -> Result<()> {
    let reason = |job: Option<&ParameterServerJob>| {
        let reason = job.and_then(|job| job.status.as_ref()?.reason.as_deref());
        reason.is_some_and(|reason| reasons.contains(&reason))
    };
    until(&site.jobs(), "mnist", SHORT, &format!("the reason of {fault}"), reason).await?;
    let row = site.kubectl(&["get", "psjobs", "--output", "wide"]).await?;
    ensure!(reasons.iter().any(|reason| row.contains(reason)), "{fault}: {row}");
    let described = site.kubectl(&["describe", "psjob", "mnist"]).await?;
    println!("    {fault}:\n{row}\n{described}");
    let missing: Vec<_> = words.iter().filter(|&&word| !described.contains(word)).collect();
    ensure!(missing.is_empty(), "{fault}: {missing:?} are not in\n{described}");
    Ok(())
}

fn limit(resources: &mut ResourceRequirements, name: &str, most: &str) {
    for amounts in [&mut resources.limits, &mut resources.requests] {
        amounts.get_or_insert_default().insert(name.to_owned(), Quantity(most.to_owned()));
    }
}

async fn delete(site: &Site) -> Result<()> {
    site.jobs().delete("mnist", &DeleteParams::foreground()).await?;
    until(&site.jobs(), "mnist", SHORT, "the deleted job to go", |job| job.is_none()).await?;
    Ok(())
}
