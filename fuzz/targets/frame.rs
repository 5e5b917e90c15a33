//! Whatever bytes come down a data stream, or one between two servers, in whatever pieces: a message, an end or an
//! error. What was read as a gradient either fits a block or is refused, and is written again as the same message.
#![no_main]

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::Frame;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use psjobs_ps::layout::{Layout, TensorSpec};
use psjobs_ps::proto::exchange_request::Message as Exchange;
use psjobs_ps::proto::{
    self, ExchangeRequest, FollowRequest, GradientBlock, InitializeBlocksRequest, JoinRequest, ParameterBlock,
    PullRequest, Replica,
};
use psjobs_ps::sparse::TableSpec;
use psjobs_ps::wire::codec_number;
use psjobs_ps::wire::{Buffers, Reader, frame};
use tonic::Status;
use tonic::body::Body;

/// Elements of the block that gradients are for: several chunks of every codec, the last not full.
const ELEMENTS: usize = 1300;

/// A body that comes in pieces of one length.
struct Pieces {
    rest: Bytes,
    length: usize,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let length = self.length.min(self.rest.len());
        let piece = self.rest.split_to(length);
        Poll::Ready((length > 0).then(|| Ok(Frame::data(piece))))
    }
}

// First byte: what the stream is of. Second: how long its pieces are, 0 for all at once.
fuzz_target!(|input: &[u8]| {
    let [kind, length, stream @ ..] = input else { return };
    let length = if *length == 0 { stream.len() } else { (*length).into() };
    let body = Pieces { rest: Bytes::copy_from_slice(stream), length };
    let mut reader = Reader::new(Body::new(body), Buffers::default());
    match kind % 7 {
        0 => read(&mut reader, |request: ExchangeRequest| match request.message {
            Some(Exchange::Gradient(gradient)) => take_gradient(&gradient),
            Some(Exchange::Open(_) | Exchange::JoinRound(_)) | None => {}
        }),
        1 => read(&mut reader, |block: ParameterBlock| take_values(block.codec, &block.payload)),
        2 => read(&mut reader, |push: InitializeBlocksRequest| take_values(push.codec, &push.payload)),
        3 => read(&mut reader, |_: PullRequest| {}),
        4 => read(&mut reader, |join: JoinRequest| take_tensors(join.tensors)),
        5 => read(&mut reader, take_replica),
        _ => read(&mut reader, |_: FollowRequest| {}),
    }
});

fn read<M: Message + Default>(reader: &mut Reader, take: impl Fn(M)) {
    while let Ok(Some(message)) = now(reader.message()) {
        take(message);
    }
}

/// A body that is all there never makes its reader wait.
fn now<M>(reading: impl Future<Output = Result<Option<M>, Status>>) -> Result<Option<M>, Status> {
    match pin!(reading).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(read) => read,
        Poll::Pending => panic!("the reader waits for a body that is all there"),
    }
}

fn take_gradient(gradient: &GradientBlock) {
    take_values(gradient.codec, &gradient.payload);
    let (head, payload) = (GradientBlock { payload: Bytes::new(), ..gradient.clone() }, &gradient.payload);
    let frame = frame::gradient(&Buffers::default(), &head, payload.len(), |bytes| bytes.copy_from_slice(payload));
    let again = ExchangeRequest::decode(frame.slice(frame::PREFIX..)).expect("what was written can be read");
    assert_eq!(again.message.as_ref(), Some(&Exchange::Gradient(gradient.clone())));
}

fn take_values(codec: i32, payload: &[u8]) {
    let Some(codec) = codec_number::from_number(codec) else { return };
    let mut values = vec![7.0; ELEMENTS];
    let checked = codec.check(payload, ELEMENTS);
    assert_eq!(codec.decode(payload, &mut values), checked, "what passes the check can be decoded, and nothing else");
    assert!(checked.is_ok() || values.iter().all(|value| *value == 7.0), "a refused payload changes nothing");
}

/// Takes what a backup reads from its primary.
fn take_replica(replica: Replica) {
    take_values(replica.codec, &replica.payload);
    let (head, payload) = (Replica { payload: Bytes::new(), ..replica.clone() }, &replica.payload);
    let frame = frame::replica(&Buffers::default(), &head, payload.len(), |bytes| bytes.copy_from_slice(payload));
    let again = Replica::decode(frame.slice(frame::PREFIX..)).expect("what was written can be read");
    // As bytes: a number may be NaN, which is not equal to itself.
    assert!(again.encode_to_vec() == replica.encode_to_vec(), "{again:?} was written for {replica:?}");
    take_tensors(replica.model.unwrap_or_default().tensors);
    let tables: Vec<_> = replica.tables.unwrap_or_default().tables.into_iter().map(TableSpec::from).collect();
    // Tables that cannot be are named, whatever they are.
    let _ = TableSpec::validate(&tables);
}

fn take_tensors(tensors: Vec<proto::TensorSpec>) {
    let tensors: Vec<_> = tensors.into_iter().map(TensorSpec::from).collect();
    if let Ok(layout) = Layout::new(&tensors, 3) {
        let last = layout.blocks() - 1;
        assert_eq!(layout.range(last).end, layout.elements());
        assert!(layout.range(last + 1).is_empty());
    }
}
