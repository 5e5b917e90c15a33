//! The result files that processes leave when they have done their work.

use std::collections::BTreeMap;
use std::fs;

use psjobs_api::{Replica, ReplicaResult};

use super::plan::Plan;

/// The results that were found.
pub type Results = BTreeMap<Replica, ReplicaResult>;

/// Reads the result of a process. One that failed has written none.
pub fn read(plan: &Plan, replica: Replica) -> Option<ReplicaResult> {
    ReplicaResult::parse(&fs::read_to_string(plan.result_file(replica)).ok()?)
}

/// Reads the results that there are.
pub fn read_all(plan: &Plan) -> Results {
    plan.replicas().filter_map(|replica| Some((replica, read(plan, replica)?))).collect()
}
