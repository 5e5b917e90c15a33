//! TensorBoard's event files: a sequence of records, each an `Event` message in a frame with checksums.
//!
//! Sources: `tensorflow/core/util/event.proto` and `tensorflow/core/framework/summary.proto` for the messages, of which this
//! module has the fields that scalars need; `tensorflow/core/lib/io/record_writer.h` for the frame: length (u64), masked
//! CRC-32C of the length, message, masked CRC-32C of the message, little endian.

use std::collections::BTreeMap;

use prost::Message;

/// The version that the first event of a file names.
const VERSION: &str = "brain.Event:2";
/// The status of a session's beginning: readers discard the points of its step and later ones that they have read.
const START: i32 = 1;

/// Values of metrics at one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Point {
    /// Steps that were done.
    pub step: u64,
    /// When, in seconds since 1970.
    pub unix_seconds: f64,
    /// By name.
    pub values: BTreeMap<String, f32>,
}

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "Content", tags = "3, 5, 7")]
    content: Option<Content>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Content {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Appends the beginning of a file that is written at `unix_seconds`.
pub fn put_beginning(file: &mut Vec<u8>, unix_seconds: f64) {
    put(file, &Event { wall_time: unix_seconds, step: 0, content: Some(Content::FileVersion(VERSION.to_owned())) });
}

/// Appends that readers discard the points of `step` and later ones that they have read of the same folder before.
pub fn put_restart(file: &mut Vec<u8>, unix_seconds: f64, step: u64) {
    let content = Some(Content::SessionLog(SessionLog { status: START }));
    put(file, &Event { wall_time: unix_seconds, step: i64::try_from(step).unwrap_or(i64::MAX), content });
}

/// Appends a point.
pub fn put_point(file: &mut Vec<u8>, point: &Point) {
    let values = point.values.iter();
    let values = values.map(|(name, value)| Value { tag: name.clone(), simple_value: Some(*value) }).collect();
    let step = i64::try_from(point.step).unwrap_or(i64::MAX);
    put(file, &Event { wall_time: point.unix_seconds, step, content: Some(Content::Summary(Summary { values })) });
}

/// The content of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// Values at a step.
    Point(Point),
    /// Readers discard the points of this step and later ones that they have read before.
    Restart(u64),
    /// Something else, as the version of the file.
    Other,
}

/// Splits the first record off a file; `None` if it is torn or damaged, or there is none.
#[must_use]
pub fn first_record(file: &[u8]) -> Option<(Record, &[u8])> {
    let (message, rest) = record(file)?;
    let event = Event::decode(message).ok()?;
    let step = event.step.max(0).unsigned_abs();
    let record = match event.content {
        Some(Content::Summary(summary)) => {
            let scalar = |value: Value| Some((value.tag, value.simple_value?));
            let values = summary.values.into_iter().filter_map(scalar).collect();
            Record::Point(Point { step, unix_seconds: event.wall_time, values })
        }
        Some(Content::SessionLog(SessionLog { status: START })) => Record::Restart(step),
        _ => Record::Other,
    };
    Some((record, rest))
}

/// Appends to `points`, those of the files before, the points of a file, up to the first record that is torn or damaged.
pub fn read(mut file: &[u8], points: &mut Vec<Point>) {
    while let Some((record, rest)) = first_record(file) {
        file = rest;
        match record {
            Record::Point(point) => points.push(point),
            Record::Restart(step) => points.retain(|point| point.step < step),
            Record::Other => {}
        }
    }
}

fn put(file: &mut Vec<u8>, event: &Event) {
    let message = event.encode_to_vec();
    let length = (message.len() as u64).to_le_bytes();
    file.extend_from_slice(&length);
    file.extend_from_slice(&checksum(&length).to_le_bytes());
    file.extend_from_slice(&message);
    file.extend_from_slice(&checksum(&message).to_le_bytes());
}

/// Splits the first record off, `None` if there is no whole one.
fn record(file: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = file.split_first_chunk::<8>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    if checksum(length) != u32::from_le_bytes(*sum) {
        return None;
    }
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (message, rest) = rest.split_at_checked(length)?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    (checksum(message) == u32::from_le_bytes(*sum)).then_some((message, rest))
}

/// Returns the masked CRC-32C: a checksum of bytes that hold checksums themselves would be weak otherwise.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(points: &[Point]) -> Vec<u8> {
        let mut file = Vec::new();
        put_beginning(&mut file, 1.0);
        put_restart(&mut file, 1.0, 0);
        points.iter().for_each(|point| put_point(&mut file, point));
        file
    }

    fn point() -> impl Strategy<Value = Point> {
        // Every bit pattern of a float, those that are no number among them.
        let values = proptest::collection::btree_map("[a-z/]{1,9}", any::<u32>().prop_map(f32::from_bits), 0..4);
        let step = 0..=i64::MAX.unsigned_abs();
        (step, 0.0..2e9, values).prop_map(|(step, unix_seconds, values)| Point { step, unix_seconds, values })
    }

    fn points(file: &[u8]) -> Vec<Point> {
        let mut points = Vec::new();
        read(file, &mut points);
        points
    }

    /// Points as text, with their values as bits: NaN differs from itself.
    fn bits(points: &[Point]) -> Vec<String> {
        let of = |Point { step, unix_seconds, values }: &Point| {
            let values: BTreeMap<_, _> = values.iter().map(|(name, value)| (name, value.to_bits())).collect();
            format!("{step} {} {values:?}", unix_seconds.to_bits())
        };
        points.iter().map(of).collect()
    }

    #[test]
    fn a_file_begins_as_tensorboard_expects_it() {
        // As the class EventFileWriter of the package tensorboard 2.20 writes it at the time 1.0.
        let expected =
            [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22, 0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x1a, 0x0d];
        let mut file = Vec::new();
        put_beginning(&mut file, 1.0);
        assert_eq!(file[..expected.len()], expected);
        assert_eq!(&file[expected.len()..expected.len() + VERSION.len()], VERSION.as_bytes());
    }

    proptest! {
        #[test]
        fn points_are_read_as_they_were_written(written in proptest::collection::vec(point(), 0..8)) {
            prop_assert_eq!(bits(&points(&file(&written))), bits(&written));
            let mut twice = written.clone();
            read(&file(&written), &mut twice);
            prop_assert_eq!(bits(&twice), bits(&written), "a restart discards what was read before");
        }

        #[test]
        fn of_a_torn_or_damaged_file_what_comes_before_is_read(
            written in proptest::collection::vec(point(), 1..5),
            place in any::<prop::sample::Index>(),
            flip in 0_u8..8,
        ) {
            let whole = file(&written);
            let torn = &whole[..place.index(whole.len())];
            let found = points(torn);
            prop_assert_eq!(bits(&found), bits(&written[..found.len()]));
            let mut damaged = whole.clone();
            damaged[place.index(whole.len())] ^= 1 << flip;
            let found = points(&damaged);
            prop_assert!(found.len() < written.len());
            prop_assert_eq!(bits(&found), bits(&written[..found.len()]));
        }
    }
}
