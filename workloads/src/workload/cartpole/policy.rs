//! The policy 4-128-2 with dropout .6, trained by REINFORCE (Williams, 1992). While an episode runs an
//! action is chosen by plain arithmetic, which is quick for a single observation; what was dropped is
//! remembered, so that all steps of a round go through libtorch at once when the policy learns.

use rand::Rng;
use tch::nn::{self, Module as _, OptimizerConfig as _};
use tch::{Device, Kind, TchError, Tensor};

use super::physics::{ACTIONS, Observation};

const HIDDEN: usize = 128;
const DROPOUT: f64 = 0.6;
/// A unit is kept if a 16-bit draw is below this.
const KEEP_BELOW: u16 = ((1.0 - DROPOUT) * 65_536.0) as u16;
/// Scales the units that are kept, so that sums stay what they are without dropout.
const KEPT_SCALE: f32 = (1.0 / (1.0 - DROPOUT)) as f32;
const GAMMA: f64 = 0.99;

/// The inputs of a step, enough to compute it again.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    observation: Observation,
    /// Bit `i` is set where hidden unit `i` was kept.
    kept: u128,
    pub action: usize,
}

/// The steps of one episode, and the reward of each.
#[derive(Clone, Debug, Default)]
pub struct Episode {
    pub decisions: Vec<Decision>,
    pub rewards: Vec<f64>,
}

pub struct Policy {
    hidden: nn::Linear,
    output: nn::Linear,
    optimizer: nn::Optimizer,
    fast: Fast,
}

/// The weights where plain arithmetic finds them.
#[derive(Debug)]
struct Fast {
    /// For each hidden unit: the weights of the observation, its bias, and its weight to each action.
    units: Vec<([f32; 4], f32, [f32; ACTIONS])>,
    bias: [f32; ACTIONS],
}

impl Policy {
    /// Initial values as PyTorch draws them; Adam with `learning_rate`.
    ///
    /// # Errors
    /// If libtorch refuses the optimizer's arguments.
    pub fn new(seed: i64, learning_rate: f64) -> Result<Self, TchError> {
        tch::manual_seed(seed);
        let store = nn::VarStore::new(Device::Cpu);
        let linear = |name: &str, inputs: usize, outputs: usize| {
            let bound = 1.0 / (inputs as f64).sqrt();
            let init = nn::Init::Uniform { lo: -bound, up: bound };
            let config = nn::LinearConfig { ws_init: init, bs_init: Some(init), bias: true };
            nn::linear(&store.root() / name, inputs as i64, outputs as i64, config)
        };
        let (hidden, output) = (linear("hidden", 4, HIDDEN), linear("output", HIDDEN, ACTIONS));
        let optimizer = nn::Adam::default().build(&store, learning_rate)?;
        let fast = Fast::of(&hidden, &output);
        Ok(Self { hidden, output, optimizer, fast })
    }

    /// Draws what is dropped and then an action, by the policy's probabilities.
    pub fn choose(&self, observation: Observation, random: &mut impl Rng) -> Decision {
        let mut draws = [0_u16; HIDDEN];
        random.fill(&mut draws);
        let kept = draws.iter().enumerate().fold(0, |kept, (i, draw)| kept | u128::from(*draw < KEEP_BELOW) << i);
        let [left, right] = self.fast.scores(observation, kept);
        let probability_of_left = 1.0 / (1.0 + (right - left).exp());
        let action = usize::from(random.random::<f32>() >= probability_of_left);
        Decision { observation, kept, action }
    }

    /// One step of Adam along the rewards to come, of all episodes together: discounted within each
    /// episode, then normalised over all steps. Gives the loss.
    pub fn learn(&mut self, episodes: &[Episode]) -> f64 {
        let decisions: Vec<_> = episodes.iter().flat_map(|episode| &episode.decisions).collect();
        let returns: Vec<_> = episodes.iter().flat_map(|episode| discounted(&episode.rewards)).collect();
        let returns = Tensor::from_slice(&normalised(&returns)).to_kind(Kind::Float);
        let loss = -(self.log_probabilities(&decisions) * returns).sum(Kind::Float);
        self.optimizer.backward_step(&loss);
        self.fast = Fast::of(&self.hidden, &self.output);
        loss.double_value(&[])
    }

    /// The logarithm of the probability of every action that was taken, `[n]`.
    fn log_probabilities(&self, decisions: &[&Decision]) -> Tensor {
        let count = decisions.len() as i64;
        let observations: Vec<f32> = decisions.iter().flat_map(|d| d.observation).collect();
        let actions: Vec<i64> = decisions.iter().map(|d| d.action as i64).collect();
        let scale = |kept: u128, i: usize| if kept >> i & 1 == 1 { KEPT_SCALE } else { 0.0 };
        let masks: Vec<f32> = decisions.iter().flat_map(|d| (0..HIDDEN).map(move |i| scale(d.kept, i))).collect();
        let observations = Tensor::from_slice(&observations).view([count, 4]);
        let masks = Tensor::from_slice(&masks).view([count, HIDDEN as i64]);
        let hidden = (self.hidden.forward(&observations) * masks).relu();
        let scores = self.output.forward(&hidden).log_softmax(-1, Kind::Float);
        scores.gather(1, &Tensor::from_slice(&actions).view([count, 1]), false).view([count])
    }
}

