//! Sparse tables over real sockets: what trainers read back, what is refused, and what rows cost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::support::*;
use psjobs_api::training::{ConsistencyMode, NonFinite};
use psjobs_ps::client::{Member, RowGradients, SessionConfig, Tables};
use psjobs_ps::proto::sparse_tables_client::SparseTablesClient;
use psjobs_ps::proto::{PullRowsRequest, PushRowsRequest, TableGradients, TableKeys, TrainerId};
use psjobs_ps::server::CheckpointConfig;
use psjobs_ps::sparse::{TableSpec, key};

pub const WIDTH: usize = 4;

pub fn member(trainer: u32, servers: Vec<String>) -> SessionConfig {
    SessionConfig { tensors: Vec::new(), ..session_config(trainer, servers) }
}

pub fn specs() -> Vec<TableSpec> {
    vec![TableSpec::new("user", WIDTH, 0.5), TableSpec::new("item", 2, 0.0)]
}

/// Joins and opens the tables.
fn open(config: SessionConfig, specs: Vec<TableSpec>) -> (Member, Tables) {
    let member = Member::join(config.clone()).expect("joins");
    (member, Tables::open(config, specs).expect("opens"))
}

/// Runs what blocks where that is allowed.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// The keys of a trainer's step: some that others have too, one only of its own.
pub fn keys(trainer: u32, step: u64) -> Vec<u64> {
    let shared = (0..5).map(|i| (step * 3 + i * 7) % 40);
    shared.chain([1_000_000_000_000 + u64::from(trainer)]).collect::<BTreeSet<_>>().into_iter().collect()
}

pub fn row(trainer: u32, step: u64, key: u64) -> [f32; WIDTH] {
    std::array::from_fn(|i| ((key % 97) as f32 + i as f32 * 0.3 + step as f32).sin() * (1.0 + trainer as f32 * 1e-4))
}

