use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body as _, Frame};
use proptest::prelude::*;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::{Code, Status};

use super::*;
use crate::proto::{self, exchange_request::Message};

/// A body that comes in these pieces.
struct Pieces(std::vec::IntoIter<Bytes>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.next().map(|piece| Ok(Frame::data(piece))))
    }
}

fn reader_of(pieces: Vec<Bytes>) -> Reader {
    Reader::new(Body::new(Pieces(pieces.into_iter())), Buffers::default())
}

/// The bytes of a stream, cut at those places that are within it.
fn cut(stream: &[u8], places: &[usize]) -> Vec<Bytes> {
    let mut places: Vec<usize> = places.iter().copied().filter(|place| *place <= stream.len()).collect();
    places.sort_unstable();
    places.push(stream.len());
    let starts = std::iter::once(0).chain(places.clone());
    starts.zip(places.clone()).map(|(start, end)| Bytes::copy_from_slice(&stream[start..end])).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

fn block(payload: usize) -> proto::GradientBlock {
    let payload = (0..payload).map(|i| i as u8).collect::<Vec<_>>().into();
    proto::GradientBlock { step: 300, block: 7, codec: 2, version: 1 << 40, payload }
}

proptest! {
    /// Messages written by hand are, byte for byte, what a generated client writes.
    #[test]
    fn frames_are_those_of_generated_code(payload in 0_usize..70_000, cuts in prop::collection::vec(0_usize..70_100, 0..8)) {
        let (gradient, buffers) = (block(payload), Buffers::default());
        let head = proto::GradientBlock { payload: Bytes::new(), ..gradient.clone() };
        let frame = frame::gradient(&buffers, &head, payload, |bytes| bytes.copy_from_slice(&gradient.payload));
        let request = proto::ExchangeRequest { message: Some(Message::Gradient(gradient.clone())) };
        prop_assert_eq!(frame.len() - frame::PREFIX, request.encoded_len());
        prop_assert_eq!(&proto::ExchangeRequest::decode(frame.slice(frame::PREFIX..)).expect("protobuf"), &request);

        let proto::GradientBlock { step, block, codec, version, payload: bytes } = gradient;
        let answer = proto::ParameterBlock { step, block, codec, version, payload: bytes.clone() };
        let head = proto::ParameterBlock { payload: Bytes::new(), ..answer.clone() };
        let parameters = frame::parameters(&buffers, &head, payload, |target| target.copy_from_slice(&bytes));
        prop_assert_eq!(&parameters[..], &frame::message(&answer)[..]);

        // However the bytes are cut, the reader finds both messages.
        let pieces = cut(&[frame, frame::message(&request)].concat(), &cuts);
        let mut reader = reader_of(pieces);
        runtime().block_on(async {
            for _ in 0..2 {
                let found: proto::ExchangeRequest = reader.message().await.expect("reads").expect("a message");
                prop_assert_eq!(&found, &request);
            }
            prop_assert!(reader.message::<proto::ExchangeRequest>().await.expect("a good end").is_none());
            Ok(())
        })?;
    }

    /// A block that is read in pieces is the one that is read as a message, however its bytes are cut.
    #[test]
    fn blocks_are_read_in_pieces(
        payload in 0_usize..70_000,
        head: (u64, u32, u64),
        cuts in prop::collection::vec(0_usize..140_000, 0..8),
    ) {
        let (step, block, version) = head;
        let payload: Bytes = (0..payload).map(|i| i as u8).collect::<Vec<_>>().into();
        let sent = proto::ParameterBlock { step, block, codec: 2, version, payload };
        let pieces = cut(&[frame::message(&sent), frame::message(&sent)].concat(), &cuts);
        let mut reader = reader_of(pieces);
        runtime().block_on(async {
            let (mut found, length) = reader.block().await.expect("reads").expect("a message");
            let mut bytes = Vec::new();
            reader.pieces(length, |piece| bytes.extend_from_slice(piece)).await.expect("reads");
            prop_assert!(found.payload.is_empty());
            found.payload = bytes.into();
            prop_assert_eq!(&found, &sent);
            let (mut found, length) = reader.block().await.expect("reads").expect("a message");
            found.payload = reader.bytes(length).await.expect("reads");
            prop_assert_eq!(&found, &sent);
            prop_assert!(reader.block().await.expect("a good end").is_none());
            Ok(())
        })?;
    }

    /// Whatever bytes come, the reader answers with a message, an end or an error.
    #[test]
    fn nonsense_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = Bytes::from(bytes);
        runtime().block_on(async {
            let mut reader = reader_of(vec![bytes.clone()]);
            while let Ok(Some(_)) = reader.message::<proto::ExchangeRequest>().await {}
            let mut reader = reader_of(vec![bytes]);
            while let Ok(Some((_, length))) = reader.block().await {
                if reader.pieces(length, |_| {}).await.is_err() {
                    break;
                }
            }
        });
    }
}

#[test]
fn bad_messages_are_named() {
    let huge = [&[0][..], &(MAX_MESSAGE as u32 + 1).to_be_bytes()].concat();
    for (label, bytes, code, words) in [
        ("cut within the prefix", vec![0, 0, 0], Code::InvalidArgument, "within a message"),
        ("cut within the message", vec![0, 0, 0, 0, 5, 1], Code::InvalidArgument, "within a message"),
        ("cut before the message", vec![0, 0, 0, 0, 5], Code::InvalidArgument, "within a message"),
        ("compressed", vec![1, 0, 0, 0, 0], Code::Unimplemented, "plain"),
        ("too long", huge, Code::InvalidArgument, "longer than"),
        ("no protobuf", vec![0, 0, 0, 0, 2, 0xff, 0xff], Code::InvalidArgument, "no protobuf"),
    ] {
        let bytes = Bytes::from(bytes);
        for as_block in [false, true] {
            let mut reader = reader_of(vec![bytes.clone()]);
            let status = runtime().block_on(async {
                if as_block {
                    reader.block().await.map(drop).expect_err(label)
                } else {
                    reader.message::<proto::ExchangeRequest>().await.map(drop).expect_err(label)
                }
            });
            assert_eq!(status.code(), code, "{label}");
            assert!(status.message().contains(words), "{label}: {}", status.message());
        }
    }
}

