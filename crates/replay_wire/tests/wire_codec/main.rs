//! The codec: messages come back as they went, and no bytes make a decoder panic or allocate.

mod messages;

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use messages::{Answer, answer, body, bytes, received, request, seen};
use replay_core::replay::*;
use replay_core::schema::{Codec, Column, Dtype, TableConfig};
use replay_core::view::{NStep, ViewSpec};
use replay_wire::error::ErrorCode;
use replay_wire::*;

proptest! {
    #[test]
    fn requests_come_back_as_they_went(request in request()) {
        let outgoing = encode_request(&request).unwrap();
        prop_assert_eq!(decode_request(received(&outgoing)).unwrap(), request);
    }

    #[test]
    fn replies_come_back_as_they_went(id: u64, answer in answer()) {
        let outgoing = encode_reply(Reply { id, body: body(answer.clone()) }).unwrap();
        let reply = decode_reply(received(&outgoing)).unwrap();
        prop_assert_eq!(reply.id, id);
        let expected = match answer {
            Answer::Sampled { items, live_items, lease, min, state, rows, blobs } => {
                Answer::Sampled { items, live_items, lease, min, state, rows, blobs: vec![blobs.concat().into()] }
            }
            other => other,
        };
        prop_assert_eq!(seen(reply), expected);
    }

    #[test]
    fn random_bytes_do_not_panic(control in vec(any::<u8>(), 0..400), payload in bytes()) {
        let frame = Frame::new(&control, payload);
        let _ = decode_request(frame.clone());
        let _ = decode_reply(frame);
    }

    #[test]
    fn mutated_and_truncated_messages_do_not_panic(
        request in request(),
        id: u64,
        answer in answer(),
        mutations in vec((any::<Index>(), any::<u8>()), 0..6),
        keep in any::<Index>(),
        truncate: bool,
    ) {
        let reply = encode_reply(Reply { id, body: body(answer) }).unwrap();
        for outgoing in [encode_request(&request).unwrap(), reply] {
            let mut control = outgoing.control().to_vec();
            for (at, byte) in &mutations {
                let at = at.index(control.len());
                control[at] = *byte;
            }
            if truncate {
                control.truncate(keep.index(control.len()));
            }
            let frame = Frame::new(&control, Bytes::from_static(b"payload"));
            let _ = decode_request(frame.clone());
            let _ = decode_reply(frame);
        }
    }
}

#[test]
fn every_error_code_crosses() {
    for number in 0..=ErrorCode::OutOfMemory as u16 {
        let code = code(number);
        let outgoing =
            encode_reply(Reply { id: 1, body: ReplyBody::Error { code, message: "why".into(), waited_for: None } })
                .unwrap();
        let reply = decode_reply(received(&outgoing)).unwrap();
        assert_eq!(seen(reply), Answer::Error(code, "why".into(), None));
    }
}

/// The code of a number, by the order that the wire and the enum share.
fn code(number: u16) -> ErrorCode {
    use ErrorCode::*;
    let all = [
        Internal,
        Priority,
        NoMass,
        UnknownTable,
        TableDiffers,
        Table,
        Schema,
        TooLarge,
        Deadline,
        View,
        Fenced,
        Expired,
        Protocol,
        Version,
        Authentication,
        Connect,
        Disconnected,
        Corrupt,
        Config,
        Parameters,
        Closed,
        Io,
        Interrupted,
        Extension,
        Forbidden,
        OutOfMemory,
    ];
    assert_eq!(all[number as usize] as u16, number);
    all[number as usize]
}

/// Frame of a push of one chunk, whose list is then of `chunks` structs of no bytes; `padding` bytes follow.
fn empty_chunks(chunks: u64, padding: usize) -> Frame {
    let chunk = ChunkHead { stream: 1, rows: 2, first_step: 3, bytes: 4, version: 5 };
    let body = PushBody { chunks: vec![chunk], ..PushBody::default() };
    let request = Request::new(1, 0, RequestBody::Push(Push { writer: 1, epoch: 1, sequence: 1, body }));
    let mut control = encode_request(&request).unwrap().control().to_vec();
    // The list's tag: one element of four data words.
    let tag = (1u64 << 2 | 4 << 32).to_le_bytes();
    let at = (0..control.len()).step_by(8).find(|&i| control[i..i + 8] == tag).unwrap();
    control[at..at + 8].copy_from_slice(&(chunks << 2).to_le_bytes());
    // The only segment's length, in words.
    let words = (control.len() - 8 + padding) / 8;
    control[4..8].copy_from_slice(&(words as u32).to_le_bytes());
    control.resize(control.len() + padding, 0);
    Frame::new(&control, Bytes::new())
}

#[test]
fn a_list_of_half_a_billion_empty_structs_is_refused() {
    let error = decode_request(empty_chunks(u64::from(u32::MAX >> 3), 0)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Protocol, "{error}");
}

#[test]
#[cfg_attr(miri, ignore = "takes hours: a message of 1 MB")]
fn a_request_takes_little_more_memory_decoded_than_encoded() {
    let padding = 1 << 20;
    // As many as the message has words: 4 bytes of memory for each of its bytes.
    let chunks = (padding / 8) as u64;
    let error = decode_request(empty_chunks(chunks, padding)).unwrap_err();
    assert!(error.to_string().contains("decoded"), "{error}");
    let fit = padding / size_of::<ChunkHead>();
    let request = decode_request(empty_chunks(fit as u64, padding)).unwrap();
    let RequestBody::Push(push) = request.body else {
        panic!("{:?} is no push", request.body);
    };
    assert_eq!(push.body.chunks.len(), fit);
}