/// Returns the result of one process: SGD with momentum .5 and rate .125 on the mean of the trainers' gradients.
pub fn local(trainers: u32, steps: u64, initial: &BTreeMap<u64, Vec<f32>>) -> BTreeMap<u64, Vec<f32>> {
    let mut rows: BTreeMap<u64, (Vec<f32>, [f32; WIDTH])> =
        initial.iter().map(|(key, values)| (*key, (values.clone(), [0.0; WIDTH]))).collect();
    for step in 0..steps {
        let mut sums: BTreeMap<u64, [f32; WIDTH]> = BTreeMap::new();
        for trainer in 0..trainers {
            for key in keys(trainer, step) {
                let sum = sums.entry(key).or_insert([0.0; WIDTH]);
                sum.iter_mut().zip(row(trainer, step, key)).for_each(|(sum, value)| *sum += value);
            }
        }
        for (key, sum) in sums {
            let (values, momentum) = rows.get_mut(&key).expect("its initial values are known");
            for ((w, m), g) in values.iter_mut().zip(momentum).zip(sum) {
                *m = 0.5 * *m + g / trainers as f32;
                *w -= 0.125 * *m;
            }
        }
    }
    rows.into_iter().map(|(key, (values, _))| (key, values)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn in_sync_rows_are_bit_equal_to_one_process_whatever_the_number_of_servers() {
    const STEPS: u64 = 12;
    for (servers, trainers) in [(1, 1), (2, 2), (3, 3)] {
        let running = start_all(servers, trainers, ConsistencyMode::Sync).await;
        let all: Vec<u64> = (0..trainers)
            .flat_map(|t| (0..STEPS).flat_map(move |s| keys(t, s)))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        let addresses = addresses(&running);
        let (read, wanted) = (
            move |tables: &mut Tables, all: &[u64]| {
                let rows = tables.pull(&[(0, all)]).expect("answers").remove(0);
                all.iter().copied().zip(rows.chunks(WIDTH).map(<[f32]>::to_vec)).collect::<BTreeMap<_, _>>()
            },
            all.clone(),
        );
        let threads: Vec<_> = (0..trainers)
            .map(|trainer| {
                let (config, all) = (member(trainer, addresses.clone()), wanted.clone());
                std::thread::spawn(move || {
                    let (member, mut tables) = open(config, specs());
                    // No trainer can have finished a round before all have pushed, so these are untrained.
                    let initial = read(&mut tables, &all);
                    for step in 0..STEPS {
                        let keys = keys(trainer, step);
                        let values: Vec<f32> = keys.iter().flat_map(|key| row(trainer, step, *key)).collect();
                        tables.push(step, &[RowGradients { table: 0, keys: &keys, values: &values }]).expect("goes on");
                    }
                    let trained = read(&mut tables, &all);
                    member.leave(true).expect("leaves");
                    (initial, trained)
                })
            })
            .collect();
        for thread in threads {
            let (initial, trained) = blocking(|| thread.join().expect("no panic")).await;
            assert!(
                initial.values().flatten().any(|v| *v != 0.0) && initial.values().flatten().all(|v| v.abs() <= 0.5)
            );
            assert!(trained == local(trainers, STEPS, &initial), "{servers} servers, {trainers} trainers");
        }
        for server in running {
            server.ended.await.expect("no panic").expect("ends well");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_counts_once_and_an_old_incarnation_is_fenced() {
    let running = start_all(2, 1, ConsistencyMode::Async).await;
    let servers = addresses(&running);
    blocking(move || {
        let (first, mut tables) = open(member(0, servers.clone()), specs());
        let keys = [3, 4, 5, 3];
        let begun = tables.pull(&[(0, &keys)]).expect("answers").remove(0);
        assert_eq!(begun[..WIDTH], begun[3 * WIDTH..], "a key that is asked for twice");
        let gradients = RowGradients { table: 0, keys: &keys, values: &[1.0; 4 * WIDTH] };
        for _ in 0..3 {
            tables.push(0, &[gradients]).expect("a repeat is answered");
        }
        tables.push(1, &[]).expect("an empty push");
        let rows = tables.pull(&[(0, &[3, 4]), (1, &[9])]).expect("answers");
        for (i, (value, begun)) in rows[0].iter().zip(&begun).enumerate() {
            let gradient = if i < WIDTH { 2.0 } else { 1.0 };
            assert_eq!(*value, begun - 0.125 * gradient, "gradients of one key are added");
        }
        assert_eq!(rows[1], [0.0, 0.0]);

        let again = SessionConfig { incarnation: 1, ..member(0, servers.clone()) };
        let (second, successor) = open(again, specs());
        assert_eq!(successor.next_step(), 2);
        let error = tables.push(2, &[gradients]).expect_err("it was replaced").to_string();
        assert!(error.contains("replaced by incarnation 1"), "{error}");
        drop(first);
        second.leave(true).expect("leaves");
    })
    .await;
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_in_a_sentence_and_changes_nothing() {
    let running = start_all(2, 1, ConsistencyMode::Async).await;
    let servers = addresses(&running);
    let (at_home, away) = ((0..).find(|k| key::server(*k, 2) == 0), (0..).find(|k| key::server(*k, 2) == 1));
    let (at_home, away) = (at_home.expect("half of them"), away.expect("half of them"));
    let (member, mut tables) = blocking({
        let servers = servers.clone();
        move || {
            let (member, tables) = open(member(0, servers.clone()), specs());
            let others = vec![TableSpec::new("user", 8, 0.5), specs().remove(1)];
            let error = Tables::open(self::member(0, servers), others).err().expect("other tables").to_string();
            assert!(error.contains("width: 4") && error.contains("width: 8"), "{error}");
            (member, tables)
        }
    })
    .await;
    let mut client = SparseTablesClient::connect(format!("http://{}", servers[0])).await.expect("connects");
    let trainer = || Some(TrainerId { job_uid: UID.into(), index: 0, incarnation: 0 });
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let good = TableGradients { table: 0, keys: vec![at_home], gradients: floats(&[1.0; WIDTH]).into() };
    let rows = [
        (
            "no table",
            vec![TableGradients { table: 2, ..good.clone() }],
            "table 2 does not exist; the job has tables 0 to 1",
        ),
        ("twice", vec![good.clone(), good.clone()], "comes twice in one push"),
        ("elsewhere", vec![TableGradients { keys: vec![away], ..good.clone() }], "belongs to server 1"),
        (
            "too short",
            vec![TableGradients { gradients: vec![0; 15].into(), ..good.clone() }],
            "need 16 bytes of gradients, 15 came",
        ),
        ("too many", vec![TableGradients { table: 1, ..good.clone() }], "need 8 bytes of gradients, 16 came"),
        (
            "NaN",
            vec![TableGradients { gradients: floats(&[1.0, f32::NAN, 1.0, 1.0]).into(), ..good.clone() }],
            "trainer 0, step 0, table user, key",
        ),
    ];
    for (label, tables, want) in rows {
        let status = client
            .push_rows(PushRowsRequest { trainer: trainer(), tables, ..PushRowsRequest::default() })
            .await
            .expect_err(label);
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{label}");
        assert!(status.message().contains(want), "{label}: {}", status.message());
    }
    // A message may name more keys than rows fit into an answer: refused before memory is taken for it.
    let wanted = vec![TableKeys { table: 0, keys: vec![at_home; 5_000_000] }];
    let pull = PullRowsRequest { trainer: trainer(), wanted, ..PullRowsRequest::default() };
    let status = client.pull_rows(pull).await.expect_err("too many rows");
    assert!(status.message().contains("ask for fewer keys at once"), "{}", status.message());
    let anonymous = client.push_rows(PushRowsRequest::default()).await.expect_err("it names no trainer");
    assert!(anonymous.message().contains("has no trainer"), "{}", anonymous.message());
    let stranger = trainer().map(|trainer| TrainerId { incarnation: 7, ..trainer });
    let stranger = PushRowsRequest { trainer: stranger, ..PushRowsRequest::default() };
    let stranger = client.push_rows(stranger).await.expect_err("it has not joined");
    assert!(stranger.message().contains("has not joined"), "{}", stranger.message());
    blocking(move || {
        let begun = tables.pull(&[(0, &[at_home])]).expect("the server lives").remove(0);
        tables.push(0, &[RowGradients { table: 0, keys: &[at_home], values: &[1.0; WIDTH] }]).expect("step 0 is free");
        let want: Vec<f32> = begun.iter().map(|v| v - 0.125).collect();
        assert_eq!(tables.pull(&[(0, &[at_home])]).expect("answers").remove(0), want);
        member.leave(true).expect("leaves");
    })
    .await;
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gradient_with_infinity_is_left_out_where_the_job_says_so() {
    let mut config = config(0, 1, 1, ConsistencyMode::Sync);
    config.training.non_finite = NonFinite::Skip;
    let server = start(config).await;
    let address = vec![server.address.to_string()];
    blocking(move || {
        let (member, mut tables) = open(member(0, address), specs());
        let begun = tables.pull(&[(0, &[1])]).expect("answers");
        let values = [f32::INFINITY; WIDTH];
        tables.push(0, &[RowGradients { table: 0, keys: &[1], values: &values }]).expect("left out");
        assert_eq!(tables.pull(&[(0, &[1])]).expect("answers"), begun);
        member.leave(true).expect("leaves");
    })
    .await;
    server.ended.await.expect("no panic").expect("ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_keeps_checkpoints_needs_the_trainers_layers_in_them() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let listener = listen().await;
    let address = listener.local_addr().expect("bound").to_string();
    let mut config = config(0, 1, 1, ConsistencyMode::Async);
    config.checkpoint = Some(CheckpointConfig {
        job: "job".into(),
        incarnation: 0,
        folder: folder.path().into(),
        interval: Duration::from_secs(60),
        keep: 1,
        resume: true,
        servers: vec![address.clone()],
    });
    let server = start_on(listener, config);
    let error = blocking(move || {
        let config = member(0, vec![address]);
        let member = Member::join(config.clone()).expect("joins");
        let error = Tables::open(config, specs()).err().expect("refused").to_string();
        member.leave(true).expect("leaves");
        error
    })
    .await;
    assert!(error.contains("table user and no layers") && error.contains("describe them in Join"), "{error}");
    server.ended.await.expect("no panic").expect("ends well");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_started_anew_is_not_taken_for_the_one_with_the_rows() {
    let mut running = start_all(2, 1, ConsistencyMode::Async).await;
    let servers = addresses(&running);
    let (member, mut tables) = blocking(move || open(member(0, servers), specs())).await;
    let lost = running.remove(1);
    let address = lost.address;
    lost.stop.cancel();
    assert!(lost.ended.await.expect("no panic").is_err(), "it was stopped before its work was done");
    let listener = tokio::net::TcpListener::bind(address).await.expect("the port is free again");
    running.push(start_on(listener, config(1, 2, 1, ConsistencyMode::Async)));
    blocking(move || {
        let keys: Vec<u64> = (0..64).collect();
        let error = tables.pull(&[(0, &keys)]).expect_err("the rows are gone").to_string();
        assert!(error.contains(&address.to_string()) && error.contains("was started anew"), "{error}");
        drop((tables, member));
    })
    .await;
    running.iter().for_each(|server| server.stop.cancel());
}

/// Reads `name` of the table from `/metrics`.
async fn metric(address: std::net::SocketAddr, name: &str) -> f64 {
    let text = metrics(address).await;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("psjobs_ps_{name}{{table=\"click\"}} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_a_hundred_million_keys_on_two_servers_costs_only_its_touched_rows() {
    const KEYS: u64 = 100_000_000;
    const TOUCHED: u64 = 20_000;
    let mut running = Vec::new();
    let mut watched = Vec::new();
    for index in 0..2 {
        let listener = listen().await;
        watched.push(listener.local_addr().expect("bound"));
        let mut config = config(index, 2, 1, ConsistencyMode::Async);
        config.metrics = Some(listener);
        running.push(start(config).await);
    }
    let servers = addresses(&running);
    let (member, tables) = blocking(move || {
        let (member, mut tables) = open(member(0, servers), vec![TableSpec::new("click", 16, 0.1)]);
        let keys: Vec<u64> = (0..KEYS).step_by((KEYS / TOUCHED) as usize).collect();
        tables
            .push(0, &[RowGradients { table: 0, keys: &keys, values: &vec![1.0; keys.len() * 16] }])
            .expect("goes on");
        // Reading ten times as many keys makes no row.
        let others: Vec<u64> = (1..KEYS).step_by((KEYS / TOUCHED / 10) as usize).collect();
        tables.pull(&[(0, &others)]).expect("answers");
        (member, tables)
    })
    .await;
    let (mut rows, mut bytes) = (0.0, 0.0);
    for address in watched {
        rows += metric(address, "table_rows").await;
        bytes += metric(address, "table_bytes").await;
        assert!(metric(address, "table_pushed_keys_total").await > 0.4 * TOUCHED as f64);
    }
    assert_eq!(rows, TOUCHED as f64);
    // Values and one slot of momentum, and no more than twice as much again for the index and what is begun.
    let (touched, all) = (TOUCHED as f64 * 2.0 * 16.0 * 4.0, KEYS as f64 * 2.0 * 16.0 * 4.0);
    assert!(bytes < 3.0 * touched && bytes < all / 1000.0, "{bytes} bytes for {rows} rows");
    blocking(move || {
        drop(tables);
        member.leave(true).expect("leaves");
    })
    .await;
    for server in running {
        server.ended.await.expect("no panic").expect("ends well");
    }
}
