//! Plays exchanges against servers without sockets, while streams break.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::layout::{BLOCK_ELEMENTS, TensorSpec};

const BLOCKS: u32 = 24;

fn layout(servers: usize) -> Layout {
    let shape = vec![(BLOCK_ELEMENTS * BLOCKS as usize) as u64];
    let layout = Layout::new(&[TensorSpec::new("weights", shape)], servers).expect("a layout");
    assert_eq!(layout.blocks(), BLOCKS);
    layout
}

/// A message on its way: the stream, the block, the step, and how often the trainer had sent that when it left.
type Message = (Name, u32, u64);

/// All servers of a job, and the streams to them.
#[derive(Default)]
struct Servers {
    /// Messages of each stream to the servers, in their order.
    up: BTreeMap<(u32, u32), VecDeque<Message>>,
    /// Answers, which the streams deliver in any order among each other.
    down: Vec<Message>,
    /// Gradients by block and step, as the servers saw them first.
    first: BTreeSet<(u32, u64)>,
    /// The step that each block is at, for entries.
    at: BTreeMap<u32, u64>,
    in_flight: BTreeSet<u32>,
    order: BTreeMap<u32, Vec<u32>>,
}

/// A trainer under test: the machine, and what its driver would hold.
struct Trainer {
    exchange: Exchange,
    servers: Servers,
    width: Vec<u32>,
    generation: u64,
    window: usize,
    taken: BTreeMap<u32, u64>,
}

impl Trainer {
    fn new(servers: u32, width: u32, window: usize) -> Self {
        let mut trainer = Self {
            exchange: Exchange::new(layout(servers as usize), servers as usize, false),
            servers: Servers::default(),
            width: vec![width; servers as usize],
            generation: 0,
            window,
            taken: BTreeMap::new(),
        };
        (0..servers).for_each(|server| trainer.open(server, (0..width).collect()));
        trainer
    }

    fn open(&mut self, server: u32, lanes: Vec<u32>) {
        self.generation += 1;
        let (width, generation, window) = (self.width[server as usize], self.generation, self.window);
        self.exchange.opened(server, &Opened { width, lanes, generation, window });
    }

    fn stream(&self, server: u32, lane: u32) -> Name {
        let generation = self.exchange.servers[server as usize].generations[&lane];
        Name { server, lane, generation }
    }

    fn send(&mut self, server: u32) {
        let (purpose, step) = self.exchange.subject();
        while let Some(Outgoing { block, lane }) = self.exchange.next_to_send(server) {
            let name = self.stream(server, lane);
            self.servers.up.entry((server, lane)).or_default().push_back((name, block, step));
            self.servers.order.entry(server).or_default().push(block);
            self.servers.in_flight.insert(block);
            let of_server = self.servers.in_flight.iter().filter(|b| self.exchange.layout.owner(**b) == server);
            assert!(purpose == Purpose::Entry || of_server.count() <= self.window, "the window is kept");
        }
    }

    fn send_all(&mut self) {
        (0..self.width.len() as u32).for_each(|server| self.send(server));
    }

    /// A server reads the first message of a stream and answers.
    fn serve(&mut self, choice: usize) {
        let waiting: Vec<_> = self.servers.up.iter().filter(|(_, q)| !q.is_empty()).map(|(key, _)| *key).collect();
        let Some(key) = waiting.get(choice % waiting.len().max(1)) else { return };
        let message = self.servers.up.get_mut(key).and_then(VecDeque::pop_front);
        let Some((name, block, step)) = message else { return };
        self.servers.first.insert((block, step));
        let at = self.servers.at.get(&block).copied().unwrap_or(0).max(step);
        self.servers.down.push((name, block, at));
    }

    /// An answer arrives.
    fn deliver(&mut self, choice: usize) {
        if self.servers.down.is_empty() {
            return;
        }
        let (name, block, step) = self.servers.down.remove(choice % self.servers.down.len());
        if !self.exchange.is_open(name) {
            return;
        }
        self.servers.in_flight.remove(&block);
        if self.exchange.receive(name, block, step) {
            assert!(self.taken.insert(block, step).is_none(), "values are put in place once");
            self.exchange.holds(block, step + 1);
        }
        self.send(name.server);
    }

