//! A network in memory: connections whose bytes take their time, come in pieces, or never come. What is random is
//! drawn for each connection, direction and moment by itself, from the seed: in which order the tasks of one
//! moment run and how many writes they make of it, which tokio does not promise, makes no difference to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::end::End;
use super::trace::Trace;

/// Bytes of one direction that may be under way; more must wait, as in a full socket.
const CAPACITY: usize = 512 * 1024;

/// A machine, with one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    /// Server by index and how often it was started before.
    Server(u32, u32),
    /// Trainer by index and incarnation.
    Trainer(u32, u32),
}

/// A connection: who dialled whom for the how-many-th time.
pub type Id = (Host, Host, u32);

/// How bytes fare.
#[derive(Clone, Debug)]
pub struct Weather {
    /// Longest ordinary delay, in ms.
    pub delay: u64,
    /// Share of writes whose packet is lost and sent again, 200 ms to 1 s later.
    pub lost: f64,
    /// Share of writes of which only a part is taken.
    pub torn: f64,
    /// Share of writes that break their connection half-way.
    pub broken: f64,
    /// Share of connections that reach the server twice; no process uses the second one.
    pub doubled: f64,
}

/// The network. Clones are the same one.
#[derive(Clone)]
pub struct Network(Arc<Mutex<Wires>>);

/// The connections between the network's hosts.
pub struct Wires {
    pub trace: Trace,
    seed: u64,
    weather: Weather,
    listeners: BTreeMap<String, (Host, mpsc::UnboundedSender<io::Result<End>>)>,
    /// By address: the machine that had it last.
    names: BTreeMap<String, Host>,
    forgets_names: bool,
    connections: BTreeMap<Id, Connection>,
    /// How often one host has dialled another.
    dialled: BTreeMap<(Host, Host), u32>,
    /// Directions in which nothing passes, and how many faults are to blame.
    cut: BTreeMap<(Host, Host), u32>,
    /// Machines that are gone without a word.
    silent: BTreeSet<Host>,
    /// Hosts that a firewall keeps apart.
    refused: BTreeSet<(Host, Host)>,
    /// The tasks that wait for a direction to be whole again.
    waiting: Vec<Waker>,
}

/// Side 0 dialled, side 1 listened.
struct Connection {
    hosts: [Host; 2],
    /// Bytes on their way to each side.
    flows: [Flow; 2],
    sides: [Side; 2],
}

#[derive(Default)]
struct Side {
    /// Its own machine has died or given the connection up.
    dead: bool,
    /// The other side's reset arrives then.
    reset: Option<Instant>,
    /// Its own kernel has given the connection up, because nothing was acknowledged for too long.
    timed_out: bool,
    /// The process has closed it.
    closed: bool,
}

#[derive(Default)]
struct Flow {
    chunks: VecDeque<(Instant, Bytes)>,
    bytes: usize,
    last: Option<Instant>,
    /// When bytes were put in last.
    fed: Option<Instant>,
    ends: Option<Instant>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// The result of a read.
pub enum Found {
    Bytes(Bytes),
    End,
    Reset,
    /// It is woken.
    Nothing,
    /// Something at that time.
    Later(Instant),
}

impl Network {
    pub fn new(seed: u64, weather: Weather, echo: bool) -> Self {
        Self(Arc::new(Mutex::new(Wires {
            trace: Trace::new(echo),
            seed,
            weather,
            listeners: BTreeMap::new(),
            names: BTreeMap::new(),
            forgets_names: false,
            connections: BTreeMap::new(),
            dialled: BTreeMap::new(),
            cut: BTreeMap::new(),
            silent: BTreeSet::new(),
            refused: BTreeSet::new(),
            waiting: Vec::new(),
        })))
    }

    pub fn wires(&self) -> MutexGuard<'_, Wires> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connections that come in at `address` from now on.
    pub fn listen(&self, host: Host, address: &str) -> UnboundedReceiverStream<io::Result<End>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut wires = self.wires();
        wires.names.insert(address.to_owned(), host);
        wires.listeners.insert(address.to_owned(), (host, sender));
        wires.wake();
        UnboundedReceiverStream::new(receiver)
    }

    /// Names of hosts are gone with their process, as those of pods are; else a dead process's address refuses.
    pub fn forget_names(&self) {
        self.wires().forgets_names = true;
    }

