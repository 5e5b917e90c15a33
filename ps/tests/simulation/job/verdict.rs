//! How the processes of a job may end, and what it must leave behind.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use psjobs_api::ReplicaResult;
use psjobs_ps::checkpoint::export::{MODEL, TABLES};
use psjobs_ps::checkpoint::{Disk as Storage, Folder, Runs};
use psjobs_ps::series::event_file::Point;
use psjobs_ps::series::writer::read_points;
use psjobs_ps::server::ServerError;
use tokio::time::Instant;

use super::{Action, DRAIN, Supervisor};
use crate::disk::{FOLDER, Mount};
use crate::fault::{Fault, MachineFault};
use crate::network::Host;
use crate::trainer::{Failure, series_steps, series_values};
use crate::{backups, tables};

/// Pause before a server that could not write the last checkpoint or the model is started again.
const RESTART: Duration = Duration::from_secs(5);
/// Pause before other processes are started again.
const AT_ONCE: Duration = Duration::from_millis(1);

impl Supervisor {
    pub(super) fn server_ended(
        &mut self,
        index: usize,
        life: u32,
        result: Result<ReplicaResult, ServerError>,
    ) -> Result<(), String> {
        let plan = &self.job.plan;
        let newest = self.newest_server(index as u32);
        self.job.network.wires().trace.log(format_args!("server {index} ({life}) ends: {}", describe(&result)));
        self.job.network.kill(Host::Server(index as u32, life), false);
        // Its successor does the work.
        if result.is_err() && newest != Host::Server(index as u32, life) {
            return Ok(());
        }
        match result {
            Ok(result) => {
                let exchanges = if plan.least.is_some() { plan.steps } else { u64::from(plan.trainers) * plan.steps };
                let want = exchanges * u64::from(plan.local_steps.max(1));
                // Server 0 counts the steps of an elastic job, and what no trainer has done in the end is missing.
                let known = plan.least.is_none() || (index == 0 && !plan.may_leave_out());
                let known = known && !plan.forgets;
                if known && result.steps != want {
                    return Err(format!("server {index} says that {} steps were done, not {want}", result.steps));
                }
                if index == 0 && plan.disk_is_never_mended() {
                    return Err("server 0 says that all is well, and could write nothing".to_owned());
                }
                self.servers_over[index] = true;
                for trainer in 0..plan.trainers {
                    self.left_as.extend(result.left_as(trainer).map(|incarnation| (trainer, incarnation)));
                }
                // All trainers have left, so whoever replaced it has no work.
                self.kill(newest, false);
                // Training is over. The operator then ends successors of trainers, which wait without limit.
                if self.job.plan.supervised {
                    self.later(DRAIN, Action::StopTrainers);
                }
            }
            Err(ServerError::Stopped) if self.stopping[index] => {
                self.stopping[index] = false;
                // If it was to start again meanwhile, that time has passed.
                self.later(AT_ONCE, Action::StartServer(index as u32));
            }
            // Both servers of its blocks are gone. It is started again, and all go back to a checkpoint, or a trainer fills
            // the servers as in the beginning, when no gradient has been counted.
            Err(ServerError::Lost { .. }) if plan.checkpoint.is_some() || plan.forgets || !self.job.has_trained() => {
                self.later(AT_ONCE, Action::StartServer(index as u32));
                self.take_trainer_along(index as u32, AT_ONCE, false);
            }
            // It is started again, and tries again.
            Err(ServerError::NotKept { .. }) if !plan.doomed && Instant::now() < self.disk_ails_until => {
                self.later(RESTART, Action::StartServer(index as u32));
                self.take_trainer_along(index as u32, RESTART, false);
            }
            // The parts of a server that is gone for good are in no checkpoint.
            Err(ServerError::NotKept { .. }) if plan.doomed => self.servers_over[index] = true,
            Err(ServerError::Abandoned(_)) if plan.doomed || self.trainers_over.iter().all(|over| *over) => {
                self.servers_over[index] = true;
            }
            Err(error) => return Err(format!("server {index} ended: {error}")),
        }
        Ok(())
    }

    pub(super) fn trainer_ended(
        &mut self,
        index: u32,
        incarnation: u32,
        result: Result<(), Failure>,
    ) -> Result<(), String> {
        self.job.network.wires().trace.log(format_args!("trainer {index} ({incarnation}) ends: {result:?}"));
        let newest = self.incarnations[index as usize];
        match result {
            // It has left, and comes back.
            Ok(())
                if self.job.plan.least.is_some() && (incarnation < newest || self.is_replaced(index, incarnation)) =>
            {
                Ok(())
            }
            Ok(()) => {
                self.trainers_over[index as usize] = true;
                self.finished.insert(index);
                // The servers have let in no successor, or it would not have been heard.
                self.kill(Host::Trainer(index, newest), false);
                Ok(())
            }
            Err(Failure::Violation(what)) => Err(what),
            // Its successor does the work.
            Err(Failure::Reported(_)) if incarnation < newest || self.is_replaced(index, incarnation) => Ok(()),
            // All have finished, a process before this one among them.
            Err(Failure::Reported(why)) if why.contains("nothing is left") => {
                self.trainers_over[index as usize] = true;
                Ok(())
            }
            // Also where servers have ended, because a process before this one did all the work.
            Err(Failure::Reported(why)) if self.may_give_up(index) && why.contains("did not answer") => {
                self.trainers_over[index as usize] = true;
                Ok(())
            }
            // The operator starts it again: the servers have not counted it as finished.
            Err(Failure::Reported(why)) if self.job.plan.supervised && why.contains("did not answer") => {
                let next = Action::StartTrainer { index, incarnation: incarnation + 1 };
                self.later(AT_ONCE, next);
                self.take_server_along(index, AT_ONCE, false);
                Ok(())
            }
            Err(Failure::Reported(why)) => Err(format!("trainer {index} gave up: {why}")),
        }
    }

