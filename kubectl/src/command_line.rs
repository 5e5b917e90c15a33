//! The command line of `kubectl psjob`.

use clap::{Parser, Subcommand};

use crate::change::{CancelArgs, ResumeArgs, ScaleArgs, SuspendArgs};
use crate::checkpoint::CheckpointArgs;
use crate::connection::ConnectionArgs;
use crate::list::ListArgs;
use crate::logs::LogsArgs;
use crate::model::ModelArgs;
use crate::submit::{CloneArgs, SubmitArgs};
use crate::top::TopArgs;
use crate::watch::WatchArgs;
use crate::web::WebArgs;
use crate::why::WhyArgs;

/// ParameterServerJobs on the cluster that kubectl talks to.
#[derive(Debug, Parser)]
#[command(name = "kubectl-psjob", bin_name = "kubectl psjob", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    connection: ConnectionArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    Submit(SubmitArgs),
    List(ListArgs),
    Why(WhyArgs),
    Logs(LogsArgs),
    Watch(WatchArgs),
    Top(TopArgs),
    Web(WebArgs),
    Model(ModelArgs),
    Checkpoint(CheckpointArgs),
    Suspend(SuspendArgs),
    Resume(ResumeArgs),
    Scale(ScaleArgs),
    Clone(CloneArgs),
    Cancel(CancelArgs),
}

impl Cli {
    /// Does what the command line says, and returns the exit code.
    ///
    /// # Errors
    /// If the command fails; the text says why.
    pub fn run(self) -> anyhow::Result<u8> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            match self.command {
                Command::Submit(args) => args.run(&self.connection).await,
                Command::List(args) => args.run(&self.connection).await,
                Command::Why(args) => args.run(&self.connection).await,
                Command::Logs(args) => args.run(&self.connection).await,
                Command::Watch(args) => args.run(&self.connection).await,
                Command::Top(args) => args.run(&self.connection).await,
                Command::Web(args) => args.run(&self.connection).await,
                Command::Model(args) => args.run(&self.connection).await,
                Command::Checkpoint(args) => args.run(&self.connection).await,
                Command::Suspend(args) => args.run(&self.connection).await,
                Command::Resume(args) => args.run(&self.connection).await,
                Command::Scale(args) => args.run(&self.connection).await,
                Command::Clone(args) => args.run(&self.connection).await,
                Command::Cancel(args) => args.run(&self.connection).await,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
