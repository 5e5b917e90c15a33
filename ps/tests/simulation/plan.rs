//! Makes of a seed a job, the quality of its network, and its faults. Pure.

use std::time::Duration;

use psjobs_api::training::{Codec, Compression, Consistency, ConsistencyMode, OptimizerKind};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::disk::DiskFault;
use super::fault::{FOR_GOOD, Fault, MachineFault};
use super::network::Weather;

/// One in so many jobs is elastic.
const ELASTIC: u64 = 4;
/// One in so many jobs has a sparse table.
const TABLES: u64 = 4;
/// One in so many jobs has a fault of a machine.
const MACHINES: u32 = 4;
/// One in so many jobs, of those with several servers, has every block twice.
const REPLICATED: u64 = 3;
/// One in so many jobs sends its gradients coded.
const CODED: u64 = 8;
/// Steps of those: what the marks add up to must be exact in bf16.
const CODED_STEPS: u64 = 6;
/// After so long the servers have copied their blocks, in any weather.
const HELD_TWICE: Duration = Duration::from_secs(8);
/// One in so many models has several full blocks on each server.
const LARGE: u64 = 25;
/// In one of so many dense jobs gradients leave while others are still being computed.
const GRADUAL: u64 = 5;
/// In one of so many jobs without tables trainers make steps alone between two exchanges.
const LOCAL: u64 = 7;
/// In one of so many jobs in Async and Bounded gradients are computed while the exchange of the one before is under way.
const OVERLAP: u64 = 5;
/// In one of so many dense jobs a sparse table is trained beside the parameters.
const BESIDE: u64 = 3;
/// In one of so many jobs with several servers and checkpoints two of them, whichever, do not hear each other.
const APART: u32 = 6;
/// In one of so many jobs with checkpoints the agent of a machine dies, and its processes live on beside their successors.
const REPLACED: u32 = 12;
/// In one of so many jobs each server shares a pod with a trainer. No number that another test names is one of these.
const COLOCATED: u64 = 23;
/// Elements of those, three blocks.
const FULL_BLOCKS: usize = 600_000;

