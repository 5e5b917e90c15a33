use proptest::prelude::*;

use super::*;

mod elastic;

fn rule(mode: ConsistencyMode, trainers: u32) -> Rule {
    Rule::new(Consistency { mode, ..Consistency::default() }, trainers)
}

#[test]
fn an_asynchronous_gradient_is_applied_once() {
    let mut rule = rule(ConsistencyMode::Async, 2);
    for (trainer, step, want) in [
        (0, 0, Verdict::Apply),
        (0, 0, Verdict::Answer),
        (1, 0, Verdict::Apply),
        (0, 1, Verdict::Apply),
        (0, 0, Verdict::Answer),
        (1, 7, Verdict::Apply),
        (1, 6, Verdict::Answer),
    ] {
        assert_eq!(rule.offer(trainer, step, true), want, "trainer {trainer}, step {step}");
    }
    assert_eq!((rule.next_step(0), rule.next_step(1), rule.next_step(2)), (2, 8, 0));
}

#[test]
fn a_round_closes_when_all_members_gave() {
    let mut rule = rule(ConsistencyMode::Sync, 3);
    assert_eq!(rule.offer(2, 0, false), Verdict::Hold);
    assert!(!rule.in_turn(2), "0 and 1 come first");
    assert_eq!(rule.offer(0, 0, false), Verdict::Hold);
    assert!(rule.in_turn(0));
    assert_eq!(rule.offer(0, 0, false), Verdict::Join, "a resent gradient waits with the first");
    assert_eq!(rule.close_round(), None);
    assert_eq!((rule.next_step(0), rule.settled(0)), (1, 0), "the open round is not in the values");
    assert_eq!(rule.offer(1, 0, false), Verdict::Hold);
    assert!(rule.in_turn(1) && rule.in_turn(2));
    assert_eq!(rule.close_round(), Some([0, 1, 2].into()));
    assert_eq!(rule.settled(0), 1);
    assert_eq!(rule.offer(1, 0, false), Verdict::Answer);
}

/// A block that was started anew has forgotten that all trainers but one are at step 7.
#[test]
fn a_trainer_that_is_behind_in_a_round_catches_up_without_the_others() {
    let mut rule = rule(ConsistencyMode::Sync, 3);
    for (trainer, step) in [(0, 7), (1, 0), (2, 7)] {
        assert_eq!(rule.offer(trainer, step, false), Verdict::Hold, "trainer {trainer}");
    }
    assert_eq!(rule.close_round(), Some([0, 1, 2].into()));
    for step in 0..8 {
        assert_eq!(rule.offer(1, step, false), Verdict::Answer, "step {step}");
    }
    for trainer in 0..3 {
        assert_eq!(rule.offer(trainer, 8, false), Verdict::Hold, "trainer {trainer}");
    }
    assert_eq!(rule.close_round(), Some([0, 1, 2].into()));
}

/// A job goes on from its checkpoint with more trainers, another one with fewer.
#[test]
fn trainers_that_no_checkpoint_knows_begin_with_the_step_of_the_slowest() {
    for mode in [ConsistencyMode::Sync, ConsistencyMode::Bounded, ConsistencyMode::Async] {
        let mut rule = rule(mode, 4);
        rule.restore(&[1000, 1000]);
        assert_eq!(rule.entry(3), 1000, "{mode:?}");
        for step in 1000..1003 {
            let want = if mode == ConsistencyMode::Sync { Verdict::Hold } else { Verdict::Apply };
            for trainer in 0..4 {
                assert_eq!(rule.offer(trainer, step, false), want, "{mode:?}, trainer {trainer}, step {step}");
            }
            assert_eq!(rule.close_round().is_some(), mode == ConsistencyMode::Sync, "{mode:?}, step {step}");
            assert!(rule.may_go_on(step), "{mode:?}, step {step}");
        }
        rule.restore(&[9, 7]);
        assert_eq!((rule.settled(0), rule.settled(2)), (9, 7), "{mode:?}");
        rule.restore(&[]);
        assert_eq!(rule.settled(2), 0, "{mode:?}");
    }
    let mut rule = rule(ConsistencyMode::Sync, 2);
    rule.restore(&[8, 8, 7, 7]);
    assert_eq!([0, 1].map(|trainer| rule.offer(trainer, 8, false)), [Verdict::Hold; 2]);
    assert_eq!(rule.close_round(), Some([0, 1].into()));
}

