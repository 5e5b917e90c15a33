//! Builds the volume claim of spec.checkpoint, unless the user brings one, and mounts it in the servers' pods; or gives them
//! the credentials of an object store.

use k8s_openapi::api::core::v1::{
    Container, PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeClaimVolumeSource, PodSpec, Volume,
    VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use psjobs_api::crd::{CheckpointSpec, names};
use psjobs_api::env::Checkpoint;

use super::credentials;
use super::metadata::metadata;
use crate::controller::checkpoint_folder::{MOUNT_PATH, path_in_volume};
use crate::controller::validate::ValidJob;

const VOLUME: &str = "psjobs-checkpoints";

/// Builds the claim; `None` if the job keeps no checkpoints, or keeps them in a claim that exists.
pub fn claim(job: &ValidJob) -> Option<PersistentVolumeClaim> {
    let wanted = job.object.spec.checkpoint.as_ref()?.volume_claim.as_ref()?;
    let size = [("storage".to_owned(), Quantity(wanted.size.clone()))];
    Some(PersistentVolumeClaim {
        metadata: metadata(job, names::claim(&job.name)),
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec![wanted.access_mode.as_str().to_owned()]),
            storage_class_name: wanted.storage_class_name.clone(),
            resources: Some(VolumeResourceRequirements {
                requests: Some(size.into()),
                ..VolumeResourceRequirements::default()
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    })
}

/// Returns the part of a server's environment about checkpoints.
pub fn environment(job: &ValidJob, spec: &CheckpointSpec) -> Checkpoint {
    let folder = spec.object_store_folder(&job.name).unwrap_or_else(|| MOUNT_PATH.into());
    Checkpoint { folder, policy: spec.policy() }
}

/// Mounts the volume in a server's first container, or gives it the variables of the object store's Secret. Those of the
/// template count more.
pub fn mount(job: &ValidJob, spec: &CheckpointSpec, pod: &mut PodSpec) {
    let Some(claim_name) = spec.claim(&job.name) else {
        let secret = spec.object_store.as_ref().and_then(|store| store.secret.as_deref());
        if let (Some(name), Some(main)) = (secret, pod.containers.first_mut()) {
            credentials::give(main, name);
        }
        return;
    };
    let source = PersistentVolumeClaimVolumeSource { claim_name, ..PersistentVolumeClaimVolumeSource::default() };
    let volume = Volume { name: VOLUME.into(), persistent_volume_claim: Some(source), ..Volume::default() };
    pod.volumes.get_or_insert_default().push(volume);
    let sub_path = Some(path_in_volume(job).to_owned());
    let mount = VolumeMount { name: VOLUME.into(), mount_path: MOUNT_PATH.into(), sub_path, ..VolumeMount::default() };
    if let Some(Container { volume_mounts, .. }) = pod.containers.first_mut() {
        volume_mounts.get_or_insert_default().push(mount);
    }
}
