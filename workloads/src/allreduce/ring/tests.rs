//! Rings of processes that talk over real connections.

use std::io::copy;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use psjobs_api::Role;
use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_ps::network::Network;
use psjobs_ps::tls::Credentials;
use psjobs_rpc::{Driver, Endpoint, Registry, RemoteError, Settings};

use super::super::order::local_sum;
use super::super::{Inbox, Meeting, trainer_name};
use super::*;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A trainer of a job.
struct Process {
    endpoint: Endpoint,
    meeting: Meeting,
    address: String,
    _driver: Driver,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.endpoint.shutdown();
    }
}

impl Process {
    fn start(place: Place, change: impl FnOnce(Settings) -> Settings) -> Self {
        let driver = Driver::start().expect("a thread");
        let mut registry = Registry::default();
        let inbox = Inbox::offer(&mut registry, place);
        let settings = change(Settings::new(trainer_name(place.rank), "job"));
        let endpoint = Endpoint::start_driven(settings, registry, &driver);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        listener.set_nonblocking(true).expect("possible");
        {
            let handle = driver.handle();
            let _runtime = handle.enter();
            endpoint.serve(tokio::net::TcpListener::from_std(listener).expect("a listener"));
        }
        let meeting = Meeting::new(endpoint.clone(), inbox);
        Self { endpoint, meeting, address, _driver: driver }
    }

    /// Meets the others, which listen at `addresses`, by rank.
    fn meet(&mut self, addresses: &[String]) -> Ring {
        let locate = |name: &str, _| {
            let rank = (0..).map(trainer_name).zip(addresses).find(|(other, _)| other == name);
            rank.map(|(_, address)| address.clone()).ok_or_else(|| RemoteError::new("no address"))
        };
        let interrupt = Arc::<AtomicBool>::default();
        let neighbours = self.meeting.meet(locate, Vec::new, TIMEOUT, &interrupt).expect("all come");
        Ring::start(Some(neighbours), interrupt).expect("starts")
    }
}

/// The processes of a job and their rings. The rings are dropped first.
struct Job {
    rings: Vec<Ring>,
    processes: Vec<Process>,
}

impl Job {
    fn start(size: u32, change: impl Fn(Settings) -> Settings) -> Self {
        let start = |rank| Process::start(Place { rank, size }, &change);
        let processes = (0..size).map(start).collect();
        let mut job = Self { rings: Vec::new(), processes };
        let addresses = job.addresses();
        job.meet(&addresses);
        job
    }

    fn addresses(&self) -> Vec<String> {
        self.processes.iter().map(|process| process.address.clone()).collect()
    }

