//! Elastic jobs: the rule by itself, and several blocks with trainers that come, go and come back.

use super::*;

fn elastic(mode: ConsistencyMode, staleness: u32) -> Rule {
    Rule::elastic(Consistency { mode, staleness, ..Consistency::default() })
}

#[test]
fn a_round_waits_for_those_who_have_entered_and_not_gone() {
    let mut rule = elastic(ConsistencyMode::Sync, 0);
    assert_eq!((rule.entry(7), rule.enter(7, 0)), (0, Ok(())));
    assert!(rule.may_begin(0));
    assert_eq!(rule.offer(7, 0, false), Verdict::Hold);
    assert_eq!(rule.close_round(), Some([7].into()), "no other trainer is there");
    assert_eq!((rule.entry(2), rule.enter(2, 0)), (1, Err(1)), "round 0 was closed without it");
    assert_eq!(rule.enter(2, 2), Ok(()));
    assert!(!rule.may_begin(2), "round 1 comes first");
    assert_eq!(rule.offer(7, 1, false), Verdict::Hold);
    assert_eq!(rule.close_round(), Some([7].into()), "and does not wait for it");
    assert!(rule.may_begin(2));
    assert_eq!(rule.offer(7, 2, false), Verdict::Hold);
    assert!(!rule.in_turn(7), "trainer 2 comes first");
    assert_eq!(rule.close_round(), None, "round 2 waits for trainer 2");
    assert_eq!(rule.offer(2, 2, false), Verdict::Hold);
    assert_eq!(rule.close_round(), Some([2, 7].into()));
    rule.finish(7);
    assert_eq!(rule.offer(2, 3, false), Verdict::Hold);
    assert_eq!(rule.close_round(), Some([2].into()), "trainer 7 has gone");
    assert_eq!(rule.offer(7, 3, false), Verdict::Late, "and has to enter again");
    assert_eq!(rule.offer(7, 4, false), Verdict::Hold);
    assert_eq!(rule.close_round(), None, "or to be in time: it is there again");
    assert_eq!((rule.entry(7), rule.enter(7, 4)), (5, Err(5)), "its successor finds it in the open round");
}

#[test]
fn rounds_that_everybody_has_left_are_passed_over() {
    let mut rule = elastic(ConsistencyMode::Sync, 0);
    rule.restore(&[5, 3, 0]);
    assert_eq!(rule.entry(1), 5);
    assert_eq!(rule.enter(0, 5), Ok(()));
    assert_eq!(rule.enter(1, 8), Ok(()));
    assert!(!rule.may_begin(8), "trainer 0 gives to round 5");
    rule.finish(0);
    assert!(rule.may_begin(8), "and no trainer after it");
}

#[test]
fn a_backup_knows_who_takes_part() {
    let mut rule = elastic(ConsistencyMode::Sync, 0);
    [(0, 4), (1, 4)].into_iter().for_each(|(trainer, step)| rule.advance(trainer, step));
    assert_eq!(rule.offer(0, 4, false), Verdict::Hold);
    assert_eq!(rule.close_round(), None, "trainer 1 gave to the round before");
    assert_eq!(rule.offer(0, 3, false), Verdict::Join);
}

#[test]
fn a_newcomer_begins_where_the_furthest_is() {
    for mode in [ConsistencyMode::Bounded, ConsistencyMode::Async] {
        let mut rule = elastic(mode, 1);
        for step in 0..4 {
            assert_eq!(rule.offer(0, step, false), Verdict::Apply);
            assert!(rule.may_go_on(step), "alone it is never ahead");
        }
        assert_eq!((rule.entry(1), rule.enter(1, 4), rule.may_begin(4)), (4, Ok(()), true));
        assert_eq!(rule.offer(1, 4, false), Verdict::Apply);
        for (step, may) in [(4, true), (5, true), (6, mode == ConsistencyMode::Async)] {
            assert_eq!(rule.offer(0, step, false), Verdict::Apply);
            assert_eq!(rule.may_go_on(step), may, "{mode:?}: step {step}, trainer 1 is at 5");
        }
        rule.finish(1);
        assert!(rule.may_go_on(6));
    }
}