impl Fast {
    fn of(hidden: &nn::Linear, output: &nn::Linear) -> Self {
        let values = |tensor: &Tensor| {
            let mut values = vec![0.0_f32; tensor.numel()];
            tensor.copy_data(&mut values, tensor.numel());
            values
        };
        let bias = |layer: &nn::Linear| layer.bs.as_ref().map(values).expect("both layers have a bias");
        let (to_hidden, to_output) = (values(&hidden.ws), values(&output.ws));
        let unit = |(i, bias): (usize, f32)| {
            (to_hidden.as_chunks().0[i], bias, std::array::from_fn(|action| to_output[action * HIDDEN + i]))
        };
        let units = bias(hidden).into_iter().enumerate().map(unit).collect();
        let bias = bias(output);
        Self { units, bias: std::array::from_fn(|action| bias[action]) }
    }

    fn scores(&self, observation: Observation, kept: u128) -> [f32; ACTIONS] {
        let mut scores = self.bias;
        for (i, (weights, bias, out)) in self.units.iter().enumerate() {
            if kept >> i & 1 == 0 {
                continue;
            }
            let sum: f32 = weights.iter().zip(observation).map(|(w, x)| w * x).sum();
            let value = ((sum + bias) * KEPT_SCALE).max(0.0);
            scores.iter_mut().zip(out).for_each(|(score, weight)| *score += value * weight);
        }
        scores
    }
}

/// The reward of each step plus that of all later ones, each later step counting [`GAMMA`] of the one
/// before.
fn discounted(rewards: &[f64]) -> Vec<f64> {
    let mut sums: Vec<f64> = rewards
        .iter()
        .rev()
        .scan(0.0, |sum, reward| {
            *sum = reward + GAMMA * *sum;
            Some(*sum)
        })
        .collect();
    sums.reverse();
    sums
}

/// Shifted to mean 0 and scaled to standard deviation 1 (of a sample, as PyTorch's `std`).
fn normalised(values: &[f64]) -> Vec<f64> {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    values.iter().map(|v| (v - mean) / (variance.sqrt() + f64::from(f32::EPSILON))).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn softmax_of(policy: &Policy, decision: &Decision) -> f64 {
        let scores = policy.fast.scores(decision.observation, decision.kept).map(f64::from);
        (scores[decision.action] - scores.map(f64::exp).iter().sum::<f64>().ln()).exp()
    }

    #[test]
    fn a_choice_has_the_probability_that_learning_gives_it() {
        let mut policy = Policy::new(3, 0.01).expect("usable");
        let mut random = ChaCha8Rng::seed_from_u64(5);
        for _ in 0..3 {
            let observe = |random: &mut ChaCha8Rng| std::array::from_fn(|_| random.random_range(-1.0..1.0));
            let decisions: Vec<_> = (0..50).map(|_| policy.choose(observe(&mut random), &mut random)).collect();
            let together = policy.log_probabilities(&decisions.iter().collect::<Vec<_>>());
            for (i, decision) in decisions.iter().enumerate() {
                let (alone, together) = (softmax_of(&policy, decision), together.double_value(&[i as i64]).exp());
                assert!((alone - together).abs() < 1e-5, "{alone} and {together}");
            }
            // The weights for choosing follow those that learned.
            policy.learn(&[Episode { rewards: vec![1.0; decisions.len()], decisions }]);
        }
    }

    #[test]
    fn four_of_ten_units_are_kept_and_actions_follow_their_probabilities() {
        let policy = Policy::new(3, 0.01).expect("usable");
        let mut random = ChaCha8Rng::seed_from_u64(6);
        let (mut kept, mut right, mut expected) = (0, 0, 0.0);
        for _ in 0..20_000 {
            let decision = policy.choose([1.0, -2.0, 0.5, 3.0], &mut random);
            kept += decision.kept.count_ones();
            right += decision.action;
            expected += softmax_of(&policy, &Decision { action: 1, ..decision });
        }
        let share = f64::from(kept) / (20_000.0 * HIDDEN as f64);
        assert!((share - 0.4).abs() < 0.002, "{share} of the units were kept");
        assert!((right as f64 - expected).abs() < 4.0 * 5000_f64.sqrt(), "{right} to the right, expected {expected}");
    }

    #[test]
    fn returns_are_discounted_and_normalised() {
        let sums = discounted(&[1.0, 1.0, 1.0]);
        for (found, want) in sums.iter().zip([1.0 + 0.99 * 1.99, 1.99, 1.0]) {
            assert!((found - want).abs() < 1e-12, "{found} should be {want}");
        }
        let normal = normalised(&[1.0, 2.0, 3.0]);
        for (found, want) in normal.iter().zip([-1.0, 0.0, 1.0]) {
            assert!((found - want).abs() < 1e-6, "{found} should be {want}");
        }
        assert_eq!(normalised(&[5.0]), [0.0], "a single step has nothing to compare with");
    }

    #[test]
    fn learning_makes_what_was_rewarded_more_likely() {
        let mut policy = Policy::new(3, 0.01).expect("usable");
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let observation = [0.1, 0.2, -0.1, 0.0];
        let share_of_right = |policy: &Policy, random: &mut ChaCha8Rng| {
            (0..1000).map(|_| policy.choose(observation, random).action).sum::<usize>()
        };
        let before = share_of_right(&policy, &mut random);
        for _ in 0..30 {
            let decisions: Vec<_> = (0..64).map(|_| policy.choose(observation, &mut random)).collect();
            // An episode for each step, so that no reward counts for another's action.
            let episodes: Vec<_> =
                decisions.into_iter().map(|d| Episode { rewards: vec![d.action as f64], decisions: vec![d] }).collect();
            policy.learn(&episodes);
        }
        let after = share_of_right(&policy, &mut random);
        assert!(after > 950 && after > before, "{before} of 1000 before, {after} after");
    }
}
