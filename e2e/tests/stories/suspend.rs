//! A job is taken off the cluster for a while.

use anyhow::{Result, ensure};
use kube::api::{ListParams, Patch, PatchParams};
use psjobs_api::crd::Phase;
use psjobs_e2e::manifest::training;
use psjobs_e2e::site::Site;
use psjobs_e2e::wait::{SHORT, TRAINING, until_none};
use serde_json::json;

pub async fn and_resume(site: &Site) -> Result<()> {
    site.apply(&training(&["train", "mnist", "--max-steps", "300"])?).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;

    suspend(site, true).await?;
    let status = site.phase("mnist", Phase::Suspended, SHORT).await?;
    ensure!(status.start_time.is_none(), "a suspended job is not active");
    until_none(&site.pods(), &ListParams::default(), SHORT, "the suspended job's pods to go").await?;

    suspend(site, false).await?;
    site.phase("mnist", Phase::Running, SHORT).await?;
    let status = site.phase("mnist", Phase::Succeeded, TRAINING).await?;
    ensure!(status.restarts_counted == 0, "being suspended was counted as a failure");
    Ok(())
}

async fn suspend(site: &Site, suspend: bool) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": {"suspend": suspend}}));
    site.jobs().patch("mnist", &PatchParams::default(), &patch).await?;
    Ok(())
}
