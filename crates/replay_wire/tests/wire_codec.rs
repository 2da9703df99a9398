//! The codec: messages come back as they went, and no bytes make a decoder panic or allocate.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::Index;

use gradients::{Arithmetic, Asynchronous, JoinJob, Ticket};
use replay_core::error::{Error, ErrorCode};
use replay_core::replay::*;
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig};
use replay_wire::*;

fn dtype() -> impl Strategy<Value = Dtype> {
    use Dtype::*;
    prop::sample::select(vec![
        Bool, Uint8, Int8, Uint16, Int16, Uint32, Int32, Uint64, Int64, Float16, Float32, Float64,
    ])
}

fn codec() -> impl Strategy<Value = Codec> {
    prop::sample::select(vec![Codec::None, Codec::Lz4, Codec::Zstd])
}

prop_compose! {
    fn column()(name in ".{0,12}", dtype in dtype(), shape in vec(any::<u32>(), 0..4), codec in codec()) -> Column {
        Column { name, dtype, shape, codec }
    }
}

prop_compose! {
    fn table()(
        name in ".{0,12}",
        columns in vec(column(), 0..4),
        (capacity, capacity_bytes, min_size, max_times_sampled) in any::<(u64, u64, u64, u32)>(),
        (priority_exponent, samples_per_insert, slack) in (-1e9..1e9, 0.0..1e9, 0.0..1e9),
        priority_unit_log2: i32,
        sampler in prop::sample::select(vec![
            Sampler::Prioritized, Sampler::Uniform, Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap, Sampler::MinHeap,
        ]),
    ) -> TableConfig {
        TableConfig {
            name, columns, capacity, capacity_bytes, sampler, priority_exponent, priority_unit_log2,
            max_times_sampled, min_size, samples_per_insert, slack,
        }
    }
}

prop_compose! {
    fn chunk()((stream, rows, first_step, bytes) in any::<(u32, u32, u64, u32)>()) -> ChunkHead {
        ChunkHead { stream, rows, first_step, bytes }
    }
}

prop_compose! {
    fn item()(
        (anchor, stream, before, after) in any::<(u64, u32, u16, u16)>(),
        priority in option::of(0.0f32..1e30),
    ) -> NewItem {
        NewItem { anchor, stream, before, after, priority }
    }
}

prop_compose! {
    fn push()(
        table in ".{0,12}",
        (writer, epoch, sequence) in any::<(u64, u32, u64)>(),
        chunks in vec(chunk(), 0..5),
        items in vec(item(), 0..20),
        payload in bytes(),
    ) -> Push {
        Push { table, writer, epoch, sequence, body: PushBody { chunks, items, payload } }
    }
}

prop_compose! {
    fn join()(
        (job, name) in (".{0,12}", ".{0,12}"),
        (worker, workers, world, segment_values, deadline_ms) in any::<(u16, u16, u32, u16, u32)>(),
        fixed: bool,
        asynchronous in proptest::option::of((1u32.., any::<u16>(), any::<u16>())),
    ) -> JoinJob {
        JoinJob {
            job, worker, workers, world, name, segment_values,
            arithmetic: if fixed { Arithmetic::Fixed } else { Arithmetic::Float },
            deadline: std::time::Duration::from_millis(deadline_ms.into()),
            asynchronous: asynchronous.map(|(values, threshold, staleness)| Asynchronous { values, threshold, staleness }),
        }
    }
}

fn bytes() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..200).prop_map(Bytes::from)
}

