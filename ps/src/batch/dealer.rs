//! Which batches of an elastic job each trainer reads. The job's work is a stream of batches, the same whoever is
//! there; trainers get a few of them at a time, in the order in which they ask, so that all are read and none
//! twice, and who is faster reads more. What a trainer has not done when it goes is dealt to others. Pure: no clock and
//! no network.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Batches dealt at a time: asking costs nothing then, and little is read twice when a trainer is lost.
const SPAN: u64 = 8;

/// What a trainer says when it asks for batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Who asks.
    pub trainer: u32,
    /// Which process of that trainer, and how often it has entered the job: what was dealt to another one is given back.
    pub process: (u32, u64),
    /// Batches that it was dealt since.
    pub dealt: u64,
    /// Of those, in their order, how many the servers have its gradients of.
    pub done: u64,
}

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deal {
    /// To read these.
    Batches(Range<u64>),
    /// To ask again: too few trainers are there.
    Wait,
    /// That nothing is left.
    Nothing,
}

/// How far the dealing is, for a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The first batch that was never dealt.
    pub next: u64,
    /// Those before it that are not known to be done, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub open: Vec<Range<u64>>,
}

impl Position {
    /// Whether nothing was dealt.
    #[must_use]
    pub fn is_beginning(&self) -> bool {
        self.next == 0
    }
}

/// Deals batches 0, 1, 2, …
#[derive(Clone, Debug, Default)]
pub struct Dealer {
    total: Option<u64>,
    next: u64,
    /// Given back, to be dealt first.
    back: VecDeque<Range<u64>>,
    held: BTreeMap<u32, Held>,
}

/// What a trainer has.
#[derive(Clone, Debug)]
struct Held {
    process: (u32, u64),
    /// Batches dealt to this process so far.
    dealt: u64,
    /// Those that are not known to be done, in the order in which they were dealt.
    open: VecDeque<Range<u64>>,
}

impl Dealer {
    /// The job has so many batches in all.
    ///
    /// # Errors
    /// The number that others have told, if it is another one.
    pub fn expect(&mut self, total: u64) -> Result<(), u64> {
        let known = *self.total.get_or_insert(total);
        if known == total { Ok(()) } else { Err(known) }
    }

    /// Of a job whose dealer was lost: a trainer has seen batches up to here.
    pub fn catch_up(&mut self, next: u64) {
        self.next = self.next.max(next);
    }

    /// Deals to a trainer. `present` trainers are there, which may be too few (`enough`).
    pub fn ask(&mut self, question: Question, present: usize, enough: bool) -> Deal {
        let Question { trainer, process, dealt, done } = question;
        if self.held.get(&trainer).is_some_and(|held| held.process != process) {
            self.give_back(trainer);
        }
        // One that is not known here was dealt its batches by a server that is gone, or was taken for gone itself.
        let held = self.held.entry(trainer).or_insert_with(|| Held { process, dealt, open: VecDeque::new() });
        held.settle(done);
        if held.dealt > dealt
            && let Some(last) = held.open.back()
        {
            return Deal::Batches(last.clone()); // The answer got lost.
        }
        let left = self.left();
        if left == 0 {
            return Deal::Nothing;
        }
        if !enough {
            return Deal::Wait;
        }
        let most = (left / (2 * present.max(1) as u64)).clamp(1, SPAN);
        let batches = self.take(most);
        let held = self.held.get_mut(&trainer).expect("it was asked by this trainer");
        held.dealt += batches.end - batches.start;
        held.open.push_back(batches.clone());
        Deal::Batches(batches)
    }

    /// A trainer says, without a question, how many of the batches that it was dealt are done.
    pub fn tell(&mut self, trainer: u32, process: (u32, u64), done: u64) {
        if let Some(held) = self.held.get_mut(&trainer).filter(|held| held.process == process) {
            held.settle(done);
        }
    }

    /// A trainer has gone: others get what it has not done.
    pub fn give_back(&mut self, trainer: u32) {
        if let Some(held) = self.held.remove(&trainer) {
            self.back.extend(held.open);
        }
    }

