//! Messages to frames.

use bytes::Bytes;
use capnp::message::{Builder, HeapAllocator};
use capnp::serialize;

use super::frame::{HEADER_BYTES, OutgoingFrame};
use super::innet_capnp as wire;
use super::{Challenge, GradientsJoined, Hello, Reply, ReplyBody, Request, RequestBody};
use gradients::JoinJob;
use replay_core::error::{Error, Result};
use replay_core::replay::{Listing, OpenWriter, Push, SampleRequest, Sampled};
use replay_core::schema::TableConfig;

/// Longest list in a message: Cap'n Proto counts elements in 29 bits.
const MAX_LIST: usize = (1 << 29) - 1;

/// The frame of a request. Its payload is shared, not copied.
///
/// # Errors
/// [`Error::TooLarge`] for lists and payloads over the format's limits, [`Error::Priority`] for a push with a priority that
/// is NaN, infinite or negative.
pub fn encode_request(request: &Request) -> Result<OutgoingFrame> {
    let mut message = builder(match &request.body {
        RequestBody::Push(push) => 64 + 3 * (push.body.chunks.len() + push.body.items.len()),
        RequestBody::UpdatePriorities { keys, .. } => 64 + 2 * keys.len(),
        _ => 128,
    });
    let mut root = message.init_root::<wire::request::Builder<'_>>();
    root.set_id(request.id);
    root.set_deadline_ms(request.deadline_ms);
    let mut payload = Bytes::new();
    match &request.body {
        RequestBody::Hello(hello) => set_hello(root.init_hello(), hello),
        RequestBody::Authenticate(proof) => root.init_authenticate().set_proof(proof_bytes(proof)),
        RequestBody::CreateTable(config) => set_table(root.init_create_table(), config)?,
        RequestBody::DescribeTable(table) => root.set_describe_table(table),
        RequestBody::EmptyTable(table) => root.set_empty_table(table),
        RequestBody::DropTable(table) => root.set_drop_table(table),
        RequestBody::OpenWriter { open, resume } => {
            let mut out = root.init_open_writer();
            out.set_resume(*resume);
            set_open_writer(out, open);
        }
        RequestBody::Push(push) => {
            set_push(root.init_push(), push)?;
            payload = push.body.payload.clone();
        }
        RequestBody::Sample(sample) => set_sample(root.init_sample(), sample),
        RequestBody::UpdatePriorities {
            table,
            keys,
            priorities,
        } => {
            let mut out = root.init_update_priorities();
            out.set_table(table);
            list("the keys of an update", keys.len().max(priorities.len()))?;
            out.set_keys(&keys[..]).map_err(internal)?;
            out.set_priorities(&priorities[..]).map_err(internal)?;
        }
        RequestBody::ReportCorrupt { table, key, reason } => {
            let mut out = root.init_report_corrupt();
            out.set_table(table);
            out.set_key(*key);
            out.set_reason(reason);
        }
        RequestBody::PutParameters { name, bytes } => {
            root.set_put_parameters(name);
            payload = bytes.clone();
        }
        RequestBody::GetParameters { name, newer_than } => {
            let mut out = root.init_get_parameters();
            out.set_name(name);
            out.set_newer_than(*newer_than);
        }
        RequestBody::Stats => root.set_stats(()),
        RequestBody::List => root.set_list(()),
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
            set_join(out, job);
        }
    }
    OutgoingFrame::new(head(&message)?, vec![payload], None)
}

