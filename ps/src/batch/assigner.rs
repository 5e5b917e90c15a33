//! Assigns the batches of an elastic job to trainers. The job's work is a stream of batches, the same for any trainers;
//! they get a few of them at a time, in the order in which they ask, so that all are read and none twice, and who is
//! faster reads more. The unfinished batches of a trainer that leaves are assigned to others. Pure: no clock and no
//! network.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Batches assigned at a time: asking costs nothing then, and little is read twice when a trainer is lost.
const SPAN: u64 = 8;

/// The request of a trainer for batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssignmentRequest {
    /// The trainer that asks.
    pub trainer: u32,
    /// The incarnation of the trainer, and how often it has joined the job: batches of another process are returned.
    pub process: (u32, u64),
    /// Number of batches assigned to this process so far.
    pub assigned: u64,
    /// How many of the assigned batches, in order, the servers have acknowledged.
    pub done: u64,
    /// One more than the highest batch that was assigned to this process.
    pub seen: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// The trainer reads these batches.
    Batches(Range<u64>),
    /// Too few trainers are there; the trainer asks again.
    Wait,
    /// No batches are left.
    Nothing,
}

/// The progress of the assignment, for a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The first batch that was never assigned.
    pub next: u64,
    /// Earlier batches that are not known to be done, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub open: Vec<Range<u64>>,
}

impl Position {
    /// Returns whether no batch was assigned.
    #[must_use]
    pub fn is_beginning(&self) -> bool {
        self.next == 0
    }
}

/// Assigns batches 0, 1, 2, …
#[derive(Clone, Debug, Default)]
pub struct BatchAssigner {
    total: Option<u64>,
    next: u64,
    /// Returned batches, which are assigned first.
    back: VecDeque<Range<u64>>,
    held: BTreeMap<u32, AssignedBatches>,
}

/// The batches of one trainer.
#[derive(Clone, Debug)]
struct AssignedBatches {
    process: (u32, u64),
    /// Batches assigned to this process so far.
    assigned: u64,
    /// Batches that are not known to be done, in the order of their assignment.
    open: VecDeque<Range<u64>>,
}

impl BatchAssigner {
    /// Sets the total number of batches of the job.
    ///
    /// # Errors
    /// The number that other trainers have reported, if it differs.
    pub fn expect(&mut self, total: u64) -> Result<(), u64> {
        let known = *self.total.get_or_insert(total);
        if known == total { Ok(()) } else { Err(known) }
    }

    /// Assigns batches to a trainer. `present` trainers are there, which may be too few (`enough`).
    pub fn ask(&mut self, question: AssignmentRequest, present: usize, enough: bool) -> Assignment {
        let AssignmentRequest { trainer, process, assigned, done, seen } = question;
        if self.held.get(&trainer).is_some_and(|held| held.process != process) {
            self.give_back(trainer);
        }
        if !self.held.contains_key(&trainer) {
            self.meet(trainer, process, assigned, seen.saturating_sub(assigned.saturating_sub(done))..seen);
        }
        let held = self.held.get_mut(&trainer).expect("it was met");
        held.settle(done);
        if held.assigned > assigned
            && let Some(last) = held.open.back()
        {
            return Assignment::Batches(last.clone()); // The answer got lost.
        }
        let left = self.left();
        if left == 0 {
            return Assignment::Nothing;
        }
        if !enough {
            return Assignment::Wait;
        }
        let most = (left / (2 * present.max(1) as u64)).clamp(1, SPAN);
        let batches = self.take(most);
        let held = self.held.get_mut(&trainer).expect("it was asked by this trainer");
        held.assigned += batches.end - batches.start;
        held.open.push_back(batches.clone());
        Assignment::Batches(batches)
    }

    /// Records the trainer's process and the batches that it has yet to do. Where it has any, an assigner that was lost has
    /// assigned them, and none before the last of them is assigned here for the first time.
    fn meet(&mut self, trainer: u32, process: (u32, u64), assigned: u64, open: Range<u64>) {
        self.next = self.next.max(open.end);
        for back in std::mem::take(&mut self.back) {
            let parts = [back.start..back.end.min(open.start), back.start.max(open.end)..back.end];
            self.back.extend(parts.into_iter().filter(|part| !part.is_empty()));
        }
        let open = [open].into_iter().filter(|open| !open.is_empty()).collect();
        self.held.insert(trainer, AssignedBatches { process, assigned, open });
    }

    /// Records, outside a request, how many of its assigned batches a trainer has done.
    pub fn record_done(&mut self, trainer: u32, process: (u32, u64), done: u64) {
        if let Some(held) = self.held.get_mut(&trainer).filter(|held| held.process == process) {
            held.settle(done);
        }
    }

