//! Bytes of a peer as frames of the protocol.

use bytes::Bytes;
use replay_wire::frame::HEADER_BYTES;
use replay_wire::{
    Frame, FrameLimits, Header, OutgoingFrame, decode_reply, decode_request, encode_reply, encode_request,
};

use crate::allocations;

/// Limit of a frame here.
const FRAME: u64 = 1 << 20;

/// Decodes frame after frame, as a request and as a reply, until the bytes end or are no frame. What decodes encodes again, to the same
/// message.
///
/// # Panics
/// When a message changes, or takes more memory than `decode_request` promises.
pub fn decode(input: &[u8]) {
    let mut rest = input;
    while let Some((header, frame, after)) = split(rest) {
        // The copy of the frame, texts and numbers, and the lists of a reply, which take three times the message, or the definition of a
        // table, which takes six times its JSON; an error's text.
        let limit = 8 * u64::from(header.control) + (32 << 10);
        request(&frame, limit);
        reply(&frame, limit);
        rest = after;
    }
}

/// The first frame, and the bytes after it.
fn split(bytes: &[u8]) -> Option<(Header, Frame, &[u8])> {
    let (head, body) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::parse(*head, &FrameLimits::new(FRAME)).ok()?;
    let (control, body) = body.split_at_checked(header.control as usize)?;
    let (payload, after) = body.split_at_checked(header.payload as usize)?;
    let frame = Frame::new(control, Bytes::copy_from_slice(payload));
    Some((header, frame, after))
}

fn request(frame: &Frame, limit: u64) {
    let decode = || decode_request(frame.clone());
    let Ok(request) = allocations::within(limit, "a request", decode) else {
        return;
    };
    // Priorities that are not finite decode, so that the memory can refuse them with its own error.
    let Ok(encoded) = encode_request(&request) else {
        return;
    };
    let again = decode_request(received(&encoded)).expect("an encoded request decodes");
    let encoded_again = encode_request(&again).expect("it has been encoded before");
    assert_same(&encoded, &encoded_again);
}

fn reply(frame: &Frame, limit: u64) {
    let decode = || decode_reply(frame.clone());
    let Ok(reply) = allocations::within(limit, "a reply", decode) else {
        return;
    };
    let Ok(encoded) = encode_reply(reply) else {
        return;
    };
    let again = decode_reply(received(&encoded)).expect("an encoded reply decodes");
    let encoded_again = encode_reply(again).expect("it has been encoded before");
    assert_same(&encoded, &encoded_again);
}

fn payload(frame: &OutgoingFrame) -> Vec<u8> {
    frame.payload().concat()
}

fn received(frame: &OutgoingFrame) -> Frame {
    Frame::new(frame.control(), Bytes::from(payload(frame)))
}

fn assert_same(one: &OutgoingFrame, other: &OutgoingFrame) {
    assert_eq!(one.control(), other.control());
    assert_eq!(payload(one), payload(other));
}
