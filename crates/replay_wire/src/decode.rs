//! Frames to messages. The bytes are untrusted: every pointer, length, text and enum is checked.

use std::time::Duration;

use bytes::Bytes;
use capnp::Word;
use capnp::message::{Reader, ReaderOptions};
use capnp::serialize::BufferSegments;

use super::fields::{Field, Message, Room, malformed, read, read_list, unknown};
use super::frame::Frame;
use super::innet_capnp as wire;
use super::{GradientsJoined, Reply, ReplyBody, Request, RequestBody};
use crate::error::{Error, ErrorCode, Result};
use gradients::{Asynchronous, JoinJob, Ticket};
use replay_core::replay::{
    BatchPart, OpenWriter, Parameters, Push, PushBody, SampleRequest, Sampled, SampledItem,
    ShardState, WriterId,
};

/// Memory for the lists of structs in a request, besides the bytes of its control message. Chunks and items are as long decoded as
/// encoded; the columns of a table are longer.
const SMALL_LISTS: usize = 16 << 10;

/// Bytes of lists of structs in a reply for each byte of its control message: a list of tables takes one and a half.
const REPLY_LISTS: usize = 3;

/// Nesting limit; the deepest message is request, table, columns, column, shape.
const NESTING: i32 = 16;

/// The request in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a request, and for one that takes much more memory than its frame: its control message,
/// decoded, takes at most twice as much as encoded, and 16 KiB.
pub fn decode_request(frame: Frame) -> Result<Request> {
    let message = reader(&frame)?;
    let root: wire::request::Reader<'_> = message.get_root().map_err(malformed)?;
    let mut payload = Some(frame.payload.clone());
    let room = Room::new(frame.control_bytes() + SMALL_LISTS);
    let body = request_body(root, &mut payload, &room)?;
    refuse_unused(payload)?;
    Ok(Request {
        id: root.get_id(),
        deadline_ms: root.get_deadline_ms(),
        body,
    })
}

/// The reply in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a reply.
pub fn decode_reply(frame: Frame) -> Result<Reply> {
    let message = reader(&frame)?;
    let root: wire::reply::Reader<'_> = message.get_root().map_err(malformed)?;
    let mut payload = Some(frame.payload.clone());
    let room = Room::new(REPLY_LISTS * frame.control_bytes());
    let body = reply_body(root, &mut payload, &room)?;
    refuse_unused(payload)?;
    Ok(Reply {
        id: root.get_id(),
        body,
    })
}

fn reader(frame: &Frame) -> Result<Reader<BufferSegments<&[u8]>>> {
    let options = ReaderOptions {
        // Each word of a well-formed message is read once, so texts and numbers take no more than the message; every element of
        // a list counts.
        traversal_limit_in_words: Some(frame.control.len() + 64),
        nesting_limit: NESTING,
    };
    let bytes = Word::words_to_bytes(&frame.control);
    let segments = BufferSegments::new(bytes, options).map_err(malformed)?;
    Ok(Reader::new(segments, options))
}

