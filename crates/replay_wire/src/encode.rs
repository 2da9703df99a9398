//! Messages to frames.

use bytes::Bytes;
use capnp::message::{Builder, HeapAllocator};
use capnp::serialize;

use super::fields::{Field, Message, internal, list_len, write_list};
use super::frame::{HEADER_BYTES, OutgoingFrame};
use super::innet_capnp as wire;
use super::{Reply, ReplyBody, Request, RequestBody};
use crate::error::Result;
use gradients::JoinJob;
use replay_core::replay::{Push, SampleRequest, Sampled};

/// The frame of a request. Its payload is shared, not copied.
///
/// # Errors
/// [`Error::TooLarge`] for lists and payloads over the format's limits, [`Error::Priority`] for a push with a priority that
/// is NaN, infinite or negative.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
/// [`Error::Priority`]: replay_core::error::Error::Priority
pub fn encode_request(request: &Request) -> Result<OutgoingFrame> {
    let mut message = builder(match &request.body {
        RequestBody::Push(push) => 64 + 3 * (push.body.chunks.len() + push.body.items.len()),
        RequestBody::UpdatePriorities { ids, .. } => 64 + 2 * ids.len(),
        _ => 128,
    });
    let mut root = message.init_root::<wire::request::Builder<'_>>();
    root.set_id(request.id);
    root.set_deadline_ms(request.deadline_ms);
    let mut payload = Bytes::new();
    match &request.body {
        RequestBody::Hello(hello) => hello.write(root.init_hello())?,
        RequestBody::Authenticate(proof) => root.init_authenticate().set_proof(proof.write()?),
        RequestBody::CreateTable(config) => config.write(root.init_create_table())?,
        RequestBody::DescribeTable(table) => root.set_describe_table(table),
        RequestBody::EmptyTable(table) => root.set_empty_table(table),
        RequestBody::DropTable(table) => root.set_drop_table(table),
        RequestBody::OpenWriter { open, resume } => {
            let mut out = root.init_open_writer();
            out.set_resume(*resume);
            open.write(out)?;
        }
        RequestBody::Push(push) => {
            set_push(root.init_push(), push)?;
            payload = push.body.payload.clone();
        }
        RequestBody::Sample(sample) => set_sample(root.init_sample(), sample),
        RequestBody::UpdatePriorities {
            table,
            ids,
            priorities,
        } => {
            let mut out = root.init_update_priorities();
            out.set_table(table);
            list_len("the ids of an update", ids.len().max(priorities.len()))?;
            out.set_ids(&ids[..]).map_err(internal)?;
            out.set_priorities(&priorities[..]).map_err(internal)?;
        }
        RequestBody::ReportCorrupt { table, id, reason } => {
            let mut out = root.init_report_corrupt();
            out.set_table(table);
            out.set_id(*id);
            out.set_reason(reason);
        }
        RequestBody::PutParameters {
            name,
            id,
            version,
            bytes,
        } => {
            let mut out = root.init_put_parameters();
            out.set_name(name);
            out.set_id(*id);
            out.set_version(*version);
            payload = bytes.clone();
        }
        RequestBody::GetParameters {
            name,
            newer_than,
            writer,
        } => {
            let mut out = root.init_get_parameters();
            out.set_name(name);
            out.set_newer_than(*newer_than);
            if let Some(writer) = writer {
                writer.write(out.init_writer())?;
            }
        }
        RequestBody::Stats => root.set_stats(()),
        RequestBody::List => root.set_list(()),
        RequestBody::Snapshot => root.set_snapshot(()),
        RequestBody::CloseWriter {
            table,
            writer,
            epoch,
        } => {
            let mut out = root.init_close_writer();
            out.set_table(table);
            out.set_writer(*writer);
            out.set_epoch(*epoch);
        }
        RequestBody::JoinGradients { job, below } => {
            let mut out = root.init_join_gradients();
            out.set_below(below.unwrap_or(0));
            set_join(out, job)?;
        }
    }
    OutgoingFrame::new(head(&message)?, vec![payload], None)
}

