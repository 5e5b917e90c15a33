//! The fields of a job's spec that are policy.

use psjobs_api::crd::{
    FailurePolicy, ParameterServerJobSpec, RestartPolicy, SchedulingBackend, SchedulingPolicy, StartupPolicy,
};

use crate::deadlines::Deadlines;
use crate::elastic::Elastic;
use crate::success_policy::Success;

/// A job's policy: the part of its spec that decides what follows from failures, successes and time.
#[derive(Clone, Debug, PartialEq)]
pub struct JobPolicy {
    /// spec.ps.restartPolicy.
    pub server_restart_policy: RestartPolicy,
    /// spec.trainer.restartPolicy.
    pub trainer_restart_policy: RestartPolicy,
    /// spec.failurePolicy.maxRestarts.
    pub max_restarts: u32,
    /// Rules, strategy and back-off of spec.failurePolicy.
    pub failure_policy: FailurePolicy,
    /// spec.successPolicy.
    pub success: Success,
    /// spec.startupPolicy.
    pub startup_policy: StartupPolicy,
    /// A scheduler places all replicas before any of them starts, so that none may wait for another.
    pub scheduled_together: bool,
    /// spec.elasticPolicy.
    pub elastic: Option<Elastic>,
    /// The deadlines of spec.runPolicy.
    pub deadlines: Deadlines,
}

impl JobPolicy {
    /// Reads the policy of a spec whose numbers are in the ranges of the definition.
    #[must_use]
    pub fn new(spec: &ParameterServerJobSpec) -> Self {
        Self {
            server_restart_policy: spec.ps.restart_policy,
            trainer_restart_policy: spec.trainer.restart_policy,
            max_restarts: spec.failure_policy.max_restarts.unsigned_abs(),
            failure_policy: spec.failure_policy.clone(),
            success: Success::new(&spec.success_policy),
            startup_policy: spec.startup_policy,
            // A server in the pod of a trainer starts with it.
            scheduled_together: spec.is_colocated() || spec.scheduling_policy.as_ref().is_some_and(schedules_together),
            elastic: spec.elastic_policy.as_ref().map(Elastic::new),
            deadlines: Deadlines::new(&spec.run_policy),
        }
    }
}

fn schedules_together(policy: &SchedulingPolicy) -> bool {
    policy.queue.is_some() || policy.backend.is_some_and(|backend| backend != SchedulingBackend::None)
}
