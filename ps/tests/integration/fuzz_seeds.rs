//! The inputs that fuzzing starts from, in `fuzz/seeds`, are what is sent and written today: a change of the wire or
//! of the checkpoints that forgets them would have the fuzzers look at yesterday's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use psjobs_arithmetic::codec::{Codec, Encoder};
use psjobs_ps::batch::assigner::Position;
use psjobs_ps::checkpoint::format::{FORMAT, MANIFEST, Manifest, PartEntry, part_name};
use psjobs_ps::checkpoint::rows::{RowsDescription, rows_name};
use psjobs_ps::checkpoint::{BlockState, Checkpoint, Description, PartWriter, export, write};
use psjobs_ps::layout::TensorSpec;
use psjobs_ps::proto::exchange_request::Message;
use psjobs_ps::proto::follow_request::Message as Follow;
use psjobs_ps::proto::{
    self, ExchangeRequest, FollowRequest, GradientBlock, InitializeBlocksRequest, JoinRequest, NextStep, Open,
    ParameterBlock, PullRequest, Replica, TrainerId,
};
use psjobs_ps::sparse::TableSpec;
use psjobs_ps::wire::{Buffers, codec_number, frame};

/// Elements of the target's block.
const ELEMENTS: usize = 1300;

#[test]
fn seeds_are_of_today() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds");
    for (name, want) in frames().into_iter().chain(checkpoints()) {
        let file = folder.join(&name);
        if std::env::var_os("PSJOBS_WRITE_SEEDS").is_some() {
            fs::write(&file, &want).expect("written");
        }
        let found = fs::read(&file).unwrap_or_default();
        assert!(found == want, "{name} is not of today; run this test with PSJOBS_WRITE_SEEDS=1 and commit it");
    }
}

fn frames() -> Vec<(String, Vec<u8>)> {
    let id = TrainerId { job_uid: "job".into(), index: 1, incarnation: 2 };
    let open = Message::Open(Open {
        trainer: Some(id.clone()),
        shared_memory_token: 3,
        epoch: 4,
        shard: Some(1),
        lane: 1,
        lanes: 2,
        leader_term: 1,
    });
    let exchange = |message| frame::message(&ExchangeRequest { message: Some(message) });
    let mut seeds = Vec::new();
    for codec in [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK] {
        let mut values: Vec<f32> = (0..ELEMENTS).map(|i| (i as f32 * 0.1).sin()).collect();
        let mut encoder = Encoder::new(codec, 0.01);
        let mut payload = vec![0; encoder.payload_len(ELEMENTS)];
        encoder.encode(&mut values, &mut payload);
        let gradient = GradientBlock {
            step: 9,
            block: 1,
            codec: codec_number::number(codec),
            payload: payload.into(),
            version: 300,
        };
        let stream = [exchange(open.clone()), exchange(Message::Gradient(gradient))].concat();
        seeds.push((format!("frame/exchange-{codec}"), 0, 0, stream));
    }
    let payload = Bytes::from(vec![0x3f; 2 * ELEMENTS]);
    let codec = codec_number::number(Codec::Bf16);
    let block = ParameterBlock { step: 9, block: 1, codec, version: 300, payload: payload.clone() };
    seeds.push(("frame/parameters".into(), 1, 100, frame::message(&block).to_vec()));
    let push = InitializeBlocksRequest { trainer: Some(id.clone()), block: 1, codec, payload };
    seeds.push(("frame/push".into(), 2, 255, frame::message(&push).to_vec()));
    let pull = PullRequest { trainer: Some(id.clone()), blocks: vec![0, 1, 300], ..Default::default() };
    seeds.push(("frame/pull".into(), 3, 1, frame::message(&pull).to_vec()));
    let tensor = |name: &str, shape: &[u64]| proto::TensorSpec { name: name.into(), shape: shape.into(), group: None };
    let tensors = vec![tensor("weight", &[300, 4]), tensor("bias", &[])];
    seeds.push(("frame/replica".into(), 5, 0, replicas(&id, &tensors)));
    seeds.push(("frame/follow".into(), 6, 7, follower()));
    let join = JoinRequest { trainer: Some(id), tensors, total_steps: 10, shard: Some(0), ..Default::default() };
    seeds.push(("frame/join".into(), 4, 3, frame::message(&join).to_vec()));
    seeds.into_iter().map(|(name, kind, length, stream)| (name, [vec![kind, length], stream].concat())).collect()
}

