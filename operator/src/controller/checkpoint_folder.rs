//! Where a job's checkpoints are: the path that servers see, and the path in the volume.

use super::validate::ValidJob;

/// Path of the job's folder in the servers' containers.
pub const MOUNT_PATH: &str = "/checkpoints";

/// Path of the job's folder in the volume.
pub fn path_in_volume(job: &ValidJob) -> &str {
    job.object.spec.checkpoint.as_ref().map_or(job.name.as_str(), |spec| spec.folder(&job.name))
}

/// Converts a path that a server reports to the path in the volume, where users find it.
pub fn in_volume(job: &ValidJob, path: &str) -> String {
    match path.strip_prefix(MOUNT_PATH).map(|below| below.trim_start_matches('/')) {
        Some(below) => format!("{}/{below}", path_in_volume(job)),
        None => path.to_owned(),
    }
}
