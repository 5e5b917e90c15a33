//! Metadata that no decision reads.

use kube::{Resource, ResourceExt as _};

/// Removes the record of who wrote which field, and the copy of the manifest that `kubectl apply` keeps. Together they
/// are as large as the object itself.
pub fn remove_unread_metadata(object: &mut impl Resource) {
    object.meta_mut().managed_fields = None;
    object.annotations_mut().remove("kubectl.kubernetes.io/last-applied-configuration");
}
