//! The end of a soak: a table of jobs by kind and one of faults, as text and as JSON, and whether it passed.

use std::fmt;
use std::time::Duration;

use psjobs_api::Role;
use serde_json::{Value, json};

use super::board::{Board, FaultRecord, JobRecord, Records};
use super::kind::Kind;
use super::schedule::Fault;
use super::series::{longest_standstill, standstill, steps_lost};

/// A job that makes no step for so long waits for something that does not come, whatever faults there are meanwhile: the longest
/// of them lasts 75 s.
const LONGEST_STANDSTILL: Duration = Duration::from_secs(300);
/// How long after a fault's end a standstill still counts as the fault's.
const AFTERWARDS: Duration = Duration::from_secs(10);

/// The jobs of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KindRow {
    kind: Kind,
    jobs: usize,
    succeeded: usize,
    /// Pods that were replaced.
    replaced: u32,
    /// Jobs whose result was compared with that of an undisturbed job, and those with the same bits.
    compared: usize,
    equal: usize,
    steps_lost: u64,
}

/// The faults of one sort.
#[derive(Clone, Debug, PartialEq)]
struct FaultRow {
    fault: Fault,
    times: usize,
    /// Times until training went on, of each job that was concerned, sorted.
    to_go_on: Vec<Duration>,
}

/// The outcome of a soak.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    seed: u64,
    seconds: u64,
    kinds: Vec<KindRow>,
    faults: Vec<FaultRow>,
    skipped: u32,
    problems: Vec<String>,
}

impl Verdict {
    pub(super) fn of(board: &Board, seed: u64) -> Self {
        Self::from_records(&board.records(), seed, board.now().as_secs())
    }

    fn from_records(records: &Records, seed: u64, seconds: u64) -> Self {
        let kinds: Vec<_> = Kind::ALL.into_iter().map(|kind| kind_row(records, kind)).collect();
        let faults = Fault::ALL.into_iter().map(|fault| fault_row(records, fault)).collect();
        let mut problems = records.problems.clone();
        for job in records.jobs.iter().filter(|job| job.kind.lives_on_two_servers()) {
            let steps = lost_of(job);
            if steps > 0 {
                problems.push(format!("{} has lost {steps} steps, though every fault left it a server", job.name));
            }
        }
        for job in &records.jobs {
            let still = longest_standstill(&job.samples, job.end);
            if let Some(still) = still.filter(|still| *still > LONGEST_STANDSTILL) {
                problems.push(format!("{} stood still for {} s, which no fault lasts", job.name, still.as_secs()));
            }
        }
        problems.extend(kinds.iter().filter(|row| row.jobs == 0).map(|row| format!("no {} job ran", row.kind.name())));
        Self { seed, seconds, kinds, faults, skipped: records.skipped, problems }
    }

    /// Returns true if nothing was wrong.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns the whole of it for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        let kinds = self.kinds.iter().map(|row| {
            json!({
                "kind": row.kind.name(),
                "jobs": row.jobs,
                "succeeded": row.succeeded,
                "podsReplaced": row.replaced,
                "compared": row.compared,
                "equal": row.equal,
                "stepsLost": row.steps_lost,
            })
        });
        let faults = self.faults.iter().map(|row| {
            let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
            json!({
                "fault": row.fault.name(),
                "times": row.times,
                "jobs": row.to_go_on.len(),
                "medianSeconds": seconds(row.median()),
                "worstSeconds": seconds(row.worst()),
            })
        });
        json!({
            "seed": self.seed,
            "seconds": self.seconds,
            "kinds": kinds.collect::<Vec<_>>(),
            "faults": faults.collect::<Vec<_>>(),
            "skipped": self.skipped,
            "problems": self.problems,
            "passed": self.passed(),
        })
    }
}

impl FaultRow {
    fn median(&self) -> Option<Duration> {
        self.to_go_on.get(self.to_go_on.len() / 2).copied()
    }

    fn worst(&self) -> Option<Duration> {
        self.to_go_on.last().copied()
    }
}

fn kind_row(records: &Records, kind: Kind) -> KindRow {
    let jobs: Vec<_> = records.jobs.iter().filter(|job| job.kind == kind).collect();
    KindRow {
        kind,
        jobs: jobs.len(),
        succeeded: jobs.iter().filter(|job| job.succeeded).count(),
        replaced: jobs.iter().map(|job| job.replaced).sum(),
        compared: jobs.iter().filter(|job| job.equal.is_some()).count(),
        equal: jobs.iter().filter(|job| job.equal == Some(true)).count(),
        steps_lost: jobs.into_iter().map(lost_of).sum(),
    }
}

fn lost_of(job: &JobRecord) -> u64 {
    steps_lost(&job.samples, job.kind.replicas(Role::Trainer).into())
}

fn fault_row(records: &Records, fault: Fault) -> FaultRow {
    let faults: Vec<_> = records.faults.iter().filter(|record| record.fault == fault).collect();
    let mut to_go_on: Vec<_> = faults.iter().flat_map(|record| times_to_go_on(records, record)).collect();
    to_go_on.sort_unstable();
    FaultRow { fault, times: faults.len(), to_go_on }
}

