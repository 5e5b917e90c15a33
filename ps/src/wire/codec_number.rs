//! The numbers of codecs in messages.

use psjobs_arithmetic::codec::Codec;

use crate::proto;

/// Returns the number of `codec` in messages.
#[must_use]
pub fn number(codec: Codec) -> i32 {
    let wire = match codec {
        Codec::F32 => proto::Codec::F32,
        Codec::Bf16 => proto::Codec::Bf16,
        Codec::Fp16 => proto::Codec::Fp16,
        Codec::Int8 => proto::Codec::Int8,
        Codec::OneBit => proto::Codec::OneBit,
        Codec::TopK => proto::Codec::TopK,
    };
    wire.into()
}

/// Returns the codec with this number in messages.
#[must_use]
pub fn from_number(wanted: i32) -> Option<Codec> {
    let all = [Codec::F32, Codec::Bf16, Codec::Fp16, Codec::Int8, Codec::OneBit, Codec::TopK];
    all.into_iter().find(|codec| number(*codec) == wanted)
}
