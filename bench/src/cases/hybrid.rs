//! Measures the cost of servers and ring for a model of clicks: steps a second of two trainers with their table on a
//! server and their dense layers in a ring, over twice those of one process that has both in its own memory. One
//! thread each.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::job;
use crate::report::Case;

/// Steps/s of two trainers with sparse tables and all-reduce, over twice one local loop's
#[derive(Debug, Args)]
pub struct HybridArgs {
    /// Steps of each process in each run
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Examples that a trainer reads in one step
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_size: u32,
    /// The psjobs-worker to measure [default: the one beside psjobs, or on PATH]
    #[arg(long, value_name = "PATH", env = "PSJOBS_WORKER")]
    worker: Option<PathBuf>,
}

impl HybridArgs {
    pub fn measure(&self, runs: u32) -> anyhow::Result<Vec<Case>> {
        let worker = job::worker(self.worker.as_deref())?;
        // The layers of DLRM's own benchmark on Criteo's logs. Evaluation is not part of what is measured.
        let train = format!(
            "train recsys --lower 512,256 --upper 512,256 --max-steps {} --batch-size {} --held-out 1",
            self.steps, self.batch_size
        );
        let training = json!({
            "consistency": {"mode": "Sync"},
            "optimizer": {"type": "Adagrad", "learningRate": 0.05},
        });
        let [together, alone] = job::Pair::new("bench-hybrid", training, 2, &train)?.measure(&worker, runs)?;
        let alone: Vec<f64> = alone.into_iter().map(|rate| 2.0 * rate).collect();
        Ok(vec![Case::new("hybrid", "2-trainers-1-server", "steps/s", &together, &alone)])
    }
}