/// The frame of a reply. It owns the credit and the blobs, which stay pinned until it is dropped.
///
/// # Errors
/// [`Error::TooLarge`] for batches and payloads over the format's limits.
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
        ReplyBody::Error { code, message } => {
            let mut out = root.init_error();
            out.set_code(code.into());
            out.set_message(&message);
        }
        ReplyBody::Challenge(challenge) => set_challenge(root.init_challenge(), &challenge),
        ReplyBody::Welcome => root.set_welcome(()),
        ReplyBody::Done => root.set_done(()),
        ReplyBody::Table(config) => set_table(root.init_table(), &config)?,
        ReplyBody::Writer(opened) => {
            let mut out = root.init_writer();
            out.set_epoch(opened.epoch);
            out.set_last_sequence(opened.last_sequence);
        }
        ReplyBody::Pushed { steps } => root.init_pushed().set_steps(steps),
        ReplyBody::Sampled(sampled) => {
            set_sampled(root.init_sampled(), &sampled)?;
            payload = sampled.blobs;
            payload.insert(0, sampled.rows);
            credit = sampled.credit;
        }
        ReplyBody::Updated(receipt) => {
            let mut out = root.init_updated();
            out.set_applied(receipt.applied);
            out.set_stale(receipt.stale);
        }
        ReplyBody::Corrupt(writer) => root.set_corrupt(writer.as_deref().unwrap_or_default()),
        ReplyBody::Parameters(parameters) => {
            let mut out = root.init_parameters();
            if let Some(parameters) = parameters {
                out.set_version(parameters.version);
                payload.push(parameters.bytes);
            }
        }
        ReplyBody::Stats(json) => root.set_stats(&json),
        ReplyBody::Listing(listing) => set_listing(root.init_listing(), &listing)?,
        ReplyBody::Gradients(joined) => set_joined(root.init_gradients(), &joined),
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

fn internal(error: capnp::Error) -> Error {
    Error::Internal(format!("a message could not be built: {error}"))
}

/// The length of a list, as Cap'n Proto counts it.
fn list(what: &'static str, len: usize) -> Result<u32> {
    if len > MAX_LIST {
        return Err(Error::TooLarge {
            what,
            size: len as u64,
            limit: MAX_LIST as u64,
            advice: "send less at a time",
        });
    }
    Ok(len as u32)
}

fn proof_bytes(proof: &Option<[u8; 32]>) -> &[u8] {
    proof.as_ref().map_or(&[], |proof| proof)
}

fn set_hello(mut out: wire::hello::Builder<'_>, hello: &Hello) {
    out.set_protocol(hello.protocol);
    out.set_release(&hello.release);
    out.set_nonce(&hello.nonce);
}

fn set_challenge(mut out: wire::challenge::Builder<'_>, challenge: &Challenge) {
    out.set_protocol(challenge.protocol);
    out.set_release(&challenge.release);
    out.set_incarnation(challenge.incarnation);
    out.set_nonce(&challenge.nonce);
    out.set_token_needed(challenge.token_needed);
    out.set_proof(proof_bytes(&challenge.proof));
    out.set_max_frame_bytes(challenge.max_frame_bytes);
}

fn set_table(mut out: wire::table_config::Builder<'_>, config: &TableConfig) -> Result<()> {
    out.set_name(&config.name);
    out.set_capacity(config.capacity);
    out.set_capacity_bytes(config.capacity_bytes);
    out.set_sampler(config.sampler.into());
    out.set_priority_exponent(config.priority_exponent);
    out.set_priority_unit_log2(config.priority_unit_log2);
    out.set_max_times_sampled(config.max_times_sampled);
    out.set_min_size(config.min_size);
    out.set_samples_per_insert(config.samples_per_insert);
    out.set_slack(config.slack);
    let mut columns = out.init_columns(list("the columns of a table", config.columns.len())?);
    for (i, column) in config.columns.iter().enumerate() {
        let mut out = columns.reborrow().get(i as u32);
        out.set_name(&column.name);
        out.set_dtype(column.dtype.into());
        out.set_codec(column.codec.into());
        list("the dimensions of a column", column.shape.len())?;
        out.set_shape(&column.shape[..]).map_err(internal)?;
    }
    Ok(())
}

fn set_listing(mut out: wire::listing::Builder<'_>, listing: &Listing) -> Result<()> {
    let mut tables = out
        .reborrow()
        .init_tables(list("the tables", listing.tables.len())?);
    for (i, table) in listing.tables.iter().enumerate() {
        set_table(tables.reborrow().get(i as u32), table)?;
    }
    let mut parameters = out.init_parameters(list("the parameters", listing.parameters.len())?);
    for (i, listed) in listing.parameters.iter().enumerate() {
        let mut out = parameters.reborrow().get(i as u32);
        out.set_name(&listed.name);
        out.set_version(listed.version);
        out.set_bytes(listed.bytes);
    }
    Ok(())
}

