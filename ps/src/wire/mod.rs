//! How blocks travel: gRPC messages written and read by hand over the HTTP/2 bodies of tonic. The
//! bytes are those that generated code would write, so any gRPC client can take part; but a payload
//! is copied once on its way out and once on its way in, into memory that is used again ([`buffers`]) or
//! to where its values belong ([`Reader::pieces`]). [`frame`] writes messages, [`Reader`] takes them out of a body, [`Outgoing`] is the
//! body that carries them.

pub mod buffers;
mod call;
pub mod codec_number;
pub mod frame;
mod outgoing;
mod reader;
mod stream_abort;

pub use buffers::Buffers;
pub use call::call;
pub use outgoing::Outgoing;
pub use reader::Reader;
pub(crate) use stream_abort::StreamAbort;

/// Longest message that is read: a block and its envelope, with room for larger blocks.
pub const MAX_MESSAGE: usize = 8 * 1024 * 1024;
/// Longest first message of a stream. It says who the peer is; until then no more memory is taken for it.
pub const MAX_FIRST_MESSAGE: usize = 64 * 1024;

/// Gradient blocks that a server may owe a trainer an answer for, where payloads travel: enough to keep the network
/// busy, few enough that memory does not grow with the model.
pub const WINDOW: usize = 16;

/// As [`WINDOW`], for each of so many trainers of a server that holds so many blocks: all together they may fill about
/// a sixth of the memory that the blocks take, as long as each has one on its way.
#[must_use]
pub fn window(blocks: usize, trainers: u32) -> usize {
    (blocks / (6 * trainers.max(1) as usize)).clamp(1, WINDOW)
}

/// HTTP/2 frames that either side takes. In the protocol's 16 KiB a block has 64 of them.
pub const MAX_FRAME: u32 = 256 * 1024;

#[cfg(test)]
mod tests;
