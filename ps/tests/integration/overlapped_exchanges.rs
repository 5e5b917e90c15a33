//! Trainers that compute each gradient while the exchange of the one before is under way.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use crate::support::job::*;
use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::batch::sharing::Work;
use psjobs_ps::client::{AsyncSession, Ended, OverlapSession, Session, SessionConfig};
use tokio::runtime::Runtime;

/// Makes `steps`, all of the gradient 1. The exchange of the last one is under way then.
fn overlap(session: &mut Session, steps: Range<u64>) {
    for step in steps {
        // Here a trainer computes.
        if let Some(ended) = session.end_exchange() {
            assert_eq!(ended.expect("the servers answer"), Ended { next: step, has_gone_back: false });
        }
        session.gradients_mut().fill(1.0);
        session.begin_exchange(step);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trainer_computes_while_its_exchange_waits_for_another_one() {
    let mut config = config(0, 1, 2, ConsistencyMode::Bounded);
    config.training.consistency.staleness = 0;
    config.training.optimizer.momentum = 0.0;
    config.training.batch.adaptive = true;
    let server = start(config).await;
    let addresses = vec![server.address.to_string()];
    tokio::task::spawn_blocking(move || {
        let join = |trainer| {
            let config = SessionConfig { overlap: true, ..session_config(trainer, addresses.clone()) };
            Session::join(config, &vec![1.0; elements()]).expect("joins")
        };
        let (mut one, mut two) = (join(0), join(1));
        let memory = one.map_memory().expect("maps");
        overlap(&mut one, 0..1);
        // It is under way until the other trainer gives the same step, which it has yet to compute.
        assert_eq!((one.next_step(), one.entries()), (1, 1));
        one.share_batch(1, 32, Work::default()).expect("the server lets it").expect("server 0 answers meanwhile");
        one.report(32, &BTreeMap::from([("loss".to_owned(), 0.5)]), None);
        assert!(memory.parameters().iter().all(|value| *value == 1.0), "no answer has come");
        overlap(&mut two, 0..1);
        overlap(&mut one, 1..2);
        overlap(&mut two, 1..2);
        for session in [&mut one, &mut two] {
            let ended = session.settle().expect("an exchange is under way").expect("the servers answer");
            assert_eq!(ended, Ended { next: 2, has_gone_back: false });
            assert!(session.parameters().iter().all(|value| *value == 0.5), "four updates of 0.125");
        }
        for session in [one, two] {
            session.leave(true, 0, BTreeMap::new()).expect("leaves");
        }
    })
    .await
    .expect("no panic");
    server.ended.await.expect("no panic").expect("ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn staleness_is_counted_by_the_parameters_that_a_gradient_was_computed_with() {
    for (overlaps, each_block) in [(false, 0), (true, 5)] {
        let (mut config, listener) = (config(0, 1, 1, ConsistencyMode::Async), listen().await);
        let watched = listener.local_addr().expect("bound");
        config.metrics = Some(listener);
        let server = start(config).await;
        let config = SessionConfig { overlap: overlaps, ..session_config(0, vec![server.address.to_string()]) };
        let session = tokio::task::spawn_blocking(move || {
            let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
            if !overlaps {
                return train(session, 0, 7).0;
            }
            // The first gradient is computed before any exchange, and the sixth after one that was waited for.
            for (steps, next) in [(0..5, 5), (5..7, 7)] {
                overlap(&mut session, steps);
                let ended = session.settle().expect("an exchange is under way").expect("the servers answer");
                assert_eq!(ended, Ended { next, has_gone_back: false });
            }
            session
        });
        let session = session.await.expect("no panic");
        let text = metrics(watched).await;
        let sum = text.lines().find_map(|line| line.strip_prefix("psjobs_ps_staleness_sum "));
        let sum: u64 = sum.expect("a histogram").parse().expect("a number");
        assert_eq!(sum, 3 * each_block, "of three blocks, with overlap: {overlaps}");
        let leave = move || session.leave(true, 0, BTreeMap::new()).expect("leaves");
        tokio::task::spawn_blocking(leave).await.expect("no panic");
        server.ended.await.expect("no panic").expect("ends well");
    }
}

/// A server dies while an exchange is under way, and all go back to a checkpoint: each step counts once all the same.
#[test]
fn servers_that_go_back_take_the_exchange_under_way_along() {
    const STEPS: u64 = 12;
    let folder = tempfile::tempdir().expect("a folder");
    let job = Job { momentum: 0.0, ..Job::checkpointed(folder.path(), 2, 1, ConsistencyMode::Async) };
    let mut servers = job.start_all();
    let config = SessionConfig { overlap: true, ..job.session(0, STEPS) };
    let mut session = Session::join(config, &vec![4.0; elements()]).expect("joins");
    let (mut step, mut rewinds) = (0, 0);
    loop {
        // Here a trainer computes the gradient of `step`.
        let entries = session.entries();
        if let Some(ended) = session.end_exchange() {
            let Ended { next, has_gone_back } = ended.expect("the servers answer");
            assert_eq!(has_gone_back, session.entries() != entries);
            if has_gone_back {
                rewinds += 1;
                step = next;
                continue; // What was computed meanwhile is dropped.
            }
            assert_eq!(next, step);
        }
        if step == STEPS {
            break;
        }
        session.gradients_mut().fill(1.0);
        session.begin_exchange(step);
        if step == STEPS / 2 && rewinds == 0 {
            wait_for_checkpoint(folder.path(), 0);
            servers.remove(1).kill();
            servers.insert(1, job.start_again(1, 1));
        }
        step += 1;
    }
    assert!(rewinds > 0, "the servers have gone back");
    let want = 4.0 - 0.125 * STEPS as f32;
    assert!(session.parameters().iter().all(|value| *value == want), "{STEPS} updates of 0.125");
    session.leave(true, 0, BTreeMap::new()).expect("leaves");
    servers.into_iter().for_each(|server| drop(server.outcome().expect("ends well")));
}

#[test]
fn a_trainer_with_an_error_of_its_own_does_not_wait_for_the_others() {
    let job = Job::plain(1, 2, ConsistencyMode::Sync);
    let mut servers = job.start_all();
    let (config, (failed, over)) = (job.session(0, 10), mpsc::channel());
    let trainer = std::thread::spawn(move || {
        let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
        // It is under way until the other trainer gives the same step, which never comes.
        session.begin_exchange(0);
        session.fail("its data is damaged".to_owned());
        failed.send(()).expect("the test waits");
    });
    over.recv_timeout(Duration::from_secs(60)).expect("it does not wait for the other trainer");
    trainer.join().expect("no panic");
    let error = servers.remove(0).outcome().expect_err("no process starts the trainer again");
    assert!(error.to_string().contains("trainer 0 ended with an error: its data is damaged"), "{error}");
}

/// A runtime that ends takes the task of an exchange along, and so its session, as a panic in it does.
#[test]
fn a_session_that_is_gone_with_its_exchange_is_not_waited_for_again() {
    let job = Job::plain(1, 2, ConsistencyMode::Sync);
    let servers = job.start_all();
    let (own, other) = (Runtime::new().expect("a runtime"), Runtime::new().expect("a runtime"));
    let session = own.block_on(AsyncSession::join(job.session(0, 10), &vec![1.0; elements()])).expect("joins");
    let mut session = OverlapSession::new(session, own.handle().clone());
    // It is under way until the other trainer gives the same step, which never comes.
    session.begin_exchange(0);
    own.shutdown_background();
    let waited = catch_unwind(AssertUnwindSafe(|| other.block_on(session.end_exchange()).is_some()));
    assert!(waited.is_err(), "the panic reaches who waits");
    assert!(!session.is_exchanging() && session.idle().is_none());
    assert!(other.block_on(session.into_session()).is_none());
    servers.into_iter().for_each(Process::kill);
}
