//! Defaults for fields that a pod's template does not set: no rights that training does not need.

use k8s_openapi::api::core::v1::{
    Capabilities, Container, EmptyDirVolumeSource, PodSecurityContext, PodSpec, SeccompProfile, SecurityContext,
    Volume, VolumeMount,
};

/// User and group that own no file of an image.
pub(super) const NON_ROOT: i64 = 65_532;

/// The writable folder next to a read-only root file system.
const SCRATCH: (&str, &str) = ("psjobs-tmp", "/tmp");

/// Shared memory, through which data loaders such as PyTorch's pass batches; a container has 64 MiB of it by default.
const SHARED_MEMORY: (&str, &str) = ("psjobs-shm", "/dev/shm");

/// Gives the first container shared memory as large as the pod's memory limit, else as its node has, unless the
/// template brings its own.
pub fn share_memory(spec: &mut PodSpec) {
    let Some(main) = spec.containers.first_mut() else { return };
    let mounts = main.volume_mounts.get_or_insert_default();
    if mounts.iter().any(|mount| mount.mount_path.trim_end_matches('/') == SHARED_MEMORY.1) {
        return;
    }
    let (name, mount_path) = (SHARED_MEMORY.0.to_owned(), SHARED_MEMORY.1.to_owned());
    mounts.push(VolumeMount { name: name.clone(), mount_path, ..VolumeMount::default() });
    let empty_dir = Some(EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: None });
    spec.volumes.get_or_insert_default().push(Volume { name, empty_dir, ..Volume::default() });
}

/// Fills in the fields that the template does not set.
pub fn apply(spec: &mut PodSpec) {
    spec.enable_service_links.get_or_insert(false);
    spec.automount_service_account_token.get_or_insert(false);
    secure_pod(spec);

    let mut scratch = false;
    let init = spec.init_containers.iter_mut().flatten();
    for container in spec.containers.iter_mut().chain(init) {
        secure_container(container);
        scratch |= add_scratch(container);
    }
    let volumes = spec.volumes.get_or_insert_default();
    if scratch && volumes.iter().all(|volume| volume.name != SCRATCH.0) {
        let empty_dir = Some(EmptyDirVolumeSource::default());
        volumes.push(Volume { name: SCRATCH.0.into(), empty_dir, ..Volume::default() });
    }
}

fn secure_pod(spec: &mut PodSpec) {
    // No runAsNonRoot where a container asks for root: it would only keep the pod from starting.
    let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let root = |context: Option<i64>| context == Some(0);
    let asks_for_root = all.flat_map(|c| &c.security_context).any(|context| root(context.run_as_user))
        || spec.security_context.as_ref().is_some_and(|context| root(context.run_as_user));
    let context: &mut PodSecurityContext = spec.security_context.get_or_insert_default();
    if !asks_for_root {
        context.run_as_non_root.get_or_insert(true);
    }
    context.run_as_user.get_or_insert(NON_ROOT);
    context.run_as_group.get_or_insert(NON_ROOT);
    context.fs_group.get_or_insert(NON_ROOT);
    context.fs_group_change_policy.get_or_insert_with(|| "OnRootMismatch".into());
    context
        .seccomp_profile
        .get_or_insert_with(|| SeccompProfile { type_: "RuntimeDefault".into(), ..Default::default() });
}

fn secure_container(container: &mut Container) {
    let context: &mut SecurityContext = container.security_context.get_or_insert_default();
    // The API server refuses a privileged container that may not escalate.
    let escalates = context.privileged == Some(true);
    context.allow_privilege_escalation.get_or_insert(escalates);
    context.read_only_root_filesystem.get_or_insert(true);
    context
        .capabilities
        .get_or_insert_with(|| Capabilities { drop: Some(vec!["ALL".into()]), ..Capabilities::default() });
}

/// Mounts the scratch folder in a container that needs it. Returns whether it does.
fn add_scratch(container: &mut Container) -> bool {
    let read_only = container.security_context.as_ref().is_some_and(|c| c.read_only_root_filesystem == Some(true));
    let mounts = container.volume_mounts.get_or_insert_default();
    let taken = mounts.iter().any(|mount| mount.mount_path == SCRATCH.1);
    if read_only && !taken {
        mounts.push(VolumeMount { name: SCRATCH.0.into(), mount_path: SCRATCH.1.into(), ..VolumeMount::default() });
    }
    read_only && !taken
}
