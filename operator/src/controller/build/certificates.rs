//! Builds the Secret of spec.network.mutualTLS, with certificates of the job's own, and mounts in each pod the part of its
//! role. It is one Secret and not one for each role, because the authority's key is not kept: two that are not made
//! together could not be completed after a crash between them.

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Container, KeyToPath, PodSpec, Secret, SecretVolumeSource, Volume, VolumeMount};
use psjobs_api::Role;
use psjobs_api::certificates::{AUTHORITY, CERTIFICATE, Certificates, Identity, KEY, LIFE, MakeError};
use psjobs_api::crd::names;

use super::metadata::metadata;
use crate::controller::validate::ValidJob;

const VOLUME: &str = "psjobs-certificates";
/// Type of the Secret. That of Kubernetes for TLS holds one certificate only.
pub const SECRET_TYPE: &str = "psjobs.dev/certificates";
/// Path of the folder in the containers.
pub const FOLDER: &str = "/etc/psjobs/tls";
/// Mode of the files: readable for the pod's group, which a process has whatever its user is.
const MODE: i32 = 0o440;

/// Builds the Secret, with other certificates each time; `None` if the job's pods talk without TLS.
pub fn secret(job: &ValidJob, now: Timestamp) -> Result<Option<Secret>, MakeError> {
    let Some(name) = job.certificates() else { return Ok(None) };
    let certificates = Certificates::make(&[names::hosts(&job.name, &job.namespace)], now.into(), LIFE)?;
    let files = [Role::Server, Role::Trainer].into_iter().flat_map(|role| {
        let Identity { certificate, key } = certificates.of(role);
        [(certificate_key(role), certificate), (private_key(role), key)]
    });
    let files = files.chain([(AUTHORITY.to_owned(), &certificates.authority)]);
    let data = files.map(|(name, text)| (name, ByteString(text.clone().into_bytes()))).collect();
    Ok(Some(Secret {
        metadata: metadata(job, name),
        type_: Some(SECRET_TYPE.into()),
        immutable: Some(true),
        data: Some(data),
        string_data: None,
    }))
}

/// Returns the key in the Secret's data of the certificate of `role`.
fn certificate_key(role: Role) -> String {
    format!("{role}.crt")
}

/// Returns the key in the Secret's data of the private key of `role`.
fn private_key(role: Role) -> String {
    format!("{role}.key")
}

/// Mounts the authority and the certificate and key of `role` in the first container of a pod of that role.
pub fn mount(secret: String, role: Role, pod: &mut PodSpec) {
    let files = [(AUTHORITY.to_owned(), AUTHORITY), (certificate_key(role), CERTIFICATE), (private_key(role), KEY)];
    let items = files.map(|(key, path)| KeyToPath { key, path: path.to_owned(), mode: None });
    let source = SecretVolumeSource {
        secret_name: Some(secret),
        default_mode: Some(MODE),
        items: Some(items.into()),
        ..SecretVolumeSource::default()
    };
    let volume = Volume { name: VOLUME.into(), secret: Some(source), ..Volume::default() };
    pod.volumes.get_or_insert_default().push(volume);
    let read_only = Some(true);
    let mount = VolumeMount { name: VOLUME.into(), mount_path: FOLDER.into(), read_only, ..VolumeMount::default() };
    if let Some(Container { volume_mounts, .. }) = pod.containers.first_mut() {
        volume_mounts.get_or_insert_default().push(mount);
    }
}
