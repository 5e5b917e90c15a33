//! A trainer that exchanges no gradient blocks, because its parameters live elsewhere: it takes part
//! in the job's life and tells its progress.

use std::collections::BTreeMap;

use tokio::runtime::Runtime;

use super::attendance::{Attendance, Report};
use super::connecting::{enter, persist};
use super::{ClientError, SessionConfig, network};

/// A trainer's place in a job whose servers train no blocks for it.
pub struct Member {
    config: SessionConfig,
    attendance: Attendance,
    runtime: Runtime,
}

impl Member {
    /// Joins every server. Waits for servers that do not answer yet, up to `config.connect_timeout`.
    /// `config` names the tensors that trainers train themselves, if checkpoints are to hold them.
    ///
    /// # Errors
    /// If a server stays away, or refuses this trainer.
    pub fn join(config: SessionConfig) -> Result<Self, ClientError> {
        let runtime = network(1)?;
        let mut attendance = Attendance::default();
        runtime.block_on(async {
            for server in 0..config.servers.len() as u32 {
                let (channel, _) = persist(&config, server, || enter(&config, server, None)).await?;
                attendance.attend(&config, server, channel);
            }
            Ok::<_, ClientError>(())
        })?;
        Ok(Self { config, attendance, runtime })
    }

    /// What the next heartbeats say: steps done and examples read so far, and metrics.
    pub fn report(&self, step: u64, examples: u64, metrics: &BTreeMap<String, f64>) {
        self.attendance.report(Report { step, examples, metrics: metrics.clone(), ..Report::default() });
    }

    /// Leaves every server, saying what [`Member::report`] said last: `finished` says that the work is
    /// done, false that a replacement will come.
    ///
    /// # Errors
    /// If a server does not answer; the others have been told all the same.
    pub fn leave(self, finished: bool) -> Result<(), ClientError> {
        let Self { config, attendance, runtime } = self;
        runtime.block_on(attendance.leave(&config, finished, false))
    }
}
