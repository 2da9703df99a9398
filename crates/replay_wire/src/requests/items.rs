//! Changes of items: new priorities, and reports of blobs that do not decode.

use crate::error::{Error, Result};
use crate::fields::{COPIED, text};
use crate::innet_capnp as wire;
use replay_core::replay::UpdateReceipt;

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