    /// A server ends when it hears of the last trainer's end, or takes a silent one that gave all its steps for
    /// finished: who is cut off then, and its successor, have no server to talk to. What they gave is in the model.
    fn may_give_up(&self, trainer: u32) -> bool {
        let plan = &self.job.plan;
        let is_known = !plan.supervised || plan.least.is_some() || self.left_as.contains_key(&trainer);
        plan.doomed || is_known && self.servers_over.iter().any(|over| *over)
    }

    /// Returns whether a successor is about to start.
    pub(super) fn is_replaced(&self, trainer: u32, incarnation: u32) -> bool {
        self.agenda.values().any(|action| match action {
            Action::StartTrainer { index, incarnation: next } => *index == trainer && *next > incarnation,
            _ => false,
        })
    }

    /// Checks that the model of the job holds every gradient once.
    pub(super) fn check_model(&self) -> Result<(), String> {
        let plan = &self.job.plan;
        if plan.checkpoint.is_none() || plan.doomed {
            return Ok(());
        }
        let read = |name: &str| self.disk.volume().read_when_all_are_dead(&Path::new(FOLDER).join(name));
        let file = read(MODEL).map_err(|error| format!("no model: {error}"))?;
        let values = &file[file.len() - 4 * plan.elements..];
        let parameters: Vec<f32> = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if plan.tables || plan.beside {
            let file = read(TABLES).map_err(|error| format!("no tables: {error}"))?;
            if plan.tables {
                return tables::check_exported(plan, &parameters, &file);
            }
            tables::check_exported_rows(plan, &file)?;
        }
        if plan.consistency.backup_trainers > 0 {
            return backups::check(&self.job.model, &parameters).map_err(|what| format!("in the model {what}"));
        }
        if plan.least.is_some() {
            let batches = self.job.model.batches(&parameters);
            let missing = batches.iter().flatten().filter(|share| **share == 0.0).count();
            let sent = self.job.sent.borrow();
            let often = batches
                .iter()
                .any(|block| block.iter().zip(sent.iter()).any(|(share, sent)| *share > *sent as f32 + 1e-3));
            return if often || (missing > 0 && !plan.may_leave_out()) {
                Err(format!("the model holds {batches:?}, given {sent:?} times"))
            } else {
                Ok(())
            };
        }
        let counts = self.job.model.counts(&parameters).map_err(|what| format!("in the model {what}"))?;
        if counts.iter().flatten().all(|count| *count == plan.steps) {
            return Ok(());
        }
        Err(format!("the model holds {counts:?} of {} gradients of each trainer", plan.steps))
    }

    /// Looks at the series that server 0 has written of each trainer: each point is there once, with its value; and all are, in
    /// jobs that lose nothing but servers.
    pub(super) fn check_series(&self) -> Result<(), String> {
        let plan = &self.job.plan;
        if plan.checkpoint.is_none() || plan.disk_is_never_mended() {
            return Ok(());
        }
        self.disk.volume().mend_all();
        let mount = Mount { disk: self.disk.clone(), host: Host::Server(0, u32::MAX) };
        let runs = Runs::new(Folder::new(Storage::Other(Arc::new(mount)), FOLDER));
        let Some(run) = runs.newest().map_err(|error| error.to_string())? else { return Ok(()) };
        let of_server = |fault: &Fault| matches!(fault, Fault::Kill { .. } | Fault::Stop { .. });
        let is_replaced = |fault: &Fault| match fault {
            Fault::Machine { number, what, .. } => *number == 0 && matches!(what, MachineFault::Replaced),
            Fault::ZombieServer { server, .. } => *server == 0,
            Fault::Zombie { trainer, .. } => plan.colocated && *trainer == 0,
            _ => false,
        };
        let lives_on = plan.faults.iter().any(|(_, fault)| is_replaced(fault));
        let has_lost_none = plan.faults.iter().all(|(_, fault)| of_server(fault));
        for (index, incarnation) in (0..).zip(&self.incarnations) {
            let folder = run.folder().folder("metrics").folder(&format!("trainer-{index}"));
            let points = read_points(&folder).map_err(|error| format!("the series of trainer {index}: {error}"))?;
            let per_exchange = series_steps(plan);
            for Point { step, values, .. } in &points {
                let want = series_values(index, step / per_exchange);
                if values.iter().any(|(name, value)| want.get(name).map(|want| *want as f32) != Some(*value)) {
                    return Err(format!("trainer {index} has {values:?} in its series at step {step}, not {want:?}"));
                }
            }
            let steps: Vec<u64> = points.iter().map(|point| point.step / per_exchange).collect();
            // A server 0 that was replaced may write points late, before it finds that out.
            if !lives_on && !steps.is_sorted_by(|before, after| before < after) {
                return Err(format!("the series of trainer {index} repeats steps: {steps:?}"));
            }
            // A server 0 that dies when a trainer has left has had the last points alone.
            let until = if self.server_starts[0] == 1 { plan.steps } else { steps.len() as u64 };
            let is_whole = steps.iter().copied().eq(1..=until);
            if has_lost_none && *incarnation == 0 && !steps.is_empty() && !is_whole {
                return Err(format!("the series of trainer {index} has gaps: {steps:?} of {}", plan.steps));
            }
        }
        Ok(())
    }
}

/// How a server ended.
fn describe(result: &Result<ReplicaResult, ServerError>) -> String {
    match result {
        Ok(result) => format!("{} steps, {} examples", result.steps, result.examples),
        Err(error) => error.to_string(),
    }
}