fn request_body() -> impl Strategy<Value = RequestBody> {
    let name = || ".{0,12}";
    prop_oneof![
        (any::<u32>(), name(), any::<[u8; 32]>()).prop_map(|(protocol, release, nonce)| {
            RequestBody::Hello(Hello {
                protocol,
                release,
                nonce,
            })
        }),
        option::of(any::<[u8; 32]>()).prop_map(RequestBody::Authenticate),
        table().prop_map(RequestBody::CreateTable),
        name().prop_map(RequestBody::DescribeTable),
        name().prop_map(RequestBody::EmptyTable),
        name().prop_map(RequestBody::DropTable),
        (name(), any::<u64>(), name(), any::<(u32, u16, u16, bool)>()).prop_map(
            |(table, writer, name, (streams, window_before, window_after, resume))| {
                RequestBody::OpenWriter {
                    open: OpenWriter {
                        table,
                        writer,
                        name,
                        streams,
                        window_before,
                        window_after,
                    },
                    resume,
                }
            }
        ),
        push().prop_map(RequestBody::Push),
        (name(), any::<(u32, u16, u16, bool, bool)>()).prop_map(
            |(table, (count, before, after, allow_short, min_probability))| {
                RequestBody::Sample(SampleRequest {
                    table,
                    count,
                    before,
                    after,
                    allow_short,
                    min_probability,
                })
            }
        ),
        (name(), vec((any::<u64>(), 0.0..1e300), 0..50)).prop_map(|(table, updates)| {
            let (keys, priorities) = updates.into_iter().unzip();
            RequestBody::UpdatePriorities {
                table,
                keys,
                priorities,
            }
        }),
        (name(), any::<u64>(), name())
            .prop_map(|(table, key, reason)| RequestBody::ReportCorrupt { table, key, reason }),
        (name(), bytes()).prop_map(|(name, bytes)| RequestBody::PutParameters { name, bytes }),
        (name(), any::<u64>())
            .prop_map(|(name, newer_than)| RequestBody::GetParameters { name, newer_than }),
        Just(RequestBody::Stats),
        Just(RequestBody::List),
        (name(), any::<u64>(), any::<u32>()).prop_map(|(table, writer, epoch)| {
            RequestBody::CloseWriter {
                table,
                writer,
                epoch,
            }
        }),
        (join(), proptest::option::of(1u32..))
            .prop_map(|(job, below)| RequestBody::JoinGradients { job, below }),
    ]
}

prop_compose! {
    fn request()(id: u64, deadline_ms: u32, body in request_body()) -> Request {
        Request { id, deadline_ms, body }
    }
}

prop_compose! {
    fn sampled_item()(
        (key, age, times_sampled, before, after) in any::<(u64, u32, u32, u16, u16)>(),
        probability in 0.0..1.0,
    ) -> SampledItem {
        SampledItem { key, probability, age, times_sampled, before, after }
    }
}

/// What a test compares of a reply: everything but the credit, with the blobs in one piece.
#[derive(Debug, Clone, PartialEq)]
enum Answer {
    Plain(String),
    Challenge(Challenge),
    Table(TableConfig),
    Sampled {
        items: Vec<SampledItem>,
        live_items: u64,
        min: Option<f64>,
        rows: Bytes,
        blobs: Vec<Bytes>,
    },
    Error(ErrorCode, String),
    Parameters(Option<Parameters>),
    Writer(WriterOpened),
    Updated(UpdateReceipt),
    Pushed(u64),
    Corrupt(Option<String>),
    Stats(String),
    Listing(Listing),
    Gradients(GradientsJoined),
}

fn answer() -> impl Strategy<Value = Answer> {
    let proof = || option::of(any::<[u8; 32]>());
    prop_oneof![
        prop::sample::select(vec!["welcome", "done"]).prop_map(|name| Answer::Plain(name.into())),
        (any::<(u32, u64, [u8; 32], bool, u64)>(), ".{0,8}", proof()).prop_map(
            |((protocol, incarnation, nonce, token_needed, max_frame_bytes), release, proof)| {
                Answer::Challenge(Challenge {
                    protocol,
                    release,
                    incarnation,
                    nonce,
                    token_needed,
                    proof,
                    max_frame_bytes,
                })
            }
        ),
        table().prop_map(Answer::Table),
        (
            vec(sampled_item(), 0..20),
            any::<u64>(),
            option::of(1e-9..1.0),
            bytes(),
            vec(bytes(), 0..5)
        )
            .prop_map(|(items, live_items, min, rows, blobs)| {
                Answer::Sampled {
                    items,
                    live_items,
                    min,
                    rows,
                    blobs,
                }
            }),
        (
            prop::sample::select(vec![
                ErrorCode::Internal,
                ErrorCode::Fenced,
                ErrorCode::Interrupted
            ]),
            ".{0,99}"
        )
            .prop_map(|(code, message)| Answer::Error(code, message)),
        option::of((1u64.., bytes())).prop_map(|parameters| {
            Answer::Parameters(parameters.map(|(version, bytes)| Parameters { version, bytes }))
        }),
        any::<(u32, u64)>().prop_map(|(epoch, last_sequence)| {
            Answer::Writer(WriterOpened {
                epoch,
                last_sequence,
            })
        }),
        any::<(u32, u32)>()
            .prop_map(|(applied, stale)| Answer::Updated(UpdateReceipt { applied, stale })),
        any::<u64>().prop_map(Answer::Pushed),
        option::of(".{1,9}").prop_map(Answer::Corrupt),
        ".{0,99}".prop_map(Answer::Stats),
        (
            vec(table(), 0..3),
            vec((".{1,9}", any::<u64>(), any::<u64>()), 0..4)
        )
            .prop_map(|(tables, parameters)| {
                let parameters = parameters.into_iter();
                let parameters = parameters.map(|(name, version, bytes)| ListedParameters {
                    name,
                    version,
                    bytes,
                });
                Answer::Listing(Listing {
                    tables,
                    parameters: parameters.collect(),
                })
            }),
        any::<(std::net::Ipv4Addr, u16, u32, [u8; 16], u64, u32)>().prop_map(
            |(ip, port, session, key, round, window)| {
                Answer::Gradients(GradientsJoined {
                    address: (ip, port).into(),
                    ticket: Ticket {
                        session,
                        key,
                        round,
                        window,
                    },
                })
            }
        ),
    ]
}

