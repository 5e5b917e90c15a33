//! A cluster for one job: it carries decisions out as the API server and the kubelet would.

use std::collections::BTreeMap;

use super::*;

pub struct Cluster {
    pub job: ValidJob,
    pub status: ParameterServerJobStatus,
    pub observed: ObservedState,
    pub now: Timestamp,
    /// The API server refuses to create pods, with these words.
    pub refuse: Option<String>,
    /// Events so far.
    pub events: Vec<String>,
    pub requeue: Option<SignedDuration>,
    /// Every pod that was ever created: replica and incarnation.
    pub history: Vec<(Replica, u32)>,
    /// By replica: what its newest pod was created from.
    newest: BTreeMap<Replica, NewPod>,
}

impl Cluster {
    pub fn new(spec: &str) -> Self {
        Self::of(valid_job(spec))
    }

    pub fn of(job: ValidJob) -> Self {
        Self {
            job,
            status: ParameterServerJobStatus::default(),
            observed: ObservedState::default(),
            now: at(0),
            refuse: None,
            events: Vec::new(),
            requeue: None,
            history: Vec::new(),
            newest: BTreeMap::new(),
        }
    }

    /// One reconcile with a cache that is up to date.
    pub fn reconcile(&mut self) -> Decision {
        self.reconcile_on(self.observed.clone())
    }

    /// One reconcile with the cache as given.
    pub fn reconcile_on(&mut self, mut cache: ObservedState) -> Decision {
        let mut decision = decide(&self.job, &self.status, &cache, self.now);
        if !decision.create.is_empty() {
            self.create(&decision.create, &mut cache);
            decision = decide(&self.job, &self.status, &cache, self.now);
        }
        self.status = decision.status.clone();
        for deletion in &decision.delete {
            self.delete(deletion);
        }
        self.events.extend(decision.events.iter().map(|event| format!("{}: {}", event.reason, event.note)));
        self.requeue = decision.requeue;
        decision
    }

    /// One reconcile that makes what is decided, and cannot write its status, because the job has changed.
    pub fn reconcile_in_vain(&mut self) {
        let decision = decide(&self.job, &self.status, &self.observed, self.now);
        self.create(&decision.create, &mut self.observed.clone());
    }

    /// Reconciles, and lets deleted pods go, until nothing changes.
    pub fn settle(&mut self) {
        for _ in 0..10 {
            let before = (self.status.clone(), self.observed.clone());
            self.reconcile();
            self.observed.pods.retain(|_, pod| pod.deletion_deadline.is_none());
            if before == (self.status.clone(), self.observed.clone()) {
                return;
            }
        }
        panic!("the job does not settle: {:#?}", self.status);
    }

    fn create(&mut self, children: &[Child], cache: &mut ObservedState) {
        for child in children {
            match (child, &self.refuse) {
                (Child::Service, _) => self.observed.service = true,
                (Child::Pod(new), _) if new_replicas(new).iter().any(|who| self.observed.pods.contains_key(who)) => {}
                (Child::Pod(NewPod { replica, .. }), Some(message)) => {
                    let child = format!("pod {}", pod(*replica).name);
                    cache.refused.push(Refusal { child, message: message.clone() });
                }
                (Child::Pod(new), None) => {
                    let NewPod { replica, incarnation, failures, failures_in_a_row, failed_incarnation, .. } = *new;
                    let pod = pod(replica).born(incarnation, failures, failures_in_a_row);
                    for who in new_replicas(new) {
                        self.newest.insert(who, new.clone());
                        self.history.push((who, incarnation));
                        let pod = ObservedPod { failed_incarnation, ..pod.clone() };
                        let of_server = new.server.as_ref().filter(|_| who.role == Role::Server);
                        let pod = of_server.map_or(pod.clone(), |server| ObservedPod {
                            failures: server.failures,
                            failures_in_a_row: server.failures_in_a_row,
                            failed_incarnation: server.failed_incarnation,
                            ..pod
                        });
                        self.observed.pods.insert(who, pod);
                    }
                }
            }
            if let Child::Pod(new) = child {
                let found = new_replicas(new).into_iter();
                let found = found.filter_map(|who| Some((who, self.observed.pods.get(&who)?.clone())));
                cache.pods.extend(found.collect::<Vec<_>>());
            }
            cache.service = self.observed.service;
        }
    }

