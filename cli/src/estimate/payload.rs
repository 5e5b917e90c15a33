//! Bytes of one exchange of a trainer: the blocks of the servers' own layout, in the lengths that the codecs give them.

use psjobs_api::training::Compression;
use psjobs_arithmetic::codec::{Codec, Encoder};
use psjobs_ps::layout::{Layout, LayoutError, TensorSpec};
use psjobs_ps::wire;

/// Bytes of a message beside its payload: numbers of block, step and version, and lengths.
const HEAD: f64 = 32.0;

/// The blocks of a model and their messages. Bytes and elements are those of the mean block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Payload {
    /// Blocks of the model.
    pub blocks: f64,
    /// Blocks of the server that has most.
    pub blocks_of_server: f64,
    /// Blocks that a trainer has under way to each server.
    pub window: f64,
    /// Elements of a block.
    pub elements: f64,
    /// Bytes of a message with a gradient.
    pub up: f64,
    /// Bytes of a message with parameters.
    pub down: f64,
    /// Gradients travel in another codec than F32.
    pub codes_gradients: bool,
    /// Parameters do.
    pub codes_parameters: bool,
}

impl Payload {
    /// Lays a model of so many parameters out over `servers`.
    ///
    /// # Errors
    /// If that is no model, or more than the servers hold.
    pub fn new(parameters: u64, servers: u32, trainers: u32, compression: &Compression) -> Result<Self, LayoutError> {
        let layout = Layout::new(&[TensorSpec::new("parameters", vec![parameters])], servers as usize)?;
        let gradients = Codec::of_gradients(compression.codec);
        let values = Codec::of_parameters(compression.codec);
        let (blocks, of_server) = (layout.blocks(), layout.owned_by(0).count());
        let bytes = |encoder: &Encoder| {
            let last = layout.range(blocks - 1).len();
            let full = f64::from(blocks - 1) * encoder.payload_len(layout.block_elements()) as f64;
            HEAD + (full + encoder.payload_len(last) as f64) / f64::from(blocks)
        };
        Ok(Self {
            blocks: blocks.into(),
            blocks_of_server: of_server as f64,
            window: wire::window(of_server, trainers) as f64,
            elements: layout.elements() as f64 / f64::from(blocks),
            up: bytes(&Encoder::new(gradients, compression.density)),
            down: bytes(&Encoder::new(values, 1.0)),
            codes_gradients: gradients != Codec::F32,
            codes_parameters: values != Codec::F32,
        })
    }
}

#[cfg(test)]
mod tests {
    use psjobs_api::training::Codec as Named;

    use super::*;

    #[test]
    fn an_exchange_carries_what_the_codec_makes_of_the_blocks() {
        // A block has 262,144 elements; the bytes are those of docs/codecs.md for each of them.
        for (codec, up, down) in [
            (Named::F32, 4.0, 4.0),
            (Named::BF16, 2.0, 2.0),
            (Named::FP16, 2.0, 2.0),
            (Named::INT8, 1.0 + 4.0 / 256.0, 2.0),
            (Named::OneBit, 0.125 + 8.0 / 512.0, 2.0),
            (Named::TopK, 0.08, 2.0),
        ] {
            let compression = Compression { codec, ..Compression::default() };
            let payload = Payload::new(8 * 262_144, 2, 1, &compression).expect("a model");
            assert_eq!((payload.blocks, payload.blocks_of_server, payload.window), (8.0, 4.0, 1.0), "{codec:?}");
            for (found, want) in [(payload.up, up), (payload.down, down)] {
                let found = (found - HEAD) / 262_144.0;
                assert!((found - want).abs() < 1e-3, "{codec:?}: {found} bytes an element, not {want}");
            }
            assert_eq!(payload.codes_gradients, codec != Named::F32);
        }
    }

    #[test]
    fn the_server_with_most_blocks_counts_and_many_trainers_have_a_small_window() {
        let plain = Compression::default();
        for (parameters, servers, trainers, want) in [
            // 25 M parameters are 95.4 blocks.
            (25_000_000, 1, 1, (96.0, 96.0, 16.0)),
            (25_000_000, 1, 8, (96.0, 96.0, 2.0)),
            (25_000_000, 10, 1, (96.0, 10.0, 1.0)),
            // A small model has a block for each server.
            (1_000, 4, 1, (4.0, 1.0, 1.0)),
        ] {
            let found = Payload::new(parameters, servers, trainers, &plain).expect("a model");
            let found = (found.blocks, found.blocks_of_server, found.window);
            assert_eq!(found, want, "{parameters} on {servers}, {trainers} trainers");
        }
        assert!(Payload::new(0, 1, 1, &plain).is_err(), "no parameters");
    }
}
