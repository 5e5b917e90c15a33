//! Decodes a payload that comes in pieces, each when it comes, so that it is never in memory as a whole. For codecs whose
//! elements stand by themselves: F32, BF16 and FP16.

use super::Codec;

/// Bytes of the longest element.
const LONGEST: usize = 4;

/// A payload of which a part has come.
#[derive(Clone, Debug)]
pub struct Pieces {
    codec: Codec,
    /// Bytes of an element.
    width: usize,
    /// Elements that are decoded.
    done: usize,
    /// The first bytes of the element that a piece ended in, so that no element is ever half written.
    cut: [u8; LONGEST],
    cut_len: usize,
}

impl Pieces {
    /// Begins a payload of `length` bytes for a block of `elements`; `None` if it has another length, or a codec that decodes
    /// whole payloads only.
    #[must_use]
    pub fn new(codec: Codec, length: usize, elements: usize) -> Option<Self> {
        let width = match codec {
            Codec::F32 => 4,
            Codec::Bf16 | Codec::Fp16 => 2,
            Codec::Int8 | Codec::OneBit | Codec::TopK => return None,
        };
        let fits = elements.checked_mul(width) == Some(length);
        fits.then_some(Self { codec, width, done: 0, cut: [0; LONGEST], cut_len: 0 })
    }

    /// Writes the elements that are complete with this piece to their places in `block`.
    ///
    /// # Panics
    /// If the pieces are longer than the payload, or `block` has fewer elements.
    pub fn take(&mut self, mut piece: &[u8], block: &mut [f32]) {
        if self.cut_len > 0 {
            let (head, rest) = piece.split_at((self.width - self.cut_len).min(piece.len()));
            self.cut[self.cut_len..][..head.len()].copy_from_slice(head);
            self.cut_len += head.len();
            piece = rest;
            if self.cut_len < self.width {
                return;
            }
            let element = self.cut;
            self.cut_len = 0;
            self.decode(&element[..self.width], block);
        }
        let (whole, cut) = piece.split_at(piece.len() / self.width * self.width);
        self.decode(whole, block);
        self.cut[..cut.len()].copy_from_slice(cut);
        self.cut_len = cut.len();
    }

    fn decode(&mut self, whole: &[u8], block: &mut [f32]) {
        let end = self.done + whole.len() / self.width;
        self.codec.decode(whole, &mut block[self.done..end]).expect("these are whole elements");
        self.done = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SINGLE: [Codec; 3] = [Codec::F32, Codec::Bf16, Codec::Fp16];

    proptest! {
        #[test]
        fn pieces_are_decoded_as_the_whole(
            elements in 0..300_usize,
            bytes in prop::collection::vec(any::<u8>(), 1200),
            cuts in prop::collection::vec(0..1200_usize, 0..9),
        ) {
            for codec in SINGLE {
                let length = elements * if codec == Codec::F32 { 4 } else { 2 };
                let payload = &bytes[..length];
                let mut want = vec![0.0; elements];
                codec.decode(payload, &mut want).expect("it has the length");
                let (mut found, mut pieces) = (vec![7.0; elements], Pieces::new(codec, length, elements).expect("fits"));
                let mut ends: Vec<usize> = cuts.iter().copied().filter(|cut| *cut < length).chain([length]).collect();
                ends.sort_unstable();
                let mut from = 0;
                for end in ends {
                    pieces.take(&payload[from..end], &mut found);
                    from = end;
                    // An element whose bytes have not all come is as it was before.
                    let whole = end * elements / length.max(1);
                    prop_assert!(found[whole..].iter().all(|value| *value == 7.0), "{}: after {} bytes", codec, end);
                }
                let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&found), bits(&want), "{}", codec);
            }
        }
    }

    #[test]
    fn a_payload_of_another_length_or_of_dependent_elements_is_not_begun() {
        for codec in SINGLE {
            let width = if codec == Codec::F32 { 4 } else { 2 };
            assert!(Pieces::new(codec, 3 * width, 3).is_some(), "{codec}");
            for length in [0, 3 * width - 1, 3 * width + 1, 4 * width] {
                assert!(Pieces::new(codec, length, 3).is_none(), "{codec}: {length} bytes for 3 elements");
            }
        }
        for codec in [Codec::Int8, Codec::OneBit, Codec::TopK] {
            assert!(Pieces::new(codec, 12, 3).is_none(), "{codec}");
        }
    }
}