    /// All meet, and find each other at `addresses`.
    fn meet(&mut self, addresses: &[String]) {
        self.rings.clear();
        let processes = &mut self.processes;
        self.rings = thread::scope(|scope| {
            let meeting: Vec<_> = processes.iter_mut().map(|process| scope.spawn(|| process.meet(addresses))).collect();
            meeting.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
    }

    /// Every rank sums its values; the results by rank.
    fn sum(&mut self, bucket: usize, length: usize) -> Vec<Vec<f32>> {
        for (rank, ring) in self.rings.iter_mut().enumerate() {
            ring.begin_sum(values(rank, bucket, length));
        }
        self.rings.iter_mut().map(|ring| ring.summed().expect("all are there")).collect()
    }
}

/// A job, and its rings to be taken apart.
fn rings(size: u32) -> (Vec<Ring>, Vec<Process>) {
    let mut job = Job::start(size, |settings| settings);
    (std::mem::take(&mut job.rings), std::mem::take(&mut job.processes))
}

fn with_certificates() -> impl Fn(Settings) -> Settings {
    let folder = tempfile::tempdir().expect("a folder");
    let certificates = Certificates::make(&[], std::time::SystemTime::now(), LIFE).expect("no names are wrong");
    for (name, text) in certificates.files(Role::Trainer) {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    let network = Network::Tls(Arc::new(Credentials::load(folder.path()).expect("usable")));
    move |settings| Settings { network: network.clone(), ..settings }
}

#[test]
fn ranks_with_certificates_add_up_the_same() {
    let length = 100_000;
    let mut job = Job::start(3, with_certificates());
    let all: Vec<_> = (0..3).map(|rank| values(rank, 0, length)).collect();
    for sum in job.sum(0, length) {
        assert_eq!(sum, local_sum(&all));
    }
}

/// Values whose sum depends on the order.
fn values(rank: usize, bucket: usize, length: usize) -> Vec<f32> {
    let magnitude = |i: usize| if (i + rank).is_multiple_of(3) { 1e6 } else { 1.0 };
    (0..length).map(|i| ((i * 7 + rank * 31 + bucket) as f32 * 0.37).sin() * magnitude(i)).collect()
}

#[test]
fn every_rank_gets_the_bits_of_the_local_sum() {
    for size in 1..=4_usize {
        // Several sums under way at once; one shorter than the ring, one empty, one of several chunks.
        let lengths = [300_000, 3, 0, 1, 70_001];
        let (rings, _processes) = if size == 1 {
            (vec![Ring::start(None, Arc::default()).expect("starts")], Vec::new())
        } else {
            rings(size as u32)
        };
        let threads: Vec<_> = rings
            .into_iter()
            .enumerate()
            .map(|(rank, mut ring)| {
                thread::spawn(move || {
                    for (bucket, length) in lengths.into_iter().enumerate() {
                        ring.begin_sum(values(rank, bucket, length));
                    }
                    lengths.map(|_| ring.summed().expect("all are there"))
                })
            })
            .collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            for (bucket, sum) in thread.join().expect("no panic").into_iter().enumerate() {
                let all: Vec<_> = (0..size).map(|rank| values(rank, bucket, lengths[bucket])).collect();
                assert!(sum == local_sum(&all), "{size} ranks, rank {rank}, bucket {bucket}");
            }
        }
    }
}

#[test]
fn the_ranks_send_each_other_numbers() {
    let numbers = [1 << 40, 77_777_777_777, 12_345_678_901];
    let (rings, _processes) = rings(3);
    let threads: Vec<_> = rings
        .into_iter()
        .zip(numbers)
        .map(|(mut ring, number)| thread::spawn(move || ring.gather(number).expect("all are there")))
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), numbers);
    }
}

#[test]
fn a_rank_that_leaves_is_noticed_while_nothing_is_added_up() {
    let (mut rings, _processes) = rings(3);
    drop(rings.remove(1));
    let end = Instant::now() + TIMEOUT;
    while !rings.iter().all(|ring| ring.broken().load(Ordering::Acquire)) {
        assert!(Instant::now() < end, "it was not noticed");
        thread::yield_now();
    }
    for mut ring in rings {
        ring.begin_sum(vec![1.0]);
        let error = ring.summed().expect_err("one is missing").to_string();
        assert!(error.contains("trainer 1 is gone"), "{error}");
    }
}

#[test]
fn a_rank_that_has_done_its_work_is_not_taken_for_lost() {
    let (mut rings, mut processes) = rings(2);
    let (mut last, mut first) = (rings.pop().expect("two"), rings.pop().expect("two"));
    for ring in [&mut first, &mut last] {
        ring.begin_sum(vec![1.0]);
    }
    assert_eq!(first.summed().expect("both are there"), [2.0]);
    first.finish();
    drop(processes.remove(0));
    assert_eq!(last.summed().expect("it was sent before"), [2.0]);
    // Until its thread has seen the end, and looked again.
    let seen = Instant::now() + 3 * LOOK;
    while Instant::now() < seen {
        assert!(!last.broken().load(Ordering::Acquire));
        thread::yield_now();
    }
    last.begin_sum(vec![1.0]);
    let error = last.summed().expect_err("the other has gone").to_string();
    assert!(error.contains("trainer 0 is gone (it has ended its work)"), "{error}");
}

/// Takes the process of rank 1 of 4 away by `end`; returns what the others say.
fn errors_without_rank_1(end: impl FnOnce(Process)) -> Vec<String> {
    let (mut rings, mut processes) = rings(4);
    let dead = (processes.remove(1), rings.remove(1));
    let threads: Vec<_> = rings
        .into_iter()
        .map(|mut ring| {
            thread::spawn(move || {
                ring.begin_sum(vec![1.0; 1000]);
                ring.summed().expect_err("one is missing").to_string()
            })
        })
        .collect();
    end(dead.0);
    let errors = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    drop(dead.1);
    errors
}

#[test]
fn a_rank_that_ends_is_named_by_all_others_at_once() {
    let start = Instant::now();
    for error in errors_without_rank_1(drop) {
        assert!(error.contains("trainer 1 is gone"), "{error}");
    }
    assert!(start.elapsed() < TIMEOUT, "its end is noticed, not its silence");
}

