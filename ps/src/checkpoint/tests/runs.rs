//! Runs in a folder: which one a job writes to, and which checkpoints belong to it, are found and go.

use std::collections::BTreeSet;
use std::fs;

use super::{description, folder, write_checkpoint, write_part};
use crate::checkpoint::catalog::Catalog;
use crate::checkpoint::format::{FORMAT, MANIFEST, part_name};
use crate::checkpoint::runs::{
    Ancestor, BY_HAND, CheckpointId, JobIdentity, KEPT, RUN, RunChoice, RunRecord, Runs, RunsError, choose, lineage,
    presumed, relatives, surplus,
};
use crate::checkpoint::{Checkpoint, PartWriter, write};

fn id(run: u32, step: u64) -> CheckpointId {
    CheckpointId { run, step }
}

fn record(run: u32, uid: &str, resumed_from: Option<CheckpointId>) -> RunRecord {
    RunRecord { format: FORMAT, run, uid: uid.into(), job: "mnist".into(), resumed_from, epoch: 0 }
}

fn job(uid: &str, resume: bool, incarnation: u32, given: bool) -> JobIdentity {
    JobIdentity { uid: uid.into(), job: "mnist".into(), incarnation, resume, given }
}

#[test]
fn a_job_goes_on_with_its_own_run_and_a_new_one_by_hand_begins_one() {
    let runs = [record(1, "a", None), record(2, BY_HAND, None), record(3, "a", None), record(4, "b", None)];
    let go_on = RunChoice::GoOn;
    for (label, uid, resume, incarnation, given, want) in [
        ("own run", "a", true, 0, false, go_on(3)),
        ("own run, not to resume others'", "a", false, 0, false, go_on(3)),
        ("own run, started again", "a", false, 2, false, go_on(3)),
        ("no own run", "c", true, 0, false, RunChoice::Begin),
        ("no own run, not to resume", "c", false, 0, false, RunChoice::Begin),
        ("no own run, started again", "c", false, 1, false, RunChoice::Begin),
        ("by hand, to resume", BY_HAND, true, 0, false, go_on(2)),
        ("by hand, anew", BY_HAND, false, 0, false, RunChoice::Begin),
        ("by hand, started again", BY_HAND, false, 1, false, go_on(2)),
        ("by hand, from the other copy", BY_HAND, false, 0, true, go_on(2)),
    ] {
        assert_eq!(choose(&runs, &BTreeSet::new(), &job(uid, resume, incarnation, given)), want, "{label}");
    }
    assert_eq!(choose(&[], &BTreeSet::new(), &job(BY_HAND, true, 3, false)), RunChoice::Begin);
}

#[test]
fn a_run_that_a_replaced_process_of_server_0_began_beside_the_jobs_own_is_passed_over() {
    for (label, uid, kept, want) in [
        ("the second has no checkpoint", "a", &[1][..], 1),
        ("neither has one", "a", &[], 2),
        ("both have", "a", &[1, 2], 2),
        ("the second alone has", "a", &[2], 2),
        ("a job by hand that began anew", BY_HAND, &[1], 2),
    ] {
        let runs = [record(1, uid, None), record(2, uid, None)];
        let kept = kept.iter().copied().collect();
        assert_eq!(choose(&runs, &kept, &job(uid, true, 1, false)), RunChoice::GoOn(want), "{label}");
    }
}

#[test]
fn a_server_that_has_not_received_its_run_takes_none_of_a_job_by_hand_for_its_own() {
    let runs = [record(1, "a", None), record(2, BY_HAND, None), record(3, "b", None)];
    for (label, uid, resume, incarnation, server, want) in [
        ("its job has a run", "a", true, 0, 1, Some(1)),
        ("and does not resume others'", "a", false, 0, 1, Some(1)),
        ("its job has none yet", "c", true, 0, 1, None),
        ("by hand, perhaps of a job before", BY_HAND, false, 0, 1, None),
        ("by hand, started again, perhaps before server 0", BY_HAND, false, 1, 1, None),
        ("by hand, to resume, perhaps with more steps", BY_HAND, true, 0, 1, None),
        ("server 0 by hand, anew", BY_HAND, false, 0, 0, None),
        ("server 0 by hand, started again", BY_HAND, false, 1, 0, Some(2)),
        ("server 0 by hand, to resume", BY_HAND, true, 0, 0, Some(2)),
    ] {
        assert_eq!(presumed(&runs, &BTreeSet::new(), &job(uid, resume, incarnation, false), server), want, "{label}");
    }
}

