//! `kubectl psjob why`: what a job waits for or why it failed, and the commands to type next.

mod explain;

use std::io::Write as _;

use clap::Args;
use jiff::Timestamp;

use crate::connection::ConnectionArgs;
pub use explain::explain;

/// Say what a job waits for or why it failed, and what to do next
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Name of the job
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl WhyArgs {
    pub async fn run(self, connection: &ConnectionArgs) -> anyhow::Result<u8> {
        let cluster = connection.open().await?;
        let job = cluster.job(&self.name).await?;
        let explanation = explain(&job, Timestamp::now());
        let flags = connection.as_flags();
        let text =
            if self.json { serde_json::to_string(&explanation.as_json(&flags))? } else { explanation.as_text(&flags) };
        // A reader that has gone away wants no explanation.
        writeln!(std::io::stdout(), "{text}").ok();
        Ok(0)
    }
}
