//! The jobs of a cluster as watches tell of them, with the part of their pods and events that the page needs. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::ops::Bound;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as KubernetesEvent, Pod};
use kube::ResourceExt as _;
use kube::runtime::watcher::Event;
use psjobs_api::Role;
use psjobs_api::crd::ParameterServerJob;
use psjobs_api::crd::names::LABEL_JOB;
use psjobs_web::Board;
use psjobs_web::job::EVENTS;

use super::facts::{EventFacts, PodFacts};
use super::page::{self, History, Seen};
use crate::connection::Flags;
use crate::programs::programs;
use crate::text;

/// Points of the curves of all jobs together: 14 MB.
const POINTS: usize = 600_000;
/// Calls of [`Jobs::changed`] after which each job is shown again though nothing has changed: what is said of a job depends on how
/// long it waits.
const IDLE: usize = 10;
/// Annotation in which kubectl keeps the manifest as it was applied.
const APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Namespace and name of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    pub namespace: String,
    pub name: String,
}

/// The names under which the page shows jobs, and the flags of the commands that it tells people to type.
#[derive(Clone, Debug)]
pub enum Naming {
    /// Jobs of one namespace, by their names alone.
    OneNamespace(Flags),
    /// `NAMESPACE/NAME`.
    Cluster,
}

/// All jobs.
#[derive(Debug, Default)]
pub struct Jobs {
    all: BTreeMap<Id, Known>,
    /// Jobs that have to be shown again.
    changed: BTreeSet<Id>,
    /// Jobs that are gone, and whose last state is being shown.
    leaving: BTreeSet<Id>,
    /// The one that was shown last only because time has passed.
    turn: Id,
    lists: [List; 3],
}

/// One job with its pods and events; of a job that is not there these alone.
#[derive(Debug, Default)]
struct Known {
    job: Option<ParameterServerJob>,
    /// The job was deleted. It stays until it was shown once more: it may have ended since it was shown last.
    is_gone: bool,
    /// Points of its curves that a smaller share may take, as of when it was shown last.
    points: usize,
    /// By uid: the programs of each.
    pods: BTreeMap<String, Vec<PodFacts>>,
    /// By uid.
    events: BTreeMap<String, EventFacts>,
    history: History,
}

/// One watch, which begins with a list of all objects.
#[derive(Debug, Default)]
struct List {
    /// Job and uid of each object that the list has named until now; the others are gone when it ends.
    named: BTreeSet<(Id, String)>,
    is_complete: bool,
    /// The last error; the watch begins again by itself.
    trouble: Option<String>,
}

/// The watches, in the order of `Jobs::lists`.
#[derive(Clone, Copy)]
enum Watch {
    Jobs,
    Pods,
    Events,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Naming {
    /// Returns the name under which the page shows a job.
    pub fn name(&self, id: &Id) -> String {
        match self {
            Self::OneNamespace(_) => id.name.clone(),
            Self::Cluster => id.to_string(),
        }
    }

    fn flags(&self, id: &Id) -> Flags {
        match self {
            Self::OneNamespace(flags) => flags.clone(),
            Self::Cluster => Flags { namespace: format!(" --namespace {}", id.namespace), ..Flags::default() },
        }
    }
}

impl Jobs {
    /// Records what the watch of the jobs says.
    pub fn see_job(&mut self, event: Event<ParameterServerJob>) {
        let id = |job: &ParameterServerJob| Id { namespace: job.namespace().unwrap_or_default(), name: job.name_any() };
        let key = |job: &ParameterServerJob| Some((id(job), job.uid().unwrap_or_default()));
        self.see(Watch::Jobs, event, key, |known, _, job| {
            known.is_gone = job.is_none();
            let Some(mut job) = job else { return };
            job.metadata.managed_fields = None;
            if let Some(annotations) = &mut job.metadata.annotations {
                annotations.remove(APPLIED);
            }
            known.job = Some(job);
        });
    }