#[test]
fn a_finished_trainer_is_not_waited_for() {
    let mut rule = rule(ConsistencyMode::Sync, 2);
    assert_eq!(rule.offer(0, 4, false), Verdict::Hold);
    assert_eq!(rule.close_round(), None);
    rule.finish(1);
    assert_eq!(rule.close_round(), Some([0].into()));
    assert_eq!(rule.close_round(), None, "an empty round does not close");
}

#[test]
fn a_round_with_backups_closes_without_the_late_ones() {
    let consistency = Consistency { mode: ConsistencyMode::Sync, backup_trainers: 1, ..Consistency::default() };
    let mut rule = Rule::new(consistency, 3);
    assert_eq!(rule.offer(2, 0, false), Verdict::Hold);
    assert!(!rule.in_turn(2), "who else will be in the round shows at its end");
    assert_eq!(rule.close_round(), None);
    assert_eq!(rule.offer(0, 0, false), Verdict::Hold);
    assert_eq!(rule.close_round(), Some([0, 2].into()));
    assert_eq!(rule.offer(1, 0, true), Verdict::Drop);
    assert_eq!(rule.offer(1, 1, false), Verdict::Hold, "it has pulled since");
    rule.finish(0);
    assert_eq!(rule.close_round(), Some([1].into()), "one of the two left is enough");
}

#[test]
fn a_bounded_trainer_waits_for_the_slowest() {
    let consistency = Consistency { mode: ConsistencyMode::Bounded, staleness: 2, ..Consistency::default() };
    let mut rule = Rule::new(consistency, 2);
    for (step, may) in [(0, true), (1, true), (2, false)] {
        assert_eq!(rule.offer(0, step, false), Verdict::Apply);
        assert_eq!(rule.may_go_on(step), may, "after step {step}");
    }
    assert_eq!(rule.offer(1, 0, true), Verdict::Apply);
    assert!(rule.may_go_on(2) && rule.may_go_on(0));
    assert_eq!(rule.offer(0, 3, false), Verdict::Apply);
    assert!(!rule.may_go_on(3));
    rule.finish(1);
    assert!(rule.may_go_on(3), "no trainer is slower any more");
}

/// After servers have gone back, one of them may have later steps of a trainer than another: to wait for others until
/// they get there too would be to wait for trainers that wait for this one.
#[test]
fn a_repeat_is_answered_by_its_own_step() {
    let consistency = Consistency { mode: ConsistencyMode::Bounded, staleness: 0, ..Consistency::default() };
    let mut rule = Rule::new(consistency, 2);
    rule.restore(&[6, 5]);
    assert_eq!(rule.offer(0, 3, true), Verdict::Answer);
    assert!(rule.may_go_on(3) && rule.may_go_on(4) && !rule.may_go_on(5));
}

#[test]
fn the_last_step_that_can_be_written_is_a_step() {
    for mode in [ConsistencyMode::Async, ConsistencyMode::Bounded, ConsistencyMode::Sync] {
        let mut rule = rule(mode, 1);
        rule.offer(0, u64::MAX, false);
        assert_eq!(rule.next_step(0), u64::MAX);
        assert_eq!(rule.lead(u64::MAX), 0);
    }
}

