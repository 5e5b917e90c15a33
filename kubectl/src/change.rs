//! Commands that change a job: suspend, resume, scale, cancel.

use clap::Args;
use kube::api::{DeleteParams, Patch, PatchParams};
use psjobs_api::crd::ParameterServerJob;
use serde_json::{Value, json};

use crate::connection::ConnectionArgs;
use crate::text;

/// Stop a job's pods and keep the job; a job with checkpoints writes one first
#[derive(Debug, Args)]
pub struct SuspendArgs {
    /// Name of the job
    name: String,
}

/// Start a suspended job's pods again, from its last checkpoint if it has any
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// Name of the job
    name: String,
}

/// Give an elastic job another number of trainers
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Name of the job
    name: String,
    /// Number of trainers, between minReplicas and maxReplicas of spec.elasticPolicy
    #[arg(long)]
    trainers: u32,
}

/// Delete a job with its pods, their logs, and the volume that was made for it
///
/// A claim of spec.checkpoint.existingClaim stays, with what lies on it. `suspend` stops a job and keeps all of it.
#[derive(Debug, Args)]
#[command(visible_alias = "delete")]
pub struct CancelArgs {
    /// Name of the job
    name: String,
}

impl SuspendArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        change(connection, &self.name, json!({"suspend": true})).await?;
        text::print(format_args!(
            "{} is suspended: its pods end; `kubectl psjob resume {0}{}` starts them again",
            self.name,
            connection.as_flags()
        ));
        Ok(0)
    }
}

impl ResumeArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let job = change(connection, &self.name, json!({"suspend": false})).await?;
        let from = if job.spec.checkpoint.is_some() {
            "its last checkpoint"
        } else {
            "the beginning, as it keeps no checkpoints"
        };
        text::print(format_args!(
            "{} is resumed, from {from}; `kubectl psjob watch {0}{}` shows its progress",
            self.name,
            connection.as_flags()
        ));
        Ok(0)
    }
}

impl ScaleArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        change(connection, &self.name, json!({"trainer": {"replicas": self.trainers}})).await?;
        text::print(format_args!(
            "{} has {} trainers from now on; `kubectl psjob watch {0}{}` shows its progress",
            self.name,
            self.trainers,
            connection.as_flags()
        ));
        Ok(0)
    }
}

impl CancelArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let deleted = cluster.jobs().delete(&self.name, &DeleteParams::background()).await;
        deleted.map_err(|error| cluster.explain(error, &self.name))?;
        text::print(format_args!("{} is deleted", self.name));
        Ok(0)
    }
}

/// Changes fields of a job's spec.
async fn change(connection: &ConnectionArgs, name: &str, spec: Value) -> anyhow::Result<ParameterServerJob> {
    let cluster = connection.open().await?;
    let patch = Patch::Merge(json!({"spec": spec}));
    cluster.jobs().patch(name, &PatchParams::default(), &patch).await.map_err(|error| cluster.explain(error, name))
}