    /// A pod that has ended goes at once, one that runs takes its time.
    fn delete(&mut self, deletion: &Deletion) {
        if deletion.force {
            self.observed.pods.retain(|_, pod| pod.uid != deletion.uid);
        }
        let deletion_deadline = self.now.checked_add(SignedDuration::from_secs(30)).expect("in range");
        for pod in self.observed.pods.values_mut().filter(|pod| pod.uid == deletion.uid) {
            pod.deletion_deadline = Some(deletion_deadline);
        }
    }

    /// Changes a pod for each replica that is in it.
    pub fn edit_pod(&mut self, who: &str, change: impl Fn(ObservedPod) -> ObservedPod) {
        let uid = self.observed.pods[&replica(who)].uid.clone();
        for pod in self.observed.pods.values_mut().filter(|pod| pod.uid == uid) {
            *pod = change(pod.clone());
        }
    }

    pub fn edit(&mut self, who: &str, change: impl FnOnce(ObservedPod) -> ObservedPod) {
        let pod = self.observed.pods.remove(&replica(who)).expect("the pod exists");
        self.observed.pods.insert(replica(who), change(pod));
    }

    pub fn run_all(&mut self) {
        let starts = |pod: &&mut ObservedPod| pod.phase == PodPhase::Pending && pod.deletion_deadline.is_none();
        for pod in self.observed.pods.values_mut().filter(starts) {
            *pod = pod.clone().running();
        }
    }

    pub fn succeed(&mut self, who: &str) {
        let second = self.second();
        self.edit(who, |pod| pod.succeeded(second));
    }

    pub fn fail(&mut self, who: &str, code: i32) {
        let second = self.second();
        self.edit(who, |pod| pod.failed(second, code));
    }

    pub fn vanish(&mut self, who: &str) {
        let uid = self.observed.pods[&replica(who)].uid.clone();
        self.observed.pods.retain(|_, pod| pod.uid != uid);
    }

    pub fn suspend(&mut self, suspend: bool) {
        self.job.suspended = suspend;
    }

    /// `kubectl scale`.
    pub fn scale(&mut self, trainers: u32) {
        self.job.trainers = trainers;
        self.job.generation = self.job.generation.map(|generation| generation + 1);
    }

    pub fn pass(&mut self, seconds: i64) {
        self.now = at(self.second() + seconds);
    }

    fn second(&self) -> i64 {
        self.now.duration_since(at(0)).as_secs()
    }

    pub fn phase(&self) -> Phase {
        self.status.phase.expect("decided")
    }

    pub fn message(&self, condition: ConditionType) -> String {
        conditions::find(&self.status, condition).expect("set").message.clone()
    }

    pub fn incarnation(&self, who: &str) -> u32 {
        self.observed.pods[&replica(who)].incarnation
    }

    pub fn finished_trainers(&self, who: &str) -> Vec<u32> {
        self.newest[&replica(who)].finished_trainers.clone()
    }

    pub fn was_created_while_closing(&self, who: &str) -> bool {
        self.newest[&replica(who)].closing
    }

    pub fn pods(&self) -> Vec<String> {
        self.observed.pods.keys().map(|r| format!("{}-{}", r.role, r.index)).collect()
    }

    pub fn deleting(&self) -> Vec<String> {
        let deleting = self.observed.pods.iter().filter(|(_, pod)| pod.deletion_deadline.is_some());
        deleting.map(|(r, _)| format!("{}-{}", r.role, r.index)).collect()
    }
}

/// The replicas that a new pod has.
fn new_replicas(new: &NewPod) -> Vec<Replica> {
    let server = new.server.as_ref().map(|_| Replica::server(new.replica.index));
    let trainer = new.server.as_ref().is_none_or(|server| !server.is_alone).then_some(new.replica);
    server.into_iter().chain(trainer).collect()
}