#[test]
fn a_rank_that_is_only_silent_is_lost_after_the_stated_time() {
    let lease = Duration::from_millis(400);
    let mut job = Job::start(2, |settings| Settings { lease, ..settings });
    let (mut rings, vanished) = (std::mem::take(&mut job.rings), job.processes.pop().expect("two"));
    let _its_ring = rings.pop();
    // Rank 1 keeps its connections open and sends nothing, as a machine that has vanished: its runtime is kept busy.
    let (release, released) = mpsc::channel::<()>();
    let (stopped, stopping) = mpsc::channel::<()>();
    vanished._driver.handle().spawn(async move {
        let _ = stopped.send(());
        // The only thread of the runtime waits here until the end of the test.
        let _ = released.recv();
    });
    stopping.recv().expect("it is stopped");
    let mut ring = rings.pop().expect("the other");
    ring.begin_sum(vec![1.0; 10]);
    let error = ring.summed().expect_err("rank 1 does not answer").to_string();
    assert!(error.contains("trainer 1 is gone (it was silent for 400ms)"), "{error}");
    drop(release);
}

#[test]
fn a_busy_rank_is_not_taken_for_a_dead_one() {
    let lease = Duration::from_secs(4);
    let certificates = with_certificates();
    let mut job = Job::start(2, |settings| Settings { lease, ..certificates(settings) });
    let (mut busy, mut waiting) = (job.rings.pop().expect("two"), job.rings.pop().expect("two"));
    let (ready, go) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        waiting.begin_sum(vec![1.0]);
        ready.send(()).expect("the test listens");
        waiting.summed().expect("it comes in the end")
    });
    go.recv().expect("it waits");
    // Longer than the silence that would end it.
    assert!(go.recv_timeout(2 * lease).is_err(), "nothing more is said");
    busy.begin_sum(vec![2.0]);
    assert_eq!(busy.summed().expect("both are there"), [3.0]);
    assert_eq!(thread.join().expect("no panic"), [3.0]);
}

#[test]
fn ranks_with_other_models_report_both_lengths() {
    let (mut rings, _processes) = rings(2);
    let threads: Vec<_> = [10, 20]
        .into_iter()
        .map(|length| {
            let mut ring = rings.remove(0);
            thread::spawn(move || {
                ring.begin_sum(vec![0.0; length]);
                ring.summed().expect_err("they differ").to_string()
            })
        })
        .collect();
    let errors: Vec<String> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert!(
        errors.iter().any(|e| e.contains("sends 10 numbers where this one expects 5")
            || e.contains("sends 5 numbers where this one expects 10")),
        "{errors:?}"
    );
}

#[test]
fn an_interrupt_ends_the_wait() {
    let mut job = Job::start(2, |settings| settings);
    let interrupt = job.rings[0].interrupt.clone();
    job.rings[0].begin_sum(vec![1.0]);
    interrupt.store(true, Ordering::Relaxed);
    assert!(matches!(job.rings[0].summed(), Err(RingError::Interrupted)));
}

#[test]
fn ranks_of_another_job_are_not_let_in_and_one_that_stays_away_is_named() {
    let mut process = Process::start(Place { rank: 0, size: 2 }, |settings| settings);
    let other = Process::start(Place { rank: 1, size: 2 }, |settings| Settings { job_uid: "other".into(), ..settings });
    let locate = |_: &str, _| Ok(other.address.clone());
    let timeout = Duration::from_millis(500);
    let met = process.meeting.meet(locate, Vec::new, timeout, &AtomicBool::new(false));
    let error = met.map(drop).expect_err("the other is of another job").to_string();
    assert!(error.contains("trainer 1 did not come within 0 s") && error.contains("of job"), "{error}");

    let locate = |_: &str, _| Err(RemoteError::new("it has not said where it listens"));
    let met = process.meeting.meet(locate, Vec::new, timeout, &AtomicBool::new(false));
    let error = met.map(drop).expect_err("it stays away").to_string();
    assert!(error.contains("it has not said where it listens"), "{error}");

    let asked = AtomicUsize::new(0);
    let finished = || if asked.fetch_add(1, Ordering::Relaxed) < 2 { vec![0] } else { vec![0, 1] };
    let met = process.meeting.meet(locate, finished, TIMEOUT, &AtomicBool::new(false));
    assert!(matches!(met, Err(RingError::Finished { rank: 1 })), "it finishes while it is waited for");

    // Of this job, but of another size.
    let larger = Process::start(Place { rank: 1, size: 3 }, |settings| settings);
    let locate = |_: &str, _| Ok(larger.address.clone());
    let met = process.meeting.meet(locate, Vec::new, timeout, &AtomicBool::new(false));
    let error = met.map(drop).expect_err("it has another size").to_string();
    assert!(error.contains("trainer 1 of 3 takes values from trainer-0, not from trainer 0 of 2"), "{error}");
}