    /// One stream, or all of a server, breaks and is opened again; the server may have seen what was on its way, or not.
    fn cut(&mut self, server: u32, lane: Option<u32>, width: u32, seen: bool) {
        let old = self.width[server as usize];
        let lanes: Vec<u32> = match lane {
            Some(lane) => vec![lane % old],
            None => (0..old).collect(),
        };
        for lane in &lanes {
            for (_, block, step) in self.servers.up.remove(&(server, *lane)).unwrap_or_default() {
                if seen {
                    self.servers.first.insert((block, step));
                }
            }
        }
        let layout = &self.exchange.layout;
        let lost = |block: &u32| layout.owner(*block) == server && lanes.contains(&layout.lane(*block, old));
        self.servers.in_flight.retain(|block| !lost(block));
        let lanes = if lane.is_some() {
            lanes
        } else {
            self.width[server as usize] = width;
            (0..width).collect()
        };
        self.open(server, lanes);
        self.send(server);
    }

    /// Lets everything arrive.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            if self.exchange.is_settled() {
                return;
            }
            self.serve(0);
            self.deliver(0);
        }
        panic!("the exchange stands still: {:?}", self.exchange);
    }
}

#[derive(Clone, Debug)]
enum Happening {
    Serve(usize),
    Deliver(usize),
    Cut { server: u32, lane: Option<u32>, width: u32, seen: bool },
}

fn happenings() -> impl Strategy<Value = Vec<Happening>> {
    let one = prop_oneof![
        5 => any::<usize>().prop_map(Happening::Serve),
        5 => any::<usize>().prop_map(Happening::Deliver),
        1 => (0..3_u32, proptest::option::of(0..4_u32), 1..4_u32, any::<bool>())
            .prop_map(|(server, lane, width, seen)| Happening::Cut { server, lane, width, seen }),
    ];
    proptest::collection::vec(one, 0..120)
}

fn play(trainer: &mut Trainer, happenings: &[Happening]) {
    let servers = trainer.width.len() as u32;
    for happening in happenings {
        match *happening {
            Happening::Serve(choice) => trainer.serve(choice),
            Happening::Deliver(choice) => trainer.deliver(choice),
            Happening::Cut { server, lane, width, seen } => trainer.cut(server % servers, lane, width, seen),
        }
    }
    trainer.finish();
}

proptest! {
    /// Whatever breaks in steps that follow each other, every block's gradient arrives, its answer counts once, and the
    /// exchange ends when nothing breaks any more. Answers of a step before are still on their way in the next one.
    #[test]
    fn every_block_is_answered_once(
        servers in 1..4_u32, width in 1..4_u32, window in 1..6_usize,
        steps in proptest::collection::vec(happenings(), 1..4),
    ) {
        let mut trainer = Trainer::new(servers, width, window);
        for (step, happenings) in (0..).zip(&steps) {
            trainer.taken.clear();
            trainer.servers.in_flight.clear();
            trainer.exchange.begin(Purpose::Step, step);
            trainer.send_all();
            play(&mut trainer, happenings);
            let all: BTreeMap<u32, u64> = (0..BLOCKS).map(|block| (block, step)).collect();
            prop_assert_eq!(&trainer.taken, &all);
            prop_assert!((0..BLOCKS).all(|block| trainer.servers.first.contains(&(block, step))));
            prop_assert!((0..BLOCKS).all(|block| trainer.exchange.version(block) == step + 1));
        }
    }

    /// An entry ends with the step of the furthest block, and takes values only of those that are not past it.
    #[test]
    fn an_entry_finds_the_furthest_block(
        servers in 1..4_u32, width in 1..4_u32, step in 0..4_u64, at in proptest::collection::vec(0..6_u64, BLOCKS as usize),
        happenings in happenings(),
    ) {
        let mut trainer = Trainer::new(servers, width, 2);
        trainer.servers.at = (0..).zip(at.clone()).collect();
        trainer.exchange.begin(Purpose::Entry, step);
        trainer.send_all();
        play(&mut trainer, &happenings);
        prop_assert_eq!(trainer.exchange.furthest(), at.iter().copied().max().unwrap_or(0).max(step));
        let open = (0..).zip(&at).filter(|(_, at)| **at <= step).map(|(block, _)| block);
        prop_assert_eq!(trainer.taken.keys().copied().collect::<Vec<u32>>(), open.collect::<Vec<u32>>());
    }

    /// Without faults the blocks of a server leave from the back to the front.
    #[test]
    fn back_layers_leave_first(servers in 1..4_u32, width in 1..4_u32, choices in proptest::collection::vec(any::<usize>(), 80)) {
        let mut trainer = Trainer::new(servers, width, 3);
        trainer.exchange.begin(Purpose::Step, 0);
        trainer.send_all();
        for choice in choices {
            trainer.serve(choice);
            trainer.deliver(choice);
        }
        trainer.finish();
        for (server, sent) in &trainer.servers.order {
            let owned: Vec<u32> = trainer.exchange.layout.owned_by(*server).rev().collect();
            prop_assert_eq!(sent, &owned);
        }
    }
}

