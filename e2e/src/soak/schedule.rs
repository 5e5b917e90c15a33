//! The schedule of faults, a pure function of the seed and the length. It has two lanes: one disturbs nodes and the API
//! server, the other processes, pods, operators and the small disk. In each lane a fault is mended before the next begins.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use psjobs_api::Role;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::kind::Kind;

/// Time at the end without faults.
pub const REST: Duration = Duration::from_secs(60);
/// Time that a job on two servers has to hold everything twice again, before another fault may take a server of it.
const REFILL: Duration = Duration::from_secs(10);

/// The ways in which a process, a pod, a node or a disk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A process of a job is killed with SIGKILL.
    KillProcess,
    /// A pod of a job is deleted without a grace period.
    DeletePod,
    /// A process of an operator is killed with SIGKILL.
    KillOperator,
    /// The small disk is filled.
    FillDisk,
    /// The API server is killed, and started again by its node.
    RestartApiServer,
    /// A node is switched off.
    StopNode,
    /// The processes of a node are stopped, and go on later.
    PauseNode,
    /// A node loses its network.
    CutNode,
    /// A node loses its kubelet; its containers go on.
    StopKubelet,
}

/// The victim of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A replica of the kind's job.
    Replica(Kind, Role, u32),
    /// A worker node, by its place among them.
    Worker(usize),
    /// The one thing that the fault is about.
    Only,
}

/// A fault of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Time from the soak's start.
    pub at: Duration,
    /// Time until it is mended; zero where nothing is to be mended.
    pub lasts: Duration,
    pub fault: Fault,
    pub target: Target,
}

/// The faults of a soak, each lane in the order of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub nodes: Vec<Entry>,
    pub pods: Vec<Entry>,
}

impl Fault {
    pub const ALL: [Self; 9] = [
        Self::KillProcess,
        Self::DeletePod,
        Self::KillOperator,
        Self::FillDisk,
        Self::RestartApiServer,
        Self::StopNode,
        Self::PauseNode,
        Self::CutNode,
        Self::StopKubelet,
    ];

    /// Returns the fault in words, for the summary.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::KillProcess => "process killed",
            Self::DeletePod => "pod deleted",
            Self::KillOperator => "operator killed",
            Self::FillDisk => "disk full",
            Self::RestartApiServer => "API server killed",
            Self::StopNode => "node switched off",
            Self::PauseNode => "node paused",
            Self::CutNode => "node cut off",
            Self::StopKubelet => "kubelet stopped",
        }
    }
}

impl Entry {
    fn end(&self) -> Duration {
        self.at + self.lasts
    }

    /// Returns true if this fault and `other` are closer in time than a job on two servers needs between them.
    fn is_close_to(&self, other: &Self) -> bool {
        self.at < other.end() + REFILL && other.at < self.end() + REFILL
    }
}

impl Schedule {
    /// Draws the schedule of a soak of this length with two worker nodes.
    #[must_use]
    pub fn draw(seed: u64, length: Duration) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let end = length.saturating_sub(REST);
        let nodes = draw_nodes(&mut rng, end);
        let pods = draw_pods(&mut rng, end, &nodes);
        Self { nodes, pods }
    }
}

/// Cards that are dealt in random order and shuffled anew when all are dealt: each comes equally often.
struct Deck<T> {
    cards: Vec<T>,
    left: VecDeque<T>,
}

impl<T: Copy> Deck<T> {
    fn new(cards: Vec<T>) -> Self {
        Self { cards, left: VecDeque::new() }
    }

    fn deal(&mut self, rng: &mut StdRng) -> Option<T> {
        if self.left.is_empty() {
            self.cards.shuffle(rng);
            self.left.extend(&self.cards);
        }
        self.left.pop_front()
    }

    /// Deals the first card that fits, and leaves the others in their order; of a deck without one it deals none.
    fn deal_that(&mut self, rng: &mut StdRng, fits: impl Fn(&T) -> bool) -> Option<T> {
        if !self.left.iter().any(&fits) {
            self.cards.shuffle(rng);
            self.left.extend(&self.cards);
        }
        let place = self.left.iter().position(fits)?;
        self.left.remove(place)
    }
}

fn seconds(rng: &mut StdRng, range: Range<u64>) -> Duration {
    Duration::from_secs(rng.random_range(range))
}

