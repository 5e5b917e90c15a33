use std::net::{TcpListener, TcpStream};

use psjobs_api::certificates::{Certificates, LIFE};
use psjobs_ps::tls::Credentials;

use super::super::order::local_sum;
use super::super::stream::Identity;
use super::*;

/// A ring of `size` ranks on this machine, not yet running: the places and their connections.
fn connected(size: u32) -> Vec<(Place, Option<Neighbours>)> {
    connected_with(size, None)
}

fn connected_with(size: u32, credentials: Option<&Credentials>) -> Vec<(Place, Option<Neighbours>)> {
    if size == 1 {
        return vec![(Place { rank: 0, size: 1 }, None)];
    }
    let listeners: Vec<TcpListener> =
        (0..size).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let addresses: Vec<String> = listeners.iter().map(|l| l.local_addr().expect("bound").to_string()).collect();
    thread::scope(|scope| {
        let connecting: Vec<_> = (0..size)
            .zip(&listeners)
            .map(|(rank, listener)| {
                let place = Place { rank, size };
                let next = addresses[place.next() as usize].clone();
                let patience = Duration::from_secs(20);
                let identity = Identity { place, uid: "job", credentials };
                let connect = move || {
                    Neighbours::connect(identity, listener, |_| Ok(next.clone()), patience, &AtomicBool::new(false))
                };
                (place, scope.spawn(connect))
            })
            .collect();
        let done = |(place, thread): (Place, thread::ScopedJoinHandle<Result<Neighbours, RingError>>)| {
            (place, Some(thread.join().expect("no panic").expect("connects")))
        };
        connecting.into_iter().map(done).collect()
    })
}

fn rings(size: u32) -> Vec<Ring> {
    let start = |(place, neighbours)| Ring::start(place, neighbours, Arc::default()).expect("starts");
    connected(size).into_iter().map(start).collect()
}

fn credentials() -> Credentials {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in Certificates::make(&[], std::time::SystemTime::now(), LIFE).expect("no names are wrong").files()
    {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    Credentials::load(folder.path()).expect("usable")
}

#[test]
fn ranks_with_certificates_add_up_the_same() {
    let length = 100_000;
    let summing: Vec<_> = connected_with(3, Some(&credentials()))
        .into_iter()
        .enumerate()
        .map(|(rank, (place, neighbours))| {
            let mut ring = Ring::start(place, neighbours, Arc::default()).expect("starts");
            thread::spawn(move || {
                ring.begin_sum(values(rank, 0, length));
                ring.summed().expect("all are there")
            })
        })
        .collect();
    let all: Vec<_> = (0..3).map(|rank| values(rank, 0, length)).collect();
    for rank in summing {
        assert_eq!(rank.join().expect("no panic"), local_sum(&all));
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
        let threads: Vec<_> = rings(size as u32)
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
fn the_ranks_tell_each_other_numbers() {
    let numbers = [1 << 40, 77_777_777_777, 12_345_678_901];
    let threads: Vec<_> = rings(3)
        .into_iter()
        .zip(numbers)
        .map(|(mut ring, number)| thread::spawn(move || ring.gather(number).expect("all are there")))
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), numbers);
    }
}

