use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Membership, Refusal, Timeouts};
use crate::checkpoint::Concluded;
use crate::proto;

#[test]
fn a_trainer_that_never_came_is_news_once_and_a_warning_for_good() {
    let start = Instant::now();
    let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
    for (second, news, warnings) in [(59, 0, 0), (60, 1, 1), (61, 0, 1)] {
        let now = start + Duration::from_secs(second);
        assert_eq!(members.look(now).len(), news, "news at {second} s");
        assert_eq!(members.warnings(now).len(), warnings, "warnings at {second} s");
    }
}

#[test]
fn trainers_are_lost_after_a_silence_in_which_the_server_looked() {
    let rows = [
        ("looked every second", (1..=40).collect::<Vec<u64>>(), Some(30)),
        ("stood still for longer than a silence", [1, 100].into_iter().chain(101..=140).collect(), Some(130)),
        ("stood still for a moment", [1, 10].into_iter().chain(11..=40).collect(), Some(30)),
        ("stood still again and again", (1..10).map(|time| time * 20).collect(), None),
    ];
    for (label, checks, want) in rows {
        let start = Instant::now();
        let mut members = Membership::new("job".into(), 1, Some(1), Timeouts::default(), start);
        members.join(&id(0, 0), Vec::new(), 9, start).expect("joins");
        let mut is_lost = |second: &u64| {
            let now = start + Duration::from_secs(*second);
            members.begin_check(now);
            !members.look(now).is_empty()
        };
        assert_eq!(checks.into_iter().find(|second| is_lost(second)), want, "{label}");
    }
}

#[test]
fn the_total_is_that_of_the_trainers_whose_steps_are_counted() {
    let start = Instant::now();
    for (finished, joined, want) in [(&[][..], &[0][..], 0), (&[], &[0, 1], 18), (&[1], &[], 0), (&[1], &[0], 9)] {
        let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
        members.expect_no_more_of(finished);
        joined.iter().for_each(|index| members.join(&id(*index, 0), Vec::new(), 9, start).expect("joins"));
        assert_eq!(members.status(start).total_steps, want, "{finished:?} had finished, {joined:?} joined");
        members.finish_ended();
        assert_eq!(members.status(start).total_steps, want, "the same once they count as finished");
    }
}

#[test]
fn the_rate_is_that_of_the_reports_whatever_comes_in_between() {
    let start = Instant::now();
    let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
    let id = id(0, 0);
    let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
    members.join(&id, Vec::new(), 100, start).expect("joins");
    for (now, examples, want) in [(0.5, 100_000, 0.0), (2.5, 100_640, 320.0), (4.5, 101_280, 320.0)] {
        members.hear(&id, at(now - 0.001)).expect("a gradient just before the heartbeat");
        members.report(&id, examples, BTreeMap::new(), at(now)).expect("reports");
        let rate = members.status(at(now)).examples_per_second;
        assert!((rate - want).abs() < 1e-6, "{rate} examples/s at {now} s");
    }
}

#[test]
fn a_heartbeat_that_the_last_words_have_overtaken_takes_nothing_back() {
    let start = Instant::now();
    let id = proto::TrainerId { job_uid: "job".into(), index: 0, incarnation: 0 };
    let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
    members.join(&id, Vec::new(), 7, start).expect("joins");
    let last = proto::LeaveRequest {
        trainer: Some(id.clone()),
        finished: true,
        examples: 70,
        metrics: [("loss".to_owned(), 0.5)].into(),
        step: 7,
        ..Default::default()
    };
    members.leave(&last, &id, start).expect("leaves");
    members.report(&id, 0, [("loss".to_owned(), 2.0)].into(), start).expect("is heard, and that is all");
    let result = members.result();
    assert_eq!((result.steps, result.examples, result.metrics["loss"]), (7, 70, 0.5));
}

