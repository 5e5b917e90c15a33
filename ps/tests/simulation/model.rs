//! Gradients that leave their mark: whoever looks at parameters can count how many gradients of which trainer
//! are in them, and whether each is in them once.
//!
//! In Async and Bounded, where the order of updates is free, each block counts: gradient *s* of a trainer adds 1,
//! *s* and *s*² to three elements of its own. In Sync the gradients are odd numbers whose sum depends on the order and
//! on the parameters of another block, and a block must be, bit for bit, one of the states that one process goes through.

use psjobs_api::training::{Codec, ConsistencyMode, Local, Optimizer, OptimizerKind};
use psjobs_arithmetic::optimizer;
use psjobs_arithmetic::parameter_group::{ParameterGroup, Stretch};
use psjobs_ps::client::TensorSpec;
use psjobs_ps::layout::Layout;

use super::plan::Plan;

const LEARNING_RATE: f64 = 0.125;
const MOMENTUM: f64 = 0.5;
/// Numbers of the parameter group of the second tensor, in Sync.
const GROUP_RATE: f64 = 0.75;
const GROUP_DECAY: f64 = 0.0625;

/// The model of a job.
pub struct Model {
    pub layout: Layout,
    trainers: u32,
    steps: u64,
    /// Steps of a trainer for one exchange, of which the servers see the difference; 0 if there is one for each.
    local_steps: u32,
    /// The factor on a mark where a round takes the mean over the trainers.
    scale: f64,
    /// Batches that leave a mark of their own, in elastic jobs and those with backup trainers.
    batches: usize,
    optimizer: OptimizerKind,
    /// In Sync: the parameters after each step.
    states: Vec<Vec<f32>>,
}

/// By block and trainer: gradients that the block contains.
pub type Counts = Vec<Vec<u64>>;

impl Model {
    pub fn new(plan: &Plan) -> Self {
        let layout = Layout::new(&tensors(plan), plan.servers as usize).expect("not empty");
        let sync = plan.consistency.mode == ConsistencyMode::Sync;
        let backups = plan.consistency.backup_trainers > 0;
        let batches = plan.steps as usize * if backups { plan.trainers as usize } else { 1 };
        let (trainers, steps) = (plan.trainers, plan.steps);
        let local_steps = plan.local_steps;
        let optimizer = if local_steps > 0 { OptimizerKind::Sgd } else { plan.optimizer };
        let states = Vec::new();
        let mut model = Self { layout, trainers, steps, local_steps, scale: 1.0, batches, optimizer, states };
        // The rounding of a codec would have to be repeated here, and rows count with another optimizer; marks are exact.
        if sync && (plan.compression.codec != Codec::F32 || plan.beside) {
            model.scale = f64::from(plan.trainers);
        } else if plan.has_states() {
            let half = Stretch { range: 0..plan.elements / 2, group: ParameterGroup::default() };
            let rest = Stretch { range: plan.elements / 2..plan.elements, group: group(plan) };
            model.states = model.undisturbed(&[half, rest]);
        }
        model
    }

    pub fn optimizer(&self) -> Optimizer {
        if self.counts_only() {
            return Optimizer { learning_rate: 1.0, ..Optimizer::default() };
        }
        self.optimizer_with_state()
    }

    fn optimizer_with_state(&self) -> Optimizer {
        let has_momentum = matches!(self.optimizer, OptimizerKind::Sgd | OptimizerKind::RmsProp);
        Optimizer {
            kind: self.optimizer,
            learning_rate: LEARNING_RATE,
            momentum: if has_momentum { MOMENTUM } else { 0.0 },
            // The third slot.
            amsgrad: self.optimizer == OptimizerKind::Adam,
            centered: self.optimizer == OptimizerKind::RmsProp,
            ..Optimizer::default()
        }
    }

    /// The servers' rule where trainers make steps alone.
    pub fn local_steps(&self) -> Option<Local> {
        let Optimizer { learning_rate, momentum, .. } = self.optimizer();
        (self.local_steps > 0).then_some(Local {
            learning_rate,
            momentum: Some(momentum),
            ..Local::every(self.local_steps)
        })
    }

    pub fn initial(&self) -> Vec<f32> {
        self.states.first().cloned().unwrap_or_else(|| vec![0.0; self.layout.elements()])
    }

    /// The gradient of a trainer's step at `parameters`.
    pub fn fill(&self, trainer: u32, step: u64, parameters: &[f32], gradients: &mut [f32]) {
        if !self.counts_only() {
            gradients.iter_mut().enumerate().for_each(|(i, g)| *g = odd(trainer, step, i, parameters));
            return;
        }
        gradients.fill(0.0);
        for block in 0..self.layout.blocks() {
            for (g, add) in gradients[self.marks(block, trainer)].iter_mut().zip(moments(step)) {
                *g = (-add * self.scale) as f32;
            }
        }
    }

    /// The gradient of a batch with a mark of its own: it adds 1 to an element, or in Sync its share of a round.
    pub fn fill_batch(&self, batch: u64, gradients: &mut [f32]) {
        gradients.fill(0.0);
        for block in 0..self.layout.blocks() {
            gradients[self.layout.range(block).start + batch as usize] = -1.0;
        }
    }

    /// By block and batch: how much of it is in the parameters of a job in which batches have marks.
    pub fn batches(&self, parameters: &[f32]) -> Vec<Vec<f32>> {
        let of_block = |block| parameters[self.layout.range(block).start..][..self.batches].to_vec();
        (0..self.layout.blocks()).map(of_block).collect()
    }

