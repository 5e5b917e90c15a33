//! Decides about a job: a pure function of the job, its last status, the observed state and the time. It holds no client
//! and no clock, so every behaviour is a row in a table of tests.
//!
//! `facts` has what a decision rests on and never changes. `active` chooses the course of an active job, in one order of
//! precedence. The other files each write one part of the decision into the `draft`.
//!
//! A property test over random histories checks three guarantees: there are never two pods of one rank, nothing is created
//! once the job has succeeded or failed, and counters only grow, incarnations also when a replica is scaled away and back.
//! A decision repeated on its own result asks for nothing, unless it asked to be repeated at once.

mod active;
mod certificates;
mod checkpoints;
mod deadline;
mod draft;
mod elastic;
mod facts;
mod failure;
mod finish;
mod phase;
mod pods;
mod recreate;
mod replica_history;
mod report;
mod suspend;
pub mod timing;

use jiff::Timestamp;
use psjobs_api::crd::{ConditionType, ParameterServerJobStatus, Phase};

use self::draft::Draft;
use self::facts::Facts;
pub use self::replica_history::ReplicaHistory;
use super::model::{Decision, Event, ObservedState};
use super::validate::{SpecError, ValidJob};
use crate::conditions::{self, ConditionUpdate};

/// Decides about a job that [`validate`](super::validate::validate) let through.
pub fn decide(job: &ValidJob, prev: &ParameterServerJobStatus, observed: &ObservedState, now: Timestamp) -> Decision {
    let facts = Facts::new(job, prev, observed, now);
    if prev.phase.is_some_and(Phase::is_final) {
        draft(&facts, Draft::clean_up)
    } else if facts.trainers_are_done() && !facts.lacks_the_model() && !facts.is_suspended_before_the_model() {
        draft(&facts.with_ends(), Draft::complete)
    } else if job.suspended {
        draft(&facts.with_ends(), Draft::suspend)
    } else {
        draft(&facts.with_failures(), Draft::run)
    }
}

fn draft<'f, 'a>(facts: &'f Facts<'a>, write: impl FnOnce(&mut Draft<'f, 'a>)) -> Decision {
    let mut draft = Draft::new(facts);
    write(&mut draft);
    draft.into_decision()
}

/// Decides about a job that cannot be run: reports why, and changes nothing until the job changes.
pub fn refuse(error: &SpecError, prev: &ParameterServerJobStatus, generation: Option<i64>, now: Timestamp) -> Decision {
    let mut status = prev.clone();
    let mut events = Vec::new();
    if !prev.phase.is_some_and(Phase::is_final) {
        const REASON: &str = "InvalidSpec";
        status.observed_generation = generation;
        status.phase = status.phase.or(Some(Phase::Pending));
        status.reason = Some(REASON.into());
        conditions::set(&mut status, ConditionType::Created, ConditionUpdate::no(REASON, error.to_string()), now);
        if status != *prev {
            events.push(Event { warning: true, reason: REASON.into(), note: error.to_string(), pod: None });
        }
    }
    Decision { status, events, ..Decision::default() }
}

#[cfg(test)]
mod tests;