#[test]
fn a_rank_that_dies_is_noticed_while_nothing_is_added_up() {
    let mut rings = rings(3);
    drop(rings.remove(1));
    let end = Instant::now() + SILENCE;
    while !rings.iter().all(|ring| ring.broken().load(Ordering::Acquire)) {
        assert!(Instant::now() < end, "nobody noticed");
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
    let mut rings = rings(2);
    let (mut last, mut first) = (rings.pop().expect("two"), rings.pop().expect("two"));
    for ring in [&mut first, &mut last] {
        ring.begin_sum(vec![1.0]);
    }
    assert_eq!(first.summed().expect("both are there"), [2.0]);
    first.finish();
    assert_eq!(last.summed().expect("it was sent before"), [2.0]);
    // Until its thread has seen the end, and looked again.
    let seen = Instant::now() + 3 * LOOK;
    while Instant::now() < seen {
        assert!(!last.broken().load(Ordering::Acquire));
        thread::yield_now();
    }
    last.begin_sum(vec![1.0]);
    let error = last.summed().expect_err("nobody is there").to_string();
    assert!(error.contains("trainer 0 is gone (it has ended its work)"), "{error}");
}

#[test]
fn a_rank_that_dies_is_named_by_all_others_at_once() {
    let mut rings = rings(4);
    let dead = rings.remove(1);
    let start = Instant::now();
    let threads: Vec<_> = rings
        .into_iter()
        .map(|mut ring| {
            thread::spawn(move || {
                ring.begin_sum(vec![1.0; 1000]);
                ring.summed().expect_err("one is missing").to_string()
            })
        })
        .collect();
    drop(dead);
    for thread in threads {
        let error = thread.join().expect("no panic");
        assert!(error.contains("trainer 1 is gone"), "{error}");
    }
    assert!(start.elapsed() < SILENCE, "noticed by its connection, not by its silence");
}

#[test]
fn a_rank_that_is_only_silent_is_lost_after_the_stated_time() {
    let mut ranks = connected(2);
    // Rank 1 keeps its connections open and says nothing, as a machine that has vanished.
    let (_, vanished) = ranks.pop().expect("two");
    let (place, neighbours) = ranks.pop().expect("two");
    let silence = Duration::from_millis(300);
    let mut ring = Ring::with_silence(place, neighbours, Arc::default(), silence).expect("starts");
    let start = Instant::now();
    ring.begin_sum(vec![1.0; 10]);
    let error = ring.summed().expect_err("nobody answers").to_string();
    assert!(error.contains("trainer 1 is gone (it was silent for 0.3 s)"), "{error}");
    assert!(start.elapsed() >= silence);
    drop(vanished);
}

#[test]
fn a_busy_rank_is_not_taken_for_a_dead_one() {
    let silence = HEARTBEAT + Duration::from_secs(1);
    let mut rings: Vec<Ring> = connected_with(2, Some(&credentials()))
        .into_iter()
        .map(|(place, neighbours)| Ring::with_silence(place, neighbours, Arc::default(), silence).expect("starts"))
        .collect();
    let mut busy = rings.pop().expect("two");
    let mut waiting = rings.pop().expect("two");
    let (ready, go) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        waiting.begin_sum(vec![1.0]);
        ready.send(()).expect("somebody listens");
        waiting.summed().expect("it comes in the end")
    });
    go.recv().expect("it waits");
    // Longer than the silence that would end it.
    assert!(go.recv_timeout(silence + Duration::from_secs(1)).is_err(), "nothing more is said");
    busy.begin_sum(vec![2.0]);
    assert_eq!(busy.summed().expect("both are there"), [3.0]);
    assert_eq!(thread.join().expect("no panic"), [3.0]);
}

#[test]
fn ranks_with_other_models_are_told_both_lengths() {
    let mut rings = rings(2);
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
    let mut ranks = connected(2);
    let interrupt = Arc::new(AtomicBool::new(false));
    let (place, neighbours) = ranks.remove(0);
    let mut ring = Ring::start(place, neighbours, interrupt.clone()).expect("starts");
    ring.begin_sum(vec![1.0]);
    interrupt.store(true, Ordering::Relaxed);
    assert!(matches!(ring.summed(), Err(RingError::Interrupted)));
}

#[test]
fn strangers_are_not_let_in_and_one_that_stays_away_is_named() {
    let place = Place { rank: 0, size: 2 };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let own = listener.local_addr().expect("bound");
    let stranger = thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(own).expect("it listens");
        stream.write_all(&[7; 80]).expect("sent");
        let mut answer = Vec::new();
        drop(stream.read_to_end(&mut answer));
        answer
    });
    let nobody = |_| Err("it has not said where it listens".to_owned());
    let patience = Duration::from_millis(500);
    let identity = Identity { place, uid: "job", credentials: None };
    let connected = Neighbours::connect(identity, &listener, nobody, patience, &AtomicBool::new(false));
    let error = connected.map(drop).expect_err("nobody comes").to_string();
    assert!(error.contains("trainer 1 did not come within 0 s"), "{error}");
    assert!(stranger.join().expect("no panic").is_empty(), "no welcome");
}
