//! The agent: has the policy, answers the observers' calls, and learns when they have run an episode.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::physics::Observation;
use super::policy::{Episode, Policy};
use psjobs_rpc::{Methods, Registry, RemoteError, RemoteObject};

pub const NAME: &str = "cartpole/agent";

/// Share of a round's reward in the running reward.
const SHARE: f64 = 0.05;

/// The policy, and the episodes of the round by observer.
struct Agent {
    policy: Policy,
    random: ChaCha8Rng,
    episodes: BTreeMap<i64, Episode>,
    running_reward: f64,
}

impl Agent {
    fn new(seed: i64, learning_rate: f64) -> Result<Self, RemoteError> {
        Ok(Self {
            policy: Policy::new(seed, learning_rate)?,
            random: ChaCha8Rng::seed_from_u64(seed.unsigned_abs()),
            episodes: BTreeMap::new(),
            running_reward: 0.0,
        })
    }

    fn select_action(&mut self, observer: i64, observation: &[f64]) -> Result<i64, RemoteError> {
        let &[position, velocity, angle, spin] = observation else {
            return Err(RemoteError::new(format!("an observation has 4 numbers, not {}", observation.len())));
        };
        let observation: Observation = [position, velocity, angle, spin].map(|x| x as f32);
        let decision = self.policy.choose(observation, &mut self.random);
        let action = decision.action as i64;
        self.episodes.entry(observer).or_default().decisions.push(decision);
        Ok(action)
    }

    fn report_reward(&mut self, observer: i64, reward: f64) -> Result<(), RemoteError> {
        match self.episodes.get_mut(&observer) {
            Some(episode) if episode.rewards.len() < episode.decisions.len() => {
                episode.rewards.push(reward);
                Ok(())
            }
            _ => Err(RemoteError::new(format!("observer {observer} reports a reward for no action"))),
        }
    }

    /// Learns from the episodes of `observers`, and forgets those of others, which were lost on their
    /// way: the smallest total reward, the running reward, and the steps.
    fn learn(&mut self, observers: &[i64]) -> Result<(f64, f64, i64), RemoteError> {
        let mut whole = Vec::new();
        for &observer in observers {
            let episode = self.episodes.remove(&observer);
            whole.push(episode.ok_or_else(|| RemoteError::new(format!("observer {observer} has run no episode")))?);
        }
        self.episodes.clear();
        let totals = whole.iter().map(|episode| episode.rewards.iter().sum::<f64>());
        let least = totals.reduce(f64::min).ok_or_else(|| RemoteError::new("no observer has run an episode"))?;
        let steps = whole.iter().map(|episode| episode.rewards.len() as i64).sum();
        self.policy.learn(&whole);
        self.running_reward = SHARE * least + (1.0 - SHARE) * self.running_reward;
        Ok((least, self.running_reward, steps))
    }
}

impl RemoteObject for Agent {
    fn methods(methods: &mut Methods<Self>) {
        methods
            .add_quick("select_action", |agent, _, (observer, observation): (i64, Vec<f64>)| {
                agent.select_action(observer, &observation)
            })
            .add_quick("report_reward", |agent, _, (observer, reward): (i64, f64)| {
                agent.report_reward(observer, reward)
            })
            // Both in one call: the reward of the last action, if there was one, and the next action.
            .add_quick("step", |agent, _, (observer, reward, observation): (i64, Option<f64>, Vec<f64>)| {
                reward.map_or(Ok(()), |reward| agent.report_reward(observer, reward))?;
                agent.select_action(observer, &observation)
            })
            .add("learn", |agent, _, observers: Vec<i64>| agent.learn(&observers))
            // What a call costs by itself.
            .add_quick("nothing", |_, _, ()| Ok(()));
    }
}

/// Offers the agent. Its arguments: the seed and the learning rate.
pub fn offer(registry: &mut Registry) {
    registry.object(NAME, |_, (seed, learning_rate): (i64, f64)| Agent::new(seed, learning_rate));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_episode(agent: &mut Agent, observer: i64, steps: usize) {
        for _ in 0..steps {
            agent.select_action(observer, &[0.0, 0.1, 0.0, -0.1]).expect("known");
            agent.report_reward(observer, 1.0).expect("of an action");
        }
    }

    #[test]
    fn the_running_reward_follows_the_worst_observer() {
        let mut agent = Agent::new(1, 0.01).expect("usable");
        run_episode(&mut agent, 0, 40);
        run_episode(&mut agent, 1, 20);
        assert_eq!(agent.learn(&[0, 1]), Ok((20.0, 1.0, 60)));
        run_episode(&mut agent, 0, 10);
        run_episode(&mut agent, 1, 30);
        assert_eq!(agent.learn(&[0, 1]), Ok((10.0, 0.05 * 10.0 + 0.95, 40)));
    }

    #[test]
    fn an_episode_that_was_broken_off_counts_for_nothing() {
        let mut agent = Agent::new(1, 0.01).expect("usable");
        run_episode(&mut agent, 0, 40);
        run_episode(&mut agent, 1, 3);
        assert_eq!(agent.learn(&[0]), Ok((40.0, 2.0, 40)));
        run_episode(&mut agent, 1, 10);
        assert_eq!(agent.learn(&[1]).expect("whole").2, 10, "the broken one is forgotten");
        assert!(agent.learn(&[]).is_err());
        assert!(agent.learn(&[7]).expect_err("it never came").to_string().contains("observer 7"));
    }

    #[test]
    fn calls_that_do_not_fit_are_refused() {
        let mut agent = Agent::new(1, 0.01).expect("usable");
        assert!(agent.select_action(0, &[0.0; 3]).expect_err("too short").to_string().contains("not 3"));
        assert!(agent.report_reward(0, 1.0).expect_err("no action").to_string().contains("for no action"));
    }
}
