//! A store does what a folder does.

use std::io::ErrorKind;
use std::path::Path;

use psjobs_ps::batch::assigner::Position;
use psjobs_ps::checkpoint::format::{FORMAT, MANIFEST, PartEntry};
use psjobs_ps::checkpoint::lock::{Lock, LockFile};
use psjobs_ps::checkpoint::runs::JobIdentity;
use psjobs_ps::checkpoint::{
    BlockState, Checkpoint, Concluded, Description, Folder, Manifest, PartWriter, Runs, WriteError, export, write,
};
use psjobs_ps::client::TensorSpec;
use psjobs_ps::layout::Layout;

use crate::store::{self, Kind, Store};

/// More than a part of an upload.
const ELEMENTS: u64 = 2_500_000;

pub fn description(step: u64, elements: u64, server: u32, servers: u32) -> Description {
    let tensors = vec![TensorSpec::new("weight", vec![elements])];
    let layout = Layout::new(&tensors, servers as usize).expect("lays out");
    Description {
        format: FORMAT,
        job: "job-1".into(),
        step,
        server,
        servers,
        trainers: 1,
        block_elements: layout.block_elements(),
        slots: 1,
        previous: false,
        training: serde_json::json!({"optimizer": {"type": "Adam"}}),
        tensors,
    }
}

/// The state of some elements after `step` steps; no other step has the same.
pub fn state(step: u64, range: std::ops::Range<usize>) -> BlockState {
    let column = |column: usize| range.clone().map(|i| (i * 3 + column) as f32 + step as f32 / 8.0).collect();
    BlockState {
        values: column(0),
        slots: vec![column(1)],
        previous: Vec::new(),
        updates: step,
        version: step,
        next_steps: vec![step],
    }
}

pub fn write_part(folder: &Folder, description: &Description) -> Result<PartEntry, WriteError> {
    let layout = description.layout().expect("lays out");
    let mut part = PartWriter::create(folder, description)?;
    for block in part.blocks().to_vec() {
        part.put(&state(description.step, layout.range(block)))?;
    }
    part.finish()
}

pub fn manifest(step: u64, parts: Vec<PartEntry>) -> Manifest {
    let (concluded, dealt) = (Concluded::new(), Position::default());
    Manifest { format: FORMAT, job: "job-1".into(), step, parts, rows: Vec::new(), concluded, dealt }
}

pub fn identity() -> JobIdentity {
    JobIdentity { uid: "job-1".into(), job: "mnist".into(), incarnation: 0, resume: true, given: false }
}

#[test]
fn a_checkpoint_is_complete_or_absent_and_read_as_it_was_written() {
    for store in store::all() {
        let kind = store.kind;
        let runs = Runs::new(store.folder("jobs/mnist"));
        assert!(runs.list().expect("an empty bucket").is_empty(), "{kind:?}");
        let run = runs.begin(&identity(), None, 1).expect("begins").run;
        let other = runs.begin(&identity(), None, 1).expect("begins").run;
        assert_eq!((run, other), (1, 2), "{kind:?}: two runs are two");
        let catalog = runs.catalog(run);
        for step in [7, 9] {
            let folder = catalog.path(step);
            let parts =
                (0..2).map(|server| write_part(&folder, &description(step, ELEMENTS, server, 2)).expect("writes"));
            let manifest = manifest(step, parts.collect());
            assert!(
                !catalog.complete().expect("lists").contains(&step),
                "{kind:?}: without its manifest it is nothing"
            );
            write::commit(&folder, &manifest).expect("commits");
            let late = write_part(&folder, &description(step, ELEMENTS, 0, 2)).expect_err("it is complete");
            assert!(late.to_string().contains("complete"), "{kind:?}: {late}");
        }
        assert_eq!(catalog.complete().expect("lists"), [7, 9].into(), "{kind:?}");
        let checkpoint = Checkpoint::open(catalog.path(9)).expect("opens");
        let found = checkpoint.read(0..ELEMENTS as usize).expect("reads");
        assert!(found == state(9, 0..ELEMENTS as usize), "{kind:?}: what was written is read");
        let file = export::export(&checkpoint, runs.folder()).expect("exports");
        assert_eq!(file, Path::new(&store.url("jobs/mnist/model.safetensors")), "{kind:?}");
        let model = runs.folder().disk().open(&file).and_then(|model| model.bytes()).expect("an object");
        assert!(model > 4 * ELEMENTS, "{kind:?}: {model}");
        catalog.remove(7).expect("removes");
        assert_eq!((catalog.steps().expect("lists"), catalog.complete().expect("lists")), ([9].into(), [9].into()));
    }
}

