mod cases;

use psjobs_api::crd::RestartPolicy;
use psjobs_policy::Elastic;

use super::*;

const PS: Replica = Replica::server(0);
const T0: Replica = Replica::trainer(0);
const T1: Replica = Replica::trainer(1);
const T2: Replica = Replica::trainer(2);

/// The rules of a job with these fields of the spec.
fn rules(spec: &str) -> Rules {
    Rules {
        policy: psjobs_policy::cases::policy(spec),
        server_drain: Duration::from_secs(60),
        servers_are_probed: false,
        writes_model: false,
    }
}

/// A job whose processes have all started at second 0.
fn job(rules: Rules) -> Lifecycle {
    let mut job = Lifecycle::new(rules, [PS, T0, T1]);
    assert_eq!(job.start(Duration::ZERO).len(), 3);
    job
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
    let mut job = job(rules(""));
    assert_eq!(job.ends(T1, 0, 5), []);
    assert_eq!(job.ends(T0, 0, 6), []);
    assert!(job.is_draining());
    assert_eq!(job.wake_at(), Some(at(66)));
    assert_eq!(job.ends(PS, 0, 7), [Action::End(Outcome::Succeeded)]);
    assert_eq!(job.tick(at(100)), [], "nothing happens after the end");
}

#[test]
fn a_server_may_end_just_before_the_last_trainer() {
    let mut job = job(rules(""));
    job.ends(T0, 0, 5);
    assert_eq!(job.ends(PS, 0, 6), []);
    assert_eq!(job.ends(T1, 0, 7), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn a_server_that_ends_long_before_the_trainers_has_failed() {
    let mut job = job(rules(""));
    assert_eq!(job.ends(PS, 0, 5), []);
    assert_eq!(job.wake_at(), Some(at(35)));
    let actions = job.tick(at(35));
    assert!(
        matches!(&actions[..], [Action::Warn(note)] if note.contains("server 0 ended with exit code 0")),
        "{actions:?}"
    );
    assert_eq!(job.tick(at(35)), [Action::Start { replica: PS, incarnation: 1 }]);
}

#[test]
fn servers_that_do_not_end_are_stopped_and_the_job_succeeds() {
    let mut job = job(rules(""));
    job.ends(T0, 0, 5);
    job.ends(T1, 0, 6);
    assert_eq!(job.tick(at(65)), []);
    let actions = job.tick(at(66));
    assert!(
        matches!(&actions[..], [Action::Warn(note), Action::End(Outcome::Succeeded)] if note.contains("60 s")),
        "{actions:?}"
    );
}

#[test]
fn a_server_that_fails_after_the_trainers_is_only_reported() {
    let mut job = job(rules(""));
    job.ends(T0, 0, 5);
    job.ends(T1, 0, 6);
    let actions = job.ends(PS, 1, 7);
    assert!(matches!(&actions[..], [Action::Warn(_), Action::End(Outcome::Succeeded)]), "{actions:?}");
}

#[test]
fn server_0_is_started_again_if_it_fails_before_it_has_written_the_model() {
    let mut job = job(Rules { writes_model: true, ..rules("failurePolicy: {maxRestarts: 2}") });
    job.ends(T0, 0, 10);
    assert_eq!(job.ends(T1, 0, 11), []);
    assert_eq!(job.progress(100, 100, at(12)), []);
    assert_eq!(job.tick(at(71)), []);
    assert!(job.is_draining() && job.wake_at().is_none(), "it has the time that it needs");
    let actions = job.ends(PS, 137, 72);
    assert!(matches!(&actions[..], [Action::Warn(text)] if text.contains("it is started again")), "{actions:?}");
    assert!(!job.is_draining());
    let due = job.wake_at().expect("the back-off");
    assert_eq!(job.tick(due), [Action::Start { replica: PS, incarnation: 1 }]);
    assert!(job.is_draining() && job.trainer_ends().finished == [0, 1]);
    assert_eq!(job.ends(PS, 0, 80), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn a_job_whose_model_cannot_be_written_fails() {
    let mut job = job(Rules { writes_model: true, ..rules("failurePolicy: {maxRestarts: 0}") });
    job.ends(T0, 0, 10);
    job.ends(T1, 0, 11);
    let actions = job.ends(PS, 1, 12);
    assert!(failed(&actions).0.contains("server 0 ended with exit code 1"), "{actions:?}");
}

#[test]
fn failed_members_are_started_again_until_the_limit() {
    let mut job = job(rules(""));
    for (replica, second, incarnation, due) in [(T0, 10, 1, 10), (PS, 11, 1, 11), (T0, 20, 2, 21)] {
        assert!(matches!(&job.ends(replica, 1, second)[..], [Action::Warn(_)]));
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
    let mut job = job(rules("failurePolicy: {maxRestarts: 1}"));
    job.ends(T0, 1, 10);
    job.tick(at(10));
    let actions = job.ends(PS, 3, 500);
    let (_, cause) = failed(&actions);
    assert_eq!(cause.map(|cause| cause.replica), Some(PS));
}

#[test]
fn a_process_whose_peer_is_away_is_not_the_cause_of_a_trouble() {
    let mut job = job(rules("failurePolicy: {maxRestarts: 0}"));
    job.ends(T0, 75, 10);
    assert_eq!(job.tick(at(10)), [Action::Start { replica: T0, incarnation: 1 }]);
    let actions = job.ends(PS, 3, 11);
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
        let mut rules = rules("");
        rules.policy.trainer_restart_policy = restart_policy;
        let mut job = job(rules);
        let actions = job.exited(replica, exit, Vec::new(), at(1));
        let ended = matches!(&actions[..], [Action::End(Outcome::Failed { .. })]);
        assert_eq!(ended, ends, "{restart_policy:?} {replica} {exit}: {actions:?}");
    }
}

#[test]
fn the_active_deadline_fails_the_job() {
    let mut job = job(rules("runPolicy: {activeDeadlineSeconds: 30}"));
    assert_eq!(job.wake_at(), Some(at(30)));
    assert_eq!(job.tick(at(29)), []);
    let actions = job.tick(at(30));
    let (reason, cause) = failed(&actions);
    assert!(reason.contains("active for 30 s"), "{reason}");
    assert_eq!(cause, None);
}

/// Three trainers, of which two are needed, and one restart.
fn elastic() -> Lifecycle {
    let mut rules = rules("failurePolicy: {maxRestarts: 1}");
    rules.policy.elastic = Some(Elastic { min: 2, max: 3 });
    let mut job = Lifecycle::new(rules, [PS, T0, T1, T2]);
    job.start(Duration::ZERO);
    job
}

#[test]
fn an_elastic_job_goes_on_without_a_trainer_that_has_no_restart_left() {
    let mut job = elastic();
    job.ends(T1, 1, 5);
    job.tick(at(5));
    let actions = job.ends(T1, 3, 10);
    let want = "trainer 1 ended with exit code 3, and spec.failurePolicy.maxRestarts is 1; it is given up, and 2 of 3 trainers go on";
    assert_eq!(actions, [Action::Warn(want.into())]);
    assert_eq!((job.wake_at(), job.restarts()), (None, 1));
    job.ends(T0, 0, 20);
    job.ends(T2, 0, 21);
    assert!(job.is_draining());
    assert_eq!(job.ends(PS, 0, 22), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn an_elastic_job_fails_without_the_first_trainer_a_server_or_enough_trainers() {
    // Who fails when all restarts are used up, and whether the job ends with the last of them.
    let rows: [(&[Replica], bool); 4] = [(&[T0], true), (&[PS], true), (&[T2], false), (&[T2, T1], true)];
    for (failing, ends) in rows {
        let mut job = Lifecycle { counted: 1, ..elastic() };
        let last = failing.iter().map(|&replica| job.ends(replica, 1, 5)).last().expect("somebody fails");
        let ended = matches!(&last[..], [Action::End(Outcome::Failed { .. })]);
        assert_eq!(ended, ends, "{failing:?}: {last:?}");
    }
}

#[test]
fn only_the_first_trainer_starts_again_in_an_elastic_job_whose_work_is_done() {
    let mut job = elastic();
    job.ends(T1, 0, 5);
    let actions = job.ends(T2, 1, 6);
    assert!(
        matches!(&actions[..], [Action::Warn(note)] if note.contains("nothing is left for it to do")),
        "{actions:?}"
    );
    assert!(matches!(&job.ends(T0, 1, 7)[..], [Action::Warn(note)] if note.contains("restart 1 of 1")));
    assert_eq!(job.tick(at(7)), [Action::Start { replica: T0, incarnation: 1 }]);
    job.ends(T0, 0, 9);
    assert!(job.is_draining());

    // A trainer that waits for its next start is not waited for.
    let mut job = elastic();
    job.rules.policy.max_restarts = 9;
    for second in [1, 2] {
        job.ends(T2, 1, second);
        job.tick(at(second));
    }
    job.ends(T0, 0, 2);
    job.ends(T1, 0, 2);
    assert!(job.is_draining());

    // The server has gone because no trainer was there; the first trainer comes too late.
    let mut job = elastic();
    job.ends(T1, 0, 5);
    job.ends(T2, 0, 5);
    job.ends(T0, 1, 5);
    job.ends(PS, 0, 6);
    assert_eq!(job.tick(at(36)).last(), Some(&Action::End(Outcome::Succeeded)));
}

/// The result of a server that saw the first processes of both trainers leave well.
fn all_left() -> ReplicaResult {
    ReplicaResult { left: [(0, "0-1".to_owned())].into(), ..ReplicaResult::default() }
}

#[test]
fn a_trainer_that_failed_just_before_its_servers_end_was_seen_gets_the_server_back() {
    let mut job = job(rules("failurePolicy: {maxRestarts: 1}"));
    job.ends(T0, 0, 5);
    job.ends(T1, 9, 5);
    assert_eq!(job.tick(at(5)), [Action::Start { replica: T1, incarnation: 1 }]);
    job.concluded(PS, &all_left(), at(6));
    assert_eq!(job.tick(at(6)), [Action::Start { replica: PS, incarnation: 1 }]);
    job.ends(T1, 0, 95);
    assert_eq!(job.concluded(PS, &all_left(), at(96)), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn trainers_go_on_without_a_server_that_saw_them_leave_and_start_it_again_if_one_fails() {
    let mut job = job(rules("failurePolicy: {maxRestarts: 1}"));
    assert_eq!(job.trainer_ends().finished, [0; 0]);
    job.ends(T0, 0, 5);
    assert_eq!(job.trainer_ends().finished, [0]);
    job.concluded(PS, &all_left(), at(6));
    assert_eq!(job.wake_at(), None, "trainer 1 may take its time");
    job.ends(T1, 1, 90);
    let started = [PS, T1].map(|replica| Action::Start { replica, incarnation: 1 });
    assert_eq!(job.tick(at(90)), started);
    job.ends(T1, 0, 95);
    assert!(job.is_draining());
    assert_eq!(job.concluded(PS, &all_left(), at(96)), [Action::End(Outcome::Succeeded)]);

    let mut job = super::tests::job(rules(""));
    job.concluded(PS, &all_left(), at(6));
    job.ends(T0, 0, 50);
    assert_eq!(job.ends(T1, 0, 60), [Action::End(Outcome::Succeeded)], "no server is waited for");
}

#[test]
fn a_trainer_that_finds_no_server_any_more_is_done_if_these_counted_it_as_finished() {
    let mut job = job(rules(""));
    job.ends(T0, 0, 5);
    job.concluded(PS, &all_left(), at(6));
    assert_eq!(job.ends(T1, PEER_AWAY, 126), [Action::End(Outcome::Succeeded)]);

    let mut job = super::tests::job(rules(""));
    job.ends(T0, 0, 5);
    assert!(job.ends(T1, PEER_AWAY, 126).iter().all(|action| !matches!(action, Action::End(_))));
    assert_eq!(job.tick(at(127)), [Action::Start { replica: T1, incarnation: 1 }], "the server is away");

    let mut job = super::tests::job(rules(""));
    job.ends(T0, 0, 5);
    job.ends(T1, PEER_AWAY, 126);
    let ended = job.concluded(PS, &all_left(), at(126));
    assert_eq!(ended, [Action::End(Outcome::Succeeded)], "the server's end was seen later");
}

#[test]
fn a_server_that_is_probed_lets_the_trainers_start_when_it_listens() {
    let mut job = Lifecycle::new(Rules { servers_are_probed: true, ..rules("") }, [PS, T0, T1]);
    assert_eq!(job.start(at(0)), [Action::Start { replica: PS, incarnation: 0 }]);
    job.ends(PS, 1, 1);
    assert_eq!(job.tick(at(1)), [Action::Start { replica: PS, incarnation: 1 }]);
    assert_eq!(job.server_is_ready(PS, 0, at(2)), [], "that was its first process");
    let trainers = [T0, T1].map(|replica| Action::Start { replica, incarnation: 0 });
    assert_eq!(job.server_is_ready(PS, 1, at(2)), trainers);
    // One that is started again does not wait for the server, which is away.
    job.ends(PS, 1, 3);
    job.ends(T0, 1, 3);
    assert_eq!(job.tick(at(3)), [Action::Start { replica: T0, incarnation: 1 }], "the server waits for a second");
}

#[test]
fn all_processes_end_before_any_of_them_is_started_again() {
    let mut job = job(rules("failurePolicy: {restartStrategy: RecreateAll}"));
    let actions = job.ends(T0, 1, 5);
    let want = "trainer 0 ended with exit code 1; all processes are started again (restart 1 of 3)";
    assert_eq!(actions, [Action::Warn(want.into()), Action::Stop(PS), Action::Stop(T1)]);
    assert_eq!(job.ends(T1, 143, 6), []);
    let started = [PS, T0, T1].map(|replica| Action::Start { replica, incarnation: 1 });
    assert_eq!(job.exited(PS, Exit::Signal(9), Vec::new(), at(7)), started);
    assert_eq!((job.restarts(), job.counted), (3, 1));
}

#[test]
fn what_is_stopped_at_success_is_no_failure_and_servers_go_last() {
    let mut job = job(rules("successPolicy: {operator: RankZero}"));
    assert_eq!(job.ends(T0, 0, 5), [Action::Stop(T1)]);
    assert!(job.is_draining());
    assert_eq!(job.exited(T1, Exit::Signal(15), Vec::new(), at(6)), [Action::Stop(PS)]);
    assert_eq!(job.exited(PS, Exit::Signal(15), Vec::new(), at(7)), [Action::End(Outcome::Succeeded)]);
}

#[test]
fn a_stall_that_was_due_while_server_0_was_silent_is_looked_at_with_its_next_report() {
    let mut job = job(rules("runPolicy: {progressDeadlineSeconds: 60}"));
    job.progress(7, 100, at(0));
    assert_eq!(job.wake_at(), Some(at(60)));
    assert_eq!(job.tick(at(60)), [], "a minute old");
    assert_eq!(job.wake_at(), None, "nothing to look at before it reports");
    let actions = job.progress(7, 100, at(70));
    let want = "the job made no step for 60 s, as long as spec.runPolicy.progressDeadlineSeconds allows (step 7 of 100); \
                all processes are started again (restart 1 of 3)";
    assert_eq!(actions[0], Action::Warn(want.into()));
    assert_eq!(actions.len(), 4, "three processes are stopped");
}
