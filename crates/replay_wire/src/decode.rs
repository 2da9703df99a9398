//! Frames to messages. The bytes are untrusted: every pointer, length, text and enum is checked.

use std::time::Duration;

use bytes::Bytes;
use capnp::message::{Reader, ReaderOptions};
use capnp::serialize::BufferSegments;
use capnp::struct_list;
use capnp::traits::ListIter;
use capnp::{Word, text};

use super::frame::Frame;
use super::innet_capnp as wire;
use super::{Challenge, GradientsJoined, Hello, Reply, ReplyBody, Request, RequestBody};
use gradients::{Asynchronous, JoinJob, Ticket};
use replay_core::error::{Error, ErrorCode, Result};
use replay_core::replay::{
    ChunkHead, ListedParameters, Listing, NewItem, OpenWriter, Parameters, Push, PushBody,
    SampleRequest, Sampled, SampledItem, UpdateReceipt, WriterOpened,
};
use replay_core::schema::{Column, TableConfig};

/// Nesting limit; the deepest message is request, table, columns, column, shape.
const NESTING: i32 = 16;

/// The request in a frame.
///
/// # Errors
/// [`Error::Protocol`] for anything but a request. Memory is bounded by a small multiple of the frame, since pointers to
/// the same target are read at most twice.
pub fn decode_request(frame: Frame) -> Result<Request> {
    let message = reader(&frame)?;
    let root: wire::request::Reader<'_> = message.get_root().map_err(malformed)?;
    let mut payload = Some(frame.payload.clone());
    let body = request_body(root, &mut payload)?;
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
    let body = reply_body(root, &mut payload)?;
    refuse_unused(payload)?;
    Ok(Reply {
        id: root.get_id(),
        body,
    })
}

/// A table's definition alone, as in snapshots of format 2.
///
/// # Errors
/// [`Error::Protocol`] for anything else.
pub fn decode_table(bytes: &[u8]) -> Result<TableConfig> {
    let frame = Frame::new(bytes, Bytes::new());
    table(reader(&frame)?.get_root().map_err(malformed)?)
}

fn reader(frame: &Frame) -> Result<Reader<BufferSegments<&[u8]>>> {
    let options = ReaderOptions {
        // Each word of a well-formed message is read once; every element of a list counts.
        traversal_limit_in_words: Some(2 * frame.control.len() + 64),
        nesting_limit: NESTING,
    };
    let bytes = Word::words_to_bytes(&frame.control);
    let segments = BufferSegments::new(bytes, options).map_err(malformed)?;
    Ok(Reader::new(segments, options))
}

fn request_body(
    root: wire::request::Reader<'_>,
    payload: &mut Option<Bytes>,
) -> Result<RequestBody> {
    use wire::request::Which;
    Ok(match root.which().map_err(unknown)? {
        Which::Hello(hello) => {
            let hello = hello.map_err(malformed)?;
            RequestBody::Hello(Hello {
                protocol: hello.get_protocol(),
                release: string(hello.get_release())?,
                nonce: nonce(hello.get_nonce())?,
            })
        }
        Which::Authenticate(authenticate) => {
            RequestBody::Authenticate(proof(authenticate.map_err(malformed)?.get_proof())?)
        }
        Which::CreateTable(config) => RequestBody::CreateTable(table(config.map_err(malformed)?)?),
        Which::DescribeTable(name) => RequestBody::DescribeTable(string(name)?),
        Which::EmptyTable(name) => RequestBody::EmptyTable(string(name)?),
        Which::DropTable(name) => RequestBody::DropTable(string(name)?),
        Which::OpenWriter(open) => {
            let open = open.map_err(malformed)?;
            RequestBody::OpenWriter {
                open: OpenWriter {
                    table: string(open.get_table())?,
                    writer: open.get_writer(),
                    name: string(open.get_name())?,
                    streams: open.get_streams(),
                    window_before: open.get_window_before(),
                    window_after: open.get_window_after(),
                },
                resume: open.get_resume(),
            }
        }
        Which::Push(push) => RequestBody::Push(self::push(push.map_err(malformed)?, payload)?),
        Which::Sample(sample) => {
            let sample = sample.map_err(malformed)?;
            RequestBody::Sample(SampleRequest {
                table: string(sample.get_table())?,
                count: sample.get_count(),
                before: sample.get_before(),
                after: sample.get_after(),
                allow_short: sample.get_allow_short(),
                min_probability: sample.get_min_priority(),
            })
        }
        Which::UpdatePriorities(update) => {
            let update = update.map_err(malformed)?;
            let keys: Vec<u64> = update.get_keys().map_err(malformed)?.iter().collect();
            let priorities: Vec<f64> = update.get_priorities().map_err(malformed)?.iter().collect();
            if keys.len() != priorities.len() {
                return Err(Error::Protocol(format!(
                    "an update has {} keys and {} priorities",
                    keys.len(),
                    priorities.len()
                )));
            }
            RequestBody::UpdatePriorities {
                table: string(update.get_table())?,
                keys,
                priorities,
            }
        }
        Which::ReportCorrupt(report) => {
            let report = report.map_err(malformed)?;
            RequestBody::ReportCorrupt {
                table: string(report.get_table())?,
                key: report.get_key(),
                reason: string(report.get_reason())?,
            }
        }
        Which::PutParameters(name) => RequestBody::PutParameters {
            name: string(name)?,
            bytes: payload.take().unwrap_or_default(),
        },
        Which::GetParameters(get) => {
            let get = get.map_err(malformed)?;
            RequestBody::GetParameters {
                name: string(get.get_name())?,
                newer_than: get.get_newer_than(),
            }
        }
        Which::Stats(()) => RequestBody::Stats,
        Which::List(()) => RequestBody::List,
        Which::CloseWriter(close) => {
            let close = close.map_err(malformed)?;
            RequestBody::CloseWriter {
                table: string(close.get_table())?,
                writer: close.get_writer(),
                epoch: close.get_epoch(),
            }
        }
        Which::JoinGradients(join) => {
            let join = join.map_err(malformed)?;
            RequestBody::JoinGradients {
                below: (join.get_below() > 0).then(|| join.get_below()),
                job: self::join(join)?,
            }
        }
    })
}

