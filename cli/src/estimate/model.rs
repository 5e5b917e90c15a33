//! The time of a training step as a function of the job, the network and the constants: pure, so that each effect is a row of a
//! table of tests. docs/scaling.md derives the formula.
//!
//! For a block, with `u` bytes up and `d` bytes down, each resource has a demand of seconds for one trainer:
//!
//! ```text
//! trainer's link   max(u, d) / B_trainer
//! trainer's cores  (u + d) byte + 2 message + elements coding
//! server's link    (max(u, d) + f) / B_server           f: what replication forwards, for one trainer
//! server's cores   (u + d + 2 f) byte + 2 (1 + r share) message + elements (element + coding)
//!                  + share elements ((1 + r) update + coding)
//!                                                       share: 1, in Sync 1 / trainers, because all make one update
//!                                                       r: 1 with replication, else 0
//! one block        latency = round trip + u / B + d / B + trainer's and server's cores, one each
//! ```
//!
//! A trainer has `w` blocks under way to each server, so a server and its trainers are a closed network of queues with
//! `N = w trainers` customers. The time of `n` blocks for each trainer is that of balanced job bounds (Zahorjan et al.,
//! Communications of the ACM 25(2), 1982), where `D` is the largest demand: `n / w (latency + (N - 1) D)`. The same holds for
//! one trainer and all its servers. The larger of the two is the exchange. For one block at a time it is `u / B + d / B` in
//! turn; for many it is the larger one, both ways at once.

use psjobs_api::training::{Compression, ConsistencyMode};
use psjobs_ps::layout::LayoutError;
use serde::Serialize;

use super::constants::Constants;
use super::payload::Payload;

/// A job, and the machines and network that it trains on. Times are in seconds, rates in bytes a second each way.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Parameters of the model.
    pub parameters: u64,
    /// Time in which a trainer computes a gradient, without any exchange.
    pub compute: f64,
    /// Examples that a trainer reads in a step.
    pub examples: f64,
    pub trainers: u32,
    pub servers: u32,
    /// Rate of the link of each trainer and of each server.
    pub trainer_link: f64,
    pub server_link: f64,
    /// Time from a trainer to a server and back.
    pub round_trip: f64,
    pub compression: Compression,
    pub mode: ConsistencyMode,
    /// In Sync: trainers that a step does not wait for.
    pub backup_trainers: u32,
    pub local: Option<LocalSteps>,
    /// Each block is held by two servers.
    pub is_replicated: bool,
    pub has_tls: bool,
    /// Share of `compute` during which gradients leave already.
    pub overlap: f64,
    /// Standard deviation of the time of a gradient, over that time.
    pub spread: f64,
    pub server_cores: f64,
    pub trainer_cores: f64,
    /// Slots of optimizer state for each parameter.
    pub slots: f64,
    /// The servers keep the value of each parameter from before the last update; not of a model of one block.
    pub keeps_previous: bool,
}

/// Steps that a trainer makes for one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSteps {
    pub steps: u32,
    /// The trainer goes on while the exchange is under way.
    pub overlap: bool,
}

/// The resource that is busy for the largest part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The computing of gradients, and the wait for the slowest trainer.
    Compute,
    TrainerLinks,
    TrainerCores,
    ServerLinks,
    /// The servers' cores, which work as fast as their memory lets them.
    ServerMemory,
    /// The time of a message on its way, with as many blocks under way as there may be.
    Latency,
    /// The heartbeats of all trainers, on each server.
    Coordination,
}

/// Duration of a step and of its parts, in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub step_seconds: f64,
    /// Steps a second of each trainer.
    pub steps_per_second: f64,
    /// Examples a second of all trainers.
    pub examples_per_second: f64,
    /// Examples a second over those of as many trainers that exchange nothing and wait for no other.
    pub efficiency: f64,
    pub limit: Limit,
    /// Share of the step in which that is busy.
    pub limit_share: f64,
    /// In a step: the wait for the slowest trainer, the exchange, and the part of that which computing hides. With local steps
    /// an exchange counts for each of them in part.
    pub waiting_seconds: f64,
    pub exchange_seconds: f64,
    pub hidden_seconds: f64,
    /// Bytes of a trainer's exchange.
    pub bytes_up: f64,
    pub bytes_down: f64,
    /// Bytes of memory that a server needs.
    pub server_bytes: f64,
    pub servers: u32,
    pub trainers: u32,
}