    /// Makes the connection that has been asked for, if somebody listens.
    pub fn connect(&self, from: Host, address: &str) -> io::Result<End> {
        let mut wires = self.wires();
        let kind = if wires.forgets_names { io::ErrorKind::NotFound } else { io::ErrorKind::ConnectionRefused };
        let refused = || io::Error::new(kind, "no process listens");
        let Some((to, listener)) = wires.listeners.get(address).cloned() else {
            wires.trace.log(format_args!("{from:?} is refused at {address}"));
            return Err(refused());
        };
        if wires.refused.contains(&(from, to)) {
            wires.trace.log(format_args!("a firewall refuses {from:?} at {address}"));
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let first = wires.open(from, to);
        let doubled = wires.draw(first, 0).random_bool(wires.weather.doubled);
        let mut ids = vec![first];
        ids.extend(doubled.then(|| wires.open(from, to)));
        drop(wires);
        let mut ends = Vec::new();
        for id in ids {
            let (ours, theirs) = (End::new(self, id, 0), End::new(self, id, 1));
            listener.send(Ok(theirs)).map_err(|_| refused())?;
            ends.push(ours);
        }
        let end = ends.remove(0);
        for unused in ends {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(45)).await;
                drop(unused);
            });
        }
        Ok(end)
    }

    /// A process dies with its connections. Its peers hear of it, unless it goes with its machine.
    pub fn kill(&self, host: Host, silently: bool) {
        let mut wires = self.wires();
        wires.listeners.retain(|_, (owner, _)| *owner != host);
        wires.reset_all(|hosts| hosts.iter().position(|other| *other == host), !silently);
        if silently {
            wires.silent.insert(host);
        }
    }

    /// A machine is there again; who still talks to the process before is notified.
    pub fn revive(&self, host: Host) {
        let mut wires = self.wires();
        if wires.silent.remove(&host) {
            wires.reset_all(|hosts| hosts.iter().position(|other| *other == host), true);
        }
        wires.wake();
    }
}

impl Wires {
    /// Nothing passes from one to the other any more.
    pub fn cut(&mut self, from: Host, to: Host) {
        *self.cut.entry((from, to)).or_default() += 1;
    }

    /// The kernels of two hosts that have not heard each other for too long give their connections up.
    pub fn time_out(&mut self, a: Host, b: Host) {
        if !self.is_cut(a, b) && !self.is_cut(b, a) {
            return;
        }
        for connection in self.connections.values_mut() {
            if connection.hosts == [a, b] || connection.hosts == [b, a] {
                connection.sides.iter_mut().for_each(|side| side.timed_out = true);
                connection.wake();
            }
        }
    }

    /// A firewall comes between two hosts: their connections break, and new ones are refused.
    pub fn refuse(&mut self, a: Host, b: Host) {
        self.refused.extend([(a, b), (b, a)]);
        self.break_between(a, b, false);
    }

    /// The firewall between two hosts is gone.
    pub fn admit(&mut self, a: Host, b: Host) {
        self.refused.retain(|hosts| *hosts != (a, b) && *hosts != (b, a));
    }

    /// One fault less between them.
    pub fn mend(&mut self, from: Host, to: Host) {
        if let Some(faults) = self.cut.get_mut(&(from, to)) {
            *faults -= 1;
            if *faults == 0 {
                self.cut.remove(&(from, to));
            }
        }
        self.wake();
    }

    /// The connections between two hosts break. With `half` only `a` hears of it at once.
    pub fn break_between(&mut self, a: Host, b: Host, half: bool) {
        let side = |hosts: &[Host; 2]| {
            let place = hosts.iter().position(|host| *host == a)?;
            (hosts[1 - place] == b).then_some(place)
        };
        self.reset_all(side, !half);
        self.wake();
    }

    /// One of the connections that `from` has made to `to` breaks.
    pub fn sever(&mut self, from: Host, to: Host, nth: u32) {
        let alive = self.connections.iter().filter(|(_, connection)| {
            connection.hosts == [from, to] && connection.sides.iter().all(|side| !side.dead && !side.closed)
        });
        let ids: Vec<Id> = alive.map(|(id, _)| *id).collect();
        let Some(id) = ids.get(nth as usize % ids.len().max(1)) else { return };
        self.trace.log(format_args!("{from:?} and {to:?} lose connection {id:?}"));
        let connection = self.connections.get_mut(id).expect("listed just now");
        connection.sides.iter_mut().for_each(|side| side.dead = true);
        connection.wake();
        self.wake();
    }