#[test]
fn the_result_reports_the_incarnation_with_which_each_trainer_left_well() {
    let start = Instant::now();
    for (least, want) in [(None, vec![(0, "0,2"), (3, "1")]), (Some(1), vec![])] {
        let mut members = Membership::new("job".into(), 4, least, Timeouts::default(), start);
        for (index, incarnation, finished) in [(0, 0, true), (1, 3, true), (2, 0, true), (3, 0, false)] {
            let id = id(index, incarnation);
            members.join(&id, Vec::new(), 9, start).expect("joins");
            let last = proto::LeaveRequest { trainer: Some(id.clone()), finished, step: 9, ..Default::default() };
            members.leave(&last, &id, start).expect("leaves");
        }
        let left = members.result().left;
        assert_eq!(left.iter().map(|(born, who)| (*born, who.as_str())).collect::<Vec<_>>(), want, "{least:?}");
    }
}

#[test]
fn the_last_words_report_steps_to_a_server_that_has_not_seen_them() {
    let start = Instant::now();
    for (seen, said, want) in [(0, 7, 7), (5, 7, 7), (9, 7, 9), (5, 0, 5)] {
        let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
        members.join(&id(0, 0), Vec::new(), 9, start).expect("joins");
        (0..seen).for_each(|step| members.gave(0, step, start));
        let last = proto::LeaveRequest { trainer: Some(id(0, 0)), finished: true, step: said, ..Default::default() };
        members.leave(&last, &id(0, 0), start).expect("leaves");
        assert_eq!(members.result().steps, want, "it has seen {seen} steps and hears of {said}");
    }
}

#[test]
fn what_was_said_last_of_a_metric_counts() {
    let start = Instant::now();
    let at = |second| start + Duration::from_secs(second);
    let perplexity = |value: f64| BTreeMap::from([("perplexity".to_owned(), value)]);
    let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
    (0..2).for_each(|index| members.join(&id(index, 0), Vec::new(), 100, start).expect("joins"));
    members.evaluated(perplexity(300.0), at(1));
    assert_eq!(members.metrics(), perplexity(300.0), "no other process has measured it");
    members.report(&id(0, 0), 10, perplexity(250.0), at(2)).expect("reports");
    assert_eq!(members.metrics(), perplexity(250.0));
    members.evaluated(perplexity(200.0), at(3));
    members.report(&id(1, 0), 10, BTreeMap::from([("loss".to_owned(), 5.0)]), at(4)).expect("reports");
    assert_eq!(members.metrics()["perplexity"], 200.0);
    assert_eq!(members.status(at(4)).metrics["loss"], 5.0);
}

#[test]
fn a_slow_trainer_is_named_although_all_go_in_step() {
    let start = Instant::now();
    let id = |index| id(index, 0);
    let mut members = Membership::new("job".into(), 3, None, Timeouts::default(), start);
    (0..3).for_each(|index| members.join(&id(index), Vec::new(), 100, start).expect("joins"));
    for second in 1..=20 {
        let now = start + Duration::from_secs(second);
        for index in 0..3 {
            // One step a second; trainers 0 and 2 wait for trainer 1 for most of it.
            members.gave(index, second - 1, now);
            let waiting = if index == 1 { Duration::ZERO } else { Duration::from_millis(700 * second) };
            members.waited(index, waiting, now);
        }
    }
    let status = members.status(start + Duration::from_secs(20));
    assert_eq!(status.stragglers, [1]);
    assert!((status.trainers[1].steps_per_second - 1.0).abs() < 1e-6, "{:?}", status.trainers[1]);
    let leave = proto::LeaveRequest { trainer: Some(id(1)), finished: true, ..Default::default() };
    members.leave(&leave, &id(1), start + Duration::from_secs(21)).expect("leaves");
    assert_eq!(members.status(start + Duration::from_secs(21)).stragglers, [0; 0], "who has left delays no trainer");
}

#[test]
fn where_the_time_of_a_trainer_goes_is_known_of_the_process_that_is_there() {
    let start = Instant::now();
    let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
    let spent = proto::TimeSpent { total: 4.0, data: 0.5, forward: 1.0, exchange: 2.0, ..Default::default() };
    let shown = |members: &Membership| members.status(start).trainers[0].spent;
    members.join(&id(0, 0), Vec::new(), 10, start).expect("joins");
    assert_eq!(shown(&members), None, "it has not said so yet");
    members.spent(0, Some(spent));
    assert_eq!(shown(&members), Some(spent));
    members.join(&id(0, 0), Vec::new(), 10, start).expect("joins again");
    assert_eq!(shown(&members), Some(spent), "the same process");
    members.join(&id(0, 1), Vec::new(), 10, start).expect("takes its place");
    assert_eq!(shown(&members), None, "another process begins at 0");
    members.spent(0, Some(spent));
    let leave = proto::LeaveRequest { trainer: Some(id(0, 1)), finished: true, ..Default::default() };
    members.leave(&leave, &id(0, 1), start).expect("leaves");
    assert_eq!(shown(&members), None, "it has no steps any more");
}

