//! How fast the servers' optimizers run through memory: bytes a second that an update touches, over what
//! a loop that only scales an array in place moves on the same core in the same minute.

use std::hint::black_box;
use std::time::Instant;

use clap::Args;
use psjobs_api::training::{self, OptimizerKind};
use psjobs_arithmetic::optimizer::Optimizer;
use psjobs_ps::layout::BLOCK_ELEMENTS;

use crate::report::{Case, say};

/// Bytes/s that updates touch, over those of a loop that only scales an array
#[derive(Debug, Args)]
pub struct OptimizersArgs {
    /// Parameters in millions; enough that no cache holds them
    #[arg(long, value_name = "M", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    millions: u32,
}

/// Passes over the parameters that one measurement takes the mean of.
const PASSES: u32 = 4;

impl OptimizersArgs {
    pub fn measure(&self, runs: u32) -> Vec<Case> {
        let kinds = [
            ("sgd", OptimizerKind::Sgd, 0.0),
            ("sgd-momentum", OptimizerKind::Sgd, 0.9),
            ("adam", OptimizerKind::Adam, 0.0),
            ("adamw", OptimizerKind::AdamW, 0.0),
            ("adagrad", OptimizerKind::Adagrad, 0.0),
            ("rmsprop", OptimizerKind::RmsProp, 0.0),
            ("ftrl", OptimizerKind::Ftrl, 0.0),
        ];
        kinds.into_iter().map(|(case, kind, momentum)| self.case(case, kind, momentum, runs)).collect()
    }

    fn case(&self, case: &'static str, kind: OptimizerKind, momentum: f64, runs: u32) -> Case {
        let spec = training::Optimizer { kind, momentum, learning_rate: 1e-6, ..training::Optimizer::default() };
        let optimizer = Optimizer::new(&spec);
        let blocks = (self.millions as usize * 1_000_000).div_ceil(BLOCK_ELEMENTS);
        let mut weights = vec![vec![1.0_f32; BLOCK_ELEMENTS]; blocks];
        let mut states: Vec<_> = (0..blocks).map(|_| optimizer.state(BLOCK_ELEMENTS)).collect();
        let gradient = vec![vec![0.5_f32.to_le_bytes(); BLOCK_ELEMENTS]; blocks];
        let mut scaled = vec![vec![1.0_f32; BLOCK_ELEMENTS]; blocks];
        let elements = (blocks * BLOCK_ELEMENTS) as f64 * f64::from(PASSES);
        let (mut values, mut limits) = (Vec::new(), Vec::new());
        for run in 1..=runs {
            say(&format!("optimizers {case}: run {run} of {runs}"));
            let start = Instant::now();
            for _ in 0..PASSES {
                for block in &mut scaled {
                    black_box(block.as_mut_slice()).iter_mut().for_each(|value| *value *= 0.999);
                }
            }
            limits.push(gigabytes(8.0, elements, start));
            let start = Instant::now();
            for _ in 0..PASSES {
                for ((weights, gradient), state) in weights.iter_mut().zip(&gradient).zip(&mut states) {
                    optimizer.apply(weights, gradient, state, 1.0);
                }
            }
            // The gradient is read; weights and every slot are read and written.
            let touched = 4.0 + 8.0 * (1 + optimizer.slots()) as f64;
            values.push(gigabytes(touched, elements, start));
        }
        Case::new("optimizers", case, "GB/s", &values, &limits)
    }
}

fn gigabytes(bytes_an_element: f64, elements: f64, since: Instant) -> f64 {
    bytes_an_element * elements / since.elapsed().as_secs_f64() / 1e9
}