    /// Batches that are known to be done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.next - self.open().map(|open| open.end - open.start).sum::<u64>().min(self.next)
    }

    /// Batches of the job, once a trainer has told.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// How far it is.
    #[must_use]
    pub fn position(&self) -> Position {
        let mut open: Vec<_> = self.open().cloned().collect();
        open.sort_unstable_by_key(|open| open.start);
        Position { next: self.next, open }
    }

    /// Goes back to `position`; what trainers hold is forgotten.
    pub fn restore(&mut self, position: Position) {
        let Position { next, open } = position;
        *self = Self { total: self.total, next, back: open.into(), held: BTreeMap::new() };
    }

    fn open(&self) -> impl Iterator<Item = &Range<u64>> {
        self.back.iter().chain(self.held.values().flat_map(|held| &held.open))
    }

    /// Batches that nobody holds.
    fn left(&self) -> u64 {
        let back: u64 = self.back.iter().map(|back| back.end - back.start).sum();
        back + self.total.unwrap_or(0).saturating_sub(self.next)
    }

    /// At most so many of those that are left.
    fn take(&mut self, most: u64) -> Range<u64> {
        let Some(first) = self.back.front_mut() else {
            let batches = self.next..(self.next + most).min(self.total.unwrap_or(0));
            self.next = batches.end;
            return batches;
        };
        let batches = first.start..(first.start + most).min(first.end);
        first.start = batches.end;
        if first.is_empty() {
            self.back.pop_front();
        }
        batches
    }
}