#[test]
fn a_lineage_goes_back_to_the_run_that_began_from_nothing() {
    let runs = [
        record(1, "a", None),
        record(2, "b", None),
        record(3, "c", Some(id(1, 100))),
        record(4, "d", Some(id(3, 40))),
        // A record that was written by somebody else.
        record(5, "e", Some(id(5, 7))),
        record(6, "f", Some(id(9, 7))),
    ];
    let until = |run, until| Ancestor { run, until: Some(until) };
    let own = |run| Ancestor { run, until: None };
    for (run, want) in [
        (1, vec![own(1)]),
        (2, vec![own(2)]),
        (3, vec![own(3), until(1, 100)]),
        (4, vec![own(4), until(3, 40), until(1, 100)]),
        (5, vec![own(5)]),
        (6, vec![own(6)]),
        (8, vec![own(8)]),
    ] {
        assert_eq!(lineage(&runs, run), want, "run {run}");
    }
}

#[test]
fn the_newest_of_the_lineage_are_kept_and_the_one_just_written_always() {
    // Newest first: run 3, then run 1 that it began from.
    let complete = [id(3, 20), id(3, 10), id(1, 100), id(1, 90)];
    for (keep, written, needed, want) in [
        (1, id(3, 20), vec![], vec![id(3, 10), id(1, 100), id(1, 90)]),
        (3, id(3, 20), vec![], vec![id(1, 90)]),
        (4, id(3, 20), vec![], vec![]),
        (9, id(3, 20), vec![], vec![]),
        (0, id(3, 20), vec![], vec![id(3, 10), id(1, 100), id(1, 90)]),
        (1, id(3, 10), vec![], vec![id(1, 100), id(1, 90)]),
        (1, id(3, 20), vec![id(1, 100)], vec![id(3, 10), id(1, 90)]),
        (1, id(3, 20), vec![id(1, 90), id(3, 10), id(7, 7)], vec![id(1, 100)]),
        (3, id(3, 20), vec![id(1, 90)], vec![]),
    ] {
        let label = format!("keep {keep}, written {written:?}, needed {needed:?}");
        assert_eq!(surplus(&complete, keep, written, &needed.into_iter().collect()), want, "{label}");
    }
    assert_eq!(surplus(&[], 2, id(1, 1), &BTreeSet::new()), []);
}

#[test]
fn runs_with_a_run_in_common_may_go_back_to_each_others_checkpoints() {
    let runs = [
        record(1, "a", None),
        record(2, "b", Some(id(1, 100))),
        record(3, "c", None),
        record(4, "d", Some(id(2, 40))),
        record(5, "e", Some(id(1, 10))),
    ];
    let numbers = |run| {
        let others = relatives(&runs, &lineage(&runs, run));
        others.iter().map(|lineage| lineage[0].run).collect::<Vec<_>>()
    };
    for (run, want) in [(1, vec![2, 4, 5]), (2, vec![1, 4, 5]), (3, vec![]), (4, vec![1, 2, 5]), (5, vec![1, 2, 4])] {
        assert_eq!(numbers(run), want, "run {run}");
    }
    assert_eq!(relatives(&runs, &lineage(&runs, 5))[1], lineage(&runs, 2));
    assert!(relatives(&runs, &[]).is_empty());
}