    /// Returns the unfinished batches of a trainer that has left, so that others get them.
    pub fn give_back(&mut self, trainer: u32) {
        if let Some(held) = self.held.remove(&trainer) {
            self.back.extend(held.open);
        }
    }

    /// Returns the number of batches that are known to be done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.next - self.open().map(|open| open.end - open.start).sum::<u64>().min(self.next)
    }

    /// Returns the number of batches of the job, once a trainer has reported it.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Returns the progress, for a checkpoint.
    #[must_use]
    pub fn position(&self) -> Position {
        let mut open: Vec<_> = self.open().cloned().collect();
        open.sort_unstable_by_key(|open| open.start);
        Position { next: self.next, open }
    }

    /// Restores `position` and forgets the batches of all trainers.
    pub fn restore(&mut self, position: Position) {
        let Position { next, open } = position;
        *self = Self { total: self.total, next, back: open.into(), held: BTreeMap::new() };
    }

    fn open(&self) -> impl Iterator<Item = &Range<u64>> {
        self.back.iter().chain(self.held.values().flat_map(|held| &held.open))
    }

    /// Returns the number of batches that no trainer holds.
    fn left(&self) -> u64 {
        let back: u64 = self.back.iter().map(|back| back.end - back.start).sum();
        back + self.total.unwrap_or(0).saturating_sub(self.next)
    }

    /// Takes up to `most` of the batches that are left.
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

