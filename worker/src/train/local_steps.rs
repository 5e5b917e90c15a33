//! Local steps (`spec.training.local`): a trainer makes some steps alone, with an optimizer of its own, and gives the servers
//! in one exchange the difference to the parameters with which it began.

use psjobs_api::Training;
use psjobs_api::training::Local as Settings;
use psjobs_ps::client::{ClientError, Ended, Session};
use psjobs_ps::schedule::Schedule;
use tch::{TchError, Tensor};

use super::UpdateError;
use super::flat::Flat;
use super::local::Local;
use super::plan::Turn;

/// The model of a trainer that makes steps alone, in memory of its own.
#[derive(Debug)]
pub struct LocalSteps {
    flat: Flat,
    optimizer: Local,
    exchanges: Exchanges,
    /// Exchanges are made while the next steps are.
    overlap: bool,
    /// The parameters without what the steps since the last exchange have changed.
    base: Vec<f32>,
    /// The parameters with which the exchange under way began.
    sent: Option<Vec<f32>>,
}

/// The steps of which each exchange consists. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Exchanges {
    /// Steps for one exchange.
    steps: u64,
    /// The number of the job's last batch, and one.
    total: u64,
    /// Steps made since the last exchange.
    made: u64,
}

impl LocalSteps {
    /// The trainer of a job that trains as `training` says, of `total` steps. The model takes the session's parameters.
    ///
    /// # Errors
    /// If libtorch refuses the optimizer's arguments.
    pub fn new(
        flat: Flat,
        training: &Training,
        settings: &Settings,
        total: u64,
        session: &Session,
    ) -> Result<Self, TchError> {
        let optimizer = Local::new(flat.shallow_clone(), &training.optimizer)?.with_non_finite(training.non_finite);
        let optimizer = optimizer.with_schedule(Schedule::from(&training.schedule));
        let exchanges = Exchanges { steps: training.steps_per_exchange(), total, made: 0 };
        let mut local = Self { flat, optimizer, exchanges, overlap: settings.overlap, base: Vec::new(), sent: None };
        local.take(session.parameters());
        Ok(local)
    }

    /// The next step, if `exchange` is the session's next one.
    pub fn next_step(&self, exchange: u64) -> u64 {
        self.exchanges.first_step(exchange) + self.exchanges.made
    }

    /// Computes the gradient of `loss`, that of a micro-batch, which is added to that of the next step.
    ///
    /// # Errors
    /// If libtorch cannot compute it.
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<(), TchError> {
        self.optimizer.add_gradient(loss)
    }

    /// Makes one step alone, and the exchange that is due after it, if one is. Returns the next step: an earlier one if the
    /// servers had to go back to a checkpoint.
    ///
    /// # Errors
    /// If libtorch cannot compute the gradient, or the servers cannot be reached or refuse.
    pub fn update(&mut self, turn: Turn, loss: &Tensor, session: &mut Session) -> Result<u64, UpdateError> {
        self.optimizer.step(turn.step, loss)?;
        let Some(exchange) = self.exchanges.made_one(turn) else { return Ok(turn.step + 1) };
        if let Some(next) = self.end_exchange(session)? {
            self.take(session.parameters());
            return Ok(self.next_step(next));
        }
        let values = self.flat.values();
        for ((gradient, base), value) in session.gradients_mut().iter_mut().zip(&self.base).zip(&values) {
            *gradient = base - value;
        }
        if self.overlap && !self.exchanges.is_last(turn) {
            session.begin_exchange(exchange);
            self.sent = Some(values);
            self.exchanges.made = 0;
            return Ok(turn.step + 1);
        }
        let next = session.exchange(exchange)?;
        self.take(session.parameters());
        Ok(self.next_step(next))
    }

    /// Takes the session's parameters, from which the next steps go on. What the steps since the last exchange have changed
    /// is gone.
    pub fn take(&mut self, parameters: &[f32]) {
        self.flat.set(parameters);
        self.base = parameters.to_vec();
        self.exchanges.made = 0;
        self.sent = None;
    }

    /// Waits for the exchange under way, if one is, and adds what the steps since it began have changed to the parameters
    /// that have come back. Returns the exchange to go on with if the servers have gone back: those steps do not count then.
    fn end_exchange(&mut self, session: &mut Session) -> Result<Option<u64>, ClientError> {
        let Some(sent) = self.sent.take() else { return Ok(None) };
        let Some(Ended { next, has_gone_back }) = session.end_exchange().transpose()? else { return Ok(None) };
        if has_gone_back {
            return Ok(Some(next));
        }
        let mut values = self.flat.values();
        for ((value, sent), parameter) in values.iter_mut().zip(&sent).zip(session.parameters()) {
            *value += parameter - sent;
        }
        self.flat.set(&values);
        self.base.copy_from_slice(session.parameters());
        Ok(None)
    }
}

impl Exchanges {
    fn first_step(self, exchange: u64) -> u64 {
        exchange.saturating_mul(self.steps)
    }

    fn is_last(self, turn: Turn) -> bool {
        turn.number + 1 == self.total
    }

    /// Counts a step. An exchange ends with a batch whose number says so: in an elastic job the numbers of a trainer's
    /// batches do not follow each other, and the last exchange of a job may be a short one.
    fn made_one(&mut self, turn: Turn) -> Option<u64> {
        self.made += 1;
        ((turn.number + 1).is_multiple_of(self.steps) || self.is_last(turn)).then_some(turn.step / self.steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_follows_so_many_steps_and_the_last_one() {
        let mut exchanges = Exchanges { steps: 4, total: 10, made: 0 };
        let mut due = Vec::new();
        for step in 0..10 {
            let made = exchanges.made;
            assert_eq!(exchanges.first_step(step / 4) + made, step);
            if let Some(exchange) = exchanges.made_one(Turn { step, number: step }) {
                due.push((step, exchange));
                exchanges.made = 0;
            }
        }
        assert_eq!(due, [(3, 0), (7, 1), (9, 2)]);
    }

    #[test]
    fn batches_of_an_elastic_job_end_an_exchange_by_their_own_numbers() {
        let mut exchanges = Exchanges { steps: 4, total: 10, made: 0 };
        // The trainer's sixth exchange reads batches 4 to 7, its seventh the last two of the job.
        let due = |exchanges: &mut Exchanges, step, number| exchanges.made_one(Turn { step, number });
        for (step, number, want) in [(20, 4, None), (22, 6, None), (23, 7, Some(5)), (24, 8, None), (25, 9, Some(6))] {
            assert_eq!(due(&mut exchanges, step, number), want, "batch {number}");
        }
    }
}