#[test]
fn a_trainer_that_had_finished_before_the_server_started_is_not_awaited() {
    let start = Instant::now();
    let later = start + Duration::from_secs(61);
    let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
    members.expect_no_more_of(&[0]);
    let sentences: Vec<_> = members.look(later).into_iter().map(|news| news.trainer).collect();
    assert_eq!((sentences, members.warnings(later).len()), (vec![1], 1), "only trainer 1 is missed");
    assert_eq!(members.finish_ended(), [0]);
    assert!(members.finish_ended().is_empty() && !members.done());

    let entry = |finished, step| proto::RosterEntry { trainer: Some(id(0, 3)), finished, step, ..Default::default() };
    members.adopt_roster(&[entry(false, 7)], true, start);
    assert_eq!((members.finished(), members.concluded()[&0]), (vec![0], 7), "the other server knows its steps");
    members.rewind(&[5, 9], &Concluded::new(), start);
    assert_eq!(members.finished(), [0], "it does not come back for an earlier checkpoint");

    members.join(&id(1, 0), Vec::new(), 10, start).expect("joins");
    let leave = proto::LeaveRequest { trainer: Some(id(1, 0)), finished: true, ..Default::default() };
    members.leave(&leave, &id(1, 0), start).expect("leaves");
    assert!(members.done());
}

#[test]
fn a_trainer_counts_as_finished_only_when_its_last_step_is_durable() {
    let start = Instant::now();
    let (later, steps) = (start + Duration::from_secs(31), Concluded::from([(0, 10)]));
    let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
    for trainer in 0..2 {
        members.join(&id(trainer, 0), Vec::new(), 10, start).expect("joins");
        members.gave(trainer, 9, start);
        members.conclude(trainer, false);
    }
    assert_eq!(members.concluded(), Concluded::from([(0, 10), (1, 10)]), "the next checkpoint has it");
    assert!(members.presume_finished(later).is_empty(), "no checkpoint has it");
    members.kept(&steps);
    // It did not hear of that, and asks again.
    members.conclude(0, false);
    assert_eq!(members.presume_finished(later), [0]);
    members.rewind(&[10, 7], &steps, later);
    assert!(members.presume_finished(later).is_empty(), "trainer 1 has to give it again");
    members.kept(&Concluded::from([(1, 10)]));
    assert!(members.presume_finished(later).is_empty(), "that was before");
    members.rewind(&[10, 10], &Concluded::from([(0, 10), (1, 10)]), later);
    assert_eq!(members.presume_finished(later), [1]);
}

#[test]
fn a_late_trainer_of_a_job_that_does_more_steps_has_not_finished() {
    let start = Instant::now();
    let (later, ended) = (start + Duration::from_secs(31), Concluded::from([(0, 10), (1, 10)]));
    for (total_steps, finished) in [(10, vec![1]), (20, vec![])] {
        let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
        members.rewind(&[10, 10], &ended, start);
        members.join(&id(0, 0), Vec::new(), total_steps, later).expect("joins");
        assert_eq!(members.presume_finished(later), finished, "{total_steps} steps");
        members.rewind(&[10, 10], &ended, later);
        assert!(members.presume_finished(later).is_empty(), "{total_steps} steps, in another epoch");
        // A trainer that has more to do is lost before it joins in the new epoch.
        let finished = if total_steps == 10 { vec![0] } else { vec![] };
        assert_eq!(members.presume_finished(later + Duration::from_secs(31)), finished, "{total_steps} steps");
    }
}