/// The frame of a reply. It owns the credit and the blobs, which stay pinned until it is dropped.
///
/// # Errors
/// [`Error::TooLarge`] for batches and payloads over the format's limits.
///
/// [`Error::TooLarge`]: replay_core::error::Error::TooLarge
pub fn encode_reply(reply: Reply) -> Result<OutgoingFrame> {
    let mut message = builder(match &reply.body {
        ReplyBody::Sampled(sampled) => 64 + 4 * sampled.items.len(),
        ReplyBody::Stats(text) | ReplyBody::Error { message: text, .. } => 64 + text.len() / 8,
        _ => 128,
    });
    let mut root = message.init_root::<wire::reply::Builder<'_>>();
    root.set_id(reply.id);
    let mut payload = Vec::new();
    let mut credit = None;
    match reply.body {
        ReplyBody::Error {
            code,
            message,
            waited_for,
        } => {
            let mut out = root.init_error();
            out.set_code(code);
            out.set_message(&message);
            if let Some(reason) = waited_for {
                reason.write(out.init_waited_for())?;
            }
        }
        ReplyBody::Challenge(challenge) => challenge.write(root.init_challenge())?,
        ReplyBody::Welcome(proof) => root.init_welcome().set_proof(proof.write()?),
        ReplyBody::Waiting(reason) => reason.write(root.init_waiting())?,
        ReplyBody::Done => root.set_done(()),
        ReplyBody::Table(config) => config.write(root.init_table())?,
        ReplyBody::Writer(opened) => opened.write(root.init_writer())?,
        ReplyBody::Pushed { steps } => root.init_pushed().set_steps(steps),
        ReplyBody::Sampled(sampled) => {
            set_sampled(root.init_sampled(), &sampled)?;
            payload = sampled.blobs;
            payload.insert(0, sampled.rows);
            credit = sampled.credit;
        }
        ReplyBody::Updated(receipt) => receipt.write(root.init_updated())?,
        ReplyBody::Corrupt(writer) => root.set_corrupt(writer.as_deref().unwrap_or_default()),
        ReplyBody::Parameters(parameters) => {
            let mut out = root.init_parameters();
            if let Some(parameters) = parameters {
                out.set_version(parameters.version);
                payload.push(parameters.bytes);
            }
        }
        ReplyBody::Stats(json) => root.set_stats(&json),
        ReplyBody::Listing(listing) => listing.write(root.init_listing())?,
        ReplyBody::Gradients(joined) => {
            let mut out = root.init_gradients();
            out.set_address(joined.address.to_string());
            joined.ticket.write(out)?;
        }
    }
    OutgoingFrame::new(head(&message)?, payload, credit)
}

fn builder(words: usize) -> Builder<HeapAllocator> {
    let words = u32::try_from(words).unwrap_or(u32::MAX);
    Builder::new(HeapAllocator::new().first_segment_words(words))
}

/// The message, behind [`HEADER_BYTES`] free bytes.
fn head(message: &Builder<HeapAllocator>) -> Result<Vec<u8>> {
    let bytes = 8 * serialize::compute_serialized_size_in_words(message);
    let mut head = Vec::with_capacity(HEADER_BYTES + bytes);
    head.resize(HEADER_BYTES, 0);
    serialize::write_message(&mut head, message).map_err(internal)?;
    Ok(head)
}

fn set_push(mut out: wire::push::Builder<'_>, push: &Push) -> Result<()> {
    out.set_table(&push.table);
    out.set_writer(push.writer);
    out.set_epoch(push.epoch);
    out.set_sequence(push.sequence);
    push.body.check_priorities()?;
    let chunks = list_len("the chunks of a push", push.body.chunks.len())?;
    write_list(out.reborrow().init_chunks(chunks), &push.body.chunks)?;
    let items = list_len("the items of a push", push.body.items.len())?;
    write_list(out.init_items(items), &push.body.items)
}

fn set_sample(mut out: wire::sample::Builder<'_>, sample: &SampleRequest) {
    out.set_table(&sample.table);
    out.set_count(sample.count);
    out.set_before(sample.before);
    out.set_after(sample.after);
    out.set_allow_short(sample.allow_short);
    out.set_min_probability(sample.min_probability);
    out.set_repeated(sample.repeated);
    if let Some(part) = sample.part {
        out.init_part().set_limiter_samples(part.limiter_samples);
    }
}

fn set_join(mut out: wire::join_gradients::Builder<'_>, job: &JoinJob) -> Result<()> {
    out.set_job(&job.job);
    out.set_worker(job.worker);
    out.set_workers(job.workers);
    out.set_world(job.world);
    out.set_name(&job.name);
    out.set_arithmetic(job.arithmetic.into());
    out.set_segment_values(job.segment_values);
    let deadline_ms = job.deadline.as_nanos().div_ceil(1_000_000);
    out.set_deadline_ms(u32::try_from(deadline_ms).unwrap_or(u32::MAX));
    job.asynchronous.map_or(Ok(()), |terms| terms.write(out))
}

fn set_sampled(mut out: wire::sampled::Builder<'_>, sampled: &Sampled) -> Result<()> {
    out.set_row_bytes(sampled.rows.len() as u64);
    out.set_items(sampled.live_items);
    out.set_min_probability(sampled.min_probability.unwrap_or(0.0));
    list_len("the items of a batch", sampled.items.len())?;
    macro_rules! set_list {
        ($set:ident, $field:ident) => {
            let values: Vec<_> = sampled.items.iter().map(|item| item.$field).collect();
            out.$set(&values[..]).map_err(internal)?;
        };
    }
    set_list!(set_ids, id);
    set_list!(set_probabilities, probability);
    set_list!(set_ages, age);
    set_list!(set_times_sampled, times_sampled);
    set_list!(set_before, before);
    set_list!(set_after, after);
    if let Some(state) = sampled.shard {
        let mut shard = out.init_shard();
        shard.set_number(state.number);
        shard.set_total_priority(state.total_priority);
        shard.set_items(state.items);
        shard.set_inserted(state.inserted);
        shard.set_allowance(state.allowance);
    }
    Ok(())
}