/// A message of each kind that a primary sends to its backup.
fn replicas(id: &TrainerId, tensors: &[proto::TensorSpec]) -> Vec<u8> {
    let roster = vec![proto::RosterEntry {
        trainer: Some(id.clone()),
        finished: true,
        step: 8,
        total_steps: 10,
        examples: 64,
        ..Default::default()
    }];
    let model = proto::Model { tensors: tensors.to_vec(), epoch: 4, instance: 5, incarnation: 1, roster };
    let bytes = |count: usize| Bytes::from(vec![0x3f; 4 * count]);
    let contents = proto::BlockContents {
        block: 0,
        version: 300,
        updates: 300,
        next_steps: vec![9, 8],
        values: bytes(12),
        slots: vec![bytes(12)],
        previous: bytes(12),
    };
    let voters = proto::Voters { version: 2, voters: vec![proto::Voter { trainer: 1, incarnation: 2 }] };
    let complete = proto::Complete { terms: vec![0, 3], voters: Some(voters.clone()) };
    let table = proto::TableSpec::from(&TableSpec::new("user", 3, 0.5));
    let (part, table, tables) = (1, 0, proto::Tables { tables: vec![table], parts: 2, servers_train_layers: true });
    let (keys, numbers) = (vec![3, 5], bytes(12));
    let rows = proto::RowsContents {
        part,
        table,
        keys: keys.clone(),
        used: vec![9, 300],
        updates: vec![4, 5],
        numbers,
        last: None,
    };
    let last = proto::RowsClock { version: 7, next_steps: vec![7, 8], requests: 400 };
    let last = proto::RowsContents { part, last: Some(last), ..Default::default() };
    let next_steps = vec![NextStep { trainer: 1, step: 9 }];
    let rows_update = proto::RowsUpdate {
        part,
        version: 8,
        last: true,
        factor: 0.5,
        gradients: vec![proto::TableGradients { table, keys, gradients: bytes(6) }],
        evicted: vec![proto::TableKeys { table, keys: vec![11] }],
        next_steps: next_steps.clone(),
        requests: 401,
    };
    let codec = codec_number::number(Codec::Bf16);
    let head = Replica { block: 1, version: 301, factor: 0.5, next_steps, codec, ..Replica::default() };
    let update = frame::replica(&Buffers::default(), &head, 2 * ELEMENTS, |payload| payload.fill(0x3f));
    let others = [
        Replica { model: Some(model), ..Replica::default() },
        Replica { tables: Some(tables), ..Replica::default() },
        Replica { contents: Some(contents), ..Replica::default() },
        Replica { rows: Some(rows), ..Replica::default() },
        Replica { rows: Some(last), ..Replica::default() },
        Replica { complete: Some(complete), ..Replica::default() },
        Replica { rows_update: Some(rows_update), ..Replica::default() },
        Replica { voters: Some(voters), ..Replica::default() },
        Replica::default(),
    ];
    others.iter().map(frame::message).chain([update]).collect::<Vec<_>>().concat()
}

/// A message of each kind that a backup sends to its primary.
fn follower() -> Vec<u8> {
    let holder = proto::ShardHolder {
        shard: 1,
        instance: 5,
        incarnation: 1,
        role: proto::ShardRole::Backup.into(),
        term: 3,
        candidate: true,
        terms: vec![0, 3],
        ..Default::default()
    };
    let messages = [
        Follow::Open(proto::OpenFollow { job_uid: "job".into(), holder: Some(holder), epoch: 4 }),
        Follow::Held(proto::Held {
            blocks: vec![proto::BlockVersion { block: 1, version: 300 }],
            row_parts: vec![7, 8],
        }),
        Follow::Acknowledgement(proto::Acknowledgement { block: 1, version: 301 }),
        Follow::RowsAcknowledgement(proto::RowsAcknowledgement { part: 1, version: 8 }),
        Follow::VotersAcknowledgement(2),
        Follow::Alive(true),
    ];
    messages.map(|message| frame::message(&FollowRequest { message: Some(message) })).concat()
}

