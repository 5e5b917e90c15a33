//! Names and labels of what a job owns. Pod names are a function of job, role and index, so that
//! creating a pod twice is refused by the API server.

use crate::role::Role;

/// Label with the job's name.
pub const LABEL_JOB: &str = "psjobs.dev/job-name";
/// Label with the role, `ps` or `trainer`.
pub const LABEL_ROLE: &str = "psjobs.dev/role";
/// Label with the index in the role.
pub const LABEL_INDEX: &str = "psjobs.dev/index";
/// Label of a job with the name of the operators that take care of it; without it those without a name do. A job's pods
/// have it too.
pub const LABEL_SHARD: &str = "psjobs.dev/shard";
/// Annotation with the number of earlier pods of this replica.
pub const ANNOTATION_INCARNATION: &str = "psjobs.dev/incarnation";
/// Annotation with the number of earlier pods of this replica that failed.
pub const ANNOTATION_FAILURES: &str = "psjobs.dev/failures";
/// Annotation with the number of earlier pods of this replica that ended before their time, in a row.
pub const ANNOTATION_FAILURES_IN_A_ROW: &str = "psjobs.dev/failures-in-a-row";
/// Annotation with the incarnation of the newest earlier pod of this replica whose program failed, if one did.
pub const ANNOTATION_FAILED_INCARNATION: &str = "psjobs.dev/failed-incarnation";
/// Label of a pod that has a server beside its trainer; the value is `Colocated`. Its role is that of the trainer.
pub const LABEL_PLACEMENT: &str = "psjobs.dev/placement";
/// As [`ANNOTATION_FAILURES`], of the server beside a trainer.
pub const ANNOTATION_SERVER_FAILURES: &str = "psjobs.dev/server-failures";
/// As [`ANNOTATION_FAILURES_IN_A_ROW`], of the server beside a trainer.
pub const ANNOTATION_SERVER_FAILURES_IN_A_ROW: &str = "psjobs.dev/server-failures-in-a-row";
/// As [`ANNOTATION_FAILED_INCARNATION`], of the server beside a trainer.
pub const ANNOTATION_SERVER_FAILED_INCARNATION: &str = "psjobs.dev/server-failed-incarnation";
/// Name of the server's container in such a pod.
pub const SERVER_CONTAINER: &str = "psjobs-server";
/// Value of `app.kubernetes.io/managed-by`.
pub const MANAGED_BY: &str = "psjobs";

/// `mnist-trainer-0`.
#[must_use]
pub fn pod(job: &str, role: Role, index: u32) -> String {
    format!("{job}-{role}-{index}")
}

/// Name of the headless service that gives the pods their host names: the job's name.
#[must_use]
pub fn service(job: &str) -> String {
    job.to_owned()
}

/// `mnist-checkpoints`: the volume claim of spec.checkpoint.volumeClaim.
#[must_use]
pub fn claim(job: &str) -> String {
    format!("{job}-checkpoints")
}

/// `mnist-0`: what schedules the job's pods together, a new one each time that all of them start anew,
/// because one whose pods have been scheduled lets later ones in one by one.
#[must_use]
pub fn pod_group(job: &str, first_incarnation: u32) -> String {
    format!("{job}-{first_incarnation}")
}

/// `mnist-tls-0b6c1d2e-0`: the Secret with the certificates of the pods that start with this incarnation. A part of
/// the job's uid keeps the Secret of an earlier job of this name from being taken for it.
#[must_use]
pub fn certificates(job: &str, uid: &str, first_incarnation: u32) -> String {
    format!("{job}-tls-{}-{first_incarnation}", uid.get(..8).unwrap_or(uid))
}

/// `mnist-tls-0b6c1d2e-0-1f2e3d4c`: another name for the Secret of [`certificates`], where somebody else has made one of
/// that name; the end is random.
#[must_use]
pub fn other_certificates(job: &str, uid: &str, first_incarnation: u32, random: u32) -> String {
    format!("{}-{random:08x}", certificates(job, uid, first_incarnation))
}

/// `*.mnist.default.svc`: all hosts of [`host`].
#[must_use]
pub fn hosts(job: &str, namespace: &str) -> String {
    format!("*.{}.{namespace}.svc", service(job))
}

/// `mnist-ps-0.mnist.default.svc`: resolvable in any cluster domain.
#[must_use]
pub fn host(job: &str, namespace: &str, role: Role, index: u32) -> String {
    format!("{}.{}.{namespace}.svc", pod(job, role, index), service(job))
}

/// Label selector of the pods of one role.
#[must_use]
pub fn selector(job: &str, role: Role) -> String {
    format!("{LABEL_JOB}={job},{LABEL_ROLE}={role}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_name_fits_a_host_label() {
        assert_eq!(pod(&"x".repeat(50), Role::Trainer, 4095).len(), 63);
    }
}
