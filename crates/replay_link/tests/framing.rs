//! Frames over streams: lengths are capped, ends are noticed, and a dropped read or write can be continued.

use std::io::{Cursor, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use proptest::prelude::*;
use tokio::io::{AsyncWrite, AsyncWriteExt, duplex};

use base::allocation::TooLarge;
use replay_core::replay::{SampleCredit, Sampled};
use replay_link::error::Error;
use replay_link::framing::{FrameReader, write_frame};
use replay_wire::ErrorCode;
use replay_wire::*;

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn put(bytes: impl Into<Bytes>) -> Request {
    let body =
        RequestBody::PutParameters(PutParameters { name: "policy".into(), version: 0, id: 0, bytes: bytes.into() });
    Request::new(3, 5, body)
}

/// The bytes of a frame.
fn wire_bytes(request: &Request) -> Vec<u8> {
    let mut out = Vec::new();
    let mut frame = encode_request(request).unwrap();
    block_on(write_frame(&mut frame, &mut out, "memory")).unwrap();
    out
}

/// What a reader with these limits says about these bytes, after which the peer hangs up.
fn read(bytes: &[u8], limits: FrameLimits) -> Result<Option<Frame>, Error> {
    block_on(FrameReader::new(bytes, limits, "peer").frame())
}

#[test]
fn frames_come_one_after_the_other_and_then_the_end() {
    let (first, second) = (put("one"), Request::new(4, 0, RequestBody::Stats));
    let bytes = [wire_bytes(&first), wire_bytes(&second)].concat();
    let mut frames = FrameReader::new(&bytes[..], FrameLimits::default(), "peer");
    block_on(async {
        for request in [first, second] {
            let frame = frames.frame().await.unwrap().unwrap();
            assert_eq!(decode_request(frame).unwrap(), request);
        }
        assert!(frames.frame().await.unwrap().is_none());
    });
}

#[test]
fn a_write_of_no_bytes_is_not_the_end_of_a_frame() {
    let bytes = wire_bytes(&put("some payload")).len();
    for room in 0..bytes {
        let mut full = vec![0; room];
        let mut frame = encode_request(&put("some payload")).unwrap();
        let written = block_on(write_frame(&mut frame, &mut Cursor::new(&mut full[..]), "memory"));
        assert!(matches!(written, Err(Error::Disconnected { .. })), "{room} of {bytes} bytes: {written:?}");
    }
}

#[test]
fn a_connection_that_ends_within_a_frame_is_an_error_at_every_byte() {
    let bytes = wire_bytes(&put("some payload"));
    for end in 1..bytes.len() {
        let error = read(&bytes[..end], FrameLimits::default()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Disconnected, "{end}: {error}");
        assert!(error.to_string().contains("within a frame"), "{error}");
    }
}

#[test]
fn lengths_over_the_limits_are_refused_before_the_rest_arrives() {
    let limits = FrameLimits { max_frame_bytes: 1000, max_control_bytes: 512 };
    let lengths = |control: u32, payload: u32| {
        let header = [control.to_le_bytes(), payload.to_le_bytes()].concat();
        read(&header, limits).err().unwrap()
    };
    let refused = lengths(520, 0);
    assert!(matches!(refused, Error::TooLarge(TooLarge { size: 520, limit: 512, .. })), "{refused}");
    let refused = lengths(512, 489);
    assert!(matches!(refused, Error::TooLarge(TooLarge { size: 1001, limit: 1000, .. })), "{refused}");
    let refused = lengths(8, u32::MAX);
    assert!(matches!(refused, Error::TooLarge { .. }), "{refused}");
    assert_eq!(lengths(512, 488).code(), ErrorCode::Disconnected);
    for no_control in [0, 12] {
        assert_eq!(lengths(no_control, 0).code(), ErrorCode::Protocol);
    }
}

#[test]
fn another_protocol_is_named_as_such() {
    let error = read(b"GET / HTTP/1.1\r\n\r\n", FrameLimits::default()).err().unwrap();
    assert!(matches!(error.code(), ErrorCode::Protocol | ErrorCode::TooLarge), "{error}");
}

#[test]
fn reads_and_writes_go_on_where_they_were_dropped() {
    let request = put(vec![7; 1000]);
    let mut outgoing = encode_request(&request).unwrap();
    let (mut near, far) = duplex(3);
    let mut frames = FrameReader::new(far, FrameLimits::default(), "peer");
    let frame = block_on(async {
        loop {
            // Each turn moves at most three bytes, then both futures are dropped.
            tokio::select! {
                biased;
                frame = frames.frame() => break frame,
                done = write_frame(&mut outgoing, &mut near, "peer") => done.unwrap(),
                _ = tokio::task::yield_now() => {}
            }
        }
    });
    assert_eq!(decode_request(frame.unwrap().unwrap()).unwrap(), request);
}

/// Takes up to `step` bytes a call, across segments.
struct Trickle {
    step: usize,
    taken: Vec<u8>,
}

impl AsyncWrite for Trickle {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        let n = bytes.len().min(self.step);
        self.taken.extend_from_slice(&bytes[..n]);
        Poll::Ready(Ok(n))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        assert!(slices.len() <= 1024, "more than Linux takes");
        let step = self.step;
        let taken: Vec<u8> = slices.iter().flat_map(|s| s.iter().copied()).take(step).collect();
        self.taken.extend_from_slice(&taken);
        Poll::Ready(Ok(taken.len()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct Credit(Arc<AtomicU32>);

impl SampleCredit for Credit {
    fn delivered(self: Box<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn batch(blobs: &[Vec<u8>], delivered: &Arc<AtomicU32>) -> OutgoingFrame {
    let sampled = Sampled {
        items: vec![],
        live_items: 0,
        min_probability: None,
        state: None,
        rows: Bytes::from_static(b"rows"),
        blobs: blobs.iter().map(|b| b.clone().into()).collect(),
        shares: Vec::new(),
        lease: 0,
        credit: Some(Box::new(Credit(delivered.clone()))),
    };
    encode_reply(Reply { id: 9, body: ReplyBody::Sampled(sampled) }).unwrap()
}

proptest! {
    #[test]
    fn segments_arrive_whole_and_in_order_however_they_are_taken(
        blobs in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..30),
        step in 1usize..100,
    ) {
        let delivered = Arc::default();
        let mut writer = Trickle { step, taken: Vec::new() };
        block_on(write_frame(&mut batch(&blobs, &delivered), &mut writer, "peer")).unwrap();
        prop_assert_eq!(delivered.load(Ordering::Relaxed), 1);
        let frame = read(&writer.taken, FrameLimits::default()).unwrap().unwrap();
        let ReplyBody::Sampled(sampled) = decode_reply(frame).unwrap().body else {
            panic!("another reply");
        };
        prop_assert_eq!(&sampled.rows[..], b"rows");
        prop_assert_eq!(sampled.blobs[0].as_ref(), blobs.concat());
    }
}

#[test]
fn a_thousand_and_more_segments_are_written() {
    let blobs: Vec<_> = (0..5000u32).map(|i| i.to_le_bytes().to_vec()).collect();
    let mut writer = Trickle { step: usize::MAX, taken: Vec::new() };
    let delivered = Arc::default();
    block_on(write_frame(&mut batch(&blobs, &delivered), &mut writer, "peer")).unwrap();
    assert!(writer.taken.ends_with(&blobs.concat()));
}

#[test]
fn a_batch_that_was_not_written_is_not_delivered() {
    let delivered = Arc::default();
    block_on(async {
        let (mut near, far) = duplex(16);
        drop(far);
        let mut frame = batch(&[vec![0; 100]], &delivered);
        let error = write_frame(&mut frame, &mut near, "peer").await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Disconnected);
        near.shutdown().await.ok();
    });
    assert_eq!(delivered.load(Ordering::Relaxed), 0);
}