fn checkpoints() -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().expect("a folder");
    let tensors = vec![TensorSpec::new("weight", vec![3, 4])];
    let description = Description {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        server: 0,
        servers: 1,
        trainers: 2,
        block_elements: 12,
        slots: 1,
        previous: true,
        training: serde_json::json!({"optimizer": {"type": "SGD"}}),
        tensors,
    };
    let column = |from: u8| (from..from + 12).map(f32::from).collect::<Vec<f32>>();
    let (values, slots, previous) = (column(0), vec![column(12)], column(24));
    let state = BlockState { values, slots, previous, updates: 7, version: 7, next_steps: vec![7, 8] };
    let mut part = PartWriter::create(folder.path(), &description).expect("creates");
    part.put(&state).expect("writes");
    let (rows, rows_entry) = rows_file();
    fs::write(folder.path().join(&rows_entry.file), rows).expect("written");
    let manifest = Manifest {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        parts: vec![part.finish().expect("finishes")],
        rows: vec![rows_entry],
        concluded: BTreeMap::new(),
        dealt: Position::default(),
    };
    write::commit(folder.path(), &manifest).expect("commits");
    // The rows are not written by a server: that they can be read shows that they are what one writes.
    let checkpoint = Checkpoint::open(folder.path()).expect("opens");
    let tables = export::export_tables(&checkpoint, &folder.path().into()).expect("reads the rows");
    assert!(tables.is_some(), "the checkpoint has rows");
    let read = |kind: u8, name: &str| [vec![kind], fs::read(folder.path().join(name)).expect("written")].concat();
    vec![
        ("checkpoint/manifest".into(), read(0, MANIFEST)),
        ("checkpoint/part".into(), read(1, &part_name(0, 1))),
        ("checkpoint/part-repaired".into(), read(2, &part_name(0, 1))),
        ("checkpoint/rows".into(), read(3, &rows_name(0, 1))),
        ("checkpoint/rows-repaired".into(), read(4, &rows_name(0, 1))),
    ]
}

/// A tensor in the header of a safetensors file.
#[derive(serde::Serialize)]
struct Entry {
    dtype: &'static str,
    shape: Vec<u64>,
    data_offsets: [usize; 2],
}

/// The rows of two tables as a server writes them, and their entry in the manifest.
fn rows_file() -> (Vec<u8>, PartEntry) {
    let specs = [TableSpec::new("user", 3, 0.5), TableSpec::new("item.b", 1, 0.0)];
    let rows_of_tables: [u64; 2] = [2, 1];
    let (mut counts, mut numbers, mut checksums) = (Vec::new(), Vec::new(), Vec::new());
    for (spec, rows) in specs.iter().zip(rows_of_tables) {
        let (name, width) = (&spec.name, spec.width as u64);
        let mut hasher = crc32fast::Hasher::new();
        for (column, first) in [("keys", 3_u64), ("used", 9), ("updates", 4)] {
            let bytes: Vec<u8> = (first..first + rows).flat_map(u64::to_le_bytes).collect();
            hasher.update(&bytes);
            counts.push((format!("{name}.{column}"), "U64", vec![rows], bytes));
        }
        for (column, first) in [("values", 0.5_f32), ("slot.0", 0.25)] {
            let bytes: Vec<u8> = (0..rows * width).flat_map(|i| (first + i as f32).to_le_bytes()).collect();
            hasher.update(&bytes);
            numbers.push((format!("{name}.{column}"), "F32", vec![rows, width], bytes));
        }
        checksums.extend(hasher.finalize().to_le_bytes());
    }
    let of_groups = ("checksums".to_owned(), "U32", vec![2], checksums.clone());
    let (mut entries, mut data) = (BTreeMap::new(), Vec::new());
    for (name, dtype, shape, bytes) in counts.into_iter().chain(numbers).chain([of_groups]) {
        let start = data.len();
        data.extend(bytes);
        entries.insert(name, Entry { dtype, shape, data_offsets: [start, data.len()] });
    }
    let description = serde_json::json!({
        "format": FORMAT,
        "job": "job",
        "step": 7,
        "server": 0,
        "servers": 1,
        "slots": 1,
        "tables": specs,
        "rows": rows_of_tables,
        "clocks": [{"next_steps": [7, 8], "requests": 40}],
    });
    // Through its own type, whose fields have another order.
    let description: RowsDescription = serde_json::from_value(description).expect("a description");
    let description = serde_json::to_string(&description).expect("JSON");
    let metadata = serde_json::json!({"__metadata__": {"psjobs": description}}).to_string();
    let entries = serde_json::to_string(&entries).expect("JSON");
    // One object of both: the metadata without its end, the entries without their beginning.
    let mut json = format!("{},{}", &metadata[..metadata.len() - 1], &entries[1..]).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
    let crc32 = crc32fast::hash(&[&header[..], &checksums].concat());
    let bytes = [header, data].concat();
    let entry = PartEntry { file: rows_name(0, 1), bytes: bytes.len() as u64, crc32 };
    (bytes, entry)
}
