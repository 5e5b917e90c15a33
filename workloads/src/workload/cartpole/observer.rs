//! An observer: has the cart, and runs an episode when the agent says so. For each step it calls back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::physics::{CartPole, Outcome};
use psjobs_ps::client::TimeSpent;
use psjobs_rpc::{Methods, RRef, Registry, RemoteError, RemoteObject, WaitClock};

pub const NAME: &str = "cartpole/observer";
/// The function by which the agent says that no more episodes will come.
pub const FINISH: &str = "cartpole/finish";

/// Each step is worth this much.
const REWARD: f64 = 1.0;

struct Observer {
    number: i64,
    random: ChaCha8Rng,
    work: Arc<Work>,
}

impl Observer {
    /// Runs an episode as [`Observer::play`] does, and adds up what it has computed.
    fn run_episode(&mut self, agent: &RRef, packed: bool) -> Result<i64, RemoteError> {
        let (waits, start) = (WaitClock::start(), Instant::now());
        let steps = self.play(agent, packed);
        self.work.computed(start.elapsed().saturating_sub(waits.waited()));
        steps
    }

    /// Runs an episode against the agent's policy: two calls a step, or one if `packed`.
    fn play(&mut self, agent: &RRef, packed: bool) -> Result<i64, RemoteError> {
        let mut cart = CartPole::start(&mut self.random);
        let mut observation = cart.observation().map(f64::from);
        let mut last_reward = None;
        for steps in 1.. {
            let action: i64 = if packed {
                agent.rpc_sync("step", (self.number, last_reward, observation.to_vec()))?
            } else {
                agent.rpc_sync("select_action", (self.number, observation.to_vec()))?
            };
            let Outcome { observation: next, done } = cart.push(usize::from(action == 1));
            if !packed || done {
                agent.rpc_sync::<()>("report_reward", (self.number, REWARD))?;
            }
            last_reward = Some(REWARD);
            observation = next.map(f64::from);
            self.work.steps.fetch_add(1, Ordering::Relaxed);
            if done {
                return Ok(steps);
            }
        }
        unreachable!("every episode has an end");
    }
}

/// Makes `count` calls that do nothing; gives the seconds that they took.
fn call_repeatedly(agent: &RRef, count: i64) -> Result<f64, RemoteError> {
    let start = Instant::now();
    for _ in 0..count {
        agent.rpc_sync::<()>("nothing", ())?;
    }
    Ok(start.elapsed().as_secs_f64())
}

impl RemoteObject for Observer {
    fn methods(methods: &mut Methods<Self>) {
        methods
            .add("run_episode", |observer, _, (agent, packed): (RRef, bool)| observer.run_episode(&agent, packed))
            .add("call_repeatedly", |_, _, (agent, count): (RRef, i64)| call_repeatedly(&agent, count));
    }
}

/// The steps of an observer's process, what it has computed, and whether it has finished.
#[derive(Debug, Default)]
pub struct Work {
    steps: AtomicU64,
    computed_nanos: AtomicU64,
    finished: Mutex<bool>,
    changed: Condvar,
}

impl Work {
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    fn computed(&self, time: Duration) {
        self.computed_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns where the `total` time of this process went, and how much of it was waiting: an observer that does not compute
    /// waits for the agent's answer, or for its next episode.
    #[must_use]
    pub fn spent(&self, total: Duration) -> (TimeSpent, Duration) {
        let compute = Duration::from_nanos(self.computed_nanos.load(Ordering::Relaxed)).min(total);
        (TimeSpent { total, compute, ..TimeSpent::default() }, total - compute)
    }

    /// Waits until the agent has said that it is over, at most for `timeout`; true if it has.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut finished = self.finished.lock();
        self.changed.wait_while_for(&mut finished, |finished| !*finished, timeout);
        *finished
    }

    fn finish(&self) {
        *self.finished.lock() = true;
        self.changed.notify_all();
    }
}

/// Offers the observer of this process. Its arguments: its number and the seed of all episodes.
pub fn offer(registry: &mut Registry, work: &Arc<Work>) {
    let counted = Arc::clone(work);
    registry.object(NAME, move |_, (number, seed): (i64, i64)| {
        let mut random = ChaCha8Rng::seed_from_u64(seed.unsigned_abs());
        random.set_stream(number.unsigned_abs());
        Ok(Observer { number, random, work: Arc::clone(&counted) })
    });
    let finished = Arc::clone(work);
    registry.function(FINISH, move |_, ()| {
        finished.finish();
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observer_waits_while_it_does_not_compute() {
        let (work, seconds) = (Work::default(), Duration::from_secs);
        let shares = |total| {
            let (spent, waiting) = work.spent(seconds(total));
            assert_eq!(spent, TimeSpent { total: seconds(total), compute: spent.compute, ..TimeSpent::default() });
            (spent.compute, waiting)
        };
        assert_eq!(shares(3), (seconds(0), seconds(3)));
        work.computed(seconds(1));
        work.computed(seconds(1));
        assert_eq!(shares(5), (seconds(2), seconds(3)));
        // An episode that began before the total did.
        assert_eq!(shares(1), (seconds(1), seconds(0)));
    }
}