#[test]
fn a_codec_of_a_later_release_is_named() {
    let column = Column {
        name: "frame".into(),
        dtype: Dtype::Float64,
        shape: vec![],
        codec: Codec::Lz4,
        finite: true,
        max_length: 0,
    };
    let message = refusal_of(&with_a_later_codec(column));
    let known = "unknown variant `lz9`, expected one of `none`, `lz4`, `zstd`";
    assert!(message.contains("the definition of a table") && message.contains(known), "{message}");
}

/// The control message of a request for a table of `column`, packed by LZ4, with another codec.
fn with_a_later_codec(column: Column) -> Vec<u8> {
    let request = Request::new(1, 0, RequestBody::CreateTable(TableConfig::new("t", vec![column], 1)));
    let mut control = encode_request(&request).unwrap().control().to_vec();
    let at = control.windows(3).position(|bytes| bytes == b"lz4").unwrap();
    control[at + 2] = b'9';
    control
}

/// The control message of a request for a table with a view of the column `observation`.
fn with_a_view(observation: &str) -> Vec<u8> {
    let column = Column {
        name: "x".into(),
        dtype: Dtype::Uint8,
        shape: vec![],
        codec: Codec::None,
        finite: true,
        max_length: 0,
    };
    let view = NStep { observation: observation.into(), ..NStep::default() };
    let body = RequestBody::CreateTable(TableConfig {
        view: Some(ViewSpec::NStep(view)),
        ..TableConfig::new("t", vec![column], 1)
    });
    let request = Request::new(1, 0, body);
    encode_request(&request).unwrap().control().to_vec()
}

fn refusal_of(control: &[u8]) -> String {
    let error = decode_request(Frame::new(control, Bytes::new())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Protocol, "{error}");
    error.to_string()
}

#[test]
#[cfg_attr(miri, ignore = "takes hours: a definition of 128 KB")]
fn a_long_definition_is_refused_before_it_is_read() {
    let message = refusal_of(&with_a_view(&"x".repeat(128 << 10)));
    assert!(message.contains("and 131072 are the most"), "{message}");
}

#[test]
fn errors_quote_the_beginning_of_what_a_client_sent() {
    const LONGEST: usize = 500;
    // Its field has another name, which the parser quotes.
    let name = "x".repeat(20_000);
    let mut control = with_a_view(&name);
    let at = control.windows(20).position(|w| w == [b'x'; 20]).unwrap();
    let field = at - "\"observation\":\"".len();
    control[field..at].copy_from_slice(b"\"gamma\":0.5,\"xx");
    let message = refusal_of(&control);
    assert!(message.contains("cannot be read"), "{message}");
    assert!(message.len() < LONGEST, "{} bytes", message.len());

    let column = Column { name, dtype: Dtype::Float64, shape: vec![], codec: Codec::Lz4, finite: true, max_length: 0 };
    let message = refusal_of(&with_a_later_codec(column));
    assert!(message.len() < LONGEST, "{} bytes", message.len());
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let body = RequestBody::UpdatePriorities(UpdatePriorities { ids: vec![1, 2], priorities: vec![1.0] });
    let outgoing = encode_request(&Request::new(1, 0, body)).unwrap();
    let error = decode_request(received(&outgoing)).unwrap_err();
    assert_eq!(error.to_string(), "protocol error: an update has 2 ids and 1 priorities");
}

#[test]
fn rows_beyond_the_payload_are_refused() {
    let sampled = Sampled {
        items: vec![],
        live_items: 0,
        min_probability: None,
        state: None,
        rows: Bytes::from_static(b"four"),
        blobs: vec![],
        shares: Vec::new(),
        lease: 0,
        credit: None,
    };
    let outgoing = encode_reply(Reply { id: 1, body: ReplyBody::Sampled(sampled) }).unwrap();
    let short = Frame::new(outgoing.control(), Bytes::from_static(b"fou"));
    let error = decode_reply(short).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Protocol, "{error}");
}

#[test]
fn a_payload_that_no_message_speaks_of_is_refused() {
    let outgoing = encode_request(&Request::new(1, 0, RequestBody::Stats)).unwrap();
    let frame = Frame::new(outgoing.control(), Bytes::from_static(b"x"));
    assert_eq!(decode_request(frame).unwrap_err().code(), ErrorCode::Protocol);
}

#[test]
fn a_priority_that_the_wire_would_read_as_none_is_refused() {
    for value in [-1.0, f32::NAN, f32::INFINITY] {
        let item = NewItem { anchor: 0, stream: 0, before: 0, after: 0, priority: Some(value) };
        let push =
            Push { writer: 1, epoch: 1, sequence: 1, body: PushBody { items: vec![item], ..PushBody::default() } };
        let request = Request::new(1, 0, RequestBody::Push(push));
        assert_eq!(encode_request(&request).err().unwrap().code(), ErrorCode::Priority);
    }
}