/// One job's fate.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub servers: u32,
    pub trainers: u32,
    /// Steps of each trainer; in an elastic job, batches in all.
    pub steps: u64,
    /// The fewest trainers of an elastic job.
    pub least: Option<u32>,
    pub consistency: Consistency,
    /// The servers' optimizer, in jobs whose parameters are compared with those of an undisturbed one.
    pub optimizer: OptimizerKind,
    pub elements: usize,
    /// Time between checkpoints, if any are written.
    pub checkpoint: Option<Duration>,
    /// Every block is held by two servers.
    pub replicated: bool,
    /// Each server has a pod together with the trainer of its number, and both are replaced together.
    pub colocated: bool,
    /// How gradients are coded.
    pub compression: Compression,
    /// A server that is started again has another address than the process before, of which nothing is left.
    pub moves: bool,
    /// Kernels give connections up on which nothing is acknowledged; else HTTP/2's pings alone find that out.
    pub kernels: bool,
    /// Gradients go into a sparse table, and the trainers train their layers themselves.
    pub tables: bool,
    /// Gradients go into a sparse table, beside those of parameters that the servers train.
    pub beside: bool,
    /// Streams of a trainer to each server, as far as that has blocks.
    pub connections: u32,
    /// Gradients leave while others are still being computed.
    pub gradual: bool,
    /// Each gradient is computed while the exchange of the one before is under way.
    pub overlap: bool,
    /// Steps that trainers make alone for one exchange; 0 if they exchange gradients in every step.
    pub local_steps: u32,
    /// Longest time that a trainer computes for a step, in ms.
    pub compute: u64,
    pub weather: Weather,
    pub faults: Vec<(Duration, Fault)>,
    /// The job cannot be done: it must end all the same, and say why.
    pub doomed: bool,
    /// Somebody starts all processes again, so that they wait for each other without limit.
    pub supervised: bool,
    /// Checkpoints to keep.
    pub keep: usize,
    /// A job goes on from checkpoints that were there before it; else from its own only.
    pub resume: bool,
    /// Servers may lose what they hold, as documented: the job must end, with whatever result.
    pub forgets: bool,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(seed: u64) -> Self {
        Self::draw(seed, seed % COLOCATED == 18)
    }

    /// The plan of a seed, of a job whose servers share pods with trainers if what they hold survives the loss of a pod.
    pub fn in_pods(seed: u64) -> Self {
        Self::draw(seed, true)
    }

    fn draw(seed: u64, may_be_colocated: bool) -> Self {
        let mut chance = ChaCha8Rng::seed_from_u64(seed);
        let chance = &mut chance;
        let (servers, trainers) = (chance.random_range(1..=3), chance.random_range(1..=4));
        let mode = [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async][chance.random_range(0..3)];
        let consistency = Consistency { mode, staleness: chance.random_range(0..4), ..Consistency::default() };
        let large = seed % LARGE == LARGE - 1;
        let steps = if large { 3 } else { chance.random_range(3..=12) };
        let small = servers as usize * (3 * trainers as usize + chance.random_range(0..20));
        let checkpoint = chance.random_bool(0.6).then(|| Duration::from_millis(chance.random_range(20..800)));
        let doomed = chance.random_bool(0.03);
        let mut plan = Self {
            seed,
            servers,
            trainers,
            steps,
            least: None,
            consistency,
            optimizer: optimizer(seed),
            elements: if large { FULL_BLOCKS } else { small },
            checkpoint,
            replicated: false,
            colocated: false,
            compression: Compression::default(),
            moves: chance.random_bool(0.3),
            kernels: chance.random_bool(0.7),
            tables: seed % TABLES == 3 && !large,
            beside: false,
            connections: 1,
            gradual: false,
            overlap: false,
            local_steps: 0,
            compute: [0, 10, 100, 400][chance.random_range(0..4)],
            weather: weather(chance),
            faults: Vec::new(),
            doomed,
            supervised: false,
            keep: 2,
            resume: true,
            forgets: false,
        };
        plan.replicated = servers > 1 && chance.random_ratio(1, REPLICATED as u32) && !doomed;
        let is_kept = plan.checkpoint.is_some() || plan.replicated;
        if may_be_colocated && is_kept && !doomed && !large && seed % ELASTIC != 1 {
            plan = plan.made_colocated();
        }
        let (servers, trainers) = (plan.servers, plan.trainers);
        let ordinary = !plan.tables && !large && seed % ELASTIC != 1;
        if ordinary && seed % CODED == 4 {
            let codec = [Codec::BF16, Codec::FP16, Codec::TopK][chance.random_range(0..3)];
            let density = if codec == Codec::TopK { 1.0 } else { plan.compression.density };
            (plan.compression, plan.steps) = (Compression { codec, density }, plan.steps.min(CODED_STEPS));
        } else if ordinary && mode == ConsistencyMode::Sync && trainers > 1 && chance.random_bool(0.3) {
            plan.consistency.backup_trainers = chance.random_range(1..trainers);
            plan.elements = plan.elements.max((servers * trainers) as usize * plan.steps as usize);
        }
        let count = chance.random_range(0..=5);
        plan.faults = (0..count).map(|_| (plan.moment(chance), plan.fault(chance))).collect();
        plan.faults.extend(plan.fault_of_machine());
        if plan.replicated && plan.checkpoint.is_none() {
            plan.keep_one_server_fault();
        }
        if doomed {
            plan.faults.push((plan.moment(chance), Fault::Lose { server: chance.random_range(0..servers) }));
        }
        if seed % ELASTIC == 1 && !doomed {
            let least = chance.random_range(1..=2.min(trainers));
            plan = plan.made_elastic(least);
            let count = chance.random_range(0..=4);
            plan.faults
                .extend((0..count).map(|_| (plan.moment(chance), plan.change(chance, least))).collect::<Vec<_>>());
        }
        if large {
            plan.connections = chance.random_range(1..=4);
            let (trainer, server) = (chance.random_range(0..trainers), chance.random_range(0..servers));
            let nth = chance.random_range(0..4);
            plan.faults.push((plan.moment(chance), Fault::Sever { trainer, server, nth }));
        }
        if plan.checkpoint.is_some() {
            plan.faults.extend(plan.faults_of_disk());
            plan.draw_what_came_later();
        }
        let is_dense = !plan.tables && plan.least.is_none() && plan.consistency.backup_trainers == 0;
        plan.gradual = seed % GRADUAL == GRADUAL - 1 && is_dense;
        plan.beside = seed % BESIDE == BESIDE - 1 && is_dense && !plan.gradual && !large;
        plan.local_steps = if seed % LOCAL == 2 && !plan.tables && !plan.beside { 4 } else { 0 };
        let exchanges_gradients = mode != ConsistencyMode::Sync && !plan.tables && plan.local_steps == 0;
        plan.overlap = seed % OVERLAP == 2 && exchanges_gradients && !plan.gradual;
        if plan.colocated {
            plan.faults.retain(|(_, fault)| !fault.is_within_a_pod());
        }
        plan
    }

    /// Draws what happens to a machine with a server and a trainer, in one of four jobs.
    fn fault_of_machine(&self) -> Option<(Duration, Fault)> {
        let chance = &mut ChaCha8Rng::seed_from_u64(self.seed.rotate_left(32));
        let has_one = chance.random_ratio(1, MACHINES);
        let (number, at) = (chance.random_range(0..self.servers.min(self.trainers)), self.moment(chance));
        // Without checkpoints a server that dies takes its state along, as documented.
        let kinds = if self.checkpoint.is_some() || self.replicated { 3 } else { 2 };
        let what = [MachineFault::CutOff, MachineFault::Paused, MachineFault::Lost][chance.random_range(0..kinds)];
        let lasts = lasting(chance);
        has_one.then_some((at, Fault::Machine { number, what, lasts }))
    }

    /// Draws what simulated jobs with checkpoints have had for a short time only, from numbers of its own, so that what came
    /// before is the same as it was.
    fn draw_what_came_later(&mut self) {
        let chance = &mut ChaCha8Rng::seed_from_u64(self.seed.rotate_left(16) ^ 0x5eed);
        self.supervised = chance.random_bool(0.5) && !self.doomed || self.colocated;
        (self.keep, self.resume) = (chance.random_range(1..=3), chance.random_bool(0.75));
        let (apart, replaced) = (chance.random_ratio(1, APART), chance.random_ratio(1, REPLACED));
        let (one, other) = (chance.random_range(0..self.servers), chance.random_range(0..self.servers));
        let (there, back) = [(true, true), (true, false), (false, true)][chance.random_range(0..3)];
        // From 10 ms to 300 s; processes that do not wait without limit give up after 120 s.
        let longest = if self.supervised { 30_000_f64 } else { 4_000_f64 };
        let lasts = Duration::from_millis((10.0 * longest.powf(chance.random_range(0.0..1.0))) as u64);
        let (apart_at, replaced_at) = (self.moment(chance), self.moment(chance));
        let (number, away) = (chance.random_range(0..self.servers.min(self.trainers)), lasting(chance));
        if apart && one != other {
            self.faults.push((apart_at, Fault::Split { one, other, there, back, lasts }));
        }
        if replaced {
            self.faults.push((replaced_at, Fault::Machine { number, what: MachineFault::Replaced, lasts: away }));
        }
    }

    /// Returns the job as it was before [`Self::draw_what_came_later`].
    pub fn without_what_came_later(seed: u64) -> Self {
        let mut plan = Self::new(seed);
        plan.faults.retain(|(_, fault)| match fault {
            Fault::Machine { what, .. } => !matches!(what, MachineFault::Replaced),
            Fault::Split { one, there, back, .. } => *one == 0 && *there && *back,
            _ => true,
        });
        Self { optimizer: OptimizerKind::Sgd, supervised: false, keep: 2, resume: true, overlap: false, ..plan }
    }

    /// Draws what goes wrong with the disk and the clock.
    fn faults_of_disk(&self) -> Vec<(Duration, Fault)> {
        let chance = &mut ChaCha8Rng::seed_from_u64(!self.seed);
        let count = [0, 0, 1, 2][chance.random_range(0..4)];
        let draw = |_| {
            let (at, server) = (self.moment(chance), chance.random_range(0..self.servers));
            let (after, lasts, all) = (chance.random_range(0..60), lasting(chance), chance.random_bool(0.5));
            let slow = Duration::from_millis([50, 1_000, 20_000][chance.random_range(0..3)]);
            let fault = match chance.random_range(0..12) {
                0 => DiskFault::Full,
                1 => DiskFault::Write,
                2 => DiskFault::Flush,
                3 => DiskFault::Rename,
                4 => DiskFault::Read,
                5 => DiskFault::Denied,
                6 => DiskFault::Stale,
                7 | 8 => DiskFault::Slow(slow),
                9 | 10 => return (at, Fault::Crash { server, after, away: lasts }),
                _ => return (at, Fault::Jump { hours: chance.random_range(-30..30) }),
            };
            (at, Fault::Disk { server: (!all).then_some(server), fault, lasts })
        };
        (0..count).map(draw).collect()
    }

    /// When the last fault is over.
    pub fn calm(&self) -> Duration {
        self.faults.iter().map(|(at, fault)| *at + fault.lasts()).max().unwrap_or_default()
    }

    /// Returns whether nothing can be written any more from some time on.
    pub fn disk_is_never_mended(&self) -> bool {
        self.faults.iter().any(|(_, fault)| matches!(fault, Fault::Disk { lasts, .. } if *lasts >= FOR_GOOD))
    }

    /// When trainers begin to train: in jobs that one server may leave, when the other one has its blocks.
    pub fn begins(&self) -> Duration {
        if self.replicated && self.checkpoint.is_none() { HELD_TWICE } else { Duration::ZERO }
    }

    /// Returns whether a server's process that was replaced may live on, and answer with what it had when others led.
    pub fn has_former_leaders(&self) -> bool {
        let lives_on = |fault: &Fault| match fault {
            Fault::ZombieServer { .. } => true,
            Fault::Zombie { .. } => self.colocated,
            Fault::Machine { what, .. } => !matches!(what, MachineFault::Lost),
            _ => false,
        };
        self.replicated && self.faults.iter().any(|(_, fault)| lives_on(fault))
    }

    /// Returns whether the parameters are compared with those of an undisturbed job after each step.
    pub fn has_states(&self) -> bool {
        let is_sync = self.consistency.mode == ConsistencyMode::Sync && self.consistency.backup_trainers == 0;
        is_sync && self.compression.codec == Codec::F32 && self.least.is_none() && !self.tables && !self.beside
    }

    /// Names of what distinguishes the job, for summaries.
    pub fn kinds(&self) -> Vec<&'static str> {
        let optimizer = match self.optimizer {
            OptimizerKind::Sgd => "optimizer SGD",
            OptimizerKind::Adam => "optimizer Adam",
            OptimizerKind::AdamW => "optimizer AdamW",
            OptimizerKind::Adagrad => "optimizer Adagrad",
            OptimizerKind::RmsProp => "optimizer RMSprop",
            OptimizerKind::Ftrl => "optimizer FTRL",
        };
        let mode = match self.consistency.mode {
            ConsistencyMode::Sync => "mode Sync",
            ConsistencyMode::Bounded => "mode Bounded",
            ConsistencyMode::Async => "mode Async",
        };
        let kinds = [
            (true, mode),
            (self.has_states() && self.local_steps == 0, optimizer),
            (self.least.is_some(), "elastic"),
            (self.tables, "sparse tables"),
            (self.beside, "sparse tables beside parameters"),
            (self.replicated, "replicated"),
            (self.colocated, "colocated"),
            (self.colocated && self.replicated, "colocated and replicated"),
            (self.checkpoint.is_some(), "checkpoints"),
            (self.consistency.backup_trainers > 0, "backup trainers"),
            (self.compression.codec != Codec::F32, "coded gradients"),
            (self.connections > 1, "several connections"),
            (self.gradual, "gradients that leave early"),
            (self.overlap, "exchanges that overlap"),
            (self.local_steps > 0, "local steps"),
            (self.moves, "successors at new addresses"),
            (!self.kernels, "half-open connections"),
            (self.supervised, "processes that wait without limit"),
            (self.keep == 1, "one checkpoint kept"),
            (!self.resume, "no checkpoints of others"),
        ];
        kinds.into_iter().filter_map(|(has, name)| has.then_some(name)).collect()
    }

    /// Leaves one fault of a server out of several, when the blocks are held twice: without checkpoints they are lost
    /// with both of their servers.
    fn keep_one_server_fault(&mut self) {
        let (mut first, colocated) = (true, self.colocated);
        let strikes_a_server = |fault: &Fault| fault.strikes_a_server() || colocated && fault.replaces_a_trainer();
        self.faults.retain(|(_, fault)| !strikes_a_server(fault) || std::mem::replace(&mut first, false));
        for (at, _) in self.faults.iter_mut().filter(|(_, fault)| strikes_a_server(fault)) {
            *at += HELD_TWICE;
        }
    }

    /// Returns the same job with trainers that may come and go.
    pub fn made_elastic(self, least: u32) -> Self {
        let steps = self.steps * u64::from(self.trainers);
        // Each batch leaves its mark in every block.
        let elements = self.elements.max(self.servers as usize * steps as usize);
        Self { steps, elements, least: Some(least), ..self }
    }

    /// Returns the same job with a server and a trainer in each pod, under an operator.
    pub fn made_colocated(self) -> Self {
        let pods = self.servers.max(self.trainers);
        // Each gradient of each trainer leaves its mark in every block, and blocks are equal.
        let elements = self.elements.max((pods * pods * 3) as usize).next_multiple_of(pods as usize);
        Self { servers: pods, trainers: pods, elements, colocated: true, supervised: true, ..self }
    }

    /// Returns whether some of its batches may be left out in the end: held by a trainer that went, or was out of
    /// reach for so long that it was taken for lost, when the others were done.
    pub fn may_leave_out(&self) -> bool {
        let harmless = |fault: &Fault| {
            matches!(
                fault,
                Fault::Break { half: false, .. }
                    | Fault::Sever { .. }
                    | Fault::Late { .. }
                    | Fault::Disk { .. }
                    | Fault::Jump { .. }
            )
        };
        self.weather.lost > 0.0 || self.weather.broken > 0.0 || !self.faults.iter().all(|(_, fault)| harmless(fault))
    }

    /// Draws a change of the trainers of an elastic job; enough of them stay.
    fn change(&self, chance: &mut ChaCha8Rng, least: u32) -> Fault {
        let (trainer, back, silent) = (chance.random_range(0..self.trainers), lasting(chance), chance.random_bool(0.3));
        match chance.random_range(0..4) {
            0 => Fault::Late { trainer, away: back },
            1 if trainer >= least => Fault::Leave { trainer, back: None },
            2 if trainer >= least => Fault::Lost { trainer, silent },
            _ => Fault::Leave { trainer, back: Some(back) },
        }
    }

    /// Returns the same job with a model of three full blocks and few steps.
    pub fn large(self, servers: u32, connections: u32) -> Self {
        Self { servers, connections, elements: FULL_BLOCKS, steps: 3, ..self }
    }

    /// Two servers, three trainers of different speed, eight steps, and nothing that goes wrong.
    pub fn fair(seed: u64) -> Self {
        Self {
            seed,
            servers: 2,
            trainers: 3,
            steps: 8,
            least: None,
            consistency: Consistency::default(),
            optimizer: OptimizerKind::Sgd,
            elements: 40,
            checkpoint: None,
            replicated: false,
            colocated: false,
            compression: Compression::default(),
            moves: false,
            kernels: true,
            tables: false,
            beside: false,
            connections: 1,
            gradual: false,
            overlap: false,
            local_steps: 0,
            compute: 80,
            weather: Weather { delay: 3, lost: 0.0, torn: 0.0, broken: 0.0, doubled: 0.0 },
            faults: Vec::new(),
            doomed: false,
            supervised: false,
            keep: 2,
            resume: true,
            forgets: false,
        }
    }

    /// Returns whether two processes of a trainer may run at a time.
    pub fn may_run_twice(&self, index: u32) -> bool {
        let runs_twice = |fault: &Fault| match fault {
            Fault::Zombie { trainer, .. } => *trainer == index,
            Fault::ZombieServer { server, .. } => self.colocated && *server == index,
            Fault::Machine { .. } => true,
            _ => false,
        };
        self.faults.iter().any(|(_, fault)| runs_twice(fault))
    }

    /// Some time in the life of the job, as long as it may last undisturbed.
    fn moment(&self, chance: &mut ChaCha8Rng) -> Duration {
        let life = 100 + self.steps * (self.compute + 2 * self.weather.delay);
        Duration::from_millis(chance.random_range(0..life))
    }

    fn fault(&self, chance: &mut ChaCha8Rng) -> Fault {
        let (trainer, server) = (chance.random_range(0..self.trainers), chance.random_range(0..self.servers));
        let (lasts, away) = (lasting(chance), lasting(chance));
        let (silent, half) = (chance.random_bool(0.3), chance.random_bool(0.5));
        // Without checkpoints a server that dies takes its state along, as documented.
        let kinds = if self.checkpoint.is_some() || self.replicated { 10 } else { 5 };
        match chance.random_range(0..kinds) {
            0 => Fault::Break { trainer, server, half },
            1 => Fault::Partition { trainer, server, up: true, down: true, lasts },
            2 => Fault::Partition { trainer, server, up: half, down: !half, lasts },
            3 => Fault::Replace { trainer, away, silent },
            4 => Fault::Zombie { trainer, away, lasts },
            5 => Fault::Split { one: 0, other: server, there: true, back: true, lasts },
            6 => Fault::Stop { server, away },
            7 => Fault::ZombieServer { server, away, lasts: half.then_some(lasts) },
            8 => Fault::Refuse { server, lasts },
            _ => Fault::Kill { server, away, silent },
        }
    }
}

/// From 10 ms to 40 s, short ones as often as long ones.
fn lasting(chance: &mut ChaCha8Rng) -> Duration {
    Duration::from_millis((10.0 * 4000_f64.powf(chance.random_range(0.0..1.0))) as u64)
}

/// Draws the optimizer from numbers of its own.
fn optimizer(seed: u64) -> OptimizerKind {
    use OptimizerKind::{Adagrad, Adam, AdamW, Ftrl, RmsProp, Sgd};
    let chance = &mut ChaCha8Rng::seed_from_u64(seed.rotate_left(48) ^ 0x0b7);
    [Sgd, Sgd, Adam, AdamW, Adagrad, RmsProp, Ftrl][chance.random_range(0..7)]
}

fn weather(chance: &mut ChaCha8Rng) -> Weather {
    let mut share = |shares: [f64; 3]| shares[chance.random_range(0..3)];
    let (lost, torn) = (share([0.0, 0.01, 0.05]), share([0.0, 0.1, 0.5]));
    let (broken, doubled) = (share([0.0, 0.002, 0.01]), share([0.0, 0.0, 0.2]));
    Weather { delay: [0, 1, 5, 30][chance.random_range(0..4)], lost, torn, broken, doubled }
}
