use super::*;

const PS: Replica = Replica { role: Role::Server, index: 0 };
const T0: Replica = Replica { role: Role::Trainer, index: 0 };
const T1: Replica = Replica { role: Role::Trainer, index: 1 };

fn rules() -> Rules {
    Rules {
        restart_policy: RestartPolicy::OnFailure,
        max_restarts: 3,
        min_trainers: None,
        active_deadline: None,
        server_drain: Duration::from_secs(60),
    }
}

fn job(rules: Rules) -> Lifecycle {
    Lifecycle::new(rules, [PS, T0, T1])
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

impl Lifecycle {
    fn ends(&mut self, replica: Replica, code: i32, second: u64) -> Vec<Action> {
        self.exited(replica, Exit::Code(code), vec![format!("last words of {replica}")], at(second))
    }
}

fn failed(actions: &[Action]) -> (&str, Option<&Failure>) {
    match actions {
        [.., Action::End(Outcome::Failed { reason, cause })] => (reason, cause.as_ref()),
        other => panic!("not failed: {other:?}"),
    }
}

#[test]
fn a_job_ends_well_when_the_trainers_and_then_the_servers_have() {
    let mut job = job(rules());
    assert_eq!(job.start().len(), 3);
    assert_eq!(job.ends(T1, 0, 5), []);
    assert_eq!(job.ends(T0, 0, 6), []);
    assert!(job.is_draining());
    assert_eq!(job.wake_at(), Some(at(66)));
    assert_eq!(job.ends(PS, 0, 7), [Action::End(Outcome::Succeeded)]);
    assert_eq!(job.tick(at(100)), [], "nothing happens after the end");
}

#[test]
fn a_server_may_end_just_before_the_last_trainer() {
    let mut job = job(rules());
    job.ends(T0, 0, 5);
    assert_eq!(job.ends(PS, 0, 6), []);
    assert_eq!(job.ends(T1, 0, 7), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn a_server_that_ends_long_before_the_trainers_has_failed() {
    let mut job = job(rules());
    assert_eq!(job.ends(PS, 0, 5), []);
    assert_eq!(job.wake_at(), Some(at(35)));
    let told = job.tick(at(35));
    assert!(matches!(&told[..], [Action::Tell(note)] if note.contains("server 0 ended with exit code 0")), "{told:?}");
    assert_eq!(job.tick(at(35)), [Action::Start { replica: PS, incarnation: 1 }]);
}

#[test]
fn servers_that_do_not_end_are_stopped_and_the_job_succeeds() {
    let mut job = job(rules());
    job.ends(T0, 0, 5);
    job.ends(T1, 0, 6);
    assert_eq!(job.tick(at(65)), []);
    let actions = job.tick(at(66));
    assert!(
        matches!(&actions[..], [Action::Tell(note), Action::End(Outcome::Succeeded)] if note.contains("60 s")),
        "{actions:?}"
    );
}

#[test]
fn a_server_that_fails_after_the_trainers_is_only_told() {
    let mut job = job(rules());
    job.ends(T0, 0, 5);
    job.ends(T1, 0, 6);
    let actions = job.ends(PS, 1, 7);
    assert!(matches!(&actions[..], [Action::Tell(_), Action::End(Outcome::Succeeded)]), "{actions:?}");
}

#[test]
fn failed_members_are_started_again_until_the_limit() {
    let mut job = job(rules());
    for (replica, second, incarnation, due) in [(T0, 10, 1, 10), (PS, 11, 1, 11), (T0, 20, 2, 21)] {
        assert!(matches!(&job.ends(replica, 1, second)[..], [Action::Tell(_)]));
        assert_eq!(job.wake_at(), Some(at(due)));
        assert_eq!(job.tick(at(due)), [Action::Start { replica, incarnation }]);
    }
    assert_eq!(job.restarts(), 3);
    let actions = job.ends(T1, 7, 30);
    let (reason, cause) = failed(&actions);
    assert!(reason.contains("trainer 1 ended with exit code 7") && reason.contains("all 3 restarts"), "{reason}");
    assert_eq!(cause.map(|cause| cause.replica), Some(T0), "the trouble began with it");
}

#[test]
fn an_old_failure_is_not_the_cause_of_a_new_trouble() {
    let mut job = job(Rules { max_restarts: 1, ..rules() });
    job.ends(T0, 1, 10);
    job.tick(at(10));
    let actions = job.ends(PS, 2, 500);
    let (_, cause) = failed(&actions);
    assert_eq!(cause.map(|cause| cause.replica), Some(PS));
}

#[test]
fn the_restart_policy_decides_which_failures_of_trainers_end_the_job() {
    use RestartPolicy::{ExitCode, Never, OnFailure};
    let (code, killed) = (Exit::Code(3), Exit::Signal(9));
    let rows = [
        (OnFailure, T0, code, false),
        (Never, T0, killed, true),
        (Never, PS, code, false),
        (ExitCode, T0, code, true),
        (ExitCode, T0, killed, false),
        (ExitCode, T0, Exit::Code(137), false),
        (OnFailure, T0, Exit::NotStarted, true),
        (OnFailure, PS, Exit::NotStarted, true),
    ];
    for (restart_policy, replica, exit, ends) in rows {
        let mut job = job(Rules { restart_policy, ..rules() });
        let actions = job.exited(replica, exit, Vec::new(), at(1));
        let ended = matches!(&actions[..], [Action::End(Outcome::Failed { .. })]);
        assert_eq!(ended, ends, "{restart_policy:?} {replica} {exit}: {actions:?}");
    }
}

#[test]
fn the_active_deadline_fails_the_job() {
    let mut job = job(Rules { active_deadline: Some(at(30)), ..rules() });
    assert_eq!(job.wake_at(), Some(at(30)));
    assert_eq!(job.tick(at(29)), []);
    let actions = job.tick(at(30));
    let (reason, cause) = failed(&actions);
    assert!(reason.contains("active for 30 s"), "{reason}");
    assert_eq!(cause, None);
}

#[test]
fn waiting_doubles_up_to_a_minute() {
    let seconds: Vec<_> = (0..9).map(|incarnation| back_off(incarnation).as_secs()).collect();
    assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
}

/// Three trainers, of which two are needed, and one restart.
fn elastic() -> Lifecycle {
    let trainers = [T0, T1, Replica { role: Role::Trainer, index: 2 }];
    Lifecycle::new(Rules { min_trainers: Some(2), max_restarts: 1, ..rules() }, [PS].into_iter().chain(trainers))
}

#[test]
fn an_elastic_job_goes_on_without_a_trainer_that_has_no_restart_left() {
    let t2 = Replica { role: Role::Trainer, index: 2 };
    let mut job = elastic();
    job.ends(T1, 1, 5);
    job.tick(at(5));
    let told = job.ends(T1, 3, 10);
    let want = "trainer 1 ended with exit code 3, and spec.failurePolicy.maxRestarts is 1; it is given up, and 2 of 3 trainers go on";
    assert_eq!(told, [Action::Tell(want.into())]);
    assert_eq!((job.wake_at(), job.restarts()), (None, 1));
    job.ends(T0, 0, 20);
    job.ends(t2, 0, 21);
    assert!(job.is_draining());
    assert_eq!(job.ends(PS, 0, 22), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn an_elastic_job_fails_without_the_first_trainer_a_server_or_enough_trainers() {
    let t2 = Replica { role: Role::Trainer, index: 2 };
    // Who fails when all restarts are used up, and whether the job ends with the last of them.
    let rows: [(&[Replica], bool); 4] = [(&[T0], true), (&[PS], true), (&[t2], false), (&[t2, T1], true)];
    for (failing, ends) in rows {
        let mut job = Lifecycle { restarts: 1, ..elastic() };
        let last = failing.iter().map(|&replica| job.ends(replica, 1, 5)).last().expect("somebody fails");
        let ended = matches!(&last[..], [Action::End(Outcome::Failed { .. })]);
        assert_eq!(ended, ends, "{failing:?}: {last:?}");
    }
}

#[test]
fn nobody_starts_again_in_an_elastic_job_whose_work_is_done_but_the_first_trainer() {
    let t2 = Replica { role: Role::Trainer, index: 2 };
    let mut job = elastic();
    job.ends(T1, 0, 5);
    let told = job.ends(t2, 1, 6);
    assert!(matches!(&told[..], [Action::Tell(note)] if note.contains("nothing is left for it to do")), "{told:?}");
    assert!(matches!(&job.ends(T0, 1, 7)[..], [Action::Tell(note)] if note.contains("restart 1 of 1")));
    assert_eq!(job.tick(at(7)), [Action::Start { replica: T0, incarnation: 1 }]);
    job.ends(T0, 0, 9);
    assert!(job.is_draining());

    // A trainer that waits for its next start is not waited for.
    let mut job = Lifecycle { rules: Rules { max_restarts: 9, ..elastic().rules }, ..elastic() };
    for second in [1, 2] {
        job.ends(t2, 1, second);
        job.tick(at(second));
    }
    job.ends(T0, 0, 2);
    job.ends(T1, 0, 2);
    assert!(job.is_draining());

    // The server has gone because nobody was there; the first trainer comes too late.
    let mut job = elastic();
    job.ends(T1, 0, 5);
    job.ends(t2, 0, 5);
    job.ends(T0, 1, 5);
    job.ends(PS, 0, 6);
    assert_eq!(job.tick(at(36)).last(), Some(&Action::End(Outcome::Succeeded)));
}
