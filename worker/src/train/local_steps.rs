//! Local steps (`spec.training.local`): a trainer makes some steps alone, with an optimizer of its own, and gives the servers
//! in one exchange the difference to the parameters with which it began.

use psjobs_api::Training;
use psjobs_ps::client::Session;
use psjobs_ps::schedule::Schedule;
use tch::{TchError, Tensor};

use super::flat::Flat;
use super::local::Local;
use super::plan::Turn;

/// The model of a trainer that makes steps alone, in memory of its own: the session's parameters stay those of the last
/// exchange.
#[derive(Debug)]
pub struct LocalSteps {
    flat: Flat,
    optimizer: Local,
    exchanges: Exchanges,
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
    pub fn new(flat: Flat, training: &Training, total: u64, session: &Session) -> Result<Self, TchError> {
        let optimizer = Local::new(flat.shallow_clone(), &training.optimizer)?;
        let optimizer = optimizer.with_schedule(Schedule::from(&training.schedule));
        let exchanges = Exchanges { steps: training.steps_per_exchange(), total, made: 0 };
        let mut local = Self { flat, optimizer, exchanges };
        local.take(session.parameters());
        Ok(local)
    }

    /// The next step, if `exchange` is the session's next one.
    pub fn next_step(&self, exchange: u64) -> u64 {
        self.exchanges.first_step(exchange) + self.exchanges.made
    }

    /// Makes one step alone. Returns the exchange that is due after it, if one is.
    ///
    /// # Errors
    /// If libtorch cannot compute the gradient.
    pub fn step(&mut self, turn: Turn, loss: &Tensor) -> Result<Option<u64>, TchError> {
        self.optimizer.step(turn.step, loss)?;
        Ok(self.exchanges.made_one(turn))
    }

    /// Gives the session the difference that the steps since the last exchange have made.
    pub fn put_differences(&self, session: &mut Session) {
        session.put_differences(&self.flat.values());
    }

    /// Takes the session's parameters, from which the next steps go on.
    pub fn take(&mut self, parameters: &[f32]) {
        self.flat.set(parameters);
        self.exchanges.made = 0;
    }
}

impl Exchanges {
    fn first_step(self, exchange: u64) -> u64 {
        exchange.saturating_mul(self.steps)
    }

    /// Counts a step. An exchange ends with a batch whose number says so: in an elastic job the numbers of a trainer's
    /// batches do not follow each other, and the last exchange of a job may be a short one.
    fn made_one(&mut self, turn: Turn) -> Option<u64> {
        self.made += 1;
        let end = turn.number + 1;
        (end.is_multiple_of(self.steps) || end == self.total).then_some(turn.step / self.steps)
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