fn request_body(
    root: wire::request::Reader<'_>,
    payload: &mut Option<Bytes>,
    room: &Room,
) -> Result<RequestBody> {
    use wire::request::Which;
    Ok(match root.which().map_err(unknown)? {
        Which::Hello(hello) => RequestBody::Hello(read(hello, room)?),
        Which::Authenticate(authenticate) => {
            RequestBody::Authenticate(Field::read(authenticate.map_err(malformed)?.get_proof())?)
        }
        Which::CreateTable(config) => RequestBody::CreateTable(read(config, room)?),
        Which::DescribeTable(name) => RequestBody::DescribeTable(Field::read(name)?),
        Which::EmptyTable(name) => RequestBody::EmptyTable(Field::read(name)?),
        Which::DropTable(name) => RequestBody::DropTable(Field::read(name)?),
        Which::OpenWriter(open) => {
            let open = open.map_err(malformed)?;
            RequestBody::OpenWriter {
                open: OpenWriter::read(open, room)?,
                resume: open.get_resume(),
            }
        }
        Which::Push(push) => {
            RequestBody::Push(self::push(push.map_err(malformed)?, payload, room)?)
        }
        Which::Sample(sample) => {
            let sample = sample.map_err(malformed)?;
            RequestBody::Sample(SampleRequest {
                table: Field::read(sample.get_table())?,
                count: sample.get_count(),
                before: sample.get_before(),
                after: sample.get_after(),
                allow_short: sample.get_allow_short(),
                min_probability: sample.get_min_probability(),
                part: match sample.has_part() {
                    false => None,
                    true => Some(BatchPart {
                        limiter_samples: sample
                            .get_part()
                            .map_err(malformed)?
                            .get_limiter_samples(),
                    }),
                },
                repeated: sample.get_repeated(),
            })
        }
        Which::UpdatePriorities(update) => {
            let update = update.map_err(malformed)?;
            let ids: Vec<u64> = update.get_ids().map_err(malformed)?.iter().collect();
            let priorities: Vec<f64> = update.get_priorities().map_err(malformed)?.iter().collect();
            if ids.len() != priorities.len() {
                return Err(Error::Protocol(format!(
                    "an update has {} ids and {} priorities",
                    ids.len(),
                    priorities.len()
                )));
            }
            RequestBody::UpdatePriorities {
                table: Field::read(update.get_table())?,
                ids,
                priorities,
            }
        }
        Which::ReportCorrupt(report) => {
            let report = report.map_err(malformed)?;
            RequestBody::ReportCorrupt {
                table: Field::read(report.get_table())?,
                id: report.get_id(),
                reason: Field::read(report.get_reason())?,
            }
        }
        Which::PutParameters(put) => {
            let put = put.map_err(malformed)?;
            RequestBody::PutParameters {
                name: Field::read(put.get_name())?,
                id: put.get_id(),
                version: put.get_version(),
                bytes: payload.take().unwrap_or_default(),
            }
        }
        Which::GetParameters(get) => {
            let get = get.map_err(malformed)?;
            RequestBody::GetParameters {
                name: Field::read(get.get_name())?,
                newer_than: get.get_newer_than(),
                writer: match get.has_writer() {
                    true => Some(WriterId::read(get.get_writer().map_err(malformed)?, room)?),
                    false => None,
                },
            }
        }
        Which::Stats(()) => RequestBody::Stats,
        Which::List(()) => RequestBody::List,
        Which::Snapshot(()) => RequestBody::Snapshot,
        Which::CloseWriter(close) => {
            let close = close.map_err(malformed)?;
            RequestBody::CloseWriter {
                table: Field::read(close.get_table())?,
                writer: close.get_writer(),
                epoch: close.get_epoch(),
            }
        }
        Which::JoinGradients(join) => {
            let join = join.map_err(malformed)?;
            RequestBody::JoinGradients {
                below: (join.get_below() > 0).then(|| join.get_below()),
                job: self::join(join, room)?,
            }
        }
    })
}

fn reply_body(
    root: wire::reply::Reader<'_>,
    payload: &mut Option<Bytes>,
    room: &Room,
) -> Result<ReplyBody> {
    use wire::reply::Which;
    Ok(match root.which().map_err(unknown)? {
        Which::Error(error) => {
            let error = error.map_err(malformed)?;
            ReplyBody::Error {
                // A newer server may have codes that this client does not know.
                code: error.get_code().unwrap_or(ErrorCode::Internal),
                message: Field::read(error.get_message())?,
                waited_for: match error.has_waited_for() {
                    true => Some(Box::new(read(error.get_waited_for(), room)?)),
                    false => None,
                },
            }
        }
        Which::Challenge(challenge) => ReplyBody::Challenge(read(challenge, room)?),
        Which::Welcome(welcome) => {
            ReplyBody::Welcome(Field::read(welcome.map_err(malformed)?.get_proof())?)
        }
        Which::Waiting(reason) => ReplyBody::Waiting(read(reason, room)?),
        Which::Done(()) => ReplyBody::Done,
        Which::Table(config) => ReplyBody::Table(read(config, room)?),
        Which::Writer(opened) => ReplyBody::Writer(read(opened, room)?),
        Which::Pushed(pushed) => ReplyBody::Pushed {
            steps: pushed.map_err(malformed)?.get_steps(),
        },
        Which::Sampled(sampled) => {
            ReplyBody::Sampled(self::sampled(sampled.map_err(malformed)?, payload)?)
        }
        Which::Updated(updated) => ReplyBody::Updated(read(updated, room)?),
        Which::Corrupt(writer) => {
            let writer = String::read(writer)?;
            ReplyBody::Corrupt((!writer.is_empty()).then_some(writer))
        }
        Which::Parameters(parameters) => {
            let version = parameters.map_err(malformed)?.get_version();
            ReplyBody::Parameters((version > 0).then(|| Parameters {
                version,
                bytes: payload.take().unwrap_or_default(),
            }))
        }
        Which::Stats(json) => ReplyBody::Stats(Field::read(json)?),
        Which::Listing(listing) => ReplyBody::Listing(read(listing, room)?),
        Which::Gradients(joined) => {
            ReplyBody::Gradients(self::joined(joined.map_err(malformed)?, room)?)
        }
    })
}

