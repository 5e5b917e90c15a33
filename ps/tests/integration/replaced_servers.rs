//! Servers that were replaced while they still ran, as when a node loses its kubelet and keeps its containers and its
//! network: the successor leads or follows, the old process stands down, and training goes on.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::support::job::{Job, Process, wait_for, wait_for_two_copies};
use crate::support::*;
use psjobs_api::training::ConsistencyMode;
use psjobs_ps::client::{Session, SessionConfig};
use psjobs_ps::network::{Dial, Dialing, Network, Stream};
use psjobs_ps::server::{ServerConfig, ServerError};
use tokio::net::TcpStream;

const NAMES: [&str; 2] = ["ps-0:29500", "ps-1:29500"];
const STEPS: u64 = 400;

/// Where the names of a job's servers lead. A name moves to the successor; connections that exist stay.
#[derive(Default)]
struct Names(Mutex<HashMap<String, SocketAddr>>);

impl Names {
    fn lead(&self, server: u32, address: SocketAddr) {
        self.0.lock().expect("no panic").insert(NAMES[server as usize].to_owned(), address);
    }
}

impl Dial for Names {
    fn dial(&self, name: &str) -> Dialing {
        let address = self.0.lock().expect("no panic").get(name).copied();
        Box::pin(async move {
            let address = address.ok_or_else(|| std::io::Error::other("no such name"))?;
            Ok(Box::new(TcpStream::connect(address).await?) as Box<dyn Stream>)
        })
    }
}

async fn start_server(names: &Arc<Names>, index: u32, incarnation: u32, is_replicated: bool) -> Server {
    let replicas = if is_replicated { NAMES.map(str::to_owned).to_vec() } else { Vec::new() };
    let address = Some(NAMES[index as usize].to_owned());
    let network = Network::Other(names.clone());
    let config = config(index, 2, 1, ConsistencyMode::Sync);
    let server = start(ServerConfig { incarnation, address, replicas, network, shared_memory: false, ..config }).await;
    names.lead(index, server.address);
    server
}

/// Trains on a thread of its own: the steps as they are done, and the parameters at the end. After each step the trainer takes
/// a message from `pace`, as long as somebody may send one.
fn begin_training(
    names: &Arc<Names>,
    replication_factor: u32,
    pace: mpsc::Receiver<()>,
) -> (mpsc::Receiver<u64>, std::thread::JoinHandle<Vec<f32>>) {
    let (done, steps) = mpsc::channel();
    let config = SessionConfig {
        network: Network::Other(names.clone()),
        replication_factor,
        shared_memory: false,
        total_steps: STEPS,
        connect_timeout: Duration::from_secs(60),
        ..session_config(0, NAMES.map(str::to_owned).to_vec())
    };
    let training = std::thread::spawn(move || {
        let mut session = Session::join(config, &vec![1.0; elements()]).expect("joins");
        let mut step = session.next_step();
        while step < STEPS {
            session.gradients_mut().copy_from_slice(&gradient(0, step, elements()));
            step = session.exchange(step).expect("the servers answer");
            // A test that has failed listens no more.
            let _ = done.send(step);
            let _ = pace.recv();
        }
        let parameters = session.parameters().to_vec();
        session.leave(true, 0, std::collections::BTreeMap::new()).expect("leaves");
        parameters
    });
    (steps, training)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_replaced_while_it_runs_stands_down_and_costs_no_step() {
    let undisturbed = tokio::task::spawn_blocking(|| Job::undisturbed(1, STEPS)).await.expect("no panic");
    for victim in [0, 1] {
        let names = Arc::<Names>::default();
        let mut servers = vec![start_server(&names, 0, 0, true).await, start_server(&names, 1, 0, true).await];
        let (go_on, pace) = mpsc::channel();
        let (steps, training) = begin_training(&names, 2, pace);
        // All but the last step.
        (0..STEPS - 2).for_each(|_| go_on.send(()).expect("it trains"));
        let addresses = addresses(&servers);
        let copied = tokio::task::spawn_blocking(move || {
            wait_for(&steps, 10);
            addresses.iter().for_each(|address| wait_for_two_copies(address));
        });
        copied.await.expect("no panic");
        // The old process keeps its connections, the trainer's among them.
        let successor = start_server(&names, victim, 1, true).await;
        let old = std::mem::replace(&mut servers[victim as usize], successor);
        let ended = tokio::time::timeout(Duration::from_secs(10), old.ended).await.expect("it stands down");
        match ended.expect("no panic") {
            Err(ServerError::Replaced { server, incarnation: 0, successor: 1 }) => assert_eq!(server, victim),
            other => panic!("server {victim} ended otherwise: {other:?}"),
        }
        drop(go_on);
        let parameters = tokio::task::spawn_blocking(|| training.join().expect("no panic"));
        let parameters = tokio::time::timeout(Duration::from_secs(60), parameters).await.expect("training goes on");
        assert!(parameters.expect("no panic") == undisturbed, "replaced server {victim}: the parameters differ");
        for server in servers {
            server.ended.await.expect("no panic").expect("ends well");
        }
    }
}

/// Nothing but the name leads to the successor: without copies and checkpoints no server talks to another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_copies_that_was_replaced_while_it_runs_ends_and_its_trainer_fills_the_successor() {
    let undisturbed = tokio::task::spawn_blocking(|| Job::undisturbed(1, STEPS)).await.expect("no panic");
    let names = Arc::<Names>::default();
    let (other, old) = (start_server(&names, 0, 0, false).await, start_server(&names, 1, 0, false).await);
    let (go_on, pace) = mpsc::channel();
    let (_steps, training) = begin_training(&names, 1, pace);
    (0..10).for_each(|_| go_on.send(()).expect("it trains"));
    let successor = start_server(&names, 1, 1, false).await;
    // The trainer waits with its connections open, which lead to the old process.
    let ended = tokio::time::timeout(Duration::from_secs(30), old.ended).await.expect("it ends").expect("no panic");
    assert!(matches!(ended, Err(ServerError::Replaced { server: 1, incarnation: 0, successor: 1 })), "{ended:?}");
    drop(go_on);
    let parameters = tokio::task::spawn_blocking(|| training.join().expect("no panic"));
    let parameters = tokio::time::timeout(Duration::from_secs(60), parameters).await.expect("training goes on");
    assert!(parameters.expect("no panic") == undisturbed, "the parameters differ");
    for server in [other, successor] {
        server.ended.await.expect("no panic").expect("ends well");
    }
}

#[test]
fn a_server_that_starts_after_a_trainer_has_finished_does_not_wait_for_it() {
    let mut job = Job::plain(2, 2, ConsistencyMode::Sync);
    let servers = job.start_all();
    let (sender, steps) = mpsc::channel();
    job.limit.set(STEPS - 1);
    let (short, long) = (job.trainer(0, 5, sender.clone()), job.trainer(1, STEPS, sender));
    short.join().expect("it leaves well");
    wait_for(&steps, 10);
    servers.into_iter().for_each(Process::kill);
    job.finished_trainers = vec![0];
    let servers: Vec<_> = (0..2).map(|index| job.start_again(index, 1)).collect();
    job.limit.remove();
    long.join().expect("it goes on alone");
    for server in servers {
        assert_eq!(server.outcome().expect("ends well").steps, STEPS, "of the trainer that this process has seen");
    }
}