    /// From now on connections are no longer broken by the weather.
    pub fn clear_up(&mut self) {
        self.weather = Weather { broken: 0.0, doubled: 0.0, ..self.weather.clone() };
    }

    /// The time from a question of `from` to its answer.
    pub fn round_trip(&mut self, from: Host, address: &str) -> Duration {
        let to = self.listeners.get(address).map_or(from, |(to, _)| *to);
        let mut chance = chance(self.seed, (from, to, self.dialled.get(&(from, to)).copied().unwrap_or(0)), [2, 0]);
        self.delay(&mut chance) + self.delay(&mut chance)
    }

    /// Returns whether the other host is within reach; the waker is woken when that may have changed.
    pub fn reach(&mut self, from: Host, address: &str, waker: &Waker) -> Poll<()> {
        let to = self.names.get(address).copied();
        if to.is_none_or(|to| !self.is_cut(from, to) && !self.is_cut(to, from)) {
            return Poll::Ready(());
        }
        self.waiting.push(waker.clone());
        Poll::Pending
    }

    /// Returns what `side` of connection `id` may read now, at most `limit` bytes.
    pub fn read(&mut self, id: Id, side: usize, limit: usize, waker: &Waker) -> Found {
        let now = Instant::now();
        let connection = self.connections.get_mut(&id).expect("a connection lives as long as its ends");
        let (to, from) = (connection.hosts[side], connection.hosts[1 - side]);
        let Side { dead, reset, timed_out, .. } = connection.sides[side];
        let flow = &mut connection.flows[side];
        flow.reader = Some(waker.clone());
        if dead || timed_out {
            return Found::Reset;
        }
        if self.cut.contains_key(&(from, to)) || self.silent.contains(&from) {
            self.waiting.push(waker.clone());
            return Found::Nothing;
        }
        if reset.is_some_and(|at| at <= now) {
            return Found::Reset;
        }
        match flow.chunks.front_mut() {
            Some((at, chunk)) if *at <= now => {
                let bytes = chunk.split_to(limit.min(chunk.len()));
                if chunk.is_empty() {
                    flow.chunks.pop_front();
                }
                flow.bytes -= bytes.len();
                flow.writer.take().into_iter().for_each(Waker::wake);
                Found::Bytes(bytes)
            }
            None if flow.ends.is_some_and(|at| at <= now) => Found::End,
            front => {
                let next = front.map(|(at, _)| *at).or(flow.ends);
                next.into_iter().chain(reset).min().map_or(Found::Nothing, Found::Later)
            }
        }
    }

