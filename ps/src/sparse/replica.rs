//! The messages by which a part of the rows is copied to another server and kept equal to it.

use bytes::Bytes;
use tonic::Status;

use super::gradients::Gradients;
use super::rows::Row;
use super::shard::{Change, Clock, Plan, Shard, ShardState};
use crate::proto;
use crate::replication_log::FrameSender;
use crate::wire::frame;

/// Bytes of keys and numbers in one message, about.
const PIECE: usize = 1024 * 1024;

/// A part of the rows as it is at one moment, on its way to a backup.
pub struct Copy {
    pub part: u32,
    pub version: u64,
    pub state: ShardState,
    /// Distinguishes this copy from those of streams before and after it.
    pub attach: u64,
}

impl Copy {
    /// Sends the part; returns false if the stream has ended before.
    pub async fn send(&self, backup: &FrameSender) -> bool {
        let part = self.part;
        for (table, snapshot) in (0..).zip(&self.state.tables) {
            let mut piece = proto::RowsContents { part, table, ..proto::RowsContents::default() };
            let mut numbers: Vec<u8> = Vec::new();
            for row in snapshot.rows() {
                piece.keys.push(row.key);
                piece.used.push(row.used);
                piece.updates.push(row.updates);
                numbers.extend_from_slice(bytemuck::cast_slice(row.numbers));
                if numbers.len() + piece.keys.len() * 24 >= PIECE {
                    let full = proto::RowsContents { numbers: std::mem::take(&mut numbers).into(), ..piece };
                    if !backup.send_when_free(contents(full)).await {
                        return false;
                    }
                    piece = proto::RowsContents { part, table, ..proto::RowsContents::default() };
                }
            }
            if !piece.keys.is_empty()
                && !backup.send_when_free(contents(proto::RowsContents { numbers: numbers.into(), ..piece })).await
            {
                return false;
            }
        }
        let Clock { next_steps, requests } = self.state.clock.clone();
        let last = Some(proto::RowsClock { version: self.version, next_steps, requests });
        backup.send_when_free(contents(proto::RowsContents { part, last, ..proto::RowsContents::default() })).await
    }
}

fn contents(rows: proto::RowsContents) -> Bytes {
    frame::message(&proto::Replica { rows: Some(rows), ..proto::Replica::default() })
}

/// The messages of a change that makes `version` of a part, one behind the other.
pub fn change_frames(change: &Change, part: u32, version: u64, plan: &Plan) -> Bytes {
    let mut frames = Vec::new();
    let mut send = |update: proto::RowsUpdate| {
        let update = proto::RowsUpdate { part, version, ..update };
        frames.extend_from_slice(&frame::message(&proto::Replica {
            rows_update: Some(update),
            ..proto::Replica::default()
        }));
    };
    for ((table, gradients), spec) in (0..).zip(&change.gradients).zip(&*plan.specs) {
        let (keys, values) = gradients.as_slices();
        let rows = (PIECE / (8 + spec.width * size_of::<f32>())).max(1);
        for (keys, values) in keys.chunks(rows).zip(values.chunks(rows * spec.width)) {
            let gradients = Bytes::copy_from_slice(bytemuck::cast_slice(values));
            let gradients = vec![proto::TableGradients { table, keys: keys.to_vec(), gradients }];
            send(proto::RowsUpdate { gradients, ..proto::RowsUpdate::default() });
        }
    }
    for (table, keys) in &change.evicted {
        for keys in keys.chunks(PIECE / 8) {
            let evicted = vec![proto::TableKeys { table: *table as u32, keys: keys.to_vec() }];
            send(proto::RowsUpdate { evicted, ..proto::RowsUpdate::default() });
        }
    }
    let next_steps = change.next_steps.iter().map(|(trainer, step)| proto::NextStep { trainer: *trainer, step: *step });
    send(proto::RowsUpdate {
        last: true,
        factor: change.factor,
        next_steps: next_steps.collect(),
        requests: change.requests,
        ..proto::RowsUpdate::default()
    });
    frames.into()
}

