//! The part of a pod and of an event that the page needs. It is small, so that the page has room for thousands of pods.

use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::ResourceExt as _;
use psjobs_api::Role;
use psjobs_web::job::{Event, Run};

use crate::top::board::{self, PodLine};

/// A pod of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    pub role: Role,
    pub index: u32,
    pub name: String,
    pub uid: String,
    /// The first container.
    pub container: Option<String>,
    /// Milliseconds since 1970.
    pub created: u64,
    pub node: Option<String>,
    /// Its address, while it may run.
    pub ip: Option<IpAddr>,
    /// A word or two for people.
    pub state: String,
    pub is_well: bool,
    /// The time in which the first container ran; `None` if it has not started.
    pub run: Option<Run>,
}

/// An event about a job.
#[derive(Clone, Debug, PartialEq)]
pub struct EventFacts {
    /// The uid of the job, if the event has one.
    pub job: Option<String>,
    pub event: Event,
}

impl PodFacts {
    /// Returns `None` for a pod that is no server or trainer.
    pub fn of(pod: &Pod) -> Option<Self> {
        let (role, index, name) = board::place(pod)?;
        // The line's age is not kept, so that the time does not matter; slow trainers are known to the job alone.
        let PodLine { state, node, is_well, .. } = board::line(role, index, pod, &[], Timestamp::UNIX_EPOCH);
        let created = pod.metadata.creation_timestamp.as_ref();
        Some(Self {
            role,
            index,
            name,
            uid: pod.uid()?,
            container: pod.spec.as_ref().and_then(|spec| Some(spec.containers.first()?.name.clone())),
            created: created.map(|created| milliseconds(created.0)).unwrap_or_default(),
            node: Some(node).filter(|node| !node.is_empty()),
            ip: ip(pod),
            state,
            is_well,
            run: run(pod),
        })
    }

    /// Returns the name of the process that it is, as `trainer-1`.
    pub fn process(&self) -> String {
        format!("{}-{}", self.role, self.index)
    }
}

impl From<&KubernetesEvent> for EventFacts {
    fn from(event: &KubernetesEvent) -> Self {
        Self {
            job: event.involved_object.uid.clone(),
            event: Event {
                time: board::time(event).map(milliseconds).unwrap_or_default(),
                is_warning: event.type_.as_deref() == Some("Warning"),
                text: text(event),
            },
        }
    }
}

/// Returns the reason and the message; a message that begins with the reason is enough.
fn text(event: &KubernetesEvent) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (reason, message) = (text(&event.reason), text(&event.message));
    if message.starts_with(&reason) { message } else { format!("{reason}: {message}") }
}

fn ip(pod: &Pod) -> Option<IpAddr> {
    let status = pod.status.as_ref()?;
    let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    status.pod_ip.as_ref().filter(|_| !has_ended)?.parse().ok()
}

fn run(pod: &Pod) -> Option<Run> {
    let container = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let state = container.state.as_ref()?;
    if let Some(running) = &state.running {
        let from = running.started_at.as_ref().or(pod.metadata.creation_timestamp.as_ref())?;
        return Some(Run { from: milliseconds(from.0), to: None, failed: false });
    }
    let ended = state.terminated.as_ref()?;
    let from = ended.started_at.as_ref().or(pod.metadata.creation_timestamp.as_ref())?;
    let to = ended.finished_at.as_ref().map(|time| milliseconds(time.0));
    Some(Run { from: milliseconds(from.0), to: to.or(Some(milliseconds(from.0))), failed: ended.exit_code != 0 })
}

/// Returns milliseconds since 1970.
pub fn milliseconds(time: Timestamp) -> u64 {
    time.as_millisecond().unsigned_abs()
}
