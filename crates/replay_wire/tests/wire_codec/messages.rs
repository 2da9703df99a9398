//! Random messages, and replies in a form that tests can compare.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use replay_core::error::WaitReason;
use replay_core::replay::*;
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig};
use replay_core::view::{NStep, ViewSpec};
use replay_wire::error::ErrorCode;
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
    fn column()(
        name in ".{0,12}", dtype in dtype(), shape in vec(any::<u32>(), 0..4), max_length: u32,
        codec in codec(), finite: bool,
    ) -> Column {
        Column { name, dtype, shape, max_length, codec, finite }
    }
}

prop_compose! {
    fn table()(
        name in ".{0,12}",
        columns in vec(column(), 0..4),
        (capacity, capacity_bytes, min_size) in any::<(u64, u64, u64)>(),
        (max_times_sampled, max_version_lag, max_sample_lag) in any::<(u32, u32, u32)>(),
        queue_size: u32,
        parameters in option::of(".{0,12}"),
        (priority_exponent, samples_per_insert, slack) in (-1e9..1e9, 0.0..1e9, 0.0..1e9),
        (priority_unit_log2, live_max_priority) in any::<(i32, bool)>(),
        sampler in prop::sample::select(vec![
            Sampler::Prioritized, Sampler::Uniform, Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap, Sampler::MinHeap,
            Sampler::RankBased,
        ]),
        view in option::of((any::<u16>(), 0.0f64..1.0).prop_map(|(n, gamma)| {
            ViewSpec::NStep(NStep { n, gamma, ..NStep::default() })
        })),
    ) -> TableConfig {
        TableConfig {
            name, columns, capacity, capacity_bytes, sampler, priority_exponent, priority_unit_log2,
            live_max_priority, max_times_sampled, min_size, samples_per_insert, slack, queue_size, max_version_lag,
            parameters, max_sample_lag, view,
        }
    }
}

prop_compose! {
    fn chunk()((stream, rows, first_step, bytes, version) in any::<(u32, u32, u64, u32, u64)>()) -> ChunkHead {
        ChunkHead { stream, rows, first_step, bytes, version }
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
        (writer, epoch, sequence) in any::<(u64, u32, u64)>(),
        chunks in vec(chunk(), 0..5),
        items in vec(item(), 0..20),
        payload in bytes(),
    ) -> Push {
        Push { writer, epoch, sequence, body: PushBody { chunks, items, payload } }
    }
}

prop_compose! {
    fn extension()(name in ".{0,12}", message in vec(any::<u8>(), 0..40)) -> Extension {
        Extension { name, message: message.into() }
    }
}

pub fn bytes() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..200).prop_map(Bytes::from)
}

fn request_body() -> impl Strategy<Value = RequestBody> {
    let name = || ".{0,12}";
    prop_oneof![
        (any::<u32>(), name(), any::<[u8; 32]>()).prop_map(|(protocol, release, nonce)| RequestBody::Hello(Hello {
            protocol,
            release,
            nonce
        })),
        option::of(any::<[u8; 32]>()).prop_map(RequestBody::Authenticate),
        table().prop_map(RequestBody::CreateTable),
        name().prop_map(RequestBody::DescribeTable),
        name().prop_map(RequestBody::EmptyTable),
        name().prop_map(RequestBody::DropTable),
        (any::<u64>(), name(), any::<(u32, u16, u16, bool)>()).prop_map(
            |(writer, name, (streams, window_before, window_after, resume))| {
                RequestBody::OpenWriter(OpenOrResume {
                    open: OpenWriter { writer, name, server: None, streams, window_before, window_after },
                    resume,
                })
            }
        ),
        push().prop_map(RequestBody::Push),
        (any::<(u32, u16, u16, bool, bool, u32, u32)>(), any::<Option<u32>>()).prop_map(
            |((count, before, after, allow_short, min_probability, definition, lease_ms), part)| {
                RequestBody::Sample(SampleRequest {
                    count,
                    before,
                    after,
                    allow_short,
                    min_probability,
                    share: part.map(|take| BatchShare { take }),
                    definition,
                    lease_ms,
                })
            }
        ),
        vec((any::<u64>(), 0.0..1e300), 0..50).prop_map(|updates| {
            let (ids, priorities) = updates.into_iter().unzip();
            RequestBody::UpdatePriorities(UpdatePriorities { ids, priorities })
        }),
        any::<(u64, bool)>().prop_map(|(lease, begin)| RequestBody::ChangeLease(ChangeLease { lease, begin })),
        name().prop_map(RequestBody::DropParameters),
        (any::<u32>(), read_position()).prop_map(|(bytes, from)| RequestBody::ReadSteps(ReadSteps { from, bytes })),
        (any::<u64>(), name()).prop_map(|(id, reason)| RequestBody::ReportCorrupt(ReportCorrupt { id, reason })),
        (name(), any::<u64>(), any::<u64>(), bytes()).prop_map(|(name, id, version, bytes)| {
            RequestBody::PutParameters(PutParameters { name, id, version, bytes })
        }),
        (name(), any::<u64>(), any::<u64>()).prop_map(|(name, newer_than, writer)| {
            RequestBody::GetParameters(GetParameters { name, newer_than, writer })
        }),
        Just(RequestBody::Stats),
        Just(RequestBody::List),
        Just(RequestBody::Snapshot),
        any::<(u64, u32)>().prop_map(|(writer, epoch)| RequestBody::CloseWriter(CloseWriter { writer, epoch })),
        extension().prop_map(RequestBody::CallExtension),
    ]
}