/// Puts a change together from its messages.
///
/// # Errors
/// If they do not fit the tables.
pub fn change(pieces: Vec<proto::RowsUpdate>, plan: &Plan) -> Result<Change, Status> {
    let mut change = Change::default();
    for proto::RowsUpdate { gradients, evicted, next_steps, factor, requests, last, .. } in pieces {
        for proto::TableGradients { table, keys, gradients } in gradients {
            let spec = plan.specs.get(table as usize).filter(|spec| gradients.len() == keys.len() * spec.width * 4);
            let spec = spec.ok_or_else(|| misfit(table))?;
            change.gradients.resize_with(plan.specs.len(), Gradients::default);
            for (key, row) in keys.iter().zip(gradients.as_chunks().0.chunks_exact(spec.width)) {
                change.gradients[table as usize].add_bytes(*key, row);
            }
        }
        for proto::TableKeys { table, keys } in evicted {
            plan.specs.get(table as usize).ok_or_else(|| misfit(table))?;
            change.evicted.push((table as usize, keys));
        }
        if last {
            change.next_steps = next_steps.into_iter().map(|next| (next.trainer, next.step)).collect();
            (change.factor, change.requests) = (factor, requests);
        }
    }
    Ok(change)
}

/// Puts the rows of a message into `shard`.
///
/// # Errors
/// If they do not fit the tables.
pub fn insert<W>(shard: &mut Shard<W>, rows: &proto::RowsContents, plan: &Plan) -> Result<(), Status> {
    let proto::RowsContents { table, keys, used, updates, numbers, .. } = rows;
    let slots = plan.rules.rows_optimizer.slots();
    let stride = plan.specs.get(*table as usize).map(|spec| spec.width * (1 + slots));
    let fits = |stride: &usize| {
        keys.len() == used.len() && keys.len() == updates.len() && numbers.len() == keys.len() * stride * 4
    };
    let stride = stride.filter(fits).ok_or_else(|| misfit(*table))?;
    let numbers: Vec<f32> = numbers.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect();
    for (((key, used), updates), numbers) in keys.iter().zip(used).zip(updates).zip(numbers.chunks_exact(stride)) {
        shard.insert(*table as usize, Row { key: *key, used: *used, updates: *updates, numbers });
    }
    Ok(())
}

/// The error for rows of another server that do not fit the tables here.
fn misfit(table: u32) -> Status {
    Status::data_loss(format!(
        "rows of table {table} do not fit the tables of this server; start all with the same version"
    ))
}