/// Draws the faults of nodes and the API server. Long ones have the node's pods replaced, short ones do not.
fn draw_nodes(rng: &mut StdRng, end: Duration) -> Vec<Entry> {
    use Fault::{CutNode, PauseNode, RestartApiServer, StopKubelet, StopNode};
    const SHORT: Range<u64> = 5..20;
    const LONG: Range<u64> = 55..75;
    let of_nodes = [StopNode, PauseNode, CutNode, StopKubelet];
    let mut cards: Vec<_> = of_nodes.into_iter().flat_map(|fault| [(fault, SHORT), (fault, LONG)]).collect();
    cards.push((RestartApiServer, 0..1));
    let places: Vec<usize> = (0..cards.len()).collect();
    let (mut deck, mut entries) = (Deck::new(places), Vec::new());
    let mut at = seconds(rng, 10..20);
    while let Some(place) = deck.deal(rng) {
        let (fault, range) = cards[place].clone();
        let target = if fault == RestartApiServer { Target::Only } else { Target::Worker(rng.random_range(0..2)) };
        let entry = Entry { at, lasts: seconds(rng, range), fault, target };
        if entry.end() > end {
            break;
        }
        entries.push(entry);
        at = entry.end() + seconds(rng, 25..40);
    }
    entries
}

/// Draws the faults of processes, pods, operators and the disk, between and during those of `nodes`. A job that lives on
/// two servers loses none of its processes while a node is away.
fn draw_pods(rng: &mut StdRng, end: Duration, nodes: &[Entry]) -> Vec<Entry> {
    use Fault::{DeletePod, FillDisk, KillOperator, KillProcess};
    let mut faults =
        Deck::new(vec![KillProcess, KillProcess, KillProcess, DeletePod, DeletePod, KillOperator, FillDisk]);
    let (mut kinds, mut entries) = (Deck::new(Kind::ALL.to_vec()), Vec::<Entry>::new());
    let mut at = seconds(rng, 5..15);
    while let Some(fault) = faults.deal(rng) {
        let lasts = if fault == FillDisk { seconds(rng, 5..13) } else { Duration::ZERO };
        let entry = Entry { at, lasts, fault, target: Target::Only };
        if entry.end() > end {
            break;
        }
        at = entry.end() + seconds(rng, 12..20);
        let target = match fault {
            KillProcess | DeletePod => {
                let node_is_away = nodes.iter().any(|other| entry.is_close_to(other));
                let kind = kinds.deal_that(rng, |kind| !(node_is_away && kind.lives_on_two_servers()));
                let Some(kind) = kind else { break };
                let role = if rng.random() { Role::Server } else { Role::Trainer };
                Target::Replica(kind, role, rng.random_range(0..kind.replicas(role)))
            }
            _ => Target::Only,
        };
        entries.push(Entry { target, ..entry });
    }
    entries
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_seed_gives_the_same_schedule_each_time() {
        for seed in 0..20 {
            assert_eq!(Schedule::draw(seed, HOUR), Schedule::draw(seed, HOUR), "seed {seed}");
        }
        assert_ne!(Schedule::draw(1, HOUR), Schedule::draw(2, HOUR));
    }

    #[test]
    fn faults_of_a_lane_do_not_overlap_and_are_mended_before_the_rest() {
        for (seed, minutes) in (0..200).flat_map(|seed| [3, 5, 60].map(|minutes| (seed, minutes))) {
            let length = Duration::from_secs(minutes * 60);
            let Schedule { nodes, pods } = Schedule::draw(seed, length);
            for lane in [&nodes, &pods] {
                assert!(!lane.is_empty(), "seed {seed}, {minutes} minutes");
                assert!(lane.windows(2).all(|pair| pair[0].end() < pair[1].at), "seed {seed}, {minutes} minutes");
                assert!(lane.iter().all(|entry| entry.end() + REST <= length), "seed {seed}, {minutes} minutes");
            }
        }
    }

    #[test]
    fn no_fault_takes_a_process_of_a_job_on_two_servers_while_a_node_is_away() {
        for seed in 0..200 {
            let Schedule { nodes, pods } = Schedule::draw(seed, HOUR);
            let on_two =
                |entry: &&Entry| matches!(entry.target, Target::Replica(kind, ..) if kind.lives_on_two_servers());
            let hits: Vec<_> = pods.iter().filter(on_two).collect();
            assert!(hits.iter().all(|hit| !nodes.iter().any(|node| hit.is_close_to(node))), "seed {seed}");
            assert!(hits.windows(2).all(|pair| !pair[0].is_close_to(pair[1])), "seed {seed}");
        }
    }

    #[test]
    fn an_hour_has_every_fault_on_every_kind_and_node() {
        for seed in 0..20 {
            let Schedule { nodes, pods } = Schedule::draw(seed, HOUR);
            let faults: BTreeSet<_> = nodes.iter().chain(&pods).map(|entry| entry.fault).collect();
            assert_eq!(faults.len(), Fault::ALL.len(), "seed {seed}: {faults:?}");
            let kind = |entry: &Entry| match entry.target {
                Target::Replica(kind, ..) => Some(kind),
                _ => None,
            };
            let kinds: BTreeSet<_> = pods.iter().filter_map(kind).collect();
            assert_eq!(kinds, BTreeSet::from(Kind::ALL), "seed {seed}");
            for worker in 0..2 {
                assert!(nodes.iter().any(|entry| entry.target == Target::Worker(worker)), "seed {seed}");
            }
        }
    }
}