fn body(answer: Answer) -> ReplyBody {
    match answer {
        Answer::Plain(name) if name == "welcome" => ReplyBody::Welcome,
        Answer::Plain(_) => ReplyBody::Done,
        Answer::Challenge(challenge) => ReplyBody::Challenge(challenge),
        Answer::Table(config) => ReplyBody::Table(config),
        Answer::Sampled {
            items,
            live_items,
            min,
            rows,
            blobs,
        } => ReplyBody::Sampled(Sampled {
            items,
            live_items,
            min_probability: min,
            rows,
            blobs,
            credit: None,
        }),
        Answer::Error(code, message) => ReplyBody::Error { code, message },
        Answer::Parameters(parameters) => ReplyBody::Parameters(parameters),
        Answer::Writer(opened) => ReplyBody::Writer(opened),
        Answer::Updated(receipt) => ReplyBody::Updated(receipt),
        Answer::Pushed(steps) => ReplyBody::Pushed { steps },
        Answer::Corrupt(writer) => ReplyBody::Corrupt(writer),
        Answer::Stats(json) => ReplyBody::Stats(json),
        Answer::Listing(listing) => ReplyBody::Listing(listing),
        Answer::Gradients(joined) => ReplyBody::Gradients(joined),
    }
}

fn seen(reply: Reply) -> Answer {
    let name = reply.body.name();
    match reply.body {
        ReplyBody::Welcome | ReplyBody::Done => Answer::Plain(name.into()),
        ReplyBody::Challenge(challenge) => Answer::Challenge(challenge),
        ReplyBody::Table(config) => Answer::Table(config),
        ReplyBody::Sampled(sampled) => Answer::Sampled {
            items: sampled.items,
            live_items: sampled.live_items,
            min: sampled.min_probability,
            rows: sampled.rows,
            blobs: vec![
                sampled
                    .blobs
                    .iter()
                    .flat_map(|b| b.as_ref().to_vec())
                    .collect(),
            ],
        },
        ReplyBody::Error { code, message } => Answer::Error(code, message),
        ReplyBody::Parameters(parameters) => Answer::Parameters(parameters),
        ReplyBody::Writer(opened) => Answer::Writer(opened),
        ReplyBody::Updated(receipt) => Answer::Updated(receipt),
        ReplyBody::Pushed { steps } => Answer::Pushed(steps),
        ReplyBody::Corrupt(writer) => Answer::Corrupt(writer),
        ReplyBody::Stats(json) => Answer::Stats(json),
        ReplyBody::Listing(listing) => Answer::Listing(listing),
        ReplyBody::Gradients(joined) => Answer::Gradients(joined),
    }
}

/// The frame as the other end has it.
fn received(outgoing: &OutgoingFrame) -> Frame {
    let payload = outgoing
        .payload()
        .iter()
        .flat_map(|s| s.as_ref().to_vec())
        .collect();
    Frame::new(outgoing.control(), payload)
}

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
            Answer::Sampled { items, live_items, min, rows, blobs } => {
                Answer::Sampled { items, live_items, min, rows, blobs: vec![blobs.concat().into()] }
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
    for number in 0..=ErrorCode::Gradients as u16 {
        let code = code(number);
        let error = Error::Remote {
            code,
            message: "why".into(),
        };
        let outgoing = encode_reply(Reply {
            id: 1,
            body: (&error).into(),
        })
        .unwrap();
        let reply = decode_reply(received(&outgoing)).unwrap();
        assert_eq!(seen(reply), Answer::Error(code, "why".into()));
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
        Gradients,
    ];
    assert_eq!(all[number as usize] as u16, number);
    all[number as usize]
}