/// Reports to the primary that this server has a part at `version`.
pub fn acknowledge(primary: &FrameSender, part: u32, version: u64) {
    let message = proto::RowsAcknowledgement { part, version };
    let message = proto::follow_request::Message::RowsAcknowledgement(message);
    // A primary that has disconnected needs no acknowledgement.
    primary.send(Ok(frame::message(&proto::FollowRequest { message: Some(message) })));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message as _;
    use psjobs_api::Training;
    use psjobs_api::training::{Consistency, ConsistencyMode, Optimizer, OptimizerKind};

    use super::*;
    use crate::sparse::TableSpec;
    use crate::splitmix;
    use crate::training_rules::TrainingRules;

    const WIDTH: usize = 3;

    fn plan(mode: ConsistencyMode) -> Plan {
        let training = Training {
            consistency: Consistency { mode, ..Consistency::default() },
            optimizer: Optimizer { kind: OptimizerKind::Adam, ..Optimizer::default() },
            ..Training::default()
        };
        let few = TableSpec { max_rows: 200, ..TableSpec::new("few", WIDTH, 0.5) };
        let specs = vec![few, TableSpec::new("many", WIDTH, 0.1)].into();
        Plan { specs, rules: Arc::new(TrainingRules::new(&training, 2, &[])), trainers: 2, seed: 7, shards: 1 }
    }

    fn replicas(mut frames: &[u8]) -> Vec<proto::Replica> {
        let mut messages = Vec::new();
        while let Some((prefix, rest)) = frames.split_first_chunk::<5>() {
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            messages.push(proto::Replica::decode(&rest[..length]).expect("a message"));
            frames = &rest[length..];
        }
        messages
    }

    /// Table, key, last use, updates and numbers of a row.
    type Whole = (usize, u64, u64, u64, Vec<u32>);

    /// All rows, and the next steps.
    fn all_of(shard: &Shard<()>) -> (Vec<Whole>, Vec<u64>) {
        let state = shard.state();
        let mut rows = Vec::new();
        for (table, snapshot) in state.tables.iter().enumerate() {
            rows.extend(snapshot.rows().map(|row| {
                (table, row.key, row.used, row.updates, row.numbers.iter().map(|number| number.to_bits()).collect())
            }));
        }
        rows.sort();
        (rows, state.clock.next_steps)
    }

    /// Pushes the gradients of `count` keys by each trainer in turn; returns the messages of the changes.
    fn push(shard: &mut Shard<()>, plan: &Plan, version: &mut u64, step: u64, count: u64) -> Vec<Bytes> {
        let mut frames = Vec::new();
        for trainer in 0..2 {
            let mut gradients = vec![Gradients::default(); 2];
            for i in 0..count {
                let key = splitmix::finalize(step * 1_000_003 + i * 7 + u64::from(trainer)) % 100_000;
                gradients[(i % 2) as usize].add_bytes(key, &[(i as f32).to_le_bytes(); WIDTH]);
            }
            shard.push(trainer, step, (step != 3).then_some(gradients), ());
            shard.evict(0);
            if let Some(change) = shard.take_change() {
                *version += 1;
                frames.push(change_frames(&change, 0, *version, plan));
            }
        }
        frames
    }

    #[test]
    fn a_backup_that_follows_every_change_is_equal() {
        for mode in [ConsistencyMode::Sync, ConsistencyMode::Async] {
            let plan = plan(mode);
            let (mut primary, mut backup, mut version) = (Shard::new(&plan), Shard::new(&plan), 0);
            for step in 0..40 {
                // One step needs several messages.
                let count = if step == 20 { 200_000 } else { 50 };
                for frames in push(&mut primary, &plan, &mut version, step, count) {
                    let pieces = replicas(&frames).into_iter().map(|replica| replica.rows_update.expect("an update"));
                    let pieces: Vec<_> = pieces.collect();
                    assert!(pieces.iter().rev().skip(1).all(|piece| !piece.last), "only the last one is the last");
                    assert!(step != 20 || pieces.len() > 2, "{} pieces", pieces.len());
                    backup.follow(&change(pieces, &plan).expect("it fits"));
                }
                assert!(all_of(&primary) == all_of(&backup), "{mode:?}, step {step}");
            }
            assert!(primary.holdings().next().is_some_and(|few| few.evicted > 0));
            assert_eq!(all_of(&backup).1, [40, 40], "a step whose gradients were left out counts, too");
        }
    }

    #[tokio::test]
    async fn a_copy_in_pieces_is_equal() {
        let plan = plan(ConsistencyMode::Async);
        let (mut primary, mut version) = (Shard::new(&plan), 0);
        for step in 0..3 {
            push(&mut primary, &plan, &mut version, step, 50_000);
        }
        let (sender, mut frames) = FrameSender::new(1);
        let copy = Copy { part: 0, version, state: primary.state(), attach: 1 };
        let sending = tokio::spawn(async move { copy.send(&sender).await });
        let (mut backup, mut pieces) = (Shard::<()>::new(&plan), 0);
        while let Some(frame) = frames.recv().await {
            for replica in replicas(&frame.expect("a frame")) {
                let rows = replica.rows.expect("rows");
                pieces += 1;
                match &rows.last {
                    None => insert(&mut backup, &rows, &plan).expect("they fit"),
                    Some(proto::RowsClock { version: at, next_steps, requests }) => {
                        assert_eq!(*at, version);
                        backup.resume([&Clock { next_steps: next_steps.clone(), requests: *requests }]);
                    }
                }
            }
        }
        assert!(sending.await.expect("no panic") && pieces > 3, "{pieces} pieces");
        assert!(all_of(&primary) == all_of(&backup));
    }

    #[test]
    fn rows_of_other_tables_are_refused() {
        let plan = plan(ConsistencyMode::Async);
        let gradients = |table, bytes| {
            let gradients = proto::TableGradients { table, keys: vec![1], gradients: vec![0; bytes].into() };
            vec![proto::RowsUpdate { gradients: vec![gradients], last: true, ..proto::RowsUpdate::default() }]
        };
        assert!(change(gradients(1, WIDTH * 4), &plan).is_ok());
        assert!(change(gradients(2, WIDTH * 4), &plan).is_err() && change(gradients(1, 8), &plan).is_err());
        let rows = |table, numbers| proto::RowsContents {
            table,
            keys: vec![1],
            used: vec![1],
            updates: vec![1],
            numbers: vec![0; numbers].into(),
            ..proto::RowsContents::default()
        };
        let mut shard = Shard::<()>::new(&plan);
        // Adam keeps two slots beside the values.
        assert!(insert(&mut shard, &rows(0, 3 * WIDTH * 4), &plan).is_ok());
        for (table, numbers) in [(2, 3 * WIDTH * 4), (0, WIDTH * 4), (0, 0)] {
            assert!(insert(&mut shard, &rows(table, numbers), &plan).is_err(), "{table}, {numbers}");
        }
    }
}