/// A way to a process that can be cut.
struct Relay {
    address: String,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let sockets = Arc::<Mutex<Vec<TcpStream>>>::default();
        let open = sockets.clone();
        // It ends with the test.
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(&target) else { continue };
                let clone = |socket: &TcpStream| socket.try_clone().expect("a socket");
                open.lock().expect("no panic").extend([clone(&near), clone(&far)]);
                for (mut from, mut to) in [(clone(&near), clone(&far)), (far, near)] {
                    thread::spawn(move || {
                        drop(copy(&mut from, &mut to));
                        drop(to.shutdown(Shutdown::Both));
                    });
                }
            }
        });
        Self { address, sockets }
    }

    /// Cuts all connections; returns their number.
    fn cut(&self) -> usize {
        let sockets = std::mem::take(&mut *self.sockets.lock().expect("no panic"));
        sockets.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        sockets.len() / 2
    }
}

#[test]
fn a_connection_that_breaks_and_comes_back_changes_no_bit() {
    let (size, length) = (3, 1_000_000);
    let mut job = Job { rings: Vec::new(), processes: Vec::new() };
    job.processes = (0..size).map(|rank| Process::start(Place { rank, size }, |settings| settings)).collect();
    let relays: Vec<Relay> = job.addresses().into_iter().map(Relay::to).collect();
    job.meet(&relays.iter().map(|relay| relay.address.clone()).collect::<Vec<_>>());
    let mut cut = 0;
    for bucket in 0..20 {
        for (rank, ring) in job.rings.iter_mut().enumerate() {
            ring.begin_sum(values(rank, bucket, length));
        }
        // In the middle of the sums, each time another one.
        cut += relays[bucket % relays.len()].cut();
        let all: Vec<_> = (0..size as usize).map(|rank| values(rank, bucket, length)).collect();
        let want = local_sum(&all);
        for ring in &mut job.rings {
            assert!(ring.summed().expect("the connection comes back") == want, "bucket {bucket}");
        }
    }
    // Rank 0 listens too, but the lower rank of a pair connects.
    assert!(cut > 10, "{cut} connections were cut");
}

#[test]
fn a_process_that_was_replaced_cannot_disturb_the_ring() {
    let mut job = Job::start(3, |settings| Settings { incarnation: 1, ..settings });
    let addresses = job.addresses();
    let mut zombie = Process::start(Place { rank: 0, size: 3 }, |settings| settings);
    let locate = |name: &str, _| Ok(addresses[usize::from(name.ends_with('2')) + 1].clone());
    let met = zombie.meeting.meet(locate, Vec::new, Duration::from_millis(500), &AtomicBool::new(false));
    let error = met.map(drop).expect_err("it was replaced").to_string();
    assert!(error.contains("was replaced"), "{error}");
    let all: Vec<_> = (0..3).map(|rank| values(rank, 0, 1000)).collect();
    for sum in job.sum(0, 1000) {
        assert_eq!(sum, local_sum(&all));
    }
}

#[test]
fn ranks_meet_again_after_one_was_replaced() {
    let mut job = Job::start(3, |settings| settings);
    job.sum(0, 1000);
    for (incarnation, rank) in [(1, 1), (2, 0), (3, 2)] {
        let replacement = Process::start(Place { rank, size: 3 }, |settings| Settings { incarnation, ..settings });
        job.processes[rank as usize] = replacement;
        // Those that are left hear of it by themselves.
        let end = Instant::now() + TIMEOUT;
        let left = |(other, ring): (usize, &Ring)| other == rank as usize || ring.broken().load(Ordering::Acquire);
        while !job.rings.iter().enumerate().all(left) {
            assert!(Instant::now() < end, "rank {rank} is missing and was not noticed");
            thread::yield_now();
        }
        let addresses = job.addresses();
        job.meet(&addresses);
        let all: Vec<_> = (0..3).map(|rank| values(rank, 7, 1000)).collect();
        for sum in job.sum(7, 1000) {
            assert_eq!(sum, local_sum(&all), "after rank {rank} was replaced");
        }
    }
}