impl Held {
    /// The first `done` of what was dealt are done.
    fn settle(&mut self, done: u64) {
        let open: u64 = self.open.iter().map(|open| open.end - open.start).sum();
        let mut settled = open.saturating_sub(self.dealt.saturating_sub(done));
        while let Some(first) = self.open.front_mut().filter(|_| settled > 0) {
            let part = settled.min(first.end - first.start);
            (first.start, settled) = (first.start + part, settled - part);
            if first.is_empty() {
                self.open.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn question(trainer: u32, dealt: u64, done: u64) -> Question {
        Question { trainer, process: (0, 1), dealt, done }
    }

    fn dealer(total: u64) -> Dealer {
        let mut dealer = Dealer::default();
        dealer.expect(total).expect("the first to tell");
        dealer
    }

    #[test]
    fn who_asks_gets_the_next_batches() {
        let mut dealer = dealer(40);
        let rows = [
            ("the first", question(0, 0, 0), 2, true, Deal::Batches(0..8)),
            ("the second", question(1, 0, 0), 2, true, Deal::Batches(8..16)),
            ("ahead of what it has done", question(0, 8, 3), 2, true, Deal::Batches(16..22)),
            ("its answer got lost", question(0, 8, 3), 2, true, Deal::Batches(16..22)),
            ("too few are there", question(1, 8, 8), 1, false, Deal::Wait),
            ("alone", question(0, 14, 14), 1, true, Deal::Batches(22..30)),
            ("near the end", question(0, 22, 22), 4, true, Deal::Batches(30..31)),
        ];
        for (what, question, present, enough, want) in rows {
            assert_eq!(dealer.ask(question, present, enough), want, "{what}");
        }
        assert_eq!((dealer.done(), dealer.total()), (30, Some(40)));
        assert_eq!(dealer.expect(41), Err(40));
    }

    #[test]
    fn what_a_trainer_leaves_undone_is_dealt_to_the_next_one() {
        let mut dealer = dealer(20);
        assert_eq!(dealer.ask(question(0, 0, 0), 1, true), Deal::Batches(0..8));
        assert_eq!(dealer.ask(question(0, 8, 5), 1, true), Deal::Batches(8..14));
        dealer.tell(0, (0, 0), 14); // Another process.
        dealer.tell(0, (0, 1), 6);
        dealer.give_back(0);
        assert_eq!(dealer.position(), Position { next: 14, open: vec![6..8, 8..14] });
        for (dealt, want) in [(0, 6..8), (2, 8..14), (8, 14..17), (11, 17..18), (12, 18..19), (13, 19..20)] {
            assert_eq!(dealer.ask(question(1, dealt, dealt), 1, true), Deal::Batches(want), "after {dealt}");
        }
        assert_eq!(dealer.ask(question(1, 14, 14), 1, true), Deal::Nothing);
        assert_eq!((dealer.done(), dealer.position()), (20, Position { next: 20, open: Vec::new() }));
        let successor = Question { process: (1, 0), ..question(1, 0, 0) };
        assert_eq!(dealer.ask(successor, 1, true), Deal::Nothing, "what is done stays done");
    }

    #[test]
    fn a_dealer_goes_back_to_its_position_and_a_new_one_catches_up() {
        let mut first = dealer(100);
        first.ask(question(0, 0, 0), 1, true);
        let position = first.position();
        first.ask(question(0, 8, 8), 1, true);
        first.restore(position.clone());
        assert_eq!(first.ask(question(1, 0, 0), 1, true), Deal::Batches(0..8));
        let json = serde_json::to_string(&position).expect("a position is JSON");
        assert_eq!(serde_json::from_str::<Position>(&json).expect("read back"), position);

        let mut second = dealer(100);
        second.catch_up(16);
        assert_eq!(second.ask(question(0, 16, 12), 1, true), Deal::Batches(16..24));
        assert_eq!(second.ask(question(0, 24, 20), 1, true), Deal::Batches(24..32));
        assert_eq!(second.done(), 20, "the rest of the first dealer's is not known here");
    }

    #[derive(Clone, Debug)]
    enum Act {
        /// A trainer asks; its answer may get lost.
        Ask(u32, bool),
        /// It does the next of its batches.
        Work(u32),
        /// It goes without a word, or after it has told what it has done.
        Go(u32),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            1 => (0_u32..3, prop::bool::weighted(0.2)).prop_map(|(trainer, lost)| Act::Ask(trainer, lost)),
            4 => (0_u32..3).prop_map(Act::Work),
            1 => (0_u32..3).prop_map(Act::Go),
        ];
        prop::collection::vec(act, 0..400)
    }

    #[derive(Default)]
    struct Reader {
        process: (u32, u64),
        queue: VecDeque<u64>,
        dealt: u64,
        done: u64,
    }

    proptest! {
        /// Whoever comes and goes: in the end every batch was done, and only those twice that a trainer did that was
        /// gone before it told.
        #[test]
        fn every_batch_is_done((total, acts) in (0_u64..120, acts())) {
            let mut dealer = dealer(total);
            let mut readers: Vec<Reader> = (0..3).map(|_| Reader::default()).collect();
            let (mut done, mut untold, mut twice) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
            let mut told = [0_u64; 3];
            let finish = (0..3).flat_map(|trainer| {
                (0..200).flat_map(move |_| [Act::Ask(trainer, false)].into_iter().chain((0..8).map(move |_| Act::Work(trainer))))
            });
            for act in acts.into_iter().chain(finish) {
                match act {
                    Act::Ask(trainer, lost) => {
                        let reader = &mut readers[trainer as usize];
                        let Reader { process, dealt, done, .. } = *reader;
                        told[trainer as usize] = done;
                        let deal = dealer.ask(Question { trainer, process, dealt, done }, 2, true);
                        if let (Deal::Batches(batches), false) = (deal, lost) {
                            prop_assert!(!batches.is_empty() && batches.end <= total);
                            reader.dealt += batches.end - batches.start;
                            reader.queue.extend(batches);
                        }
                    }
                    Act::Work(trainer) => {
                        let reader = &mut readers[trainer as usize];
                        let Some(batch) = reader.queue.pop_front() else { continue };
                        reader.done += 1;
                        if !done.insert(batch) {
                            twice.insert(batch);
                        }
                        untold.push((trainer, reader.process, reader.done, batch));
                    }
                    Act::Go(trainer) => {
                        dealer.give_back(trainer);
                        let reader = &mut readers[trainer as usize];
                        let process = (reader.process.0 + 1, 0);
                        *reader = Reader { process, ..Reader::default() };
                        told[trainer as usize] = 0;
                    }
                }
                untold.retain(|(trainer, process, number, _)| {
                    *process != readers[*trainer as usize].process || *number > told[*trainer as usize]
                });
                prop_assert!(dealer.done() <= done.len() as u64);
            }
            prop_assert_eq!(done.len() as u64, total);
            prop_assert_eq!(dealer.done(), total);
            let excused: BTreeSet<u64> = untold.into_iter().map(|(.., batch)| batch).collect();
            prop_assert!(twice.is_subset(&excused), "{:?} were done twice, only {:?} may", twice, excused);
        }
    }
}
