//! How a block of f32 travels. A payload is little-endian and holds one block; its codec is named
//! in the frame, the number of elements follows from the layout. `Encoder` writes payloads,
//! `Codec` reads them, `Feedback` keeps what a lossy gradient codec left out and adds it to the
//! next step's gradient. Frames and streams are the wire's business.
//!
//! | codec  | bytes an element | what is lost                                             |
//! |--------|------------------|----------------------------------------------------------|
//! | F32    | 4                | nothing                                                  |
//! | BF16   | 2                | 16 of 23 mantissa bits                                   |
//! | FP16   | 2                | 13 of 23 mantissa bits, magnitudes below 6e-8            |
//! | INT8   | 1.02             | all but 255 steps between the extremes of 256 elements   |
//! | OneBit | 0.14             | all but the sign and two means in 512 elements           |
//! | TopK   | 8 x density      | all but the largest elements                             |

pub mod bf16;
pub mod feedback;
pub mod fp16;
pub mod int8;
pub mod onebit;
pub mod pieces;
pub mod topk;

use std::fmt;

use psjobs_api::training;

pub use feedback::Feedback;
pub use pieces::Pieces;

/// The form of a payload. Decoding needs nothing else: chunk sizes are fixed, and top-k's number
/// of elements follows from the payload's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// IEEE single precision, as it is in memory.
    F32,
    /// The upper half of an f32, rounded to nearest even.
    Bf16,
    /// IEEE half precision, rounded to nearest even, saturating.
    Fp16,
    /// A scale and signed bytes for each chunk of 256 elements.
    Int8,
    /// Two means and a sign bit an element for each chunk of 512 (Seide et al., Interspeech 2014).
    OneBit,
    /// Indices and values of the largest elements (Lin et al., ICLR 2018).
    TopK,
}

/// A payload that does not fit its block. Nothing of it was decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The payload is cut, too long, or for another block.
    #[error(
        "a {codec} payload for a block of {elements} elements has {expected} bytes, found {found}; \
         sender and receiver must use one layout"
    )]
    Length {
        /// Codec of the frame.
        codec: Codec,
        /// Elements of the block.
        elements: usize,
        /// Bytes such a payload has, in words where several lengths are right.
        expected: String,
        /// Bytes it has.
        found: usize,
    },
    /// A top-k index beyond the block, or not above the one before it.
    #[error(
        "top-k entry {entry} has index {found}, expected one from {low} to {high}: \
         indices ascend and stay within the block"
    )]
    Index {
        /// Place in the payload.
        entry: usize,
        /// Least index allowed there.
        low: u64,
        /// Greatest index allowed.
        high: u64,
        /// The index.
        found: u32,
    },
}

/// Values that are decoded together where the whole is not needed: a multiple of the chunks of every codec.
const PART: usize = 4096;

impl Codec {
    /// The codec of gradients that a job asks for.
    #[must_use]
    pub fn of_gradients(spec: training::Codec) -> Self {
        match spec {
            training::Codec::F32 => Self::F32,
            training::Codec::BF16 => Self::Bf16,
            training::Codec::FP16 => Self::Fp16,
            training::Codec::INT8 => Self::Int8,
            training::Codec::OneBit => Self::OneBit,
            training::Codec::TopK => Self::TopK,
        }
    }

    /// The codec of parameters in a job whose gradients are coded so: they have no error feedback, so
    /// no codec that loses more than a rounding.
    #[must_use]
    pub fn of_parameters(spec: training::Codec) -> Self {
        if spec == training::Codec::F32 { Self::F32 } else { Self::Bf16 }
    }

    /// Writes `values` to `payload`, without error feedback.
    ///
    /// # Panics
    /// If the codec needs error feedback, or the payload has another length.
    pub fn write(self, values: &[f32], payload: &mut [u8]) {
        match self {
            Self::F32 => payload.copy_from_slice(bytemuck::cast_slice(values)),
            Self::Bf16 => bf16::encode(values, payload),
            _ => panic!("{self} is not a codec of parameters"),
        }
    }

