//! `kubectl psjob model`: fetches the trained model from the job's volume.

use std::path::PathBuf;

use clap::Args;
use psjobs::BadInput;

use crate::connection::ConnectionArgs;
use crate::volume::{Volume, with_volume};

/// Fetch the trained model of a job as a safetensors file
///
/// A pod of the job's own image reads it from the volume of the checkpoints, and is deleted afterwards. The job may have
/// ended, and its pods may be gone. Needs the rights to create pods and to exec in them.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Name of the job
    name: String,
    /// The file to write; by default NAME.safetensors
    #[arg(long, short)]
    output: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long)]
    force: bool,
}

impl ModelArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let file = self.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.safetensors", self.name)));
        if file.exists() && !self.force {
            return Err(BadInput::new(format!("{} is there already; --force replaces it", file.display())).into());
        }
        let cluster = connection.open().await?;
        let job = cluster.job(&self.name).await?;
        let Some(model) = job.status.as_ref().and_then(|status| status.model.as_ref()) else {
            return Err(BadInput::new(format!(
                "{0} has no model to fetch: a job exports one when it succeeds, if it keeps checkpoints \
                 (spec.checkpoint); `kubectl psjob why {0}{1}` says how far it is",
                self.name,
                connection.as_flags()
            ))
            .into());
        };
        let copy = async |volume: &Volume<'_>| volume.copy(&model.path, &file).await;
        let size = with_volume(connection, &cluster, &job, copy).await?;
        println!("{} has the model of {}, {size} bytes", file.display(), self.name);
        Ok(0)
    }
}