#[test]
fn a_block_that_ends_within_its_payload_is_cut() {
    let sent = proto::ParameterBlock { step: 1, payload: vec![9; 100].into(), ..Default::default() };
    let whole = frame::message(&sent);
    let mut reader = reader_of(vec![whole.slice(..whole.len() - 1)]);
    runtime().block_on(async {
        let (_, length) = reader.block().await.expect("its head is there").expect("a message");
        assert_eq!(length, 100);
        let mut found = 0;
        let status = reader.pieces(length, |piece| found += piece.len()).await.expect_err("the last byte never came");
        assert_eq!(found, 99);
        assert!(status.message().contains("within a message"), "{}", status.message());
    });
}

#[test]
fn a_block_that_others_write_comes_whole() {
    let want = proto::ParameterBlock { step: 300, block: 7, codec: 2, version: 1, payload: vec![1, 2, 3].into() };
    let step = [0x08, 0xac, 0x02];
    let (block, codec, version, payload) = ([0x10, 7], [0x18, 2], [0x20, 1], [0x2a, 3, 1, 2, 3]);
    let unknown = [0x32, 1, 0];
    for (label, message, in_pieces) in [
        ("as servers do", [&step[..], &block, &codec, &version, &payload].concat(), true),
        ("numbers in another order", [&version[..], &block, &codec, &step, &payload].concat(), true),
        ("the payload before a number", [&step[..], &block, &codec, &payload, &version].concat(), false),
        ("a field of tomorrow", [&step[..], &block, &codec, &version, &payload, &unknown].concat(), false),
        ("a field of tomorrow before it", [&step[..], &block, &codec, &version, &unknown, &payload].concat(), false),
    ] {
        let framed = [&[0, 0, 0, 0, message.len() as u8][..], &message].concat();
        let mut reader = reader_of(vec![framed.into()]);
        let (mut found, length) = runtime().block_on(reader.block()).expect(label).expect(label);
        assert_eq!(length > 0, in_pieces, "{label}");
        if length > 0 {
            found.payload = runtime().block_on(reader.bytes(length)).expect(label);
        }
        assert_eq!(found, want, "{label}");
    }
}

/// The next frame of a body that has one ready; `None` at its end.
fn next(body: &mut Outgoing) -> Option<Frame<Bytes>> {
    let mut context = Context::from_waker(std::task::Waker::noop());
    match Pin::new(body).poll_frame(&mut context) {
        Poll::Ready(frame) => frame.map(|frame| frame.expect("cannot fail")),
        Poll::Pending => panic!("nothing is ready"),
    }
}

/// Returns the status in a body's last frame.
fn status(frame: Option<Frame<Bytes>>) -> Status {
    let trailers = frame.expect("a frame").into_trailers().expect("trailers");
    Status::from_header_map(&trailers).expect("a status")
}

#[test]
fn small_messages_leave_together_and_in_order() {
    let (sender, receiver) = mpsc::channel(10);
    let large = Bytes::from(vec![9; 10_000]);
    for message in [Bytes::from("a"), Bytes::from("b"), large.clone(), Bytes::from("c")] {
        sender.try_send(Ok(message)).expect("fits");
    }
    sender.try_send(Err(Status::aborted("enough"))).expect("fits");
    sender.try_send(Ok(Bytes::from("never sent"))).expect("fits");
    let mut body = Outgoing::response(receiver);
    let data = |frame: Option<Frame<Bytes>>| frame.expect("a frame").into_data().expect("data");
    assert_eq!(data(next(&mut body)), "ab");
    assert_eq!(data(next(&mut body)), large);
    assert_eq!(data(next(&mut body)), "c");
    assert_eq!(status(next(&mut body)).message(), "enough");
    assert!(next(&mut body).is_none());
}

#[test]
fn a_body_that_is_ended_while_it_looks_reports_why() {
    let (sender, receiver) = mpsc::channel(1);
    let mut sender = Some(sender);
    // Between the look at the end and the look at the channel, another thread ends the body and lets go of it.
    let cut = std::future::poll_fn(move |_| match sender.take() {
        Some(sender) => {
            drop(sender);
            Poll::Pending
        }
        None => Poll::Ready(Status::aborted("enough")),
    });
    let mut body = Outgoing::response(receiver).until(cut);
    assert_eq!(status(next(&mut body)).message(), "enough");
}

#[test]
fn a_buffer_is_used_again_when_all_views_of_it_are_gone() {
    let buffers = Buffers::default();
    let mut buffer = buffers.take(10_000);
    buffer.bytes_mut().fill(1);
    let address = buffer.as_ref().as_ptr();
    let view = buffer.freeze().slice(5..10);
    assert_ne!(buffers.take(10_000).as_ref().as_ptr(), address, "it is still looked at");
    drop(view);
    assert_eq!(buffers.take(8_000).as_ref().as_ptr(), address);
}

#[test]
fn the_more_trainers_a_server_has_the_fewer_blocks_each_has_on_its_way() {
    for (blocks, trainers, want) in [(96, 1, 16), (96, 2, 8), (96, 8, 2), (96, 64, 1), (1, 1, 1), (4000, 16, 16)] {
        assert_eq!(super::window(blocks, trainers), want, "{blocks} blocks, {trainers} trainers");
    }
}