#[test]
fn a_run_leaves_each_other_one_the_checkpoint_that_it_would_go_back_to() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let begin = |uid, from| runs.begin(&job(uid, true, 0, false), from, 0).expect("begins").run;
    let write = |run, step| {
        write_checkpoint(&runs.path(id(run, step)), 6, 1, 0);
        let own = lineage(&runs.list().expect("reads"), run);
        runs.prune(&own, 1, id(run, step)).expect("removes")
    };
    let first = begin("a", None);
    assert_eq!(write(first, 90), []);
    assert_eq!(write(first, 100), [id(first, 90)]);
    // A job that resumes while the first is suspended.
    let second = begin("b", Some(id(first, 100)));
    assert_eq!(write(second, 110), []);
    assert_eq!(write(second, 120), [id(second, 110)]);
    assert_eq!(runs.catalog(first).complete().expect("reads"), [100].into(), "the first goes on from it");
    // A third one has no checkpoint of its own yet: that of the second is all that it has.
    let third = begin("c", Some(id(second, 120)));
    assert_eq!(write(second, 130), []);
    // The first goes on, and the others have newer ones than its old one.
    assert_eq!(write(first, 140), [id(first, 100)]);
    assert_eq!(write(third, 150), [id(second, 120)], "the second has a newer one, which the third never had");
    assert_eq!(runs.catalog(second).complete().expect("reads"), [130].into());
}

#[test]
fn a_run_that_has_had_a_checkpoint_says_so_for_good() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let run = runs.begin(&job("a", false, 0, false), None, 0).expect("begins").run;
    assert!(!runs.has_kept(run).expect("reads"));
    runs.note_kept(id(run, 10)).expect("writes");
    let file = runs.catalog(run).folder().join(KEPT);
    let written = fs::read(&file).expect("reads");
    runs.note_kept(id(run, 20)).expect("it is there");
    assert!(runs.has_kept(run).expect("reads") && fs::read(&file).expect("reads") == written, "it names the first");
    assert!(!runs.has_kept(run + 1).expect("there is no such run"));
    fs::write(runs.catalog(run + 2).folder(), "").expect("writes");
    assert!(matches!(runs.has_kept(run + 2).expect_err("not a folder"), RunsError::Read { .. }));
}

#[test]
fn a_run_prunes_its_own_checkpoints_whatever_steps_others_have() {
    let folder = folder();
    let runs = Runs::new(folder.path().join("later"));
    assert_eq!(runs.list().expect("none yet"), []);
    let first = runs.begin(&job("a", false, 0, false), None, 0).expect("begins").run;
    for step in [100, 110, 120] {
        write_checkpoint(&runs.path(id(first, step)), 6, 1, 0);
    }
    let second = runs.begin(&job("b", false, 0, false), None, 0).expect("begins").run;
    let own = lineage(&runs.list().expect("reads"), second);
    for step in [10, 20] {
        write_checkpoint(&runs.path(id(second, step)), 6, 1, 0);
        let want = if step == 20 { vec![id(second, 10)] } else { vec![] };
        assert_eq!(runs.prune(&own, 1, id(second, step)).expect("removes"), want);
    }
    assert_eq!(runs.catalog(first).complete().expect("reads"), [100, 110, 120].into());

    // One that resumes descends from the other run, up to a step.
    let third = runs.begin(&job("c", true, 0, false), Some(id(first, 110)), 0).expect("begins").run;
    let own = lineage(&runs.list().expect("reads"), third);
    write_checkpoint(&runs.path(id(third, 115)), 6, 1, 0);
    assert_eq!(runs.complete(&own).expect("reads"), [id(third, 115), id(first, 110), id(first, 100)]);
    assert_eq!(runs.prune(&own, 2, id(third, 115)).expect("removes"), [id(first, 100)]);
    assert_eq!(runs.catalog(first).complete().expect("reads"), [110, 120].into(), "120 is of another life");
    assert_eq!(runs.catalog(second).complete().expect("reads"), [20].into());
    assert_eq!((first, second, third), (1, 2, 3));
}