    /// Counts the gradients in `parameters`.
    pub fn counts(&self, parameters: &[f32]) -> Result<Counts, String> {
        (0..self.layout.blocks()).map(|block| self.counts_of(block, parameters)).collect()
    }

    fn counts_of(&self, block: u32, parameters: &[f32]) -> Result<Vec<u64>, String> {
        if !self.counts_only() {
            let range = self.layout.range(block);
            let found = bits(&parameters[range.clone()]);
            let step = self.states.iter().position(|state| bits(&state[range.clone()]).eq(found.clone()));
            let step = step.ok_or_else(|| format!("block {block} is in no state of an undisturbed job"))?;
            return Ok(vec![step as u64; self.trainers as usize]);
        }
        let count = |trainer| {
            let marks: Vec<f64> = parameters[self.marks(block, trainer)].iter().map(|v| f64::from(*v)).collect();
            counted(&marks, self.steps).ok_or_else(|| {
                format!("block {block} holds {marks:?} of trainer {trainer}: not its first gradients once each")
            })
        };
        (0..self.trainers).map(count).collect()
    }

    fn counts_only(&self) -> bool {
        self.states.is_empty()
    }

    /// Where a trainer leaves its marks in a block.
    fn marks(&self, block: u32, trainer: u32) -> std::ops::Range<usize> {
        let start = self.layout.range(block).start + 3 * trainer as usize;
        start..start + 3
    }

    /// Returns the parameters after each step, of which the two `stretches` are in parameter groups.
    fn undisturbed(&self, stretches: &[Stretch; 2]) -> Vec<Vec<f32>> {
        let n = self.layout.elements();
        let (rule, mut weights) = (optimizer::Optimizer::new(&self.optimizer_with_state()), vec![1.0_f32; n]);
        let (mut state, mut momentum) = (rule.state(n), vec![0.0_f32; n]);
        let mut states = vec![weights.clone()];
        for step in 0..self.steps {
            let before = &states[step as usize];
            let mean = (0..n).map(|i| {
                let first = odd(0, step, i, before);
                let sum = (1..self.trainers).fold(first, |sum, trainer| sum + odd(trainer, step, i, before));
                sum / self.trainers as f32
            });
            if self.optimizer == OptimizerKind::Sgd {
                let half = stretches[0].range.end;
                for (i, ((w, m), mean)) in weights.iter_mut().zip(&mut momentum).zip(mean).enumerate() {
                    let group = &stretches[usize::from(i >= half)].group;
                    let mean = mean + group.weight_decay.unwrap_or_default() as f32 * *w;
                    *m = MOMENTUM as f32 * *m + mean;
                    // Local steps are applied with Nesterov momentum.
                    let along = if self.local_steps > 0 { mean + MOMENTUM as f32 * *m } else { *m };
                    *w -= (LEARNING_RATE * group.learning_rate_factor) as f32 * along;
                }
            } else {
                // The formulas of the others have tests of their own.
                let mean: Vec<[u8; 4]> = mean.map(f32::to_le_bytes).collect();
                rule.apply_by_group(&mut weights, &mean, &mut state, 1.0, stretches);
            }
            states.push(weights.clone());
        }
        states
    }
}

/// One tensor for each half, so that a tensor begins within a block.
pub fn tensors(plan: &Plan) -> Vec<TensorSpec> {
    let half = plan.elements as u64 / 2;
    let weight = TensorSpec { group: group(plan), ..TensorSpec::new("weight", vec![1, plan.elements as u64 - half]) };
    vec![TensorSpec::new("bias", vec![half]), weight]
}

/// Returns the parameter group of the second tensor.
fn group(plan: &Plan) -> ParameterGroup {
    if !plan.has_states() || plan.local_steps > 0 {
        return ParameterGroup::default();
    }
    // FTRL has no weight decay.
    let weight_decay = (plan.optimizer != OptimizerKind::Ftrl).then_some(GROUP_DECAY);
    ParameterGroup { learning_rate_factor: GROUP_RATE, weight_decay }
}

/// How many gradients left these marks, if they are the first of at most `most`, each once.
pub fn counted(marks: &[f64], most: u64) -> Option<u64> {
    let count = marks[0] as u64;
    let want = (0..count.min(most))
        .map(moments)
        .fold(vec![0.0; 3], |sum, more| sum.iter().zip(more).map(|(a, b)| a + b).collect());
    (marks == want).then_some(count)
}

/// Returns what gradient `step` adds to the three marks. Sums of them are exact in f32.
pub fn moments(step: u64) -> [f64; 3] {
    let s = step as f64;
    [1.0, s, s * s]
}

/// A number of varying size, for element `i`, that depends on an element of the other half.
fn odd(trainer: u32, step: u64, i: usize, parameters: &[f32]) -> f32 {
    let seed = (i as u32).wrapping_mul(0x9e37_79b1) ^ (step as u32).wrapping_mul(0x85eb_ca6b) ^ (trainer << 16);
    let hash = (seed ^ (seed >> 15)).wrapping_mul(0x2c1b_3c6d);
    let fraction = f32::from_bits(0x3f80_0000 | (hash >> 9)) - 1.5;
    let other = parameters[(i + parameters.len() / 2) % parameters.len()];
    fraction * [1e-3, 1.0, 1e3][hash as usize % 3] + other / 64.0
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> + Clone + '_ {
    values.iter().map(|value| value.to_bits())
}
