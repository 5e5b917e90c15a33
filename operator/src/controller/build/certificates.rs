//! Builds the Secret of spec.network.mutualTLS, with certificates of the job's own, and mounts it in the job's pods.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Container, PodSpec, Secret, SecretVolumeSource, Volume, VolumeMount};
use psjobs_api::certificates::{Certificates, LIFE, MakeError};
use psjobs_api::crd::names;

use super::metadata::metadata;
use crate::controller::validate::ValidJob;

const VOLUME: &str = "psjobs-certificates";
/// Type of the Secret.
pub const SECRET_TYPE: &str = "kubernetes.io/tls";
/// Path of the folder in the containers.
pub const FOLDER: &str = "/etc/psjobs/tls";
/// Mode of the files: readable for the pod's group, which a process has whatever its user is.
const MODE: i32 = 0o440;

/// Builds the Secret, with other certificates each time; `None` if the job's pods talk without TLS.
pub fn secret(job: &ValidJob, now: Timestamp) -> Result<Option<Secret>, MakeError> {
    let Some(name) = job.certificates() else { return Ok(None) };
    let certificates = Certificates::make(&[names::hosts(&job.name, &job.namespace)], now.into(), LIFE)?;
    let files = certificates.files().map(|(name, text)| (name.to_owned(), ByteString(text.into())));
    Ok(Some(Secret {
        metadata: metadata(job, name),
        type_: Some(SECRET_TYPE.into()),
        immutable: Some(true),
        data: Some(BTreeMap::from(files)),
        string_data: None,
    }))
}

/// Mounts the Secret in a pod's first container.
pub fn mount(secret: String, pod: &mut PodSpec) {
    let source =
        SecretVolumeSource { secret_name: Some(secret), default_mode: Some(MODE), ..SecretVolumeSource::default() };
    let volume = Volume { name: VOLUME.into(), secret: Some(source), ..Volume::default() };
    pod.volumes.get_or_insert_default().push(volume);
    let read_only = Some(true);
    let mount = VolumeMount { name: VOLUME.into(), mount_path: FOLDER.into(), read_only, ..VolumeMount::default() };
    if let Some(Container { volume_mounts, .. }) = pod.containers.first_mut() {
        volume_mounts.get_or_insert_default().push(mount);
    }
}