    /// Records what the watch of their pods says.
    pub fn see_pod(&mut self, event: Event<Pod>) {
        let key = |pod: &Pod| {
            let name = pod.labels().get(LABEL_JOB)?.clone();
            Some((Id { namespace: pod.namespace().unwrap_or_default(), name }, pod.uid()?))
        };
        self.see(Watch::Pods, event, key, |known, uid, pod| {
            let programs = pod.into_iter().flat_map(programs);
            let facts: Vec<_> = programs.filter_map(|program| PodFacts::of(&program)).collect();
            if facts.is_empty() {
                known.pods.remove(&uid);
            } else {
                known.pods.insert(uid, facts);
            }
        });
    }

    /// Records what the watch of their events says.
    pub fn see_event(&mut self, event: Event<KubernetesEvent>) {
        let key = |event: &KubernetesEvent| {
            let (namespace, name) = (event.namespace().unwrap_or_default(), event.involved_object.name.clone()?);
            Some((Id { namespace, name }, event.uid()?))
        };
        self.see(Watch::Events, event, key, |known, uid, event| match event {
            Some(event) => {
                known.events.insert(uid, EventFacts::from(&event));
                if known.events.len() > EVENTS
                    && let Some(oldest) = known.events.iter().min_by_key(|(_, facts)| facts.event.time)
                {
                    let oldest = oldest.0.clone();
                    known.events.remove(&oldest);
                }
            }
            // Kubernetes forgets events after an hour.
            None => drop(known.events.remove(&uid)),
        });
    }

    /// Records an event of a watch. `key` names the job and the object, `put` writes an object, or `None` for one that is gone.
    fn see<K>(
        &mut self,
        watch: Watch,
        event: Event<K>,
        key: impl Fn(&K) -> Option<(Id, String)>,
        put: impl Fn(&mut Known, String, Option<K>),
    ) {
        self.answered(watch);
        let list = &mut self.lists[watch as usize];
        let (keys, mut object): (Vec<(Id, String)>, Option<K>) = match event {
            Event::Init => {
                list.named.clear();
                return;
            }
            Event::InitApply(object) => {
                let key = key(&object);
                list.named.extend(key.clone());
                (key.into_iter().collect(), Some(object))
            }
            Event::Apply(object) => (key(&object).into_iter().collect(), Some(object)),
            Event::Delete(object) => (key(&object).into_iter().collect(), None),
            Event::InitDone => {
                list.is_complete = true;
                let named = std::mem::take(&mut list.named);
                let gone = |key: &(Id, String)| !named.contains(key);
                (self.keys(watch).into_iter().filter(gone).collect(), None)
            }
        };
        for (id, uid) in keys {
            // A job that was replaced by another one of its name is not gone.
            let known = self.all.entry(id.clone()).or_default();
            if matches!(watch, Watch::Jobs) && object.is_none() && known.uid() != Some(&uid) {
                continue;
            }
            put(known, uid, object.take());
            self.changed.insert(id);
        }
    }

    /// Returns job and uid of every object that a watch has told of.
    fn keys(&self, watch: Watch) -> Vec<(Id, String)> {
        let of = |(id, known): (&Id, &Known)| -> Vec<(Id, String)> {
            let uids: Vec<&String> = match watch {
                Watch::Jobs => known.uid().into_iter().collect(),
                Watch::Pods => known.pods.keys().collect(),
                Watch::Events => known.events.keys().collect(),
            };
            uids.into_iter().map(|uid| (id.clone(), uid.clone())).collect()
        };
        self.all.iter().flat_map(of).collect()
    }

    /// Records the error of the watch of jobs, pods or events: number 0, 1 or 2.
    pub fn fails(&mut self, watch: usize, error: String) {
        if self.trouble().is_none() {
            self.changed.extend(self.all.keys().cloned());
        }
        self.lists[watch].trouble = Some(error);
    }

    fn answered(&mut self, watch: Watch) {
        if self.lists[watch as usize].trouble.take().is_some() && self.trouble().is_none() {
            self.changed.extend(self.all.keys().cloned());
        }
    }

    fn trouble(&self) -> Option<&str> {
        self.lists.iter().find_map(|list| list.trouble.as_deref())
    }