#[test]
fn a_server_learns_from_trainers_who_has_finished() {
    let start = Instant::now();
    let mut members = Membership::new("job".into(), 3, None, Timeouts::default(), start);
    members.join(&id(0, 0), Vec::new(), 10, start).expect("joins");
    assert_eq!(members.learn_finished(&[0, 1, 7]), [1], "trainer 0 is there");
    assert!(members.learn_finished(&[1]).is_empty(), "it is known");
    assert_eq!(members.finished(), [1]);
}

#[test]
fn trainers_that_a_checkpoint_does_not_know_count_as_its_slowest() {
    let start = Instant::now();
    let mut members = Membership::new("job".into(), 4, None, Timeouts::default(), start);
    members.rewind(&[9, 7], &Concluded::new(), start);
    assert_eq!(members.status(start).step, 9 + 7 + 7 + 7);
    members.rewind(&[], &Concluded::new(), start);
    assert_eq!(members.status(start).step, 0, "it begins anew");
}

#[test]
fn steps_that_another_server_counted_before_this_one_started_count() {
    let start = Instant::now();
    let entry = |step| proto::RosterEntry { trainer: Some(id(0, 0)), step, ..Default::default() };
    let rows = [
        ("it joined here first", None, 33, true, 33),
        ("it has given a later step since", Some(40), 33, true, 41),
        ("the other server has another epoch", None, 33, false, 0),
    ];
    for (label, given, step, same_epoch, want) in rows {
        let mut members = Membership::new("job".into(), 1, None, Timeouts::default(), start);
        members.join(&id(0, 0), Vec::new(), 100, start).expect("joins");
        given.into_iter().for_each(|step| members.gave(0, step, start));
        members.adopt_roster(&[entry(step)], same_epoch, start);
        assert_eq!(members.status(start).step, want, "{label}");
    }
}

#[test]
fn the_last_metrics_of_a_finished_trainer_reach_every_server() {
    let start = Instant::now();
    let metrics = |of: &[(&str, f64)]| of.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let joined = || {
        let mut members = Membership::new("job".into(), 2, None, Timeouts::default(), start);
        for (trainer, loss) in [(0, 0.5), (1, 0.6)] {
            members.join(&id(trainer, 0), Vec::new(), 10, start).expect("joins");
            members.report(&id(trainer, 0), 64, metrics(&[("loss", loss)]), start).expect("reports");
        }
        members
    };
    let leave = |trainer: u32, accuracy| proto::LeaveRequest {
        trainer: Some(id(trainer, 0)),
        finished: true,
        step: 10,
        examples: 320,
        metrics: metrics(&[("accuracy", accuracy), ("loss", 0.1)]),
        ..Default::default()
    };
    let mut first = joined();
    for (trainer, accuracy) in [(0, 0.98), (1, 0.97)] {
        first.leave(&leave(trainer, accuracy), &id(trainer, 0), start).expect("leaves");
    }
    let (_, roster) = first.model_and_roster();
    assert_eq!(roster.iter().map(|entry| entry.metrics.len()).collect::<Vec<_>>(), [2, 0], "each name once");
    let want = first.result();
    assert_eq!((want.examples, want.metrics["accuracy"]), (640, 0.98));

    let empty = || Membership::new("job".into(), 2, None, Timeouts::default(), start);
    for (label, mut second) in [("it knew the trainers", joined()), ("it has just started", empty())] {
        second.adopt_roster(&roster, true, start);
        assert_eq!((second.result().metrics, second.result().examples), (want.metrics.clone(), 640), "{label}");
    }

    // The Leave comes after the roster of a server of an older version, which has no metrics.
    let mut third = joined();
    let bare =
        roster.into_iter().map(|entry| proto::RosterEntry { metrics: BTreeMap::new(), own_examples: 0, ..entry });
    third.adopt_roster(&bare.collect::<Vec<_>>(), true, start);
    assert_eq!((third.result().metrics["loss"], third.result().examples), (0.5, 128));
    third.leave(&leave(0, 0.98), &id(0, 0), start).expect("leaves");
    third.leave(&leave(1, 0.97), &id(1, 0), start).expect("leaves");
    assert_eq!((third.result().metrics, third.result().examples), (want.metrics, 640));
}

fn elastic(least: u32, start: Instant) -> Membership {
    Membership::new("job".into(), 4, Some(least), Timeouts::default(), start)
}