    /// Checks that `payload` can be decoded into a block of `elements`.
    ///
    /// # Errors
    /// Says what was expected and what was found.
    pub fn check(self, payload: &[u8], elements: usize) -> Result<(), CodecError> {
        let expected = match self {
            Self::F32 => elements * 4,
            Self::Bf16 | Self::Fp16 => elements * 2,
            Self::Int8 => int8::payload_len(elements),
            Self::OneBit => onebit::payload_len(elements),
            Self::TopK => return topk::check(payload, elements),
        };
        if payload.len() == expected {
            return Ok(());
        }
        Err(CodecError::Length { codec: self, elements, expected: expected.to_string(), found: payload.len() })
    }

    /// Writes the payload's values to `out`.
    ///
    /// # Errors
    /// As `check`; `out` is unchanged then.
    pub fn decode(self, payload: &[u8], out: &mut [f32]) -> Result<(), CodecError> {
        self.check(payload, out.len())?;
        match self {
            Self::TopK => {
                out.fill(0.0);
                topk::scatter(payload, out);
            }
            _ => self.for_each(payload, out, |slot, value| *slot = value),
        }
        Ok(())
    }

    /// Calls `take` with the values of the payload, a part at a time and in their order, with the index of the part's first
    /// value. A part fits in the fastest cache, so that a caller who goes over the values once needs no decoded copy of them.
    /// The payload of a codec that decodes whole payloads only is decoded into `scratch`.
    ///
    /// # Errors
    /// As `check`; `take` is not called then.
    pub fn decode_in_parts(
        self,
        payload: &[u8],
        elements: usize,
        scratch: &mut Vec<f32>,
        mut take: impl FnMut(usize, &[f32]),
    ) -> Result<(), CodecError> {
        let part_len = match self {
            Self::F32 => PART * 4,
            Self::Bf16 | Self::Fp16 => PART * 2,
            Self::Int8 => int8::payload_len(PART),
            Self::OneBit => onebit::payload_len(PART),
            Self::TopK => {
                scratch.resize(elements, 0.0);
                self.decode(payload, scratch)?;
                take(0, scratch);
                return Ok(());
            }
        };
        self.check(payload, elements)?;
        let mut part = [0.0; PART];
        for (payload, start) in payload.chunks(part_len).zip((0..elements).step_by(PART)) {
            let part = &mut part[..PART.min(elements - start)];
            self.decode(payload, part).expect("a part of a payload that fits");
            take(start, part);
        }
        Ok(())
    }

    /// Adds the payload's values to `out`: a sum over trainers needs no decoded copy.
    ///
    /// # Errors
    /// As `check`; `out` is unchanged then.
    pub fn accumulate(self, payload: &[u8], out: &mut [f32]) -> Result<(), CodecError> {
        self.check(payload, out.len())?;
        match self {
            Self::TopK => topk::scatter(payload, out),
            _ => self.for_each(payload, out, |slot, value| *slot += value),
        }
        Ok(())
    }

    /// Returns whether the payload, which passes [`Codec::check`], holds neither NaN nor infinity, where that can be seen without
    /// decoding it.
    #[must_use]
    pub fn finite(self, payload: &[u8]) -> Option<bool> {
        let exponent = match self {
            Self::Bf16 => 0x7f80,
            Self::Fp16 => 0x7c00,
            Self::Int8 => return Some(int8::is_finite(payload)),
            Self::F32 | Self::OneBit | Self::TopK => return None,
        };
        Some(!crate::simd::run(any_exponent_full, (payload.as_chunks().0, exponent)))
    }