prop_compose! {
    pub fn request()(
        id: u64,
        deadline_ms: u32,
        table: u16,
        table_name in option::of(".{0,12}"),
        body in request_body(),
    ) -> Request {
        Request { id, deadline_ms, table, table_name, body }
    }
}

prop_compose! {
    fn sampled_item()(
        (id, age, times_sampled, before, after) in any::<(u64, u32, u32, u16, u16)>(),
        (probability, version) in (0.0..1.0, 0..3u64),
    ) -> SampledItem {
        SampledItem { id, probability, age, times_sampled, before, after, version }
    }
}

prop_compose! {
    fn read_position()((number, next, end) in any::<(u16, u64, u64)>()) -> ReadPosition {
        ReadPosition { server: 0, number, next, end }
    }
}

prop_compose! {
    fn stored_steps()(
        (writer, stream, rows, first_step, version) in any::<(u64, u32, u32, u64, u64)>(),
        packed in bytes(),
    ) -> StoredSteps {
        StoredSteps { writer, stream, rows, first_step, version, packed }
    }
}

/// What a test compares of a reply: everything but the credit, with the blobs in one piece.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Done,
    Waiting(WaitReason),
    Challenge(Challenge),
    Table(TableConfig),
    Sampled {
        items: Vec<SampledItem>,
        live_items: u64,
        lease: u64,
        min: Option<f64>,
        state: Option<ShareState>,
        rows: Bytes,
        blobs: Vec<Bytes>,
    },
    Error(ErrorCode, String, Option<WaitReason>),
    Parameters(Option<Parameters>),
    Welcome(Option<[u8; 32]>),
    Writer(WriterOpened),
    Updated(UpdateReceipt),
    Pushed(u64),
    Corrupt(Option<String>),
    Stats(String),
    Listing(Listing),
    Extension(Extension),
    StepsRead(StepsRead),
}

fn wait_reason() -> impl Strategy<Value = WaitReason> {
    prop_oneof![
        (".{0,9}", any::<String>()).prop_map(|(table, sentence)| WaitReason::for_writers(&table, sentence)),
        any::<String>().prop_map(WaitReason::from),
    ]
}

pub fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        Just(Answer::Done),
        wait_reason().prop_map(Answer::Waiting),
        option::of(any::<[u8; 32]>()).prop_map(Answer::Welcome),
        (any::<(u32, u64, [u8; 32], bool, u64)>(), ".{0,8}").prop_map(
            |((protocol, incarnation, nonce, token_needed, max_frame_bytes), release)| {
                Answer::Challenge(Challenge { protocol, release, incarnation, nonce, token_needed, max_frame_bytes })
            }
        ),
        table().prop_map(Answer::Table),
        (
            vec(sampled_item(), 0..20),
            any::<[u64; 2]>(),
            option::of(1e-9..1.0),
            option::of(any::<(u16, u64, u32, bool, u64, u32)>()),
            bytes(),
            vec(bytes(), 0..5)
        )
            .prop_map(|(items, [live_items, lease], min, state, rows, blobs)| {
                Answer::Sampled {
                    items,
                    live_items,
                    lease,
                    min,
                    state: state.map(|(number, items, taken, holds_pushes, min_size, max_times_sampled)| ShareState {
                        number,
                        total_mass: items as f64,
                        items,
                        taken,
                        allowance: f64::INFINITY,
                        holds_pushes,
                        min_size,
                        samples_per_insert: f64::from(max_times_sampled),
                        max_times_sampled,
                    }),
                    rows,
                    blobs,
                }
            }),
        (
            prop::sample::select(vec![ErrorCode::Internal, ErrorCode::Fenced, ErrorCode::Interrupted]),
            ".{0,99}",
            option::of(wait_reason())
        )
            .prop_map(|(code, message, reason)| Answer::Error(code, message, reason)),
        option::of((1u64.., bytes())).prop_map(|parameters| {
            Answer::Parameters(parameters.map(|(version, bytes)| Parameters { version, bytes }))
        }),
        any::<(u32, u64, u64, u64)>().prop_map(|(epoch, last_sequence, steps, connected)| {
            Answer::Writer(WriterOpened { epoch, last_sequence, steps, connected })
        }),
        any::<(u32, u32)>().prop_map(|(applied, stale)| Answer::Updated(UpdateReceipt { applied, stale })),
        any::<u64>().prop_map(Answer::Pushed),
        option::of(".{1,9}").prop_map(Answer::Corrupt),
        ".{0,99}".prop_map(Answer::Stats),
        (vec(table(), 0..3), vec((".{1,9}", any::<u64>(), any::<u64>()), 0..4)).prop_map(|(tables, parameters)| {
            let parameters = parameters.into_iter();
            let parameters = parameters.map(|(name, version, bytes)| ListedParameters { name, version, bytes });
            Answer::Listing(Listing { tables, parameters: parameters.collect() })
        }),
        extension().prop_map(Answer::Extension),
        (vec(stored_steps(), 0..4), option::of(read_position()))
            .prop_map(|(chunks, next)| Answer::StepsRead(StepsRead { chunks, next })),
    ]
}