/// Returns for each job that a fault concerned and that trained then how long it stood still.
fn times_to_go_on<'a>(records: &'a Records, record: &'a FaultRecord) -> impl Iterator<Item = Duration> + 'a {
    let jobs = records.jobs.iter().filter(|job| record.jobs.contains(&job.name));
    jobs.filter_map(|job| standstill(&job.samples, job.end, record.from, record.until + AFTERWARDS))
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "soak: seed {}, {} s", self.seed, self.seconds)?;
        writeln!(
            f,
            "\n{:14}{:>6}{:>11}{:>15}{:>12}{:>12}",
            "kind", "jobs", "succeeded", "pods replaced", "equal", "steps lost"
        )?;
        for row in &self.kinds {
            let equal = if row.compared == 0 { "-".to_owned() } else { format!("{}/{}", row.equal, row.compared) };
            let KindRow { kind, jobs, succeeded, replaced, steps_lost, .. } = row;
            writeln!(f, "{:14}{jobs:>6}{succeeded:>11}{replaced:>15}{equal:>12}{steps_lost:>12}", kind.name())?;
        }
        writeln!(f, "\n{:20}{:>6}{:>22}{:>10}", "fault", "times", "to go on: median s", "worst s")?;
        let seconds =
            |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), |time| format!("{:.1}", time.as_secs_f64()));
        for row in &self.faults {
            let (median, worst) = (seconds(row.median()), seconds(row.worst()));
            writeln!(f, "{:20}{:>6}{median:>22}{worst:>10}", row.fault.name(), row.times)?;
        }
        writeln!(f, "{:20}{:>6}", "skipped", self.skipped)?;
        for problem in &self.problems {
            writeln!(f, "\nPROBLEM: {problem}")?;
        }
        write!(f, "\n{}", if self.passed() { "passed" } else { "failed" })
    }
}

#[cfg(test)]
mod tests {
    use super::super::series::Sample;
    use super::*;

    fn job(kind: Kind, steps: &[u64]) -> JobRecord {
        let at = |(second, &step): (u64, &u64)| Sample { at: Duration::from_secs(second), step };
        JobRecord {
            kind,
            name: format!("{}-1", kind.name()),
            end: Some(Duration::from_secs(steps.len() as u64)),
            succeeded: true,
            samples: (0..).zip(steps).map(at).collect(),
            replaced: 1,
            equal: Some(true),
        }
    }

    #[test]
    fn a_soak_fails_over_any_problem_and_over_steps_lost_with_two_servers() {
        let all = |kind: Kind| job(kind, &[1, 2, 3, 4]);
        let jobs: Vec<_> = Kind::ALL.into_iter().map(all).collect();
        let good = Records { jobs, ..Records::default() };
        let mut with_problem = good.clone();
        with_problem.problems.push("a job failed".into());
        let changed = |kind: Kind, steps: &[u64]| {
            let mut records = good.clone();
            records.jobs.iter_mut().filter(|job| job.kind == kind).for_each(|old| *old = job(kind, steps));
            records
        };
        let mut without = good.clone();
        without.jobs.retain(|job| job.kind != Kind::Sparse);
        let mut still = good.clone();
        still.jobs[0].end = Some(LONGEST_STANDSTILL + Duration::from_secs(5));
        for (label, records, passed) in [
            ("good", good.clone(), true),
            ("a problem", with_problem, false),
            ("steps lost to a checkpoint", changed(Kind::Checkpointed, &[1, 9, 3, 10]), true),
            ("steps lost with two servers", changed(Kind::Replicated, &[1, 9, 3, 10]), false),
            ("no job of a kind", without, false),
            ("a job that stood still", still, false),
        ] {
            assert_eq!(Verdict::from_records(&records, 1, 60).passed(), passed, "{label}");
        }
        let verdict = Verdict::from_records(&changed(Kind::Replicated, &[1, 9, 3, 10]), 1, 60);
        let named = format!("{}-1 has lost 4 steps", Kind::Replicated.name());
        assert!(verdict.problems.iter().any(|problem| problem.starts_with(&named)), "{:?}", verdict.problems);
    }

    #[test]
    fn times_to_go_on_are_those_of_the_jobs_concerned() {
        let jobs = vec![job(Kind::Sync, &[1, 2, 2, 2, 3, 4]), job(Kind::Async, &[1, 2, 3, 4, 5, 6])];
        let (from, until) = (Duration::from_secs(1), Duration::from_secs(1));
        let fault = Fault::KillProcess;
        let record = FaultRecord { fault, from, until, jobs: vec!["sync-1".into()] };
        let records = Records { jobs, faults: vec![record], ..Records::default() };
        let verdict = Verdict::from_records(&records, 1, 60);
        let row = verdict.faults.iter().find(|row| row.fault == fault).expect("every fault has a row");
        assert_eq!((row.times, row.median(), row.worst()), (1, Some(3 * from), Some(3 * from)));
        let text = verdict.to_string();
        assert!(text.contains("process killed") && text.contains("3.0"), "{text}");
    }
}
