//! `kubectl psjob model`: fetches the trained model from the job's volume or object store.

use std::path::PathBuf;

use clap::Args;
use psjobs::BadInput;

use crate::connection::ConnectionArgs;
use crate::reader::{Reader, with_reader};
use crate::source::SourceArgs;
use crate::text;

/// Fetch the trained model of a job as a safetensors file
///
/// A pod of the job's own image reads it from the volume or the object store of the checkpoints, and is deleted afterwards. The
/// job may have ended, and its pods may be gone. Needs the rights to create, get, list, watch and delete pods, and to exec in them.
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
    #[command(flatten)]
    source: SourceArgs,
}

/// Name of the model in a job's folder.
const MODEL: &str = "model.safetensors";

impl ModelArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let file = self.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}.safetensors", self.name)));
        if file.exists() && !self.force {
            return Err(BadInput::new(format!("{} is there already; --force replaces it", file.display())).into());
        }
        let cluster = connection.open().await?;
        let job = self.source.job(&cluster, &self.name).await?;
        let of_status = job.status.as_ref().and_then(|status| Some(status.model.as_ref()?.path.clone()));
        let of_deleted = self.source.is_deleted().then(|| format!("{}/{MODEL}", self.name));
        let Some(path) = of_deleted.or(of_status) else {
            return Err(BadInput::new(format!(
                "{0} has no model to fetch: a job exports one when it succeeds, if it keeps checkpoints \
                 (spec.checkpoint); `kubectl psjob why {0}{1}` says how far it is",
                self.name,
                connection.as_flags()
            ))
            .into());
        };
        let copy = async |reader: &Reader<'_>| reader.copy(&path, &file).await;
        let size = with_reader(connection, &cluster, &job, self.source.image(), copy).await?;
        text::print(format_args!("{} has the model of {}, {size} bytes", file.display(), self.name));
        Ok(0)
    }
}