fn id(index: u32, incarnation: u32) -> proto::TrainerId {
    proto::TrainerId { job_uid: "job".into(), index, incarnation }
}

#[test]
fn an_elastic_job_needs_some_of_its_trainers() {
    let start = Instant::now();
    let mut members = elastic(2, start);
    assert_eq!((members.present(), members.warnings(start).len()), ((0, false), 1));
    for (index, want) in [(3, (1, false)), (0, (2, true)), (1, (3, true))] {
        members.join(&id(index, 0), Vec::new(), 100, start).expect("joins");
        assert_eq!(members.present(), want, "with trainer {index}");
    }
    let later = start + Duration::from_secs(120);
    assert!(members.look(later).iter().all(|news| news.is_lost), "a place that no trainer took is no news");
    assert_eq!(members.absent(), [0, 1, 2, 3]);
    members.hear(&id(1, 0), later).expect("it is back");
    assert_eq!((members.present(), members.absent()), ((1, false), vec![0, 2, 3]));
    assert_eq!(members.status(later).trainers.len(), 3, "places that no trainer took are not shown");
}

#[test]
fn an_elastic_job_goes_on_with_those_that_are_left_when_one_has_finished() {
    let start = Instant::now();
    let mut members = elastic(3, start);
    (0..3).for_each(|index| members.join(&id(index, 0), Vec::new(), 100, start).expect("joins"));
    for (index, finished, want) in [(2, false, (2, false)), (0, true, (1, true))] {
        let leave = proto::LeaveRequest { trainer: Some(id(index, 0)), finished, ..Default::default() };
        members.leave(&leave, &id(index, 0), start).expect("leaves");
        assert_eq!(members.present(), want, "without trainer {index}");
    }
}

#[test]
fn an_elastic_job_ends_when_one_has_finished_and_no_trainer_is_at_work() {
    let start = Instant::now();
    let leave = |index, finished| proto::LeaveRequest { trainer: Some(id(index, 0)), finished, ..Default::default() };
    let mut members = elastic(1, start);
    (0..3).for_each(|index| members.join(&id(index, 0), Vec::new(), 100, start).expect("joins"));
    members.leave(&leave(0, false), &id(0, 0), start).expect("leaves");
    members.conclude(1, true);
    assert_eq!(members.concluded().into_keys().collect::<Vec<_>>(), [1], "trainer 2 is at work");
    members.leave(&leave(1, true), &id(1, 0), start).expect("leaves");
    assert!(!members.done(), "trainer 2 is at work");
    let later = start + Duration::from_secs(31);
    assert_eq!(members.look(later).len(), 1, "trainer 2 is lost");
    assert!(members.done());
    assert_eq!(members.concluded().into_keys().collect::<Vec<_>>(), [0, 1, 2, 3], "no trainer is missed");
    members.close();
    let error = members.join(&id(3, 0), Vec::new(), 100, later).expect_err("too late").to_string();
    assert!(error.contains("nothing is left for trainer 3"), "{error}");
    for lost in [id(0, 0), id(2, 0)] {
        let over = Refusal::Over { trainer: lost.index };
        assert_eq!(members.hear(&lost, later), Err(over.clone()), "the last checkpoint is without it");
        assert_eq!(members.join(&lost, Vec::new(), 100, later), Err(over));
        members.leave(&leave(lost.index, false), &lost, later).expect("it may say that it ends");
    }
    assert!(members.done());
    members.join(&id(1, 0), Vec::new(), 100, later).expect("it has given its last step, and waits for the end");

    let mut members = elastic(1, start);
    members.join(&id(0, 0), Vec::new(), 100, start).expect("joins");
    members.leave(&leave(0, false), &id(0, 0), start).expect("leaves");
    assert!(!members.done(), "no trainer has finished");
    let why = members.abandoned(start + Duration::from_secs(601)).expect("no trainer came back");
    assert!(why.ends_with("missing: trainer 0 (left to be replaced)"), "{why}");
}

