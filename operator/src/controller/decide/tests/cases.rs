//! The cases that `psjobs run` goes through as well.

use std::collections::BTreeMap;

use psjobs_policy::cases::{CASES, Case, Event, State, Want};

use super::*;
use crate::controller::observe;

/// A job's cluster, with the second that each pod last began to run.
struct Adapter {
    cluster: Cluster,
    began: BTreeMap<Replica, i64>,
}

impl Adapter {
    fn new(case: &Case) -> Self {
        let job = validate(case.job().into()).expect(case.name);
        Self { cluster: Cluster::of(job), began: BTreeMap::new() }
    }

    fn second(&self) -> i64 {
        self.cluster.now.duration_since(at(0)).as_secs()
    }

    fn apply(&mut self, event: Event) {
        let second = self.second();
        match event {
            Event::Begin => {}
            Event::Run => {
                // The servers, and what is created when they are ready.
                for _ in 0..2 {
                    let starts = |pod: &ObservedPod| pod.phase == PodPhase::Pending;
                    let pods = self.cluster.observed.pods.iter().filter(|(_, pod)| starts(pod));
                    self.began.extend(pods.map(|(&replica, _)| (replica, second)));
                    self.cluster.run_all();
                    self.cluster.settle();
                }
            }
            Event::Exit(who, 0, _) => self.cluster.succeed(who),
            Event::Exit(who, code, log) => {
                let started = self.began.get(&replica(who)).map(|&second| at(second));
                self.cluster.edit(who, |pod| {
                    let pod = pod.failed(second, code);
                    let PodPhase::Failed(failure) = pod.phase else { unreachable!("it failed") };
                    let phase = PodPhase::Failed(observe::Failure { started, log_tail: log.into(), ..failure });
                    ObservedPod { phase, ..pod }
                });
            }
            Event::Pass(seconds) => self.cluster.pass(seconds.into()),
            Event::Step(step) => {
                let at = Some(self.cluster.now);
                self.cluster.observed.progress =
                    Some(ProgressReport { step, total_steps: 100, at, ..ProgressReport::default() });
            }
        }
        self.cluster.settle();
        // A report is of the processes that made it.
        if self.cluster.phase() == Phase::Restarting {
            self.cluster.observed.progress = None;
        }
    }

    fn found(&self, want: &Want) -> Want {
        let cluster = &self.cluster;
        let newest = |who| cluster.history.iter().filter(|(r, _)| *r == replica(who)).map(|(_, n)| *n).max();
        let state = match cluster.phase() {
            Phase::Succeeded => State::Succeeded,
            Phase::Completing => State::Completing,
            Phase::Failed => match want.state {
                State::Failed(reason) if cluster.message(ConditionType::Failed).contains(reason) => want.state,
                _ => panic!("failed: {}", cluster.message(ConditionType::Failed)),
            },
            _ => State::Active,
        };
        let started = ["ps-0", "trainer-0", "trainer-1"].map(newest);
        Want { state, started, counted: cluster.status.restarts_counted.unsigned_abs() }
    }
}

#[test]
fn every_case_of_the_policy_holds_for_pods() {
    for case in CASES {
        let mut adapter = Adapter::new(case);
        for (step, (event, want)) in case.steps.iter().enumerate() {
            adapter.apply(*event);
            let found = adapter.found(want);
            assert_eq!(found, *want, "{}: after step {step}, {event:?}", case.name);
        }
    }
}
