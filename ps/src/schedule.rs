//! The learning rate over time: a pure function of the step. The step is the one that travels with
//! a gradient, the trainer's own count: so a schedule means the same in every consistency mode and
//! for any number of trainers, and a restarted server needs no memory of it.

use std::f64::consts::PI;

use psjobs_api::training::{self, ScheduleKind};

/// A warm-up, then a shape. `factor` is what the job's learning rate is multiplied by.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Steps over which the factor rises linearly from 1/warmup to that of the shape; 0 for none.
    pub warmup: u64,
    /// The shape after the warm-up.
    pub shape: Shape,
}

/// How the learning rate falls.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Not at all.
    Constant,
    /// By `gamma` every `size` steps (PyTorch's StepLR).
    Step {
        /// Steps between two falls, at least 1; counted from step 0, through the warm-up.
        size: u64,
        /// Factor of one fall.
        gamma: f64,
    },
    /// Along half a cosine until step `total`, then it stays (PyTorch's CosineAnnealingLR until
    /// T_max, after which that one rises again).
    Cosine {
        /// Step at which the end is reached, warm-up included.
        total: u64,
        /// Factor at the end.
        end: f64,
    },
    /// Along a straight line until step `total`, then it stays.
    Linear {
        /// Step at which the end is reached, warm-up included.
        total: u64,
        /// Factor at the end.
        end: f64,
    },
}

impl Schedule {
    /// The learning rate as it is.
    pub const CONSTANT: Self = Self { warmup: 0, shape: Shape::Constant };

    /// Factor on the learning rate at `step`, counted from 0.
    #[must_use]
    pub fn factor(&self, step: u64) -> f64 {
        let warmup = if step < self.warmup { (step + 1) as f64 / self.warmup as f64 } else { 1.0 };
        warmup * self.shape.factor(step, self.warmup)
    }
}

impl From<&training::Schedule> for Schedule {
    fn from(spec: &training::Schedule) -> Self {
        let (total, end) = (spec.total_steps, spec.end);
        let shape = match spec.kind {
            ScheduleKind::Constant => Shape::Constant,
            ScheduleKind::Step => Shape::Step { size: spec.step_size, gamma: spec.gamma },
            ScheduleKind::Linear => Shape::Linear { total, end },
            ScheduleKind::Cosine => Shape::Cosine { total, end },
        };
        Self { warmup: spec.warmup_steps, shape }
    }
}

impl Shape {
    fn factor(&self, step: u64, warmup: u64) -> f64 {
        // Share of the way from the end of the warm-up to `total`.
        let way = |total: u64| match (step.saturating_sub(warmup), total.saturating_sub(warmup)) {
            (done, all) if done >= all => 1.0,
            (done, all) => done as f64 / all as f64,
        };
        match *self {
            Self::Constant => 1.0,
            Self::Step { size, gamma } => gamma.powf((step / size.max(1)) as f64),
            Self::Cosine { total, end } => end + (1.0 - end) * (1.0 + (PI * way(total)).cos()) / 2.0,
            Self::Linear { total, end } => 1.0 + (end - 1.0) * way(total),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifests_schedule_is_taken_field_by_field() {
        let fields = r#""stepSize": 30, "gamma": 0.2, "totalSteps": 100, "end": 0.1, "warmupSteps": 7"#;
        for (kind, shape) in [
            ("Constant", Shape::Constant),
            ("Step", Shape::Step { size: 30, gamma: 0.2 }),
            ("Linear", Shape::Linear { total: 100, end: 0.1 }),
            ("Cosine", Shape::Cosine { total: 100, end: 0.1 }),
        ] {
            let spec: training::Schedule =
                serde_json::from_str(&format!(r#"{{"type": "{kind}", {fields}}}"#)).expect("a schedule");
            assert_eq!(Schedule::from(&spec), Schedule { warmup: 7, shape }, "{kind}");
        }
    }

    #[test]
    fn factors_are_those_of_the_equations() {
        let step = Shape::Step { size: 30, gamma: 0.1 };
        let cosine = Shape::Cosine { total: 100, end: 0.1 };
        let linear = Shape::Linear { total: 110, end: 0.0 };
        for (label, warmup, shape, at, want) in [
            ("constant", 0, Shape::Constant, 1_000_000, 1.0),
            ("the first step of a warm-up moves already", 10, Shape::Constant, 0, 0.1),
            ("the last step of a warm-up has the full rate", 10, Shape::Constant, 9, 1.0),
            ("step before a fall", 0, step.clone(), 29, 1.0),
            ("step after two falls", 0, step.clone(), 60, 0.01),
            ("step falls are counted through the warm-up", 40, step, 30, 31.0 / 40.0 * 0.1),
            ("cosine at its start", 0, cosine.clone(), 0, 1.0),
            // PyTorch: CosineAnnealingLR(lr=1, T_max=100, eta_min=0.1) at epoch 25.
            ("cosine at a quarter", 0, cosine.clone(), 25, 0.868_198_051_533_946_4),
            ("cosine in the middle", 0, cosine.clone(), 50, 0.55),
            ("cosine at its end", 0, cosine.clone(), 100, 0.1),
            ("cosine stays at its end", 0, cosine, 150, 0.1),
            ("linear starts behind the warm-up", 10, linear.clone(), 10, 1.0),
            ("linear in the middle", 10, linear.clone(), 60, 0.5),
            ("linear at its end", 10, linear.clone(), 110, 0.0),
            ("a total within the warm-up", 200, linear, 200, 0.0),
        ] {
            let found = Schedule { warmup, shape }.factor(at);
            assert!((found - want).abs() < 1e-12, "{label}: {found}, want {want}");
        }
    }
}
