//! The inputs that fuzzing starts from, in `fuzz/seeds`, are what is sent and written today: a change of the wire or
//! of the checkpoints that forgets them would have the fuzzers look at yesterday's.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bytes::Bytes;
use psjobs_arithmetic::codec::{Codec, Encoder};
use psjobs_ps::batch::assigner::Position;
use psjobs_ps::checkpoint::format::{FORMAT, MANIFEST, Manifest, part_name};
use psjobs_ps::checkpoint::{BlockState, Description, PartWriter, write};
use psjobs_ps::layout::TensorSpec;
use psjobs_ps::proto::exchange_request::Message;
use psjobs_ps::proto::{
    self, ExchangeRequest, GradientBlock, InitializeBlocksRequest, JoinRequest, Open, ParameterBlock, PullRequest,
    TrainerId,
};
use psjobs_ps::wire::codec_number;
use psjobs_ps::wire::frame;

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
    let join = JoinRequest { trainer: Some(id), tensors, total_steps: 10, shard: Some(0), ..Default::default() };
    seeds.push(("frame/join".into(), 4, 3, frame::message(&join).to_vec()));
    seeds.into_iter().map(|(name, kind, length, stream)| (name, [vec![kind, length], stream].concat())).collect()
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
    let manifest = Manifest {
        format: FORMAT,
        job: "job".into(),
        step: 7,
        parts: vec![part.finish().expect("finishes")],
        rows: Vec::new(),
        concluded: BTreeMap::new(),
        dealt: Position::default(),
    };
    write::commit(folder.path(), &manifest).expect("commits");
    let read = |kind: u8, name: &str| [vec![kind], fs::read(folder.path().join(name)).expect("written")].concat();
    vec![
        ("checkpoint/manifest".into(), read(0, MANIFEST)),
        ("checkpoint/part".into(), read(1, &part_name(0, 1))),
        ("checkpoint/part-repaired".into(), read(2, &part_name(0, 1))),
    ]
}
