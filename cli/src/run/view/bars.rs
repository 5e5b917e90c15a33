//! Progress on a terminal: one line for the servers, one bar for each trainer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use psjobs_api::Role;
use psjobs_ps::proto::{JobPhase, StatusReply, TrainerState, TrainerStatus};

use super::words::{self, Pace};
use crate::run::exit::Exit;
use crate::run::log::Watcher;
use crate::run::plan::{Plan, Replica};

/// Redraws a second. Drawing takes time from training on a small machine.
const RATE: u8 = 5;
/// Trainers beyond this many have no bar of their own: a terminal is not that high.
const BARS: u32 = 16;

#[derive(Debug)]
pub struct Bars {
    all: MultiProgress,
    servers: ProgressBar,
    trainers: Vec<ProgressBar>,
    /// `1 server`.
    title: String,
    pace: Pace,
}

impl Bars {
    pub fn new(plan: &Plan) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(RATE));
        let servers = all.add(ProgressBar::new_spinner());
        servers.set_style(style("{spinner} {prefix} {elapsed:>4}  {wide_msg}"));
        servers.enable_steady_tick(Duration::from_millis(1000 / u64::from(RATE)));
        servers.set_prefix(plan.name.clone());
        let title = format!("{} server{}", plan.servers, if plan.servers == 1 { "" } else { "s" });
        servers.set_message(format!("{title}, starting"));
        let bar = |index| {
            let bar = all.add(ProgressBar::new(0));
            bar.set_style(style("  {prefix} [{bar:30}] {pos:>6}/{len:<6} {wide_msg}"));
            bar.set_prefix(format!("{:<10}", Replica { role: Role::Trainer, index }.to_string()));
            bar
        };
        let trainers = (0..plan.trainers.min(BARS)).map(bar).collect();
        Self { all, servers, trainers, title, pace: Pace::default() }
    }

    pub fn print(&self, text: &str) {
        self.all.println(text).ok();
    }

    pub fn printer(&self) -> Watcher {
        let all = self.all.clone();
        Arc::new(move |line: &str| {
            all.println(line).ok();
        })
    }

    pub fn started(&self, replica: Replica, incarnation: u32) {
        if let Some(bar) = self.bar(replica) {
            let again = if incarnation == 0 { "" } else { " again" };
            bar.set_message(format!("starting{again}"));
        }
    }

    pub fn ended(&self, replica: Replica, exit: Exit) {
        let Some(bar) = self.bar(replica) else { return };
        if exit == Exit::Code(0) {
            bar.set_position(bar.length().unwrap_or_default());
            bar.abandon_with_message("done");
        } else {
            bar.set_message(exit.to_string());
        }
    }

    pub fn progress(&mut self, status: &StatusReply) {
        let phase = match status.phase() {
            JobPhase::Training => {
                words::progress(status, &mut self.pace, Instant::now()).unwrap_or_else(|| "training begins".into())
            }
            JobPhase::Done => "all trainers are done".into(),
            JobPhase::Waiting | JobPhase::Unspecified => "waiting for trainers to join".into(),
        };
        self.servers.set_message(format!("{}, {phase}", self.title));
        for trainer in &status.trainers {
            if let Some(bar) = self.trainers.get(trainer.index as usize).filter(|bar| !bar.is_finished()) {
                show_trainer(bar, trainer);
            }
        }
    }

    pub fn draining(&self) {
        self.servers.set_message(format!("{}, all trainers are done, waiting for the servers to end", self.title));
    }

    fn bar(&self, replica: Replica) -> Option<&ProgressBar> {
        self.trainers.get(replica.index as usize).filter(|_| replica.role == Role::Trainer)
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.servers.finish_and_clear();
        self.trainers.iter().for_each(ProgressBar::abandon);
    }
}

fn show_trainer(bar: &ProgressBar, trainer: &TrainerStatus) {
    bar.set_length(trainer.total_steps);
    bar.set_position(trainer.step);
    let message = match trainer.state() {
        TrainerState::Lost => format!("silent for {}", words::duration(trainer.silent_seconds)),
        TrainerState::Left => "left".into(),
        TrainerState::Finished => "done".into(),
        TrainerState::Active => words::rate(trainer.examples_per_second)
            .into_iter()
            .chain((trainer.batch > 0).then(|| format!("batch {}", trainer.batch)))
            .chain(words::metrics(&trainer.metrics))
            .collect::<Vec<_>>()
            .join(", "),
        TrainerState::Awaited | TrainerState::Unspecified => return,
    };
    bar.set_message(message);
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is valid").progress_chars("=> ")
}