    /// Says if every watch has named all objects that there are.
    pub fn is_complete(&self) -> bool {
        self.lists.iter().all(|list| list.is_complete)
    }

    /// Returns the jobs that have to be shown again: those that have changed, and some whose turn it is. A job that was deleted is
    /// among them twice: as it was, and as gone at the next call.
    pub fn changed(&mut self) -> BTreeSet<Id> {
        for id in std::mem::take(&mut self.leaving) {
            if let Some(known) = self.all.get_mut(&id).filter(|known| known.is_gone) {
                (known.job, known.is_gone) = (None, false);
                self.changed.insert(id);
            }
        }
        let (share, count) = (self.share(), self.all.len().div_ceil(IDLE));
        let behind = self.all.range_mut::<Id, _>((Bound::Excluded(&self.turn), Bound::Unbounded)).take(count);
        let behind: Vec<(Id, bool)> = behind.map(|(id, known)| (id.clone(), known.takes_turn(share))).collect();
        self.turn = if behind.len() < count { Id::default() } else { behind.last().cloned().unwrap_or_default().0 };
        self.changed.extend(behind.into_iter().filter(|(_, takes_turn)| *takes_turn).map(|(id, _)| id));
        let changed = std::mem::take(&mut self.changed);
        let is_gone = |id: &&Id| self.all.get(*id).is_some_and(|known| known.is_gone);
        self.leaving = changed.iter().filter(is_gone).cloned().collect();
        changed
    }

    /// Returns the points that the curves of each job have room for.
    pub fn share(&self) -> usize {
        POINTS / self.all.len().max(1)
    }

    /// Returns a job; one that was deleted as long as its last state is shown.
    pub fn job(&self, id: &Id) -> Option<&ParameterServerJob> {
        self.all.get(id)?.job.as_ref()
    }

    /// Returns the pods of a job.
    pub fn pods(&self, id: &Id) -> Vec<PodFacts> {
        self.all.get(id).map(|known| known.pods.values().flatten().cloned().collect()).unwrap_or_default()
    }

    /// Returns the address of server 0 of a job, if its pod has one.
    pub fn server(&self, id: &Id) -> Option<IpAddr> {
        let servers =
            self.all.get(id)?.pods.values().flatten().filter(|pod| (pod.role, pod.index) == (Role::Server, 0));
        // A successor and its predecessor may both be there.
        servers.max_by_key(|pod| pod.created)?.ip
    }

    /// Writes a job as it is `now` to the board, or removes it from there if it is gone.
    pub fn show(&mut self, id: &Id, naming: &Naming, board: &Board, now: Timestamp) {
        let (name, flags) = (naming.name(id), naming.flags(id));
        let share = self.share();
        let trouble = self.trouble().map(str::to_owned);
        let Some(known) = self.all.get_mut(id) else {
            board.remove(&name);
            return;
        };
        let Some(job) = &known.job else {
            board.remove(&name);
            known.history = History::default();
            self.forget(id);
            return;
        };
        let pods: Vec<&PodFacts> = known.pods.values().flatten().collect();
        let events: Vec<&EventFacts> = known.events.values().collect();
        known.history.see(job, &pods, now);
        let seen = Seen { job, pods: &pods, events: &events, trouble: trouble.as_deref() };
        board.change(&name, |shown, curves| {
            page::show(&seen, &mut known.history, &flags, now, shown, curves);
            curves.bound(share);
            known.points = curves.points().min(share);
        });
    }

    /// Forgets a job that is gone, when its pods and events are, too.
    fn forget(&mut self, id: &Id) {
        let is_gone = |known: &Known| known.job.is_none() && known.pods.is_empty() && known.events.is_empty();
        if self.all.get(id).is_some_and(is_gone) {
            self.all.remove(id);
        }
    }
}

impl Known {
    fn uid(&self) -> Option<&String> {
        self.job.as_ref()?.metadata.uid.as_ref()
    }

    /// There is no job, or its phase is the last one.
    fn is_over(&self) -> bool {
        self.job.as_ref().is_none_or(|job| text::phase(job).is_some_and(|phase| phase.is_final()))
    }

