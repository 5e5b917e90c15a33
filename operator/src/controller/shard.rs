//! Shards: several operators share a cluster's jobs by the label psjobs.dev/shard. Each watches the jobs with its own
//! name there, and their pods.

use kube::{Resource, ResourceExt as _};
use psjobs_api::crd::names;

/// Name of this operator's shard; without a name the operator manages the jobs without the label.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard(pub Option<String>);

impl Shard {
    /// Returns the label selector of the shard's objects. No object is in two shards.
    pub fn selector(&self) -> String {
        match &self.0 {
            Some(name) => format!("{}={name}", names::LABEL_SHARD),
            None => format!("!{}", names::LABEL_SHARD),
        }
    }

    /// Returns whether an object has the label of this shard.
    pub fn has(&self, object: &impl Resource) -> bool {
        object.labels().get(names::LABEL_SHARD) == self.0.as_ref()
    }
}

/// Returns whether two objects have the same shard label.
pub fn same(one: &impl Resource, other: &impl Resource) -> bool {
    one.labels().get(names::LABEL_SHARD) == other.labels().get(names::LABEL_SHARD)
}