/// Trainers and blocks that talk as `client::session` and `server::block` do, a message at a time. A trainer's block
/// is sent when the one before is answered, which is the narrowest window and the easiest to get stuck in.
struct Job {
    blocks: Vec<Block>,
    trainers: Vec<State>,
    /// The gradients that were taken, by block, trainer and step.
    taken: BTreeSet<(usize, u32, u64)>,
}

struct Block {
    rule: Rule,
    /// Gave, and wait for the round or for slower ones.
    waiting: Vec<(u32, u64)>,
    entering: Vec<(u32, u64)>,
}

#[derive(Clone, Debug)]
enum State {
    Away,
    /// The answers of the blocks so far to the trainer's step.
    Entering {
        step: u64,
        margin: u64,
        sent: Vec<bool>,
        said: Vec<Option<u64>>,
    },
    Giving {
        step: u64,
        sent: usize,
        answered: usize,
    },
}

const BLOCKS: usize = 3;

impl Job {
    fn new(mode: ConsistencyMode, staleness: u32) -> Self {
        let block = |_| Block { rule: elastic(mode, staleness), waiting: Vec::new(), entering: Vec::new() };
        Self { blocks: (0..BLOCKS).map(block).collect(), trainers: vec![State::Away; 3], taken: BTreeSet::new() }
    }

    fn enter(&mut self, trainer: u32, step: u64, margin: u64) {
        let (sent, said) = (vec![false; BLOCKS], vec![None; BLOCKS]);
        self.trainers[trainer as usize] = State::Entering { step, margin, sent, said };
    }

    /// The trainer says what it has to say, to `place` if it is free to choose.
    fn talk(&mut self, trainer: u32, place: usize) {
        match self.trainers[trainer as usize].clone() {
            State::Away => {
                let step = self.blocks.iter().map(|block| block.rule.entry(trainer)).max().expect("blocks");
                self.enter(trainer, step, 0);
            }
            State::Entering { step, ref sent, .. } if !sent[place] => {
                let State::Entering { sent, said, .. } = &mut self.trainers[trainer as usize] else { unreachable!() };
                sent[place] = true;
                match self.blocks[place].rule.enter(trainer, step) {
                    Ok(()) => self.blocks[place].entering.push((trainer, step)),
                    Err(round) => said[place] = Some(round),
                }
                self.settle(place);
            }
            State::Entering { .. } => {}
            State::Giving { step, sent, answered } if sent == answered => {
                self.trainers[trainer as usize] = State::Giving { step, sent: sent + 1, answered };
                match self.blocks[sent].rule.offer(trainer, step, false) {
                    Verdict::Apply | Verdict::Hold => {
                        assert!(self.taken.insert((sent, trainer, step)), "twice: {sent}, {trainer}, {step}");
                        self.blocks[sent].waiting.push((trainer, step));
                    }
                    Verdict::Answer | Verdict::Join => self.blocks[sent].waiting.push((trainer, step)),
                    Verdict::Late => self.trainers[trainer as usize] = State::Away,
                    Verdict::Drop => panic!("there are no backup trainers"),
                }
                self.settle(sent);
            }
            State::Giving { .. } => {}
        }
    }

