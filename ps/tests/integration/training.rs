//! Whole jobs over real sockets: what the trainers end up with, and how the servers end.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::Session;

/// Returns the result of one process that adds up the trainers' gradients in their order and divides.
fn local(trainers: u32, steps: u64) -> Vec<f32> {
    let n = elements();
    let (mut weights, mut momentum) = (vec![1.0_f32; n], vec![0.0_f32; n]);
    for step in 0..steps {
        let mut sum = gradient(0, step, n);
        for trainer in 1..trainers {
            for (sum, g) in sum.iter_mut().zip(gradient(trainer, step, n)) {
                *sum += g;
            }
        }
        for ((w, m), g) in weights.iter_mut().zip(&mut momentum).zip(sum) {
            *m = 0.5 * *m + g / trainers as f32;
            *w -= 0.125 * *m;
        }
    }
    weights
}

#[tokio::test(flavor = "multi_thread")]
async fn sync_is_bit_equal_to_one_process_that_adds_in_trainer_order() {
    for (servers, trainers, shared) in [(1, 1, true), (1, 3, false), (2, 2, true), (2, 2, false), (3, 2, true)] {
        let running = start_all(servers, trainers, ConsistencyMode::Sync).await;
        let threads: Vec<_> = (0..trainers)
            .map(|trainer| {
                let mut config = session_config(trainer, addresses(&running));
                // One trainer over TCP beside others in shared memory must make no difference.
                config.shared_memory = shared && trainer != 1;
                std::thread::spawn(move || {
                    let session = Session::join(config, &vec![1.0; elements()]).expect("joins");
                    let (session, parameters) = train(session, trainer, 10);
                    session
                        .leave(true, 320, BTreeMap::from([("accuracy".into(), f64::from(trainer))]))
                        .expect("leaves");
                    parameters
                })
            })
            .collect();
        let want = local(trainers, 10);
        for thread in threads {
            let parameters = tokio::task::spawn_blocking(|| thread.join().expect("no panic")).await.expect("runs");
            assert!(
                parameters == want,
                "{servers} servers, {trainers} trainers, shared memory {shared}: parameters differ"
            );
        }
        for server in running {
            let result = server.ended.await.expect("no panic").expect("ends well");
            assert_eq!(result.steps, u64::from(trainers) * 10);
            assert_eq!(result.examples, u64::from(trainers) * 320);
            assert_eq!(result.metrics["accuracy"], 0.0, "the trainer of lowest index counts");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn async_applies_every_gradient_once() {
    let running = start_all(2, 2, ConsistencyMode::Async).await;
    let servers = addresses(&running);
    let parameters = tokio::task::spawn_blocking(move || {
        let mut one = Session::join(session_config(0, servers.clone()), &vec![1.0; elements()]).expect("joins");
        let two = Session::join(session_config(1, servers), &vec![7.0; elements()]).expect("joins");
        assert!(two.parameters().iter().all(|v| *v == 1.0), "the first one's values count");
        one.gradients_mut().fill(1.0);
        one.exchange(0).expect("answers");
        let (two, _) = train(two, 1, 0);
        one.exchange(0).expect("a repeat is answered");
        let parameters = one.parameters().to_vec();
        one.leave(true, 0, BTreeMap::new()).expect("leaves");
        two.leave(true, 0, BTreeMap::new()).expect("leaves");
        parameters
    })
    .await
    .expect("no panic");
    assert!(parameters.iter().all(|v| *v == 0.875), "one update of 0.125, not two");
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_trainer_adds_a_momentum_of_its_own_gradients_in_async() {
    let mut running = Vec::new();
    for index in 0..2 {
        let mut config = config(index, 2, 2, ConsistencyMode::Async);
        config.training.staleness.momentum = None;
        running.push(start(config).await);
    }
    let servers = addresses(&running);
    let parameters = tokio::task::spawn_blocking(move || {
        let mut sessions = [0, 1].map(|trainer| {
            let mut config = session_config(trainer, servers.clone());
            config.shared_memory = trainer == 0;
            Session::join(config, &vec![1.0; elements()]).expect("joins")
        });
        for step in 0..5 {
            for (trainer, session) in (0..).zip(&mut sessions) {
                session.gradients_mut().copy_from_slice(&gradient(trainer, step, elements()));
                session.exchange(step).expect("answers");
            }
        }
        let parameters = sessions[1].parameters().to_vec();
        for session in sessions {
            session.leave(true, 0, BTreeMap::new()).expect("leaves");
        }
        parameters
    })
    .await
    .expect("no panic");
    let n = elements();
    let (mut weights, mut velocities) = (vec![1.0_f32; n], vec![vec![0.0_f32; n]; 2]);
    for step in 0..5 {
        for (trainer, velocity) in (0..).zip(&mut velocities) {
            for ((w, v), g) in weights.iter_mut().zip(velocity).zip(gradient(trainer, step, n)) {
                *v = 0.5 * *v + g;
                *w -= 0.125 * (g + 0.5 * *v);
            }
        }
    }
    assert!(parameters == weights, "the bits of two momenta with the look-ahead of Nesterov");
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_trainer_goes_on_where_the_servers_are() {
    let running = start_all(2, 1, ConsistencyMode::Sync).await;
    let servers = addresses(&running);
    let parameters = tokio::task::spawn_blocking(move || {
        let first = Session::join(session_config(0, servers.clone()), &vec![1.0; elements()]).expect("joins");
        let (first, _) = train(first, 0, 4);
        let mut config = session_config(0, servers.clone());
        config.incarnation = 1;
        let second = Session::join(config, &vec![9.0; elements()]).expect("joins");
        assert_eq!(second.next_step(), 4);
        let (second, parameters) = train(second, 0, 10);
        let error =
            Session::join(session_config(0, servers), &vec![1.0; elements()]).err().expect("fenced").to_string();
        assert!(error.contains("replaced by incarnation 1"), "{error}");
        drop(first);
        second.leave(true, 0, BTreeMap::new()).expect("leaves");
        parameters
    })
    .await
    .expect("no panic");
    assert!(parameters == local(1, 10));
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_empty_is_filled_by_the_trainer() {
    for shared in [false, true] {
        come_back_empty(shared).await;
    }
}

async fn come_back_empty(shared: bool) {
    let mut running = start_all(2, 1, ConsistencyMode::Async).await;
    let servers = addresses(&running);
    let (session, _) = tokio::task::spawn_blocking(move || {
        let mut config = session_config(0, servers);
        config.shared_memory = shared;
        let session = Session::join(config, &vec![1.0; elements()]).expect("joins");
        train(session, 0, 3)
    })
    .await
    .expect("no panic");
    let lost = running.remove(1);
    let address = lost.address;
    lost.stop.cancel();
    assert!(lost.ended.await.expect("no panic").is_err(), "it was stopped before its work was done");
    let listener = tokio::net::TcpListener::bind(address).await.expect("the port is free again");
    running.push(start_on(listener, config(1, 2, 1, ConsistencyMode::Async)));
    tokio::task::spawn_blocking(move || {
        let before = session.parameters().to_vec();
        let (session, after) = {
            let mut session = session;
            session.gradients_mut().fill(0.0);
            session.exchange(3).expect("goes on");
            let after = session.parameters().to_vec();
            (session, after)
        };
        // Elements of the lost server have no momentum any more: a zero gradient leaves them be.
        let range = 262_144..524_288;
        assert!(after[range.clone()] == before[range], "filled with what the trainer held");
        session.leave(true, 0, BTreeMap::new()).expect("leaves");
    })
    .await
    .expect("no panic");
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_show_progress_trainers_and_the_blocks_that_work_most() {
    let (mut config, listener) = (config(0, 1, 1, ConsistencyMode::Async), listen().await);
    let watched = listener.local_addr().expect("bound");
    config.metrics = Some(listener);
    let server = start(config).await;
    let address = server.address.to_string();
    let session = tokio::task::spawn_blocking(move || {
        let session = Session::join(session_config(0, vec![address]), &vec![1.0; elements()]).expect("joins");
        let mut session = train(session, 0, 3).0;
        session.report(24, &BTreeMap::from([("loss \"a\"".to_owned(), 0.5)]), None);
        session
    });
    let session = session.await.expect("no panic");
    let reported = "psjobs_ps_metric{metric=\"loss \\\"a\\\"\"} 0.5\n";
    // It comes with the next heartbeat.
    let heard = async {
        loop {
            let text = metrics(watched).await;
            if text.contains(reported) {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = tokio::time::timeout(Duration::from_secs(20), heard).await.expect("the metric is shown");
    for line in ["psjobs_ps_step 3\n", "psjobs_ps_total_steps 10\n", "psjobs_ps_trainer_steps{trainer=\"0\"} 3\n"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert!(text.contains("psjobs_ps_trainer_silent_seconds{trainer=\"0\"} "), "{text}");
    for (block, tensor) in [(0, "fc.bias"), (1, "fc.weight"), (2, "fc.weight")] {
        let name = format!("psjobs_ps_block_busy_seconds_total{{block=\"{block}\",tensor=\"{tensor}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_else(|| panic!("{name} in {text}"));
        assert!(line.parse::<f64>().expect("a number") > 0.0, "{line}");
    }
    tokio::task::spawn_blocking(move || session.leave(true, 0, BTreeMap::new()).expect("leaves")).await.expect("runs");
    server.ended.await.expect("no panic").expect("ends well");
}
