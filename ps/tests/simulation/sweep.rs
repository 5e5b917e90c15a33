//! Which seeds a test runs, and running them on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Distance of the seeds that an ordinary run takes of those of long tests.
const STRIDE: usize = 3;

/// Every [`STRIDE`]th of the first `seeds` seeds; all of them with `PSJOBS_SIMULATE_ALL`, each night.
pub fn sample(seeds: u64) -> impl Iterator<Item = u64> {
    (0..seeds).step_by(if variable("ALL").is_some() { 1 } else { STRIDE })
}

/// Runs seeds on all cores; those that failed, in order.
pub fn sweep(
    seeds: impl IntoIterator<Item = u64>,
    run: impl Fn(u64) -> Result<(), String> + Sync,
) -> Vec<(u64, String)> {
    let seeds: Vec<_> = seeds.into_iter().collect();
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let (begun, printed) = (Instant::now(), AtomicU64::new(0));
    let work = || {
        loop {
            let taken = next.fetch_add(1, Relaxed);
            let Some(&seed) = seeds.get(taken) else { return };
            if let Err(what) = run(seed) {
                println!("seed {seed} failed: {what}");
                failures.lock().expect("no panic").push((seed, what));
            }
            let (done, tenth) = (taken + 1, begun.elapsed().as_secs() / 10);
            if printed.fetch_max(tenth, Relaxed) < tenth {
                let failed = failures.lock().expect("no panic").len();
                println!(
                    "{done} of {} seeds in {:?}, {failed} failed",
                    seeds.len(),
                    Duration::from_secs(begun.elapsed().as_secs())
                );
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    let mut failures = failures.into_inner().expect("no panic");
    failures.sort();
    failures
}

/// A number from the environment.
pub fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(format!("PSJOBS_SIMULATE_{name}")).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}
