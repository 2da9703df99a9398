//! Samples of a table, changes of their items (new priorities, and reports of blobs that do not decode), and its stored steps.

use replay_core::replay::{
    BatchShare, ChangeLease, ChunkHead, ReadPosition, ReadSteps, SampleRequest, Sampled, SampledItem, ShareState,
    StepsRead, StoredSteps, UpdateReceipt,
};

use super::push::{read_chunk, write_chunk};
use crate::error::{Error, Result};
use crate::frame::{COPIED, Rest, text, write_list};
use crate::innet_capnp as wire;

pub fn read(from: wire::sample::Reader<'_>) -> Result<SampleRequest> {
    let share = |share: wire::batch_share::Reader<'_>| BatchShare { take: share.get_take() };
    Ok(SampleRequest {
        count: from.get_count(),
        before: from.get_before(),
        after: from.get_after(),
        allow_short: from.get_allow_short(),
        min_probability: from.get_min_probability(),
        share: from.has_share().then(|| from.get_share().map(share)).transpose()?,
        definition: from.get_definition(),
        lease_ms: from.get_lease_ms(),
    })
}

pub fn write(request: &SampleRequest, mut out: wire::sample::Builder<'_>) {
    out.set_count(request.count);
    out.set_before(request.before);
    out.set_after(request.after);
    out.set_allow_short(request.allow_short);
    out.set_min_probability(request.min_probability);
    out.set_definition(request.definition);
    out.set_lease_ms(request.lease_ms);
    if let Some(share) = request.share {
        out.init_share().set_take(share.take);
    }
}

pub fn read_sampled(from: wire::sampled::Reader<'_>, rest: &Rest) -> Result<Sampled> {
    let mut rows = rest.payload();
    let row_bytes = from.get_row_bytes();
    if row_bytes > rows.len() as u64 {
        return Err(Error::Protocol(format!(
            "a batch says that it has {row_bytes} bytes of rows, in a payload of {}",
            rows.len()
        )));
    }
    let blobs = rows.split_off(row_bytes as usize);
    Ok(Sampled {
        items: read_items(from)?,
        live_items: from.get_items(),
        min_probability: Some(from.get_min_probability()).filter(|&p| p != 0.0),
        state: from.has_state().then(|| from.get_state().map(read_state)).transpose()?,
        rows,
        blobs: vec![blobs],
        shares: Vec::new(),
        lease: from.get_lease(),
        credit: None,
    })
}

/// Items of a batch, from a list for each of their fields.
fn read_items(from: wire::sampled::Reader<'_>) -> Result<Vec<SampledItem>> {
    let (ids, probabilities, ages) = (from.get_ids()?, from.get_probabilities()?, from.get_ages()?);
    let (times_sampled, before, after) = (from.get_times_sampled()?, from.get_before()?, from.get_after()?);
    let lengths = [ids.len(), probabilities.len(), ages.len(), times_sampled.len(), before.len(), after.len()];
    let versions = from.get_versions()?;
    let named = versions.len() == ids.len();
    if lengths.iter().any(|&length| length != ids.len()) || !(named || versions.is_empty()) {
        return Err(Error::Protocol(format!("a batch has lists of different lengths: {lengths:?}")));
    }
    let item = |i| SampledItem {
        id: ids.get(i),
        probability: probabilities.get(i),
        age: ages.get(i),
        times_sampled: times_sampled.get(i),
        before: before.get(i),
        after: after.get(i),
        version: if named { versions.get(i) } else { 0 },
    };
    Ok((0..ids.len()).map(item).collect())
}

pub fn write_sampled(sampled: &Sampled, mut out: wire::sampled::Builder<'_>) {
    let items = &sampled.items;
    out.set_row_bytes(sampled.rows.len() as u64);
    out.set_ids(&each(items, |item| item.id)[..]).expect(COPIED);
    out.set_probabilities(&each(items, |item| item.probability)[..]).expect(COPIED);
    out.set_ages(&each(items, |item| item.age)[..]).expect(COPIED);
    out.set_times_sampled(&each(items, |item| item.times_sampled)[..]).expect(COPIED);
    out.set_before(&each(items, |item| item.before)[..]).expect(COPIED);
    out.set_after(&each(items, |item| item.after)[..]).expect(COPIED);
    if items.iter().any(|item| item.version > 0) {
        out.set_versions(&each(items, |item| item.version)[..]).expect(COPIED);
    }
    out.set_items(sampled.live_items);
    out.set_min_probability(sampled.min_probability.unwrap_or(0.0));
    out.set_lease(sampled.lease);
    if let Some(state) = &sampled.state {
        write_state(state, out.init_state());
    }
}

fn each<T>(items: &[SampledItem], field: impl Fn(&SampledItem) -> T) -> Vec<T> {
    items.iter().map(field).collect()
}

fn read_state(from: wire::share_state::Reader<'_>) -> ShareState {
    ShareState {
        number: from.get_number(),
        total_mass: from.get_total_mass(),
        items: from.get_items(),
        taken: from.get_taken(),
        allowance: from.get_allowance(),
        holds_pushes: from.get_holds_pushes(),
        min_size: from.get_min_size(),
        samples_per_insert: from.get_samples_per_insert(),
        max_times_sampled: from.get_max_times_sampled(),
    }
}

