//! Tells a decision's notices as Kubernetes events, the lines at the end of `kubectl describe`.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource as _;
use kube::runtime::events::{Event, EventType, Recorder};
use psjobs_api::crd::ParameterServerJob;
use tracing::{info, warn};

use super::decide::Notice;

/// Kubernetes refuses longer notes.
const NOTE_BYTES: usize = 1000;

/// Publishes the notices in order. An event that cannot be written costs no more than a line in the log.
pub async fn publish(recorder: &Recorder, job: &ParameterServerJob, notices: &[Notice]) {
    let reference = job.object_ref(&());
    for notice in notices {
        if notice.warning {
            warn!(reason = notice.reason, "{}", notice.note);
        } else {
            info!(reason = notice.reason, "{}", notice.note);
        }
        if let Err(error) = recorder.publish(&event(notice, &reference), &reference).await {
            warn!(%error, reason = notice.reason, "cannot write the event");
        }
    }
}

fn event(notice: &Notice, job: &ObjectReference) -> Event {
    let note = &notice.note[..notice.note.floor_char_boundary(NOTE_BYTES)];
    Event {
        type_: if notice.warning { EventType::Warning } else { EventType::Normal },
        reason: notice.reason.clone(),
        note: Some(note.to_owned()),
        action: "Reconcile".into(),
        secondary: notice.pod.as_ref().map(|(name, uid)| ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(name.clone()),
            namespace: job.namespace.clone(),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
    }
}
