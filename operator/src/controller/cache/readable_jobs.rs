//! Reads jobs from their watch. A job that cannot be read, as it is of a newer version for example, is left alone and does
//! not keep the others from being read: without this the watch would fail as a whole until the job is gone.

use kube::core::{DeserializeGuard, ObjectMeta};
use kube::runtime::watcher::Event;
use psjobs_api::crd::{ParameterServerJob, ParameterServerJobSpec};
use tracing::warn;

type Stored = DeserializeGuard<ParameterServerJob>;

/// Returns the event with the job, or the job's deletion if it cannot be read; `None` if a list has such a job.
pub fn readable(event: Event<Stored>) -> Option<Event<ParameterServerJob>> {
    match event {
        Event::Init => Some(Event::Init),
        Event::InitDone => Some(Event::InitDone),
        Event::InitApply(stored) => read(stored).ok().map(Event::InitApply),
        Event::Apply(stored) => Some(read(stored).map_or_else(deletion, Event::Apply)),
        Event::Delete(stored) => Some(read(stored).map_or_else(deletion, Event::Delete)),
    }
}

fn read(stored: Stored) -> Result<ParameterServerJob, Box<ObjectMeta>> {
    stored.0.map_err(|invalid| {
        let (name, namespace) = (invalid.metadata.name.clone(), invalid.metadata.namespace.clone());
        warn!(
            namespace,
            name,
            "the job cannot be read and is left alone: {}; correct its spec, or install the operator that goes with its \
             CustomResourceDefinition",
            invalid.error
        );
        invalid.metadata.into()
    })
}

/// Returns the deletion of a job of which only the metadata is known. The cache reads nothing else.
fn deletion(metadata: Box<ObjectMeta>) -> Event<ParameterServerJob> {
    let spec = ParameterServerJobSpec::default();
    Event::Delete(ParameterServerJob { metadata: *metadata, spec, status: None })
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::controller::fixtures::job;

    fn stored(change: impl FnOnce(&mut Value)) -> Stored {
        let mut value = serde_json::to_value(job("")).expect("JSON");
        change(&mut value);
        serde_json::from_value(value).expect("the metadata can be read")
    }

    #[test]
    fn a_job_that_cannot_be_read_is_left_alone_and_the_others_are_read() {
        let good = || stored(|_| ());
        let bad = || stored(|job| job["spec"]["trainer"]["replicas"] = json!("two"));
        let read = |event| readable(event).map(|event| format!("{event:?}"));
        let name = |event: Event<Stored>| match readable(event) {
            Some(Event::Apply(job) | Event::InitApply(job)) => format!("has {}", job.name_any()),
            Some(Event::Delete(job)) => format!("lacks {}", job.name_any()),
            Some(Event::Init | Event::InitDone) | None => "nothing".to_owned(),
        };
        let rows = [
            (Event::InitApply(good()), "has mnist"),
            (Event::InitApply(bad()), "nothing"),
            (Event::Apply(good()), "has mnist"),
            (Event::Apply(bad()), "lacks mnist"),
            (Event::Delete(good()), "lacks mnist"),
            (Event::Delete(bad()), "lacks mnist"),
        ];
        for (event, want) in rows {
            assert_eq!(name(event.clone()), want, "{event:?}");
        }
        assert_eq!((read(Event::Init), read(Event::InitDone)), (Some("Init".into()), Some("InitDone".into())));
    }
}
