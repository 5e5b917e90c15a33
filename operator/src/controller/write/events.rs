//! Tells decisions' notices as Kubernetes events, the lines at the end of `kubectl describe`. This goes on beside
//! the reconciles: no job waits for its events, or for those of others.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Resource as _, ResourceExt as _};
use psjobs_api::crd::ParameterServerJob;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::write_priority::{Turns, Write};
use crate::controller::model::Notice;
use crate::metrics::Metrics;

/// Kubernetes refuses longer notes.
const NOTE_BYTES: usize = 1000;
/// Events under way at once.
const CONCURRENCY: usize = 4;
/// Decisions whose notices may wait, those of some thousand jobs that begin together. What comes on top of
/// that is only logged.
const WAITING: usize = 4096;

/// What a decision has to tell about its job.
struct Tale {
    job: ObjectReference,
    notices: Vec<Notice>,
}

/// Takes what is to be told.
#[derive(Clone)]
pub struct Teller(mpsc::Sender<Tale>);

/// Tells it.
pub struct Telling(mpsc::Receiver<Tale>);

/// Both ends.
pub fn channel() -> (Teller, Telling) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (Teller(sender), Telling(receiver))
}

impl Teller {
    /// Logs the notices, and has them told in order. Never waits.
    pub fn tell(&self, job: &ParameterServerJob, notices: &[Notice]) {
        for notice in notices {
            if notice.warning {
                warn!(reason = notice.reason, "{}", notice.note);
            } else {
                info!(reason = notice.reason, "{}", notice.note);
            }
        }
        let tale = Tale { job: job.object_ref(&()), notices: notices.to_vec() };
        if !notices.is_empty() && self.0.try_send(tale).is_err() {
            warn!(job = job.name_any(), "too many events wait to be written; these are only in this log");
        }
    }
}

impl Telling {
    /// Writes events until every teller is gone and nothing is left to tell. One that cannot be written costs no more
    /// than a line in the log.
    pub async fn run(self, recorder: Recorder, turns: Arc<Turns>, metrics: Metrics) {
        let tales = stream::unfold(self.0, async |mut tales| tales.recv().await.map(|tale| (tale, tales)));
        tales.for_each_concurrent(CONCURRENCY, |tale| publish(tale, &recorder, &turns, &metrics)).await;
    }
}

async fn publish(Tale { job, notices }: Tale, recorder: &Recorder, turns: &Turns, metrics: &Metrics) {
    for notice in &notices {
        let _turn = turns.turn(Write::Event).await;
        if let Err(error) = metrics.step("tell", recorder.publish(&event(notice, &job), &job)).await {
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