    /// Takes bytes that `side` sends; how many.
    pub fn write(&mut self, id: Id, side: usize, bytes: &[u8], waker: &Waker) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        let mut chance = self.draw(id, side);
        let (torn, broken) = (chance.random_bool(self.weather.torn), chance.random_bool(self.weather.broken));
        let delay = self.delay(&mut chance);
        let part = chance.random_range(0.0..1.0);
        let connection = self.connections.get_mut(&id).expect("a connection lives as long as its ends");
        let (from, to) = (connection.hosts[side], connection.hosts[1 - side]);
        let heard = !self.cut.contains_key(&(to, from)) && !self.silent.contains(&to);
        let Side { dead, reset, timed_out, .. } = connection.sides[side];
        let gone = connection.sides[1 - side].closed || reset.is_some_and(|at| at <= now);
        if dead || timed_out || (gone && heard) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let flow = &mut connection.flows[1 - side];
        if flow.bytes >= CAPACITY {
            flow.writer = Some(waker.clone());
            return Poll::Pending;
        }
        let taken = if torn { 1 + (part * (bytes.len() - 1) as f64) as usize } else { bytes.len().min(CAPACITY) };
        let at = flow.last.unwrap_or(now).max(now + delay);
        flow.last = Some(at);
        flow.bytes += taken;
        flow.chunks.push_back((at, Bytes::copy_from_slice(&bytes[..taken])));
        flow.reader.take().into_iter().for_each(Waker::wake);
        if flow.fed.replace(now) != Some(now) {
            self.trace.mark(format_args!("{id:?} {side}"));
        }
        let connection = self.connections.get_mut(&id).expect("it was there just now");
        // Once in a moment, however many writes it has: their number is not the same in each run.
        if broken && connection.sides.iter().any(|side| side.reset != Some(at)) {
            connection.sides.iter_mut().for_each(|side| side.reset = Some(at));
            connection.wake();
            self.trace.log(format_args!("{from:?} and {to:?} lose connection {id:?}"));
        }
        Poll::Ready(Ok(taken))
    }

    /// `side` sends nothing more; `closed` says that it reads nothing more either.
    pub fn finish(&mut self, id: Id, side: usize, closed: bool) {
        let mut chance = self.draw(id, side);
        let delay = self.delay(&mut chance);
        let connection = self.connections.get_mut(&id).expect("a connection lives as long as its ends");
        connection.sides[side].closed |= closed;
        let flow = &mut connection.flows[1 - side];
        let now = Instant::now();
        flow.ends.get_or_insert(flow.last.unwrap_or(now).max(now + delay));
        connection.wake();
        if connection.sides.iter().all(|side| side.closed) {
            self.connections.remove(&id);
        }
    }

    fn open(&mut self, from: Host, to: Host) -> Id {
        let dialled = self.dialled.entry((from, to)).or_default();
        *dialled += 1;
        let id = (from, to, *dialled);
        self.trace.log(format_args!("{from:?} reaches {to:?} for the {dialled}. time"));
        let connection = Connection { hosts: [from, to], flows: Default::default(), sides: Default::default() };
        self.connections.insert(id, connection);
        id
    }

    /// Breaks the connections of which `dying` names a side: that side knows at once, the other one soon, or
    /// much later.
    fn reset_all(&mut self, dying: impl Fn(&[Host; 2]) -> Option<usize>, notified: bool) {
        let found: Vec<(Id, usize)> =
            self.connections.iter().filter_map(|(id, connection)| Some((*id, dying(&connection.hosts)?))).collect();
        for (id, side) in found {
            let mut chance = self.draw(id, side);
            let late = Duration::from_secs(chance.random_range(1..60));
            let after = if notified { self.delay(&mut chance) } else { late };
            let connection = self.connections.get_mut(&id).expect("listed just now");
            connection.sides[side].dead = true;
            connection.sides[1 - side].reset.get_or_insert(Instant::now() + after);
            connection.wake();
        }
    }

    fn is_cut(&self, from: Host, to: Host) -> bool {
        self.cut.contains_key(&(from, to)) || self.silent.contains(&from) || self.silent.contains(&to)
    }

    fn delay(&self, chance: &mut ChaCha8Rng) -> Duration {
        let lost = chance.random_bool(self.weather.lost);
        let again = chance.random_range(200..1000);
        let ordinary = chance.random_range(0..=self.weather.delay);
        Duration::from_millis(if lost { again } else { ordinary })
    }

    /// This moment's draw of a side of a connection.
    fn draw(&self, id: Id, side: usize) -> ChaCha8Rng {
        chance(self.seed, id, [side as u64, self.trace.age().as_micros() as u64])
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

impl Connection {
    fn wake(&mut self) {
        for flow in &mut self.flows {
            flow.reader.take().into_iter().chain(flow.writer.take()).for_each(Waker::wake);
        }
    }
}

fn chance(seed: u64, (from, to, nth): Id, draw: [u64; 2]) -> ChaCha8Rng {
    let number = |host| match host {
        Host::Server(index, life) => u64::from(index) | u64::from(life) << 16,
        Host::Trainer(index, incarnation) => u64::from(index + 1) << 32 | u64::from(incarnation),
    };
    let parts = [number(from), number(to), nth.into(), draw[0], draw[1]];
    let mixed = parts.iter().fold(seed, |mixed, part| {
        let mixed = (mixed ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    });
    ChaCha8Rng::seed_from_u64(mixed)
}

/// Where a server listens.
pub fn address_of(host: Host) -> String {
    match host {
        Host::Server(index, _) => format!("server-{index}:7000"),
        Host::Trainer(index, incarnation) => format!("trainer-{index}-{incarnation}:0"),
    }
}