fn reply_body(root: wire::reply::Reader<'_>, payload: &mut Option<Bytes>) -> Result<ReplyBody> {
    use wire::reply::Which;
    Ok(match root.which().map_err(unknown)? {
        Which::Error(error) => {
            let error = error.map_err(malformed)?;
            ReplyBody::Error {
                // A newer server may have codes that this client does not know.
                code: error.get_code().map_or(ErrorCode::Internal, Into::into),
                message: string(error.get_message())?,
            }
        }
        Which::Challenge(challenge) => {
            let challenge = challenge.map_err(malformed)?;
            ReplyBody::Challenge(Challenge {
                protocol: challenge.get_protocol(),
                release: string(challenge.get_release())?,
                incarnation: challenge.get_incarnation(),
                nonce: nonce(challenge.get_nonce())?,
                token_needed: challenge.get_token_needed(),
                proof: proof(challenge.get_proof())?,
                max_frame_bytes: challenge.get_max_frame_bytes(),
            })
        }
        Which::Welcome(()) => ReplyBody::Welcome,
        Which::Done(()) => ReplyBody::Done,
        Which::Table(config) => ReplyBody::Table(table(config.map_err(malformed)?)?),
        Which::Writer(opened) => {
            let opened = opened.map_err(malformed)?;
            ReplyBody::Writer(WriterOpened {
                epoch: opened.get_epoch(),
                last_sequence: opened.get_last_sequence(),
            })
        }
        Which::Pushed(pushed) => ReplyBody::Pushed {
            steps: pushed.map_err(malformed)?.get_steps(),
        },
        Which::Sampled(sampled) => {
            ReplyBody::Sampled(self::sampled(sampled.map_err(malformed)?, payload)?)
        }
        Which::Updated(updated) => {
            let updated = updated.map_err(malformed)?;
            ReplyBody::Updated(UpdateReceipt {
                applied: updated.get_applied(),
                stale: updated.get_stale(),
            })
        }
        Which::Corrupt(writer) => {
            let writer = string(writer)?;
            ReplyBody::Corrupt((!writer.is_empty()).then_some(writer))
        }
        Which::Parameters(parameters) => {
            let version = parameters.map_err(malformed)?.get_version();
            ReplyBody::Parameters((version > 0).then(|| Parameters {
                version,
                bytes: payload.take().unwrap_or_default(),
            }))
        }
        Which::Stats(json) => ReplyBody::Stats(string(json)?),
        Which::Listing(listing) => ReplyBody::Listing(self::listing(listing.map_err(malformed)?)?),
        Which::Gradients(joined) => ReplyBody::Gradients(self::joined(joined.map_err(malformed)?)?),
    })
}

fn table(config: wire::table_config::Reader<'_>) -> Result<TableConfig> {
    let columns = structs(config.get_columns().map_err(malformed)?)
        .map(|column: wire::column::Reader<'_>| {
            let name = string(column.get_name())?;
            let codec = column.get_codec().map_err(|codec| {
                Error::Protocol(format!(
                    "column {name:?} has codec {}, which this release does not know: update it, or choose another codec",
                    codec.0
                ))
            })?;
            Ok(Column {
                name,
                dtype: column.get_dtype().map_err(unknown)?.into(),
                shape: column.get_shape().map_err(malformed)?.iter().collect(),
                codec: codec.into(),
            })
        })
        .collect::<Result<_>>()?;
    Ok(TableConfig {
        name: string(config.get_name())?,
        columns,
        capacity: config.get_capacity(),
        capacity_bytes: config.get_capacity_bytes(),
        sampler: config.get_sampler().map_err(unknown)?.into(),
        priority_exponent: config.get_priority_exponent(),
        priority_unit_log2: config.get_priority_unit_log2(),
        max_times_sampled: config.get_max_times_sampled(),
        min_size: config.get_min_size(),
        samples_per_insert: config.get_samples_per_insert(),
        slack: config.get_slack(),
    })
}