fn push(push: wire::push::Reader<'_>, payload: &mut Option<Bytes>, room: &Room) -> Result<Push> {
    Ok(Push {
        table: Field::read(push.get_table())?,
        writer: push.get_writer(),
        epoch: push.get_epoch(),
        sequence: push.get_sequence(),
        body: PushBody {
            chunks: read_list(push.get_chunks(), room)?,
            items: read_list(push.get_items(), room)?,
            payload: payload.take().unwrap_or_default(),
        },
    })
}

fn sampled(sampled: wire::sampled::Reader<'_>, payload: &mut Option<Bytes>) -> Result<Sampled> {
    let ids = sampled.get_ids().map_err(malformed)?;
    let probabilities = sampled.get_probabilities().map_err(malformed)?;
    let ages = sampled.get_ages().map_err(malformed)?;
    let times_sampled = sampled.get_times_sampled().map_err(malformed)?;
    let before = sampled.get_before().map_err(malformed)?;
    let after = sampled.get_after().map_err(malformed)?;
    let lengths = [
        probabilities.len(),
        ages.len(),
        times_sampled.len(),
        before.len(),
        after.len(),
    ];
    if lengths.iter().any(|&n| n != ids.len()) {
        return Err(Error::Protocol(format!(
            "a batch of {} ids has lists of other lengths: {lengths:?}",
            ids.len()
        )));
    }
    let shard = match sampled.has_shard() {
        false => None,
        true => {
            let shard = sampled.get_shard().map_err(malformed)?;
            Some(ShardState {
                number: shard.get_number(),
                total_priority: shard.get_total_priority(),
                items: shard.get_items(),
                inserted: shard.get_inserted(),
                allowance: shard.get_allowance(),
            })
        }
    };
    let items = (0..ids.len())
        .map(|i| SampledItem {
            id: ids.get(i),
            probability: probabilities.get(i),
            age: ages.get(i),
            times_sampled: times_sampled.get(i),
            before: before.get(i),
            after: after.get(i),
        })
        .collect();
    let mut rows = payload.take().unwrap_or_default();
    let row_bytes = sampled.get_row_bytes();
    if row_bytes > rows.len() as u64 {
        return Err(Error::Protocol(format!(
            "a batch says that it has {row_bytes} bytes of rows, in a payload of {}",
            rows.len()
        )));
    }
    let blobs = rows.split_off(row_bytes as usize);
    Ok(Sampled {
        items,
        live_items: sampled.get_items(),
        min_probability: Some(sampled.get_min_probability()).filter(|&p| p != 0.0),
        shard,
        rows,
        blobs: vec![blobs],
        credit: None,
    })
}

fn join(join: wire::join_gradients::Reader<'_>, room: &Room) -> Result<JoinJob> {
    Ok(JoinJob {
        job: Field::read(join.get_job())?,
        worker: join.get_worker(),
        workers: join.get_workers(),
        world: join.get_world(),
        name: Field::read(join.get_name())?,
        arithmetic: Field::read(join.get_arithmetic())?,
        segment_values: join.get_segment_values(),
        deadline: Duration::from_millis(join.get_deadline_ms().into()),
        asynchronous: match join.get_values() {
            0 => None,
            _ => Some(Asynchronous::read(join, room)?),
        },
    })
}

fn joined(joined: wire::gradients_joined::Reader<'_>, room: &Room) -> Result<GradientsJoined> {
    let address = String::read(joined.get_address())?;
    let address = address.parse().map_err(|error| {
        Error::Protocol(format!(
            "{address:?} is no address of an aggregator: {error}"
        ))
    })?;
    if joined.get_window() == 0 {
        return Err(Error::Protocol("a window of no segments".to_owned()));
    }
    Ok(GradientsJoined {
        address,
        ticket: Ticket::read(joined, room)?,
    })
}

fn refuse_unused(payload: Option<Bytes>) -> Result<()> {
    match payload {
        Some(payload) if !payload.is_empty() => Err(Error::Protocol(format!(
            "a payload of {} bytes with a message that has none",
            payload.len()
        ))),
        _ => Ok(()),
    }
}
