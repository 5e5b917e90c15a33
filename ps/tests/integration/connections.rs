//! Trainers with several connections to each server: they train as with one, and one that breaks is made again alone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{Session, SessionConfig, TensorSpec};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const STEPS: u64 = 6;
/// Five blocks and a bit.
const ELEMENTS: usize = 5 * 262_144 + 99;

/// Values that differ in every element, trainer and step; those of a step are quickly made.
fn gradients(trainer: u32, step: u64) -> impl Iterator<Item = f32> {
    (0..ELEMENTS as u32)
        .map(move |i| (i.wrapping_mul(2_654_435_761) >> 9) as f32 * 1e-6 + (step as f32) - trainer as f32 * 1e-3)
}

/// Returns the result of one process that adds up the trainers' gradients in their order and divides.
fn local(trainers: u32) -> Vec<f32> {
    let (mut weights, mut momentum) = (vec![1.0_f32; ELEMENTS], vec![0.0_f32; ELEMENTS]);
    for step in 0..STEPS {
        let mut sum: Vec<f32> = gradients(0, step).collect();
        for trainer in 1..trainers {
            sum.iter_mut().zip(gradients(trainer, step)).for_each(|(sum, g)| *sum += g);
        }
        for ((w, m), g) in weights.iter_mut().zip(&mut momentum).zip(sum) {
            *m = 0.5 * *m + g / trainers as f32;
            *w -= 0.125 * *m;
        }
    }
    weights
}

/// Where a connection breaks.
#[derive(Clone, Copy)]
struct Break {
    /// Its number.
    connection: u32,
    /// Bytes that go through in the direction in which it breaks: the last ones may be within a message.
    bytes: u64,
    /// On their way to the trainer.
    down: bool,
}

/// Passes on what comes to a server, and counts the connections. One of them may break.
struct Relay {
    address: SocketAddr,
    connections: Arc<AtomicU32>,
    /// The bytes received over each connection.
    bytes: Arc<[AtomicU64; 8]>,
}

impl Relay {
    async fn start(server: SocketAddr, broken: Option<Break>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (connections, bytes) = (Arc::<AtomicU32>::default(), Arc::<[AtomicU64; 8]>::default());
        let (counted, brought) = (connections.clone(), bytes.clone());
        tokio::spawn(async move {
            loop {
                let (mut trainer, _) = listener.accept().await.expect("it listens");
                let number = counted.fetch_add(1, SeqCst);
                let (brought, broken) = (brought.clone(), broken.filter(|broken| broken.connection == number));
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(server).await.expect("it is there");
                    let (up, to_trainer) = trainer.split();
                    let (down, to_server) = server.split();
                    let most = |is_down| broken.filter(|broken| broken.down == is_down).map(|broken| broken.bytes);
                    let answered = AtomicU64::new(0);
                    // Whoever ends first ends both.
                    tokio::select! {
                        () = pass(up, to_server, most(false), &brought[number as usize]) => {}
                        () = pass(down, to_trainer, most(true), &answered) => {}
                    }
                });
            }
        });
        Self { address, connections, bytes }
    }
}

/// Passes bytes on, `most` at most, and counts them.
async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    most: Option<u64>,
    passed: &AtomicU64,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let n = from.read(&mut buffer).await.unwrap_or(0);
        let so_far = passed.fetch_add(n as u64, SeqCst);
        let left = most.map_or(n, |most| n.min((most - so_far.min(most)) as usize));
        if n == 0 || to.write_all(&buffer[..left]).await.is_err() || left < n {
            return;
        }
    }
}

fn train_over(config: SessionConfig) -> Vec<f32> {
    let trainer = config.trainer;
    let mut session = Session::join(config, &vec![1.0; ELEMENTS]).expect("joins");
    let mut step = session.next_step();
    while step < STEPS {
        session.gradients_mut().iter_mut().zip(gradients(trainer, step)).for_each(|(g, value)| *g = value);
        step = session.exchange(step).expect("the servers answer");
    }
    let parameters = session.parameters().to_vec();
    session.leave(true, 0, BTreeMap::new()).expect("leaves");
    parameters
}

