//! A store that throttles, loses its replies and breaks connections, at places that a seed chooses: no checkpoint is ever
//! complete and wrong, and what a server was promised is there.

use std::sync::atomic::Ordering;

use psjobs_ps::checkpoint::{Checkpoint, Runs, write};

use crate::between::Between;
use crate::checkpoints::{description, identity, manifest, state, write_part};
use crate::store::{Kind, Store, sample};

/// Faults that each store is tried with by `make test-stores`.
const FAULTS: u32 = 250;
/// A part of an upload and a piece of it, so that uploads have several.
const ELEMENTS: u64 = 1_200_000;

#[test]
fn no_fault_of_s3_makes_a_checkpoint_that_is_wrong_or_loses_one() {
    Store::start(Kind::S3).iter().for_each(survive);
}

#[test]
fn no_fault_of_google_makes_a_checkpoint_that_is_wrong_or_loses_one() {
    Store::start(Kind::Google).iter().for_each(survive);
}

#[test]
fn no_fault_of_azure_makes_a_checkpoint_that_is_wrong_or_loses_one() {
    Store::start(Kind::Azure).iter().for_each(survive);
}

/// Writes and reads checkpoints in a store until all faults have come.
fn survive(store: &Store) {
    let between = Between::start(store.address, 7);
    let faulty = psjobs_object_store::folder(&store.url("jobs/mnist"), store.variables_at(between.address));
    let faulty = Runs::new(faulty.expect("a folder"));
    let sound = Runs::new(store.folder("jobs/mnist"));
    // The reply to an attempt may be lost for good: then there are two runs, of which the later one counts.
    let mut attempts = (0..100).map(|_| faulty.begin(&identity(), None, 1));
    let run = attempts.find_map(Result::ok).expect("one of a hundred attempts succeeds").run;
    let (mut acknowledged, mut failed, mut step) = (Vec::new(), 0, 0);
    let faults = sample(FAULTS);
    while between.faults.load(Ordering::SeqCst) < faults {
        step += 1;
        assert!(step < 5_000, "the faults do not come");
        let folder = faulty.catalog(run).path(step);
        let written = write_part(&folder, &description(step, ELEMENTS, 0, 1))
            .and_then(|part| write::commit(&folder, &manifest(step, vec![part])));
        match written {
            Ok(()) => acknowledged.push(step),
            Err(_) => failed += 1,
        }
        // Old ones go, as servers do it.
        if step > 3 {
            drop(faulty.catalog(run).remove(step - 3));
            acknowledged.retain(|kept| *kept > step - 3);
        }
        let complete = sound.catalog(run).complete().expect("the store itself is sound");
        assert!(acknowledged.iter().all(|step| complete.contains(step)), "{:?}: {complete:?}", store.kind);
        for step in complete.iter().rev().take(1).copied() {
            // A reader behind the faults gets the right values, or an error.
            for runs in [&sound, &faulty] {
                let read = Checkpoint::open(runs.catalog(run).path(step));
                let read = read.and_then(|checkpoint| checkpoint.read(0..ELEMENTS as usize));
                match read {
                    Ok(found) => {
                        assert!(found == state(step, 0..ELEMENTS as usize), "{:?}: step {step}", store.kind)
                    }
                    Err(damage) => {
                        assert!(
                            std::ptr::eq(runs, &raw const faulty) && !damage.is_proved(),
                            "{:?}: {damage}",
                            store.kind
                        );
                    }
                }
            }
        }
    }
    between.active.store(false, Ordering::SeqCst);
    let kind = store.kind;
    assert!(step - failed > 10, "{kind:?}: of {step} checkpoints {failed} failed, so that little was tried");
    eprintln!("{kind:?}: {faults} faults, {step} checkpoints, {failed} could not be written");
}