/// Seconds of each resource for a block of one trainer.
#[derive(Clone, Copy, Debug)]
struct Demands {
    trainer_link: f64,
    trainer_cores: f64,
    server_link: f64,
    server_cores: f64,
    /// The time of one block alone, from the trainer to the server and back.
    latency: f64,
    /// Share of the servers' cores that heartbeats take.
    heartbeats: f64,
}

/// Share of its cores that a server has left at least, however many heartbeats come: the formula has no meaning beyond.
const LEAST_CORES: f64 = 0.02;

impl Demands {
    fn new(setup: &Setup, payload: &Payload, constants: &Constants) -> Self {
        let Payload { elements, up, down, .. } = *payload;
        let trainers = f64::from(setup.trainers);
        let byte = 1e-9 * (constants.byte_ns + if setup.has_tls { constants.tls_ns } else { 0.0 });
        let message = 1e-6 * constants.message_us;
        let coded = |codes: bool| if codes { 1e-9 * constants.coding_ns * elements } else { 0.0 };
        let (gradients, values) = (coded(payload.codes_gradients), coded(payload.codes_parameters));
        let is_sync = setup.mode == ConsistencyMode::Sync;
        let updates = if is_sync { 1.0 / trainers } else { 1.0 };
        // In Sync the sum goes to the backup, as f32; else each gradient as it came.
        let (copies, forwarded) = match (setup.is_replicated, is_sync) {
            (false, _) => (1.0, 0.0),
            (true, true) => (2.0, 4.0 * elements / trainers),
            (true, false) => (2.0, up),
        };
        let update = copies * 1e-9 * constants.update_ns * elements * (1.0 + setup.slots / 2.0);
        let one_way = (up + down) * byte + 2.0 * message;
        let trainer = one_way + gradients + values;
        let forwarding = (copies - 1.0) * (2.0 * forwarded * byte + 2.0 * updates * message);
        let add = 1e-9 * constants.element_ns * elements;
        let server = one_way + forwarding + gradients + add + updates * (update + values);
        let beats = if setup.is_replicated { 2.0 } else { 1.0 };
        let heartbeats = beats * trainers * 1e-6 * constants.heartbeat_us / setup.server_cores;
        let left = (1.0 - heartbeats).max(LEAST_CORES);
        let rate = setup.trainer_link.min(setup.server_link) * constants.link_share;
        Self {
            trainer_link: up.max(down) / (setup.trainer_link * constants.link_share),
            trainer_cores: trainer / setup.trainer_cores,
            server_link: (up.max(down) + forwarded) / (setup.server_link * constants.link_share),
            server_cores: server / (setup.server_cores * left),
            // Several cores do not make one block faster.
            latency: setup.round_trip
                + (up + down) / rate
                + trainer / setup.trainer_cores.min(1.0)
                + server / setup.server_cores.min(1.0),
            heartbeats,
        }
    }

    fn of_trainer(&self) -> f64 {
        self.trainer_link.max(self.trainer_cores)
    }

    fn of_server(&self) -> f64 {
        self.server_link.max(self.server_cores)
    }
}

/// Time of `blocks` blocks of each customer, of which `window` are under way, where `customers` blocks are under way in all and
/// the busiest resource takes `demand` for each.
fn balanced(blocks: f64, window: f64, customers: f64, latency: f64, demand: f64) -> f64 {
    blocks / window * (latency + (customers - 1.0) * demand)
}

/// Time of the exchanges of `trainers` trainers that begin together.
fn exchange(demands: &Demands, payload: &Payload, trainers: f64, servers: f64) -> f64 {
    let Payload { blocks, blocks_of_server, window, .. } = *payload;
    let Demands { latency, .. } = *demands;
    let at_server = balanced(blocks_of_server, window, window * trainers, latency, demands.of_server());
    let under_way = window * servers.min(blocks);
    let at_trainer = balanced(blocks, under_way, under_way, latency, demands.of_trainer());
    at_server.max(at_trainer)
}