/// A job of one server behind a relay that breaks a connection: what its trainers end with, and what the relay saw.
async fn run(connections: &[u32], shared_memory: bool, broken: Option<Break>) -> (Vec<Vec<f32>>, Relay) {
    let server = start(config(0, 1, connections.len() as u32, ConsistencyMode::Sync)).await;
    let relay = Relay::start(server.address, broken).await;
    let address = relay.address.to_string();
    let trainers: Vec<_> = (0..)
        .zip(connections)
        .map(|(trainer, connections)| {
            let config = SessionConfig {
                tensors: vec![TensorSpec::new("weight", vec![ELEMENTS as u64])],
                total_steps: STEPS,
                connections: *connections,
                shared_memory,
                ..session_config(trainer, vec![address.clone()])
            };
            tokio::task::spawn_blocking(move || train_over(config))
        })
        .collect();
    let mut parameters = Vec::new();
    for trainer in trainers {
        parameters.push(trainer.await.expect("no panic"));
    }
    let result = server.ended.await.expect("no panic").expect("ends well");
    assert_eq!(result.steps, STEPS * connections.len() as u64);
    (parameters, relay)
}

#[tokio::test(flavor = "multi_thread")]
async fn sync_is_bit_equal_over_any_number_of_connections() {
    let (alone, together) = (local(1), local(2));
    let rows: [(&[u32], bool, u32); 7] = [
        (&[1], false, 1),
        (&[2], false, 2),
        (&[3], false, 3),
        (&[4], false, 4),
        // It has six blocks: no trainer needs a seventh connection. Shared memory needs one.
        (&[9], false, 6),
        (&[4], true, 1),
        (&[2, 3], false, 5),
    ];
    for (connections, shared_memory, opened) in rows {
        let (parameters, relay) = run(connections, shared_memory, None).await;
        let want = if connections.len() == 1 { &alone } else { &together };
        assert!(parameters.iter().all(|got| got == want), "{connections:?}, shared memory {shared_memory}: differs");
        assert_eq!(relay.connections.load(SeqCst), opened, "{connections:?}, shared memory {shared_memory}");
        let brought: Vec<u64> = relay.bytes.iter().map(|bytes| bytes.load(SeqCst)).take(opened as usize).collect();
        // A mebibyte for each of its blocks, of which the last is short, and each step.
        let least = STEPS * (1 << 20) * (5 / u64::from(opened));
        assert!(shared_memory || brought.iter().all(|bytes| *bytes >= least), "{connections:?}: {brought:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_within_a_step_is_made_again_alone() {
    let (alone, together) = (local(1), local(2));
    for (connections, broken) in [(&[3][..], 0), (&[3], 1), (&[3], 2), (&[2, 2], 1)] {
        // The first fills the blocks; then each brings two of them in a step: this is within one of the second.
        let filled = if broken == 0 { ELEMENTS as u64 * 4 } else { 0 };
        let bytes = filled + (5 << 19);
        let broken_up = Break { connection: broken, bytes, down: false };
        let (parameters, relay) = run(connections, false, Some(broken_up)).await;
        let want = if connections.len() == 1 { &alone } else { &together };
        assert!(
            parameters.iter().all(|got| got == want),
            "{connections:?}, without {broken}: a gradient is lost or repeated"
        );
        let opened = connections.iter().sum::<u32>() + 1;
        assert_eq!(relay.connections.load(SeqCst), opened, "{connections:?}, without {broken}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_within_an_answer_of_the_last_step_leaves_no_half_of_a_block() {
    let want = local(1);
    // Elements of the blocks of each connection; the first one brings all values in the beginning, too.
    let block = 262_144;
    for (connections, connection, pulled, each_step) in
        [(1, 0, ELEMENTS, ELEMENTS), (2, 1, 0, 2 * block + 99), (3, 0, ELEMENTS, 2 * block), (3, 1, 0, 2 * block)]
    {
        // The last block of the last step is half there. What HTTP/2 adds is far less than the other half.
        let bytes = 4 * (pulled as u64 + STEPS * each_step as u64 - block as u64 / 2);
        let broken = Break { connection, bytes, down: true };
        let (parameters, relay) = run(&[connections], false, Some(broken)).await;
        assert!(parameters == [want.clone()], "{connections} connections, without {connection}: differs");
        let opened = relay.connections.load(SeqCst);
        assert_eq!(opened, connections + 1, "{connections} connections, without {connection}: it broke once");
    }
}
