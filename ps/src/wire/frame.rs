//! Messages as they travel: a byte that says "not compressed", the length, then protobuf. Those with
//! a payload are written field by field, so that the payload is written where it leaves from.

use bytes::{BufMut as _, Bytes};
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint, encoded_len_varint, key_len};

use super::buffers::{Buffer, Buffers};
use crate::proto;

/// Bytes in front of every message.
pub const PREFIX: usize = 5;
/// Longest that the fields of a `ParameterBlock` before its payload are, with the payload's key and length: three numbers
/// of up to 10 bytes with their keys, one of up to 5, and the payload's.
pub const LONGEST_HEAD: usize = 3 * 11 + 6 + 6;
/// Number of `ExchangeRequest.gradient`.
const GRADIENT: u32 = 2;
/// Number of `GradientBlock.payload`.
const GRADIENT_PAYLOAD: u32 = 4;
/// Number of `ParameterBlock.payload`.
const PARAMETER_PAYLOAD: u32 = 5;
/// Number of `Replica.payload`.
const REPLICA_PAYLOAD: u32 = 9;

/// Any message without a large payload.
#[must_use]
pub fn message(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = Vec::with_capacity(PREFIX + length);
    prefix(&mut bytes, length);
    message.encode(&mut bytes).expect("a Vec grows");
    bytes.into()
}

/// An `ExchangeRequest` with a gradient: `head` without its payload, and `payload` bytes that `fill`
/// writes.
#[must_use]
pub fn gradient(buffers: &Buffers, head: &proto::GradientBlock, payload: usize, fill: impl FnOnce(&mut [u8])) -> Bytes {
    let inner = head.encoded_len() + payload_len(GRADIENT_PAYLOAD, payload);
    let outer = key_len(GRADIENT) + encoded_len_varint(inner as u64) + inner;
    let mut start = Vec::with_capacity(64);
    prefix(&mut start, outer);
    encode_key(GRADIENT, WireType::LengthDelimited, &mut start);
    encode_varint(inner as u64, &mut start);
    head.encode(&mut start).expect("a Vec grows");
    finish(buffers, start, GRADIENT_PAYLOAD, payload, fill)
}

/// A `ParameterBlock`: `head` without its payload, and `payload` bytes that `fill` writes.
#[must_use]
pub fn parameters(
    buffers: &Buffers,
    head: &proto::ParameterBlock,
    payload: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Bytes {
    let mut start = Vec::with_capacity(64);
    prefix(&mut start, head.encoded_len() + payload_len(PARAMETER_PAYLOAD, payload));
    head.encode(&mut start).expect("a Vec grows");
    finish(buffers, start, PARAMETER_PAYLOAD, payload, fill)
}

/// Reads the fields of a `ParameterBlock` of `length` bytes up to its payload, from its first bytes. Returns them and where
/// the payload begins. `None` if it is not written as [`parameters`] does, with the payload as its end.
#[must_use]
pub fn parameters_head(start: &[u8], length: usize) -> Option<(proto::ParameterBlock, usize)> {
    let start = &start[..start.len().min(length)];
    let mut rest = start;
    loop {
        let fields = start.len() - rest.len();
        let (field, wire) = decode_key(&mut rest).ok()?;
        let number = decode_varint(&mut rest).ok()?;
        let behind = start.len() - rest.len();
        match wire {
            WireType::Varint => {}
            WireType::LengthDelimited if field == PARAMETER_PAYLOAD && number == (length - behind) as u64 => {
                let head = proto::ParameterBlock::decode(&start[..fields]).ok()?;
                return Some((head, behind));
            }
            _ => return None,
        }
    }
}

/// A `Replica` with an update: `head` without its payload, and `payload` bytes that `fill` writes.
#[must_use]
pub fn replica(buffers: &Buffers, head: &proto::Replica, payload: usize, fill: impl FnOnce(&mut [u8])) -> Bytes {
    let mut start = Vec::with_capacity(64);
    prefix(&mut start, head.encoded_len() + payload_len(REPLICA_PAYLOAD, payload));
    head.encode(&mut start).expect("a Vec grows");
    finish(buffers, start, REPLICA_PAYLOAD, payload, fill)
}

fn prefix(bytes: &mut Vec<u8>, length: usize) {
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
}

/// Bytes of a payload field; an empty one is left out, as protobuf does.
fn payload_len(field: u32, payload: usize) -> usize {
    if payload == 0 { 0 } else { key_len(field) + encoded_len_varint(payload as u64) + payload }
}

fn finish(buffers: &Buffers, mut start: Vec<u8>, field: u32, payload: usize, fill: impl FnOnce(&mut [u8])) -> Bytes {
    if payload == 0 {
        return start.into();
    }
    encode_key(field, WireType::LengthDelimited, &mut start);
    encode_varint(payload as u64, &mut start);
    let mut buffer: Buffer = buffers.take(start.len() + payload);
    let (head, body) = buffer.bytes_mut().split_at_mut(start.len());
    head.copy_from_slice(&start);
    fill(body);
    buffer.freeze()
}