#[test]
fn a_damaged_checkpoint_is_neither_counted_nor_found_again() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let run = runs.begin(&job("a", true, 0, false), None, 0).expect("begins").run;
    let own = [Ancestor { run, until: None }];
    for step in [10, 20] {
        write_checkpoint(&runs.path(id(run, step)), 6, 1, 0);
    }
    let catalog = runs.catalog(run);
    catalog.set_aside(20).expect("sets aside");
    catalog.set_aside(20).expect("it is aside already");
    assert_eq!(runs.complete(&own).expect("reads"), [id(run, 10)]);
    assert_eq!(runs.damaged(&own).expect("reads"), [id(run, 20)]);
    // With one to keep, the one that is newer than the step of the damaged one's predecessor stays.
    write_checkpoint(&runs.path(id(run, 15)), 6, 1, 0);
    assert_eq!(runs.prune(&own, 1, id(run, 15)).expect("removes"), [id(run, 10)]);
    assert_eq!(runs.complete(&own).expect("reads"), [id(run, 15)]);
    // Training passes the damaged step, writes it again, and leaves nothing behind.
    write_checkpoint(&runs.path(id(run, 20)), 6, 1, 0);
    assert_eq!(runs.damaged(&own).expect("reads"), []);
    assert_eq!(runs.prune(&own, 1, id(run, 20)).expect("removes"), [id(run, 15)]);
    Checkpoint::open(runs.path(id(run, 20))).expect("it is whole again");
    catalog.set_aside(20).expect("sets aside");
    write_checkpoint(&runs.path(id(run, 30)), 6, 1, 0);
    assert_eq!(runs.prune(&own, 2, id(run, 30)).expect("removes"), [], "fewer than are to be kept");
    assert_eq!(runs.prune(&own, 1, id(run, 30)).expect("removes"), [id(run, 20)]);
}

#[test]
fn the_catalog_lists_complete_checkpoints_and_pruning_clears_up() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let catalog = runs.catalog(1);
    assert_eq!(catalog.complete().expect("none yet"), BTreeSet::new());
    for step in [10, 20, 30, 40] {
        write_checkpoint(&catalog.path(step), 6, 1, 0);
    }
    write_part(&catalog.path(15), &description(6, 0, 1, 0));
    write_part(&catalog.path(50), &description(6, 0, 1, 0));
    for foreign in ["step-", "step-x", "step-10", "notes"] {
        fs::create_dir(catalog.folder().join(foreign)).expect("creates");
    }
    assert_eq!(catalog.complete().expect("reads"), [10, 20, 30, 40].into());
    let own = [Ancestor { run: 1, until: None }];
    let gone: BTreeSet<_> = runs.prune(&own, 2, id(1, 40)).expect("removes").into_iter().collect();
    assert_eq!(gone, [id(1, 10), id(1, 15), id(1, 20)].into(), "50 may be on its way");
    assert_eq!(catalog.complete().expect("reads"), [30, 40].into());
    assert_eq!(fs::read_dir(catalog.folder()).expect("reads").count(), 3 + 4, "foreign folders stay");
    write::revoke(catalog.path(40)).expect("revokes");
    write::revoke(catalog.path(40)).expect("nothing to revoke");
    assert_eq!(catalog.complete().expect("reads"), [30].into());
}

#[test]
fn runs_that_begin_at_the_same_time_get_numbers_of_their_own() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let begin = || runs.begin(&job("a", true, 0, false), None, 7).expect("begins").run;
    let numbers: BTreeSet<u32> = std::thread::scope(|scope| {
        let begun: Vec<_> = (0..8).map(|_| scope.spawn(begin)).collect();
        begun.into_iter().map(|run| run.join().expect("no panic")).collect()
    });
    assert_eq!(numbers.len(), 8);
    assert_eq!(runs.list().expect("reads").len(), 8);
    // A crash between the folder and its record leaves no run, and its number is not given again.
    fs::create_dir(folder.path().join("run-00020")).expect("creates");
    assert_eq!(runs.list().expect("reads").len(), 8);
    assert_eq!(begin(), 21);
    let newest = runs.newest().expect("reads").expect("there are runs");
    assert_eq!(newest, Catalog::new(folder.path().join("run-00021")));
}

