//! Kubernetes events of jobs, the lines at the end of `kubectl describe`. They are written beside the reconciles: no
//! reconcile waits for its events, or for those of other jobs.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event as KubernetesEvent, EventType, Recorder};
use kube::{Resource as _, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::write_priority::{PriorityLimiter, WritePriority};
use crate::controller::model::Event;
use crate::metrics::Metrics;

/// Kubernetes refuses longer notes.
const NOTE_BYTES: usize = 1000;
/// Jobs whose events are written at the same time.
const CONCURRENCY: usize = 4;
/// Decisions whose events may wait, those of some thousand jobs that begin together. Events beyond that are only logged.
const WAITING: usize = 4096;

/// The events of one decision.
struct JobEvents {
    job: ObjectReference,
    events: Vec<Event>,
}

/// Queues events to be written.
#[derive(Clone)]
pub struct EventRecorder(mpsc::Sender<JobEvents>);

/// Writes the queued events.
pub struct EventWriter(mpsc::Receiver<JobEvents>);

/// Creates both ends of the queue.
pub fn channel() -> (EventRecorder, EventWriter) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (EventRecorder(sender), EventWriter(receiver))
}

impl EventRecorder {
    /// Logs events and queues them. Never waits.
    pub fn record(&self, job: &ParameterServerJob, events: &[Event]) {
        for event in events {
            if event.warning {
                warn!(reason = event.reason, "{}", event.note);
            } else {
                info!(reason = event.reason, "{}", event.note);
            }
        }
        let of_job = JobEvents { job: job.object_ref(&()), events: events.to_vec() };
        if !events.is_empty() && self.0.try_send(of_job).is_err() {
            warn!(job = job.name_any(), "too many events wait to be written; these are only in this log");
        }
    }
}

impl EventWriter {
    /// Writes events until all recorders are dropped and the queue is empty. An event that cannot be written is logged.
    pub async fn run(self, recorder: Recorder, limiter: Arc<PriorityLimiter>, metrics: Metrics) {
        let queued = stream::unfold(self.0, async |mut queue| queue.recv().await.map(|events| (events, queue)));
        queued.for_each_concurrent(CONCURRENCY, |events| publish(events, &recorder, &limiter, &metrics)).await;
    }
}

async fn publish(
    JobEvents { job, events }: JobEvents,
    recorder: &Recorder,
    limiter: &PriorityLimiter,
    metrics: &Metrics,
) {
    for event in &events {
        let _permit = limiter.permit(WritePriority::Event).await;
        if let Err(error) = metrics.step("tell", recorder.publish(&to_kubernetes(event, &job), &job)).await {
            warn!(%error, reason = event.reason, "cannot write the event");
        }
    }
}

/// Returns the action of an event, which differs for each note: the recorder counts events of one reason and action as one for
/// some minutes, and keeps only the note of the first, which may name another pod.
fn action(note: &str) -> String {
    let mut hasher = DefaultHasher::new();
    note.hash(&mut hasher);
    format!("Reconcile-{:016x}", hasher.finish())
}

fn to_kubernetes(event: &Event, job: &ObjectReference) -> KubernetesEvent {
    let note = &event.note[..event.note.floor_char_boundary(NOTE_BYTES)];
    KubernetesEvent {
        type_: if event.warning { EventType::Warning } else { EventType::Normal },
        reason: event.reason.clone(),
        note: Some(note.to_owned()),
        action: action(note),
        secondary: event.pod.as_ref().map(|(name, uid)| ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(name.clone()),
            namespace: job.namespace.clone(),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_reason_are_one_only_if_they_say_the_same() {
        let action = |note: &str| {
            let event = Event { warning: true, reason: "PodLost".into(), note: note.into(), pod: None };
            to_kubernetes(&event, &ObjectReference::default()).action
        };
        assert_eq!(action("the pod of server 0 was deleted"), action("the pod of server 0 was deleted"));
        assert_ne!(action("the pod of server 0 was deleted"), action("the pod of trainer 1 was deleted"));
        assert!(action(&"long ".repeat(500)).len() <= 128, "Kubernetes refuses longer ones");
    }
}