fn write_state(state: &ShareState, mut out: wire::share_state::Builder<'_>) {
    out.set_number(state.number);
    out.set_total_mass(state.total_mass);
    out.set_items(state.items);
    out.set_taken(state.taken);
    out.set_allowance(state.allowance);
    out.set_holds_pushes(state.holds_pushes);
    out.set_min_size(state.min_size);
    out.set_samples_per_insert(state.samples_per_insert);
    out.set_max_times_sampled(state.max_times_sampled);
}

/// New priorities.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdatePriorities {
    /// Ids of items.
    pub ids: Vec<u64>,
    /// New priority of each id, before the exponent.
    pub priorities: Vec<f64>,
}

/// A blob that does not decode. The answer is the name of the removed item's writer, `None` when it was removed before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportCorrupt {
    /// The item.
    pub id: u64,
    /// The fault.
    pub reason: String,
}

pub fn read_update(from: wire::update_priorities::Reader<'_>) -> Result<UpdatePriorities> {
    let ids: Vec<u64> = from.get_ids()?.iter().collect();
    let priorities: Vec<f64> = from.get_priorities()?.iter().collect();
    if ids.len() != priorities.len() {
        let (ids, priorities) = (ids.len(), priorities.len());
        return Err(Error::Protocol(format!("an update has {ids} ids and {priorities} priorities")));
    }
    Ok(UpdatePriorities { ids, priorities })
}

pub fn write_update(update: &UpdatePriorities, mut out: wire::update_priorities::Builder<'_>) {
    out.set_ids(&update.ids[..]).expect(COPIED);
    out.set_priorities(&update.priorities[..]).expect(COPIED);
}

pub fn read_lease(from: wire::change_lease::Reader<'_>) -> ChangeLease {
    ChangeLease { lease: from.get_lease(), begin: from.get_begin() }
}

pub fn write_lease(change: ChangeLease, mut out: wire::change_lease::Builder<'_>) {
    out.set_lease(change.lease);
    out.set_begin(change.begin);
}

pub fn read_receipt(from: wire::updated::Reader<'_>) -> UpdateReceipt {
    UpdateReceipt { applied: from.get_applied(), stale: from.get_stale() }
}

pub fn write_receipt(receipt: &UpdateReceipt, mut out: wire::updated::Builder<'_>) {
    out.set_applied(receipt.applied);
    out.set_stale(receipt.stale);
}

pub fn read_report(from: wire::report_corrupt::Reader<'_>) -> Result<ReportCorrupt> {
    Ok(ReportCorrupt { id: from.get_id(), reason: text(from.get_reason())? })
}

pub fn write_report(report: &ReportCorrupt, mut out: wire::report_corrupt::Builder<'_>) {
    out.set_id(report.id);
    out.set_reason(&report.reason);
}

pub fn read_steps(from: wire::read_steps::Reader<'_>) -> Result<ReadSteps> {
    Ok(ReadSteps { bytes: from.get_bytes(), from: read_position(from.get_from()?) })
}

pub fn write_steps(request: &ReadSteps, mut out: wire::read_steps::Builder<'_>) {
    out.set_bytes(request.bytes);
    write_position(&request.from, out.init_from());
}

pub fn read_steps_read(from: wire::steps_read::Reader<'_>, rest: &Rest) -> Result<StepsRead> {
    let heads = rest.list(from.get_chunks(), |chunk| Ok(read_chunk(chunk)))?;
    let writers = from.get_writers()?;
    let mut payload = rest.payload();
    let bytes: u64 = heads.iter().map(|head| u64::from(head.bytes)).sum();
    if writers.len() as usize != heads.len() || bytes != payload.len() as u64 {
        return Err(Error::Protocol(format!(
            "stored steps in {} chunks of {bytes} bytes come with {} writers and {} bytes",
            heads.len(),
            writers.len(),
            payload.len()
        )));
    }
    let chunks = heads.iter().zip(writers).map(|(head, writer)| StoredSteps {
        writer,
        stream: head.stream,
        rows: head.rows,
        first_step: head.first_step,
        version: head.version,
        packed: payload.split_to(head.bytes as usize),
    });
    let chunks = chunks.collect();
    let next = from.has_next().then(|| from.get_next().map(read_position)).transpose()?;
    Ok(StepsRead { chunks, next })
}

pub fn write_steps_read(read: &StepsRead, mut out: wire::steps_read::Builder<'_>) {
    let chunks = &read.chunks;
    write_list(out.reborrow().init_chunks(chunks.len() as u32), chunks, |chunk, out| {
        // A chunk came in a frame, whose payload has at most so many bytes.
        let bytes = chunk.packed.len() as u32;
        let &StoredSteps { stream, rows, first_step, version, .. } = chunk;
        write_chunk(&ChunkHead { stream, rows, first_step, bytes, version }, out);
    });
    let writers: Vec<_> = chunks.iter().map(|chunk| chunk.writer).collect();
    out.set_writers(&writers[..]).expect(COPIED);
    if let Some(next) = &read.next {
        write_position(next, out.init_next());
    }
}

fn read_position(from: wire::read_position::Reader<'_>) -> ReadPosition {
    ReadPosition { server: 0, number: from.get_number(), next: from.get_next(), end: from.get_end() }
}

fn write_position(position: &ReadPosition, mut out: wire::read_position::Builder<'_>) {
    out.set_number(position.number);
    out.set_next(position.next);
    out.set_end(position.end);
}