#[test]
fn a_record_that_cannot_be_read_is_an_error_and_no_run_is_forgotten() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let run = runs.begin(&job("a", true, 0, false), None, 0).expect("begins").run;
    let file = runs.catalog(run).folder().join(RUN);
    let written = fs::read(&file).expect("reads");
    for damaged in ["", "{}", "null", r#"{"format": 1, "run": 9, "uid": "a", "job": "j", "epoch": 0}"#] {
        fs::write(&file, damaged).expect("writes");
        let error = runs.list().expect_err(damaged);
        assert!(matches!(&error, RunsError::Damaged { .. }) && error.to_string().contains("run.json"), "{error}");
    }
    fs::write(&file, written).expect("writes");
    assert_eq!(runs.list().expect("reads").len(), 1);
    // A folder that is a file, as on a mount that is broken: it is not the same as no folder.
    let broken = Runs::new(&file);
    assert!(matches!(broken.list().expect_err("not a folder"), RunsError::Read { .. }));
    let broken = [Ancestor { run: 2, until: None }];
    fs::write(runs.catalog(2).folder(), "").expect("writes");
    assert!(matches!(runs.complete(&broken).expect_err("not a folder"), RunsError::Read { .. }));
    assert!(matches!(runs.list().expect_err("not a folder"), RunsError::Read { .. }));
}

#[test]
fn only_what_is_proved_counts_as_damage() {
    let folder = folder();
    let catalog = Catalog::new(folder.path());
    write_checkpoint(&catalog.path(7), 6, 1, 0);
    let part = catalog.path(7).join(part_name(0, 1));
    let bytes = fs::read(&part).expect("reads");
    let proved = || Checkpoint::open(catalog.path(7)).expect_err("not usable").is_proved();
    fs::write(&part, &bytes[..bytes.len() - 1]).expect("writes");
    assert!(proved(), "a part that is cut short");
    fs::remove_file(&part).expect("removes");
    assert!(proved(), "a part that is missing beside its manifest");
    fs::create_dir(&part).expect("creates");
    fs::write(catalog.path(7).join(MANIFEST), "{").expect("writes");
    assert!(proved(), "a manifest that is none");
    fs::remove_file(catalog.path(7).join(MANIFEST)).expect("removes");
    assert!(!proved(), "a manifest that this machine does not see");
    fs::remove_dir_all(catalog.path(7)).expect("removes");
    fs::write(catalog.path(7), "").expect("writes");
    assert!(!proved(), "a folder that is a file, as on a broken mount");
}

#[test]
fn files_that_a_dead_process_has_begun_go_and_no_others() {
    let folder = folder();
    let runs = Runs::new(folder.path());
    let run = runs.begin(&job("a", false, 0, false), None, 0).expect("begins").run;
    let step = runs.path(CheckpointId { run, step: 3 });
    fs::create_dir_all(&step).expect("makes");
    let begun = "0123456789abcdef.tmp";
    let left_over = [
        folder.path().join(format!("model.safetensors.{begun}")),
        runs.catalog(run).folder().join(format!("run.json.{begun}")),
        step.join(format!("ps-00000-of-00001.safetensors.{begun}")),
    ];
    let foreign = [
        folder.path().join("notes.tmp"),
        step.join("ps-00000-of-00001.safetensors"),
        folder.path().join(format!("lock.json.{begun}")),
    ];
    left_over.iter().chain(&foreign).for_each(|file| fs::write(file, "x").expect("writes"));
    let part = PartWriter::create(&step, &description(6, 0, 1, 0)).expect("creates");
    runs.remove_left_overs().expect("removes");
    assert!(left_over.iter().all(|file| !file.exists()) && foreign.iter().all(|file| file.exists()));
    assert!(part.blocks().len() == 1 && fs::read_dir(&step).expect("reads").count() == 1, "its writer was replaced");
    assert!(runs.catalog(run).folder().join(RUN).exists());
}