    fn for_each(self, payload: &[u8], out: &mut [f32], write: impl Fn(&mut f32, f32) + Copy) {
        match self {
            Self::F32 => crate::simd::run(f32_for_each, (payload, out, write)),
            Self::Bf16 => crate::simd::run(bf16::for_each, (payload, out, write)),
            Self::Fp16 => crate::simd::run(fp16::for_each, (payload, out, write)),
            Self::Int8 => crate::simd::run(int8::for_each, (payload, out, write)),
            Self::OneBit => crate::simd::run(onebit::for_each, (payload, out, write)),
            Self::TopK => unreachable!("top-k has no value for each element"),
        }
    }
}

#[inline(always)]
fn any_exponent_full((values, exponent): (&[[u8; 2]], u16)) -> bool {
    // No early end: a loop without one is vectorised.
    values.iter().fold(false, |any, value| any | (u16::from_le_bytes(*value) & exponent == exponent))
}

#[inline(always)]
fn f32_for_each((payload, out, write): (&[u8], &mut [f32], impl Fn(&mut f32, f32))) {
    for (slot, bytes) in out.iter_mut().zip(payload.as_chunks::<4>().0) {
        write(slot, f32::from_le_bytes(*bytes));
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::Fp16 => "FP16",
            Self::Int8 => "INT8",
            Self::OneBit => "OneBit",
            Self::TopK => "TopK",
        })
    }
}

/// Writes payloads of one codec. Holds top-k's scratch space, so one encoder serves all blocks of
/// a sender and allocates nothing after its first block.
#[derive(Clone, Debug)]
pub struct Encoder {
    codec: Codec,
    density: f64,
    candidates: Vec<topk::Candidate>,
}

impl Encoder {
    /// `density` is the share of elements that top-k sends, above 0 and at most 1; other codecs
    /// ignore it.
    #[must_use]
    pub fn new(codec: Codec, density: f64) -> Self {
        Self { codec, density, candidates: Vec::new() }
    }

    /// Codec of the payloads.
    #[must_use]
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Bytes of a payload for a block of `elements`.
    #[must_use]
    pub fn payload_len(&self, elements: usize) -> usize {
        match self.codec {
            Codec::F32 => elements * 4,
            Codec::Bf16 | Codec::Fp16 => elements * 2,
            Codec::Int8 => int8::payload_len(elements),
            Codec::OneBit => onebit::payload_len(elements),
            Codec::TopK => topk::payload_len(topk::count(elements, self.density)),
        }
    }

    /// Fills `payload` and leaves in `values` what the payload does not carry: the decoded
    /// payload plus the rest is the sum that was there before, up to rounding. A rest that
    /// is not a finite number becomes 0, so that one bad gradient does not spoil all later ones;
    /// the payload itself decodes to something not finite, which its receiver can see.
    ///
    /// # Panics
    /// If `payload` is not `payload_len(values.len())` bytes long.
    pub fn encode(&mut self, values: &mut [f32], payload: &mut [u8]) {
        assert_eq!(payload.len(), self.payload_len(values.len()), "the caller sizes the payload with payload_len");
        match self.codec {
            Codec::F32 => {
                for (value, bytes) in values.iter_mut().zip(payload.as_chunks_mut::<4>().0) {
                    *bytes = std::mem::take(value).to_le_bytes();
                }
            }
            Codec::Bf16 => crate::simd::run(bf16::encode_rest, (values, payload)),
            Codec::Fp16 => crate::simd::run(fp16::encode_rest, (values, payload)),
            Codec::Int8 => crate::simd::run(int8::encode_rest, (values, payload)),
            Codec::OneBit => crate::simd::run(onebit::encode_rest, (values, payload)),
            Codec::TopK => topk::encode_rest(values, payload, &mut self.candidates),
        }
    }
}

/// Returns the part of `value` that was not sent, or 0 if the difference is not finite.
#[inline(always)]
fn rest(value: f32, sent: f32) -> f32 {
    let rest = value - sent;
    if rest.abs() < f32::INFINITY { rest } else { 0.0 }
}

#[cfg(test)]
mod tests;