impl AssignedBatches {
    /// Removes the first `done` assigned batches, which are done.
    fn settle(&mut self, done: u64) {
        let open: u64 = self.open.iter().map(|open| open.end - open.start).sum();
        let mut settled = open.saturating_sub(self.assigned.saturating_sub(done));
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

    /// The question of a trainer that this assigner knows.
    fn question(trainer: u32, assigned: u64, done: u64) -> AssignmentRequest {
        AssignmentRequest { trainer, process: (0, 1), assigned, done, seen: 0 }
    }

    fn assigner(total: u64) -> BatchAssigner {
        let mut assigner = BatchAssigner::default();
        assigner.expect(total).expect("the first to report");
        assigner
    }

    #[test]
    fn who_asks_gets_the_next_batches() {
        let mut assigner = assigner(40);
        let rows = [
            ("the first", question(0, 0, 0), 2, true, Assignment::Batches(0..8)),
            ("the second", question(1, 0, 0), 2, true, Assignment::Batches(8..16)),
            ("ahead of what it has done", question(0, 8, 3), 2, true, Assignment::Batches(16..22)),
            ("its answer got lost", question(0, 8, 3), 2, true, Assignment::Batches(16..22)),
            ("too few are there", question(1, 8, 8), 1, false, Assignment::Wait),
            ("alone", question(0, 14, 14), 1, true, Assignment::Batches(22..30)),
            ("near the end", question(0, 22, 22), 4, true, Assignment::Batches(30..31)),
        ];
        for (what, question, present, enough, want) in rows {
            assert_eq!(assigner.ask(question, present, enough), want, "{what}");
        }
        assert_eq!((assigner.done(), assigner.total()), (30, Some(40)));
        assert_eq!(assigner.expect(41), Err(40));
    }

    #[test]
    fn what_a_trainer_leaves_undone_is_dealt_to_the_next_one() {
        let mut assigner = assigner(20);
        assert_eq!(assigner.ask(question(0, 0, 0), 1, true), Assignment::Batches(0..8));
        assert_eq!(assigner.ask(question(0, 8, 5), 1, true), Assignment::Batches(8..14));
        assigner.record_done(0, (0, 0), 14); // Another process.
        assigner.record_done(0, (0, 1), 6);
        assigner.give_back(0);
        assert_eq!(assigner.position(), Position { next: 14, open: vec![6..8, 8..14] });
        for (assigned, want) in [(0, 6..8), (2, 8..14), (8, 14..17), (11, 17..18), (12, 18..19), (13, 19..20)] {
            assert_eq!(
                assigner.ask(question(1, assigned, assigned), 1, true),
                Assignment::Batches(want),
                "after {assigned}"
            );
        }
        assert_eq!(assigner.ask(question(1, 14, 14), 1, true), Assignment::Nothing);
        assert_eq!((assigner.done(), assigner.position()), (20, Position { next: 20, open: Vec::new() }));
        let successor = AssignmentRequest { process: (1, 0), ..question(1, 0, 0) };
        assert_eq!(assigner.ask(successor, 1, true), Assignment::Nothing, "what is done stays done");
    }

    #[test]
    fn a_dealer_goes_back_to_its_position_and_a_new_one_catches_up() {
        let mut first = assigner(100);
        first.ask(question(0, 0, 0), 1, true);
        let position = first.position();
        first.ask(question(0, 8, 8), 1, true);
        first.restore(position.clone());
        assert_eq!(first.ask(question(1, 0, 0), 1, true), Assignment::Batches(0..8));
        let json = serde_json::to_string(&position).expect("a position is JSON");
        assert_eq!(serde_json::from_str::<Position>(&json).expect("read back"), position);

        // A trainer was assigned 16 batches by the first one and has 4 of them left; another one has those from 16 on.
        let mut second = assigner(100);
        let known = AssignmentRequest { seen: 16, ..question(0, 16, 12) };
        assert_eq!(second.ask(known, 2, true), Assignment::Batches(16..24));
        assert_eq!(second.position(), Position { next: 24, open: vec![12..16, 16..24] });
        let ahead = AssignmentRequest { seen: 40, ..question(1, 8, 5) };
        assert_eq!(second.ask(ahead, 2, true), Assignment::Batches(40..48));
        assert_eq!(second.position(), Position { next: 48, open: vec![12..16, 16..24, 37..40, 40..48] });
        assert_eq!(second.ask(question(0, 24, 20), 2, true), Assignment::Batches(48..56));
        second.give_back(1);
        assert_eq!(second.position().open, [20..24, 37..40, 40..48, 48..56], "others get what it has left");
    }

    #[test]
    fn batches_of_a_checkpoint_that_a_trainer_says_it_holds_are_assigned_to_no_other() {
        let mut assigner = assigner(100);
        assigner.restore(Position { next: 24, open: vec![0..8, 8..16] });
        let known = AssignmentRequest { seen: 16, ..question(0, 8, 5) };
        assert_eq!(assigner.ask(known, 2, true), Assignment::Batches(0..8));
        assert_eq!(assigner.position(), Position { next: 24, open: vec![0..8, 8..13, 13..16] });
        assert_eq!(assigner.ask(question(1, 0, 0), 2, true), Assignment::Batches(8..13));
    }

    #[derive(Clone, Debug)]
    enum Act {
        /// A trainer asks; its answer may get lost.
        Ask(u32, bool),
        /// It does the next of its batches.
        Work(u32),
        /// It leaves with or without a report of its batches.
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
        assigned: u64,
        done: u64,
    }

    proptest! {
        /// Trainers come and go: in the end every batch was done, and only those twice that a trainer did and left
        /// before it reported them.
        #[test]
        fn every_batch_is_done((total, acts) in (0_u64..120, acts())) {
            let mut assigner = assigner(total);
            let mut readers: Vec<Reader> = (0..3).map(|_| Reader::default()).collect();
            let (mut done, mut unreported, mut twice) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
            let mut reported = [0_u64; 3];
            let finish = (0..3).flat_map(|trainer| {
                (0..200).flat_map(move |_| [Act::Ask(trainer, false)].into_iter().chain((0..8).map(move |_| Act::Work(trainer))))
            });
            for act in acts.into_iter().chain(finish) {
                match act {
                    Act::Ask(trainer, lost) => {
                        let reader = &mut readers[trainer as usize];
                        let Reader { process, assigned, done, .. } = *reader;
                        reported[trainer as usize] = done;
                        let deal = assigner.ask(AssignmentRequest { trainer, process, assigned, done, seen: 0 }, 2, true);
                        if let (Assignment::Batches(batches), false) = (deal, lost) {
                            prop_assert!(!batches.is_empty() && batches.end <= total);
                            reader.assigned += batches.end - batches.start;
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
                        unreported.push((trainer, reader.process, reader.done, batch));
                    }
                    Act::Go(trainer) => {
                        assigner.give_back(trainer);
                        let reader = &mut readers[trainer as usize];
                        let process = (reader.process.0 + 1, 0);
                        *reader = Reader { process, ..Reader::default() };
                        reported[trainer as usize] = 0;
                    }
                }
                unreported.retain(|(trainer, process, number, _)| {
                    *process != readers[*trainer as usize].process || *number > reported[*trainer as usize]
                });
                prop_assert!(assigner.done() <= done.len() as u64);
            }
            prop_assert_eq!(done.len() as u64, total);
            prop_assert_eq!(assigner.done(), total);
            let excused: BTreeSet<u64> = unreported.into_iter().map(|(.., batch)| batch).collect();
            prop_assert!(twice.is_subset(&excused), "{:?} were done twice, only {:?} may", twice, excused);
        }
    }
}