fn push(push: wire::push::Reader<'_>, payload: &mut Option<Bytes>) -> Result<Push> {
    let chunks = structs(push.get_chunks().map_err(malformed)?)
        .map(|chunk: wire::chunk::Reader<'_>| ChunkHead {
            stream: chunk.get_stream(),
            rows: chunk.get_rows(),
            first_step: chunk.get_first_step(),
            bytes: chunk.get_bytes(),
        })
        .collect();
    let items = structs(push.get_items().map_err(malformed)?)
        .map(|item: wire::item::Reader<'_>| NewItem {
            anchor: item.get_anchor(),
            stream: item.get_stream(),
            before: item.get_before(),
            after: item.get_after(),
            priority: Some(item.get_priority()).filter(|&p| p != -1.0),
        })
        .collect();
    Ok(Push {
        table: string(push.get_table())?,
        writer: push.get_writer(),
        epoch: push.get_epoch(),
        sequence: push.get_sequence(),
        body: PushBody {
            chunks,
            items,
            payload: payload.take().unwrap_or_default(),
        },
    })
}

fn listing(listing: wire::listing::Reader<'_>) -> Result<Listing> {
    let tables = structs(listing.get_tables().map_err(malformed)?);
    let parameters = structs(listing.get_parameters().map_err(malformed)?);
    Ok(Listing {
        tables: tables.map(table).collect::<Result<_>>()?,
        parameters: parameters
            .map(|listed| {
                Ok(ListedParameters {
                    name: string(listed.get_name())?,
                    version: listed.get_version(),
                    bytes: listed.get_bytes(),
                })
            })
            .collect::<Result<_>>()?,
    })
}

fn sampled(sampled: wire::sampled::Reader<'_>, payload: &mut Option<Bytes>) -> Result<Sampled> {
    let keys = sampled.get_keys().map_err(malformed)?;
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
    if lengths.iter().any(|&n| n != keys.len()) {
        return Err(Error::Protocol(format!(
            "a batch of {} keys has lists of other lengths: {lengths:?}",
            keys.len()
        )));
    }
    let items = (0..keys.len())
        .map(|i| SampledItem {
            key: keys.get(i),
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
        rows,
        blobs: vec![blobs],
        credit: None,
    })
}

fn join(join: wire::join_gradients::Reader<'_>) -> Result<JoinJob> {
    Ok(JoinJob {
        job: string(join.get_job())?,
        worker: join.get_worker(),
        workers: join.get_workers(),
        world: join.get_world(),
        name: string(join.get_name())?,
        arithmetic: join.get_arithmetic().map_err(unknown)?.into(),
        segment_values: join.get_segment_values(),
        deadline: Duration::from_millis(join.get_deadline_ms().into()),
        asynchronous: (join.get_values() > 0).then(|| Asynchronous {
            values: join.get_values(),
            threshold: join.get_threshold(),
            staleness: join.get_staleness(),
        }),
    })
}

fn joined(joined: wire::gradients_joined::Reader<'_>) -> Result<GradientsJoined> {
    let address = string(joined.get_address())?;
    let address = address.parse().map_err(|error| {
        Error::Protocol(format!(
            "{address:?} is no address of an aggregator: {error}"
        ))
    })?;
    let key = joined.get_key().map_err(malformed)?;
    let key = key
        .try_into()
        .map_err(|_| Error::Protocol(format!("a key has 16 bytes, got {}", key.len())))?;
    if joined.get_window() == 0 {
        return Err(Error::Protocol("a window of no segments".to_owned()));
    }
    Ok(GradientsJoined {
        address,
        ticket: Ticket {
            session: joined.get_session(),
            key,
            round: joined.get_round(),
            window: joined.get_window(),
        },
    })
}

fn structs<T: capnp::traits::OwnedStruct>(
    list: struct_list::Reader<'_, T>,
) -> ListIter<struct_list::Reader<'_, T>, T::Reader<'_>> {
    ListIter::new(list, list.len())
}

fn string(text: capnp::Result<text::Reader<'_>>) -> Result<String> {
    let text = text.map_err(malformed)?;
    match text.to_str() {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err(Error::Protocol(format!(
            "a text is not UTF-8 but {:?}: {error}",
            String::from_utf8_lossy(&text.as_bytes()[..text.len().min(64)])
        ))),
    }
}

fn nonce(data: capnp::Result<&[u8]>) -> Result<[u8; 32]> {
    let data = data.map_err(malformed)?;
    <[u8; 32]>::try_from(data)
        .map_err(|_| Error::Protocol(format!("a nonce has 32 bytes, got {}", data.len())))
}

fn proof(data: capnp::Result<&[u8]>) -> Result<Option<[u8; 32]>> {
    let data = data.map_err(malformed)?;
    if data.is_empty() {
        return Ok(None);
    }
    <[u8; 32]>::try_from(data)
        .map(Some)
        .map_err(|_| Error::Protocol(format!("a proof has 32 bytes, got {}", data.len())))
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

fn malformed(error: capnp::Error) -> Error {
    Error::Protocol(format!("a malformed message: {error}"))
}

fn unknown(error: capnp::NotInSchema) -> Error {
    Error::Protocol(format!(
        "a message with a variant that this release does not know: {error}"
    ))
}
