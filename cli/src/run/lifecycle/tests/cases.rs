//! The cases that the operator goes through as well.

use psjobs_policy::cases::{CASES, Case, Event, State as Where, Want};

use super::*;

/// A job's processes, which do at once what is asked of them.
struct Adapter {
    job: Lifecycle,
    now: Duration,
    started: BTreeMap<Replica, u32>,
    end: Option<Outcome>,
}

fn replica(text: &str) -> Replica {
    let (role, index) = text.split_once('-').expect("role-index");
    Replica { role: Role::parse(role).expect("a role"), index: index.parse().expect("an index") }
}

impl Adapter {
    fn new(case: &Case) -> Self {
        let spec = case.job().spec;
        let writes_model = spec.checkpoint.is_some();
        let server_drain = Duration::from_secs(spec.run_policy.server_drain_seconds.unsigned_abs());
        let rules = Rules { policy: JobPolicy::new(&spec), server_drain, servers_are_probed: true, writes_model };
        let job = Lifecycle::new(rules, [PS, T0, T1]);
        Self { job, now: Duration::ZERO, started: BTreeMap::new(), end: None }
    }

    fn apply(&mut self, event: Event) {
        let actions = match event {
            Event::Begin => self.job.start(self.now),
            Event::Run => self.job.server_is_ready(PS, self.started[&PS], self.now),
            Event::Exit(who, code, log) => {
                self.job.exited(replica(who), Exit::Code(code), vec![log.to_owned()], self.now)
            }
            Event::Pass(seconds) => {
                self.now += Duration::from_secs(seconds.into());
                Vec::new()
            }
            Event::Step(step) => self.job.progress(step, 100, self.now),
        };
        self.follow(actions);
        // At each moment once, as a clock that stands still would.
        while self.end.is_none() && self.job.wake_at().is_some_and(|at| at <= self.now) {
            let actions = self.job.tick(self.now);
            self.follow(actions);
        }
    }

    fn follow(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Start { replica, incarnation } => {
                    self.started.insert(replica, incarnation);
                }
                Action::Stop(replica) => {
                    let actions = self.job.exited(replica, Exit::Signal(15), Vec::new(), self.now);
                    self.follow(actions);
                }
                Action::Warn(_) => {}
                Action::End(outcome) => self.end = Some(outcome),
            }
        }
    }

    fn found(&self, want: &Want) -> Want {
        let state = match &self.end {
            Some(Outcome::Succeeded) => Where::Succeeded,
            Some(Outcome::Failed { reason, .. }) => match want.state {
                Where::Failed(part) if reason.contains(part) => want.state,
                _ => panic!("failed: {reason}"),
            },
            None if self.job.is_draining() => Where::Completing,
            None => Where::Active,
        };
        let started = [PS, T0, T1].map(|replica| self.started.get(&replica).copied());
        Want { state, started, counted: self.job.counted }
    }
}

#[test]
fn every_case_of_the_policy_holds_for_processes() {
    for case in CASES {
        let mut adapter = Adapter::new(case);
        for (step, (event, want)) in case.steps.iter().enumerate() {
            adapter.apply(*event);
            let found = adapter.found(want);
            assert_eq!(found, *want, "{}: after step {step}, {event:?}", case.name);
        }
    }
}