#[test]
fn a_list_of_half_a_billion_empty_structs_is_refused() {
    let column = Column {
        name: "x".into(),
        dtype: Dtype::Uint8,
        shape: vec![],
        codec: Codec::None,
    };
    let config = TableConfig::new("t", vec![column], 1);
    let request = Request {
        id: 1,
        deadline_ms: 0,
        body: RequestBody::CreateTable(config),
    };
    let mut control = encode_request(&request).unwrap().control().to_vec();

    // The list's tag: one element of one data word and two pointers. It becomes 2^29 - 1 of nothing.
    let tag = (1u64 << 2 | 1 << 32 | 2 << 48).to_le_bytes();
    let at = (0..control.len())
        .step_by(8)
        .find(|&i| control[i..i + 8] == tag)
        .unwrap();
    control[at..at + 8].copy_from_slice(&(u64::from(u32::MAX >> 3) << 2).to_le_bytes());

    let error = decode_request(Frame::new(&control, Bytes::new())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Protocol, "{error}");
}

#[test]
fn a_codec_of_a_later_release_is_named() {
    let column = Column {
        name: "frame".into(),
        dtype: Dtype::Float64,
        shape: vec![],
        codec: Codec::Lz4,
    };
    let request = Request {
        id: 1,
        deadline_ms: 0,
        body: RequestBody::CreateTable(TableConfig::new("t", vec![column], 1)),
    };
    let mut control = encode_request(&request).unwrap().control().to_vec();
    // The column's data word: element type 11, codec 1.
    let word = (11u64 | 1 << 16).to_le_bytes();
    let at = (0..control.len())
        .step_by(8)
        .find(|&i| control[i..i + 8] == word)
        .unwrap();
    control[at + 2] = 99;
    let error = decode_request(Frame::new(&control, Bytes::new())).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Protocol);
    assert!(
        error
            .to_string()
            .contains("column \"frame\" has codec 99, which this release does not know")
    );
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let body = RequestBody::UpdatePriorities {
        table: "t".into(),
        keys: vec![1, 2],
        priorities: vec![1.0],
    };
    let outgoing = encode_request(&Request {
        id: 1,
        deadline_ms: 0,
        body,
    })
    .unwrap();
    let error = decode_request(received(&outgoing)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "protocol error: an update has 2 keys and 1 priorities"
    );
}

#[test]
fn rows_beyond_the_payload_are_refused() {
    let sampled = Sampled {
        items: vec![],
        live_items: 0,
        min_probability: None,
        rows: Bytes::from_static(b"four"),
        blobs: vec![],
        credit: None,
    };
    let outgoing = encode_reply(Reply {
        id: 1,
        body: ReplyBody::Sampled(sampled),
    })
    .unwrap();
    let short = Frame::new(outgoing.control(), Bytes::from_static(b"fou"));
    let error = decode_reply(short).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Protocol, "{error}");
}

#[test]
fn a_payload_that_no_message_speaks_of_is_refused() {
    let outgoing = encode_request(&Request {
        id: 1,
        deadline_ms: 0,
        body: RequestBody::Stats,
    })
    .unwrap();
    let frame = Frame::new(outgoing.control(), Bytes::from_static(b"x"));
    assert_eq!(
        decode_request(frame).unwrap_err().code(),
        ErrorCode::Protocol
    );
}

#[test]
fn a_priority_that_the_wire_would_read_as_none_is_refused() {
    for value in [-1.0, f32::NAN, f32::INFINITY] {
        let item = NewItem {
            anchor: 0,
            stream: 0,
            before: 0,
            after: 0,
            priority: Some(value),
        };
        let push = Push {
            table: "t".into(),
            writer: 1,
            epoch: 1,
            sequence: 1,
            body: PushBody {
                items: vec![item],
                ..PushBody::default()
            },
        };
        let request = Request {
            id: 1,
            deadline_ms: 0,
            body: RequestBody::Push(push),
        };
        assert_eq!(
            encode_request(&request).err().unwrap().code(),
            ErrorCode::Priority
        );
    }
}