fn set_open_writer(mut out: wire::open_writer::Builder<'_>, open: &OpenWriter) {
    out.set_table(&open.table);
    out.set_writer(open.writer);
    out.set_name(&open.name);
    out.set_streams(open.streams);
    out.set_window_before(open.window_before);
    out.set_window_after(open.window_after);
}

fn set_push(mut out: wire::push::Builder<'_>, push: &Push) -> Result<()> {
    out.set_table(&push.table);
    out.set_writer(push.writer);
    out.set_epoch(push.epoch);
    out.set_sequence(push.sequence);
    let n = list("the chunks of a push", push.body.chunks.len())?;
    let mut chunks = out.reborrow().init_chunks(n);
    for (i, chunk) in push.body.chunks.iter().enumerate() {
        let mut out = chunks.reborrow().get(i as u32);
        out.set_stream(chunk.stream);
        out.set_rows(chunk.rows);
        out.set_first_step(chunk.first_step);
        out.set_bytes(chunk.bytes);
    }
    let n = list("the items of a push", push.body.items.len())?;
    let mut items = out.init_items(n);
    for (i, item) in push.body.items.iter().enumerate() {
        let mut out = items.reborrow().get(i as u32);
        out.set_anchor(item.anchor);
        out.set_stream(item.stream);
        out.set_before(item.before);
        out.set_after(item.after);
        // The wire's -1 means "none", so a negative priority has to stop here.
        match item.priority {
            Some(p) if !(p.is_finite() && p >= 0.0) => {
                return Err(Error::Priority { value: p.into() });
            }
            Some(p) => out.set_priority(p),
            None => out.set_priority(-1.0),
        }
    }
    Ok(())
}

fn set_sample(mut out: wire::sample::Builder<'_>, sample: &SampleRequest) {
    out.set_table(&sample.table);
    out.set_count(sample.count);
    out.set_before(sample.before);
    out.set_after(sample.after);
    out.set_allow_short(sample.allow_short);
    out.set_min_priority(sample.min_probability);
}

fn set_join(mut out: wire::join_gradients::Builder<'_>, job: &JoinJob) {
    out.set_job(&job.job);
    out.set_worker(job.worker);
    out.set_workers(job.workers);
    out.set_world(job.world);
    out.set_name(&job.name);
    out.set_arithmetic(job.arithmetic.into());
    out.set_segment_values(job.segment_values);
    let deadline_ms = job.deadline.as_nanos().div_ceil(1_000_000);
    out.set_deadline_ms(u32::try_from(deadline_ms).unwrap_or(u32::MAX));
    if let Some(terms) = job.asynchronous {
        out.set_values(terms.values);
        out.set_threshold(terms.threshold);
        out.set_staleness(terms.staleness);
    }
}

fn set_joined(mut out: wire::gradients_joined::Builder<'_>, joined: &GradientsJoined) {
    out.set_address(joined.address.to_string());
    out.set_session(joined.ticket.session);
    out.set_key(&joined.ticket.key);
    out.set_round(joined.ticket.round);
    out.set_window(joined.ticket.window);
}

fn set_sampled(mut out: wire::sampled::Builder<'_>, sampled: &Sampled) -> Result<()> {
    out.set_row_bytes(sampled.rows.len() as u64);
    out.set_items(sampled.live_items);
    out.set_min_probability(sampled.min_probability.unwrap_or(0.0));
    list("the items of a batch", sampled.items.len())?;
    macro_rules! set_list {
        ($set:ident, $field:ident) => {
            let values: Vec<_> = sampled.items.iter().map(|item| item.$field).collect();
            out.$set(&values[..]).map_err(internal)?;
        };
    }
    set_list!(set_keys, key);
    set_list!(set_probabilities, probability);
    set_list!(set_ages, age);
    set_list!(set_times_sampled, times_sampled);
    set_list!(set_before, before);
    set_list!(set_after, after);
    Ok(())
}
