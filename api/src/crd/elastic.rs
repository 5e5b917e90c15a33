//! `spec.elasticPolicy`: how far a job may grow and shrink while it trains.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Between how many trainers the job may have while it trains. With it
/// `kubectl scale psjob/NAME --replicas=N`, or an autoscaler, changes spec.trainer.replicas of a running
/// job: trainers join and leave, and no other process is started again. A trainer that is lost for good (its
/// restarts are used up, or no node takes it for schedulingPolicy.scheduleTimeoutSeconds) makes the job
/// smaller instead of failing it, as long as minReplicas are left. The job's work is dealt out to
/// whoever is there: more trainers make it shorter, and each example of an epoch is read by one of them.
/// Example: `{minReplicas: 2, maxReplicas: 8}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ElasticPolicy {
    /// Trainers that the job needs to train, 1 to 4096: with fewer it waits for them, and when one of
    /// the last is lost for good it fails. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 4096))]
    pub min_replicas: i32,
    /// Trainers that the job may ever have, 1 to 4096. All its processes know this number from their
    /// start (PSJOB_TRAINERS), so that none has to change when the job does.
    #[schemars(range(min = 1, max = 4096))]
    pub max_replicas: i32,
}

fn one() -> i32 {
    1
}