fn consistency() -> impl Strategy<Value = Consistency> {
    let mode = prop_oneof![Just(ConsistencyMode::Sync), Just(ConsistencyMode::Bounded), Just(ConsistencyMode::Async)];
    (mode, 0_u32..4, 0_u32..3).prop_map(|(mode, staleness, backups)| {
        let backup_trainers = if mode == ConsistencyMode::Sync { backups } else { 0 };
        Consistency { mode, staleness, backup_trainers, ..Consistency::default() }
    })
}

proptest! {
    /// Whatever arrives in whatever order, with repeats: each (trainer, step) is taken once.
    #[test]
    fn nothing_is_applied_twice(consistency in consistency(), offers in prop::collection::vec((0_u32..4, 0_u64..6, any::<bool>()), 0..200)) {
        let backups = consistency.backup_trainers as usize;
        let mut rule = Rule::new(consistency, 4);
        let mut taken = BTreeSet::new();
        for (trainer, step, stale) in offers {
            let before = rule.next_step(trainer);
            match rule.offer(trainer, step, stale) {
                Verdict::Apply | Verdict::Hold | Verdict::Drop => prop_assert!(taken.insert((trainer, step))),
                Verdict::Answer | Verdict::Join => prop_assert!(step < before),
                Verdict::Late => prop_assert!(false, "no trainer is late in a job that is not elastic"),
            }
            prop_assert!(rule.next_step(trainer) >= before);
            prop_assert!(rule.settled(trainer) <= rule.next_step(trainer));
            if let Some(round) = rule.close_round() {
                prop_assert!(round.len() >= 4 - backups);
            }
        }
    }

    /// The members that are waited for, and the slowest of them, are kept from one gradient to the next: after any sequence
    /// of events they are what the members and their steps say.
    #[test]
    fn what_is_kept_about_members_follows_from_them(
        consistency in consistency(),
        is_elastic in any::<bool>(),
        events in prop::collection::vec((0_u8..8, 0_u32..4, 0_u64..6), 0..200),
    ) {
        let bounded = consistency.mode == ConsistencyMode::Bounded;
        let mut rule = if is_elastic { Rule::elastic(consistency) } else { Rule::new(consistency, 4) };
        for (event, trainer, step) in events {
            match event {
                0 => rule.finish(trainer),
                1 => {
                    let _ = rule.enter(trainer, step);
                }
                2 => rule.restore(&[step; 4]),
                3 => rule.advance(trainer, step),
                4 => drop(rule.close_round()),
                _ => {
                    let _ = rule.offer(trainer, step, false);
                }
            }
            let is_awaited = |(member, from): (&u32, &u64)| {
                (*from <= rule.round && !rule.given.contains(member)).then_some(*member)
            };
            let awaited: BTreeSet<u32> = rule.members.iter().filter_map(is_awaited).collect();
            prop_assert_eq!(rule.awaited(), &awaited);
            let steps: Vec<u64> = rule.members.keys().map(|member| rule.next_step(*member)).collect();
            let least = steps.iter().copied().min().filter(|_| bounded);
            let count = |least| steps.iter().filter(|step| **step == least).count();
            prop_assert_eq!(rule.slowest, least.map(|least| (least, count(least))));
        }
    }

    /// Trainers that go on when they may never drift further apart than the bound, and one always may.
    #[test]
    fn bounded_trainers_stay_together_and_never_all_wait(staleness in 0_u32..4, picks in prop::collection::vec(0_u32..4, 1..300)) {
        let consistency = Consistency { mode: ConsistencyMode::Bounded, staleness, ..Consistency::default() };
        let mut rule = Rule::new(consistency, 4);
        for trainer in picks {
            let may = |rule: &Rule, trainer| rule.next_step(trainer).checked_sub(1).is_none_or(|step| rule.may_go_on(step));
            let next = rule.next_step(trainer);
            if may(&rule, trainer) {
                prop_assert_eq!(rule.offer(trainer, next, false), Verdict::Apply);
                prop_assert!(rule.lead(next) <= u64::from(staleness) + 1);
            }
            prop_assert!((0..4).any(|trainer| may(&rule, trainer)));
        }
    }
}