    /// Returns whether the job is shown though nothing has changed. One that is over is shown when its curves have more points than
    /// `share`, which becomes less with each job.
    fn takes_turn(&mut self, share: usize) -> bool {
        if !self.is_over() {
            return true;
        }
        let takes_turn = self.points > share;
        if takes_turn {
            // A caller that shows something else in its place shows no curves.
            self.points = 0;
        }
        takes_turn
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::top::board::tests::{at, event, job, pod};

    fn named(name: &str, uid: &str, phase: &str) -> ParameterServerJob {
        let mut job = job(uid, phase, Value::Null);
        (job.metadata.name, job.metadata.namespace) = (Some(name.into()), Some("team".into()));
        job
    }

    fn id(name: &str) -> Id {
        Id { namespace: "team".into(), name: name.into() }
    }

    fn server_of(job: &str, uid: &str) -> Pod {
        let mut pod = pod("ps", 0, true, json!({"running": {"startedAt": at(0).to_string()}}));
        (pod.metadata.namespace, pod.metadata.uid) = (Some("team".into()), Some(uid.into()));
        pod.metadata.labels.get_or_insert_default().insert(LABEL_JOB.into(), job.into());
        pod
    }

    fn phase(board: &Board, name: &str) -> Option<String> {
        board.job(name).map(|(job, _)| job.phase)
    }

    fn show(jobs: &mut Jobs, board: &Board) -> Vec<String> {
        let changed = jobs.changed();
        changed.iter().for_each(|id| jobs.show(id, &Naming::Cluster, board, at(0)));
        changed.into_iter().map(|id| id.name).collect()
    }

    #[test]
    fn a_change_shows_the_job_that_it_is_about() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        for watch in [Event::Init, Event::InitApply(named("a", "1", "Failed")), Event::InitDone] {
            jobs.see_job(watch);
        }
        jobs.see_job(Event::Apply(named("b", "2", "Failed")));
        assert_eq!(show(&mut jobs, &board), ["a", "b"]);
        assert_eq!(board.names(), ["team/a", "team/b"]);
        assert!(show(&mut jobs, &board).is_empty(), "jobs that are over change no more by themselves");
        jobs.see_pod(Event::Apply(server_of("b", "p")));
        assert_eq!(show(&mut jobs, &board), ["b"]);
        let (shown, _) = board.job("team/b").expect("it is shown");
        assert_eq!((shown.processes.len(), shown.processes[0].state.as_str()), (1, "Running"));
        assert!(shown.explanation.commands[0].command.ends_with(" --namespace team"), "{:?}", shown.explanation);
        let mut about = event("e", -5, true);
        (about.metadata.namespace, about.involved_object.name) = (Some("team".into()), Some("a".into()));
        jobs.see_event(Event::Apply(about));
        assert_eq!(show(&mut jobs, &board), ["a"]);
        assert_eq!(board.job("team/a").map(|(job, _)| job.events.len()), Some(1));
    }

    #[test]
    fn jobs_that_are_not_over_are_shown_again_in_turn() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        let name = |number: usize| format!("{number:02}");
        (0..20).for_each(|number| jobs.see_job(Event::Apply(named(&name(number), "u", "Running"))));
        assert_eq!(show(&mut jobs, &board).len(), 20);
        let shown: Vec<String> = (0..IDLE + 1).flat_map(|_| show(&mut jobs, &board)).collect();
        let missing: Vec<_> = (0..20).map(name).filter(|name| !shown.contains(name)).collect();
        assert!(missing.is_empty() && shown.len() <= 30, "{shown:?}");
    }