    /// A block answers whom it may.
    fn settle(&mut self, place: usize) {
        let Block { rule, waiting, entering } = &mut self.blocks[place];
        let answered = if rule.counts_rounds() {
            let closed = rule.close_round().is_some();
            let done = |(trainer, step): &(u32, u64)| closed || !rule.given.contains(trainer) || rule.round > *step;
            waiting.extract_if(.., |who| done(who)).collect::<Vec<_>>()
        } else {
            waiting.extract_if(.., |(_, step)| rule.may_go_on(*step)).collect()
        };
        let begun: Vec<_> = entering.extract_if(.., |(_, step)| rule.may_begin(*step)).collect();
        for (trainer, step) in answered {
            if let State::Giving { answered, .. } = &mut self.trainers[trainer as usize] {
                *answered += 1;
                if *answered == BLOCKS {
                    self.trainers[trainer as usize] = State::Giving { step: step + 1, sent: 0, answered: 0 };
                }
            }
        }
        for (trainer, step) in begun {
            if let State::Entering { said, .. } = &mut self.trainers[trainer as usize] {
                said[place] = Some(step);
            }
        }
        for trainer in 0..self.trainers.len() as u32 {
            let State::Entering { step, margin, said, .. } = &self.trainers[trainer as usize] else { continue };
            let Some(furthest) = said.iter().copied().collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max())
            else {
                continue;
            };
            let (step, margin) = (*step, (2 * margin).clamp(1, 64));
            if furthest == step {
                self.trainers[trainer as usize] = State::Giving { step, sent: 0, answered: 0 };
            } else {
                self.enter(trainer, furthest + margin, margin);
            }
        }
    }

    /// A block takes the trainer for gone, and ends its stream. The trainer, if it is there, comes again with what was
    /// not answered.
    fn lose(&mut self, trainer: u32, place: usize) {
        let of = |(who, _): &mut (u32, u64)| *who == trainer;
        let waited = self.blocks[place].waiting.extract_if(.., of).count() > 0;
        let entered = self.blocks[place].entering.extract_if(.., of).count() > 0;
        match &mut self.trainers[trainer as usize] {
            State::Giving { sent, .. } if waited => *sent -= 1,
            State::Entering { sent, .. } if entered => sent[place] = false,
            _ => {}
        }
        self.blocks[place].rule.finish(trainer);
        self.settle(place);
    }

    /// Another process takes the trainer's place, before any block knows that the first one is gone.
    fn succeed(&mut self, trainer: u32) {
        self.trainers[trainer as usize] = State::Away;
        for block in &mut self.blocks {
            block.waiting.retain(|(who, _)| *who != trainer);
            block.entering.retain(|(who, _)| *who != trainer);
        }
    }

    fn go(&mut self, trainer: u32) {
        self.trainers[trainer as usize] = State::Away;
        (0..BLOCKS).for_each(|place| self.lose(trainer, place));
    }

    fn step(&self, trainer: u32) -> Option<u64> {
        match self.trainers[trainer as usize] {
            State::Giving { step, .. } => Some(step),
            State::Away | State::Entering { .. } => None,
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Talk(u32, usize),
    Lose(u32, usize),
    Go(u32),
    Succeed(u32),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        40 => (0_u32..3, 0..BLOCKS).prop_map(|(trainer, place)| Act::Talk(trainer, place)),
        1 => (0_u32..3, 0..BLOCKS).prop_map(|(trainer, place)| Act::Lose(trainer, place)),
        1 => (0_u32..3).prop_map(Act::Go),
        1 => (0_u32..3).prop_map(Act::Succeed),
    ];
    prop::collection::vec(act, 0..600)
}

proptest! {
    /// Trainers join, are lost, leave and return, and the blocks hear of it in any order: no gradient is taken twice,
    /// and the trainers that are present go on without the others.
    #[test]
    fn whoever_is_there_goes_on(
        mode in prop_oneof![Just(ConsistencyMode::Sync), Just(ConsistencyMode::Bounded), Just(ConsistencyMode::Async)],
        staleness in 0_u32..3,
        acts in acts(),
        there in 1_usize..8,
    ) {
        let mut job = Job::new(mode, staleness);
        for act in acts {
            match act {
                Act::Talk(trainer, place) => job.talk(trainer, place),
                Act::Lose(trainer, place) => job.lose(trainer, place),
                Act::Go(trainer) => job.go(trainer),
                Act::Succeed(trainer) => job.succeed(trainer),
            }
        }
        let there: Vec<u32> = (0..3).filter(|trainer| there & 1 << trainer > 0).collect();
        (0..3).filter(|trainer| !there.contains(trainer)).for_each(|trainer| job.go(trainer));
        let sweep = |job: &mut Job| {
            for trainer in &there {
                (0..BLOCKS).for_each(|place| job.talk(*trainer, place));
            }
        };
        (0..40).for_each(|_| sweep(&mut job));
        let steps: Vec<_> = there.iter().map(|trainer| job.step(*trainer)).collect();
        (0..10 * BLOCKS).for_each(|_| sweep(&mut job));
        for (trainer, before) in there.iter().zip(steps) {
            let now = job.step(*trainer);
            prop_assert!(before.is_some() && now > before, "{trainer} at {before:?}, then {now:?}: {:?}", job.trainers);
        }
        if mode == ConsistencyMode::Sync {
            let steps: BTreeSet<_> = there.iter().filter_map(|trainer| job.step(*trainer)).collect();
            prop_assert!(steps.last() <= steps.first().map(|first| first + 1).as_ref(), "{steps:?}");
        }
    }
}