#[test]
fn of_two_processes_that_lead_one_completes_a_checkpoint() {
    for store in store::all() {
        let folder = store.folder("jobs/mnist/run-00001/step-000000000007");
        let part = write_part(&folder, &description(7, 1000, 0, 1)).expect("writes");
        let [first, second] = [1, 2].map(|trainer| {
            let mut manifest = manifest(7, vec![part.clone()]);
            manifest.concluded.insert(trainer, 7);
            manifest
        });
        let both = std::thread::scope(|scope| {
            [&first, &second]
                .map(|own| scope.spawn(|| write::commit(&folder, own)))
                .map(|one| one.join().expect("ends"))
        });
        let done: Vec<_> = both.iter().map(Result::is_ok).collect();
        assert!(done == [true, false] || done == [false, true], "{:?}: {both:?}", store.kind);
        let loser = both.iter().find_map(|one| one.as_ref().err());
        assert!(matches!(loser, Some(WriteError::Exists { .. })), "{:?}: {both:?}", store.kind);
        let kept = Checkpoint::open(&folder).expect("opens").manifest().clone();
        assert_eq!(kept, if done[0] { first.clone() } else { second }, "{:?}", store.kind);
        write::amend(&folder, &first).expect("a later manifest replaces it");
        assert_eq!(*Checkpoint::open(&folder).expect("opens").manifest(), first);
    }
}

#[test]
fn a_lock_and_its_marks_are_kept_in_a_store() {
    for store in store::all() {
        let file = LockFile::new(store.folder("jobs/mnist"));
        let own = |incarnation, counter| Lock {
            job: "mnist".into(),
            uid: "a".into(),
            holder: u64::from(incarnation),
            incarnation,
            counter,
        };
        for counter in 0..3 {
            file.write(&own(1, counter)).expect("renews");
            assert_eq!(file.read().expect("reads"), Some(own(1, counter)), "{:?}: the last one counts", store.kind);
        }
        file.mark(&own(2, 0)).expect("marks");
        assert_eq!(file.newest_mark().expect("lists"), 2);
        assert_eq!(file.successor(&own(1, 0), 0).expect("reads"), Some(own(2, 0)));
        file.write(&own(2, 0)).expect("takes");
        file.release(&own(2, 0)).expect("releases");
        assert_eq!((file.read().expect("reads"), file.newest_mark().expect("lists")), (None, 0));
    }
}

#[test]
fn what_is_wrong_is_said_in_the_words_of_the_store() {
    let Some(store) = Store::start(Kind::S3) else { return };
    let place = |url: &str, changes: &[(&str, &str)]| {
        let mut variables = store.variables();
        for (name, value) in &mut variables {
            if let Some((_, other)) = changes.iter().find(|(changed, _)| changed == name) {
                *value = (*other).to_owned();
            }
        }
        psjobs_object_store::folder(url, variables).expect("a folder")
    };
    let missing = place("s3://other/jobs", &[]);
    let error = Runs::new(&missing).list().expect_err("there is no such bucket").to_string();
    assert!(error.contains("NoSuchBucket") && error.contains("create the bucket"), "{error}");
    let error = Runs::new(&missing).begin(&identity(), None, 1).expect_err("there is no such bucket").to_string();
    assert!(error.contains("s3://other"), "{error}");
    let denied = place(&store.url("jobs"), &[("AWS_SECRET_ACCESS_KEY", "expired")]);
    let error = Runs::new(&denied).list().expect_err("the key is wrong").to_string();
    assert!(error.contains("SignatureDoesNotMatch") && error.contains("objectStore.secret"), "{error}");
    let error = denied.disk().exists(&denied.join(MANIFEST)).expect_err("the key is wrong");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
}