    #[test]
    fn an_object_that_a_new_list_does_not_name_is_gone() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        jobs.see_job(Event::Apply(named("a", "1", "Running")));
        jobs.see_job(Event::Apply(named("b", "2", "Running")));
        jobs.see_pod(Event::Apply(server_of("a", "p")));
        jobs.see_pod(Event::Apply(server_of("b", "q")));
        for again in [Event::Init, Event::InitApply(named("b", "3", "Running")), Event::InitDone] {
            jobs.see_job(again);
        }
        for again in [Event::Init, Event::InitApply(server_of("b", "q")), Event::InitDone] {
            jobs.see_pod(again);
        }
        assert!(!jobs.is_complete(), "the events have not been listed");
        // The last state, and then that it is gone.
        (0..2).for_each(|_| drop(show(&mut jobs, &board)));
        assert_eq!((board.names(), jobs.all.len()), (vec!["team/b".to_owned()], 1));
        assert_eq!(jobs.job(&id("b")).and_then(|job| job.metadata.uid.clone()).as_deref(), Some("3"));
        assert_eq!(jobs.pods(&id("b")).len(), 1);
    }

    #[test]
    fn a_job_that_is_deleted_right_at_its_end_is_shown_as_it_ended() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        jobs.see_job(Event::Apply(named("a", "1", "Running")));
        show(&mut jobs, &board);
        jobs.see_job(Event::Apply(named("a", "1", "Succeeded")));
        jobs.see_job(Event::Delete(named("a", "1", "Succeeded")));
        show(&mut jobs, &board);
        assert_eq!(phase(&board, "team/a").as_deref(), Some("Succeeded"));
        assert!(jobs.job(&id("a")).is_some());
        show(&mut jobs, &board);
        assert_eq!((phase(&board, "team/a"), jobs.all.len()), (None, 0));
        // One that comes back under its name is not gone.
        jobs.see_job(Event::Apply(named("a", "2", "Failed")));
        jobs.see_job(Event::Delete(named("a", "2", "Failed")));
        show(&mut jobs, &board);
        jobs.see_job(Event::Apply(named("a", "3", "Pending")));
        (0..2).for_each(|_| drop(show(&mut jobs, &board)));
        assert_eq!(phase(&board, "team/a").as_deref(), Some("Pending"));
    }

    #[test]
    fn the_curves_of_jobs_that_are_over_make_room_for_those_of_others() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        jobs.see_job(Event::Apply(named("a", "1", "Failed")));
        show(&mut jobs, &board);
        board.change("team/a", |_, curves| {
            for step in 1..=60_000 {
                curves.push(&format!("metric-{}", step % 40), None, step, step, 1.0 / step as f64);
            }
        });
        jobs.see_pod(Event::Apply(server_of("a", "p")));
        show(&mut jobs, &board);
        let points = || board.job("team/a").map(|(_, curves)| curves.points());
        assert_eq!(points(), Some(60_000), "there is room");
        (0..20).for_each(|number| jobs.see_job(Event::Apply(named(&format!("b{number}"), "u", "Failed"))));
        let shown: Vec<String> = (0..IDLE * 3).flat_map(|_| show(&mut jobs, &board)).collect();
        assert!(points().is_some_and(|points| points <= POINTS / 21), "{:?}", points());
        assert_eq!(shown.iter().filter(|name| *name == "a").count(), 1, "it is shown once more");
    }

    #[test]
    fn trouble_is_shown_of_every_job_until_the_cluster_answers() {
        let (mut jobs, board) = (Jobs::default(), Board::default());
        jobs.see_job(Event::Apply(named("a", "1", "Failed")));
        show(&mut jobs, &board);
        jobs.fails(1, "forbidden".into());
        show(&mut jobs, &board);
        let says = || {
            let (job, _) = board.job("team/a").expect("it is shown");
            job.explanation.sentences.iter().any(|sentence| sentence.contains("forbidden"))
        };
        assert!(says());
        jobs.see_pod(Event::Init);
        show(&mut jobs, &board);
        assert!(!says());
    }

    #[test]
    fn the_events_of_a_job_are_bounded() {
        let mut jobs = Jobs::default();
        for number in 0..EVENTS as i64 + 10 {
            let mut about = event(&format!("e{number}"), number, false);
            (about.metadata.namespace, about.involved_object.name) = (Some("team".into()), Some("a".into()));
            jobs.see_event(Event::Apply(about));
        }
        let times: Vec<u64> = jobs.all[&id("a")].events.values().map(|facts| facts.event.time).collect();
        assert_eq!((times.len(), times.iter().min()), (EVENTS, Some(&at(10).as_millisecond().unsigned_abs())));
    }
}