/// Estimates the time of a step.
///
/// # Errors
/// If the model is none, or more than the servers hold.
pub fn estimate(setup: &Setup, constants: &Constants) -> Result<Estimate, LayoutError> {
    let Setup { trainers, servers, .. } = *setup;
    let payload = Payload::new(setup.parameters, servers, trainers, &setup.compression)?;
    let demands = Demands::new(setup, &payload, constants);
    let steps = f64::from(setup.local.map_or(1, |local| local.steps.max(1)));
    let (count, servers_count) = (f64::from(trainers), f64::from(servers));
    let is_sync = setup.mode == ConsistencyMode::Sync;
    let computing = steps * setup.compute;
    // The largest of so many normal deviates; a sum of steps spreads with the root of their number.
    let others = (count / f64::from(1 + setup.backup_trainers)).max(1.0);
    let waiting = if is_sync { setup.compute * setup.spread * (2.0 * others.ln() * steps).sqrt() } else { 0.0 };
    let at_once = if is_sync { count } else { 1.0 };
    let exchanged = exchange(&demands, &payload, at_once, servers_count);
    let hidable = match setup.local {
        None => setup.overlap * setup.compute,
        Some(local) if local.overlap => computing,
        Some(_) => 0.0,
    };
    let hidden = exchanged.min(hidable);
    // Trainers that do not wait for each other fill the servers until these have no time left.
    let saturated = payload.blocks_of_server * count * demands.of_server();
    let alone = computing + waiting + exchanged - hidden;
    let cycle = if is_sync { alone } else { alone.max(saturated) };
    let shown_exchange = exchanged + (cycle - alone);
    let left = (1.0 - demands.heartbeats).max(0.0);
    let busy = [
        (Limit::Compute, computing + waiting),
        (Limit::TrainerLinks, payload.blocks * demands.trainer_link),
        (Limit::TrainerCores, payload.blocks * demands.trainer_cores),
        (Limit::ServerLinks, payload.blocks_of_server * count * demands.server_link),
        (Limit::ServerMemory, payload.blocks_of_server * count * demands.server_cores * left),
        (Limit::Coordination, demands.heartbeats * cycle),
    ];
    // Where no resource is busy for long, the step waits for messages on their way.
    let carried = busy[1..].iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    let on_the_way = if carried < exchanged / 2.0 { exchanged - carried } else { 0.0 };
    let larger = |one: (Limit, f64), other: (Limit, f64)| if other.1 > one.1 { other } else { one };
    let (limit, most) = busy.into_iter().fold((Limit::Latency, on_the_way), larger);
    let step = cycle / steps;
    let copies = if setup.is_replicated { 2.0 } else { 1.0 };
    let previous = if setup.keeps_previous && payload.blocks > 1.0 { 1.0 } else { 0.0 };
    let kept = 4.0 * payload.blocks_of_server * payload.elements * (1.0 + setup.slots + previous) * copies;
    let under_way = (payload.window * count * payload.up).min(payload.blocks_of_server * count * payload.up);
    Ok(Estimate {
        step_seconds: step,
        steps_per_second: 1.0 / step,
        examples_per_second: count * setup.examples / step,
        efficiency: setup.compute / step,
        limit,
        limit_share: (most / cycle).min(1.0),
        waiting_seconds: waiting / steps,
        exchange_seconds: shown_exchange / steps,
        hidden_seconds: hidden / steps,
        bytes_up: payload.blocks * payload.up,
        bytes_down: payload.blocks * payload.down,
        server_bytes: kept + under_way,
        servers,
        trainers,
    })
}

/// A step that is longer by less than this share is as good as the shortest.
const CLEARLY: f64 = 1.05;

/// Returns the smallest number of servers, up to `most`, with which a step takes less than 5 % longer than with any other.
///
/// # Errors
/// As [`estimate`], with the most servers.
pub fn enough_servers(setup: &Setup, constants: &Constants, most: u32) -> Result<u32, LayoutError> {
    let with = |servers| estimate(&Setup { servers, ..setup.clone() }, constants);
    let mut steps = vec![(most, with(most)?.step_seconds)];
    // Fewer servers may not hold the model.
    steps.extend((1..most).filter_map(|servers| Some((servers, with(servers).ok()?.step_seconds))));
    let shortest = steps.iter().map(|(_, seconds)| *seconds).fold(f64::INFINITY, f64::min);
    let enough = steps.iter().filter(|(_, seconds)| *seconds < CLEARLY * shortest).map(|(servers, _)| *servers);
    Ok(enough.min().unwrap_or(most))
}

#[cfg(test)]
mod tests;