#[test]
fn trainers_of_an_elastic_job_get_time_to_come_back_before_one_counts_as_finished() {
    let start = Instant::now();
    let mut members = elastic(1, start);
    let restored = start + Duration::from_secs(60);
    members.rewind(&[8, 9], &[(0, 9)].into(), restored);
    assert!(members.presume_finished(restored + Duration::from_secs(29)).is_empty());
    members.join(&id(1, 0), Vec::new(), 100, restored + Duration::from_secs(29)).expect("joins");
    assert_eq!(members.presume_finished(restored + Duration::from_secs(30)), [0]);
    assert!(!members.done(), "trainer 1 is at work");
}

#[test]
fn a_trainer_that_ended_with_an_error_is_reported_until_it_is_back() {
    let start = Instant::now();
    let leave = |index, failure: &str| proto::LeaveRequest {
        trainer: Some(id(index, 0)),
        failure: failure.into(),
        ..Default::default()
    };
    for (least, others_are_enough) in [(None, false), (Some(1), true)] {
        let mut members = Membership::new("job".into(), 2, least, Timeouts::default(), start);
        (0..2).for_each(|index| members.join(&id(index, 0), Vec::new(), 100, start).expect("joins"));
        members.leave(&leave(0, ""), &id(0, 0), start).expect("leaves");
        assert_eq!(members.failed(), None, "it expects to be replaced");
        members.join(&id(0, 1), Vec::new(), 100, start).expect("joins");
        let failed = proto::LeaveRequest { trainer: Some(id(0, 1)), ..leave(0, "the loss is inf") };
        members.leave(&failed, &id(0, 1), start).expect("leaves");
        let reported = Some("trainer 0 ended with an error: the loss is inf".to_owned());
        assert_eq!(members.failed(), reported.clone().filter(|_| !others_are_enough), "trainer 1 is active");
        members.leave(&leave(1, ""), &id(1, 0), start).expect("leaves");
        assert_eq!(members.failed(), reported, "no trainer is active");
        members.join(&id(0, 2), Vec::new(), 100, start).expect("joins");
        assert_eq!(members.failed(), None, "it is back");
    }
}

#[test]
fn only_an_unsupervised_server_gives_up() {
    let start = Instant::now();
    let year = start + Duration::from_secs(365 * 24 * 3600);
    for (supervised, gives_up) in [(false, true), (true, false)] {
        let members = Membership::new("job".into(), 1, None, Timeouts::new(supervised), start);
        assert_eq!(members.abandoned(year).is_some(), gives_up, "supervised: {supervised}");
        let (alone, why) = members.alone(start + Duration::from_secs(30)).expect("no trainer came");
        assert_eq!(alone, Duration::from_secs(30));
        assert!(why.ends_with("missing: trainer 0 (never joined)"), "{why}");
    }
}

#[test]
fn metrics_are_bounded_however_many_names_trainers_report() {
    let start = Instant::now();
    let mut members = Membership::new("job".into(), 3, None, Timeouts::default(), start);
    (0..3).for_each(|index| members.join(&id(index, 0), Vec::new(), 100, start).expect("joins"));
    let mut report = |trainer: u32, name: String, value: f64| {
        members.report(&id(trainer, 0), 0, [(name, value)].into(), start).expect("reports");
    };
    for trainer in 0..2 {
        (0..1000).for_each(|number| report(trainer, format!("{trainer}-step-{number:04}"), 1.0));
        report(trainer, format!("{trainer}-step-0000"), 7.0);
    }
    report(2, "x".repeat(129), 1.0);
    report(2, "loss".into(), 0.5);
    members.evaluated([("perplexity".to_owned(), 3.0)].into(), start);
    let status = members.status(start);
    for trainer in &status.trainers[..2] {
        assert_eq!(trainer.metrics.len(), 32);
        assert_eq!(trainer.metrics[&format!("{}-step-0000", trainer.index)], 7.0, "those that are kept go on");
    }
    assert_eq!(status.trainers[2].metrics.keys().collect::<Vec<_>>(), ["loss"]);
    assert_eq!(status.metrics.len(), 32);
    assert_eq!(status.metrics["perplexity"], 3.0, "that of the evaluation is shown in any case");
    let count = status.warnings.iter().filter(|text| text.contains("more than 32 metrics")).count();
    assert_eq!(count, 3, "{:?}", status.warnings);
}