pub fn body(answer: Answer) -> ReplyBody {
    match answer {
        Answer::Welcome(proof) => ReplyBody::Welcome(proof),
        Answer::Waiting(reason) => ReplyBody::Waiting(reason),
        Answer::Done => ReplyBody::Done,
        Answer::Challenge(challenge) => ReplyBody::Challenge(challenge),
        Answer::Table(config) => ReplyBody::Table(config),
        Answer::Sampled { items, live_items, lease, min, state, rows, blobs } => ReplyBody::Sampled(Sampled {
            items,
            live_items,
            min_probability: min,
            state,
            rows,
            blobs,
            shares: Vec::new(),
            lease,
            credit: None,
        }),
        Answer::Error(code, message, reason) => ReplyBody::Error { code, message, waited_for: reason.map(Box::new) },
        Answer::Parameters(parameters) => ReplyBody::Parameters(parameters),
        Answer::Writer(opened) => ReplyBody::Writer(opened),
        Answer::Updated(receipt) => ReplyBody::Updated(receipt),
        Answer::Pushed(steps) => ReplyBody::Pushed(steps),
        Answer::Corrupt(writer) => ReplyBody::Corrupt(writer),
        Answer::Stats(json) => ReplyBody::Stats(json),
        Answer::Listing(listing) => ReplyBody::Listing(listing),
        Answer::Extension(answer) => ReplyBody::Extension(answer),
        Answer::StepsRead(read) => ReplyBody::StepsRead(read),
    }
}

pub fn seen(reply: Reply) -> Answer {
    match reply.body {
        ReplyBody::Welcome(proof) => Answer::Welcome(proof),
        ReplyBody::Done => Answer::Done,
        ReplyBody::Waiting(reason) => Answer::Waiting(reason),
        ReplyBody::Challenge(challenge) => Answer::Challenge(challenge),
        ReplyBody::Table(config) => Answer::Table(config),
        ReplyBody::Sampled(sampled) => Answer::Sampled {
            items: sampled.items,
            live_items: sampled.live_items,
            lease: sampled.lease,
            min: sampled.min_probability,
            state: sampled.state,
            rows: sampled.rows,
            blobs: vec![sampled.blobs.iter().flat_map(|b| b.as_ref().to_vec()).collect()],
        },
        ReplyBody::Error { code, message, waited_for } => {
            Answer::Error(code, message, waited_for.map(|reason| *reason))
        }
        ReplyBody::Parameters(parameters) => Answer::Parameters(parameters),
        ReplyBody::Writer(opened) => Answer::Writer(opened),
        ReplyBody::Updated(receipt) => Answer::Updated(receipt),
        ReplyBody::Pushed(steps) => Answer::Pushed(steps),
        ReplyBody::Corrupt(writer) => Answer::Corrupt(writer),
        ReplyBody::Stats(json) => Answer::Stats(json),
        ReplyBody::Listing(listing) => Answer::Listing(listing),
        ReplyBody::Extension(answer) => Answer::Extension(answer),
        ReplyBody::StepsRead(read) => Answer::StepsRead(read),
    }
}

/// The frame as the other end has it.
pub fn received(outgoing: &OutgoingFrame) -> Frame {
    let payload = outgoing.payload().iter().flat_map(|s| s.as_ref().to_vec()).collect();
    Frame::new(outgoing.control(), payload)
}