#[test]
fn answers_that_do_not_count_are_dropped() {
    let mut trainer = Trainer::new(2, 1, 4);
    trainer.exchange.begin(Purpose::Step, 5);
    let stream = trainer.stream(1, 0);
    let of_server_0 = trainer.exchange.layout.owned_by(0).next().expect("a block");
    let of_server_1 = trainer.exchange.layout.owned_by(1).next().expect("a block");
    for (label, block, step) in [
        ("an earlier step", of_server_1, 4),
        ("a later step", of_server_1, 6),
        ("a block of another server", of_server_0, 5),
        ("no block", BLOCKS, 5),
    ] {
        assert!(!trainer.exchange.receive(stream, block, step), "{label}");
    }
    assert!(trainer.exchange.receive(stream, of_server_1, 5));
    assert!(!trainer.exchange.receive(stream, of_server_1, 5), "a second answer");
    trainer.open(1, vec![0]);
    assert!(!trainer.exchange.is_open(stream), "a stream that was replaced");
}

#[test]
fn a_server_that_has_forgotten_gets_the_whole_step_again() {
    let mut trainer = Trainer::new(2, 1, 64);
    trainer.exchange.begin(Purpose::Step, 7);
    trainer.send_all();
    let stream = trainer.stream(1, 0);
    assert_eq!(trainer.exchange.may_lack(1), 7, "it has not answered");
    let blocks: Vec<u32> = trainer.exchange.layout.owned_by(1).collect();
    for block in &blocks {
        assert!(trainer.exchange.receive(stream, *block, 7));
    }
    assert_eq!(trainer.exchange.may_lack(1), 8, "it has answered all");
    trainer.servers.in_flight.clear();
    trainer.open(1, vec![0]);
    assert_eq!(trainer.exchange.next_to_send(1), None, "nothing was lost");
    trainer.exchange.forgotten(1);
    let again = std::iter::from_fn(|| trainer.exchange.next_to_send(1)).map(|outgoing| outgoing.block);
    assert_eq!(again.collect::<Vec<_>>(), blocks.iter().rev().copied().collect::<Vec<_>>());
    let stream = trainer.stream(1, 0);
    for block in &blocks {
        assert!(trainer.exchange.receive(stream, *block, 7) && !trainer.exchange.receive(stream, *block, 7));
    }
    for block in trainer.exchange.layout.owned_by(0).collect::<Vec<_>>() {
        let stream = trainer.stream(0, 0);
        assert!(!trainer.exchange.is_settled() && trainer.exchange.receive(stream, block, 7));
    }
    assert!(trainer.exchange.is_settled());
}
