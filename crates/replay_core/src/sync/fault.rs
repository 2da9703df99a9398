//! Mutations of the lock-free code, injected by models to show that the models find them. Without the features of the
//! models they are compiled away.

use super::Ordering;

/// A mutation that a model has to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The sum tree does not add a change to one level.
    LostDelta,
    /// The sum tree activates a leaf without a release ordering.
    RelaxedPublication,
    /// The sum tree stores a new priority without compare-and-exchange.
    BlindUpdate,
    /// A sample from the sum tree returns the root's first sum, 0, after a restart has sampled a leaf.
    StaleTotal,
    /// The slab checks a slot and counts the pin in two steps instead of one.
    LateCount,
    /// A table writes an item's metadata without ordering it after the end of the slot's last item.
    UnorderedMetadata,
    /// A sample uses its pinned chunks without checking that the sampled item still exists.
    UnconfirmedPin,
    /// A sample is counted for the slot's current item, which may be another one.
    ForeignClaim,
    /// A table counts a new item's samples as available without a release ordering after its activation.
    EarlySamples,
    /// A table checks for batches of claims only before it reads the number of items with mass, and not after.
    OneLook,
    /// The rate limiter ends the count of an admitted push without a release ordering.
    EarlyEnd,
    /// The rate limiter does not count pushes that have ended.
    ForgottenEnd,
    /// The rate limiter admits a sample by counts of two epochs.
    MixedEpochs,
    /// The rate limiter takes back a sample of an earlier epoch.
    ForeignCredit,
}

/// `ordering`, or relaxed if `fault` was injected.
#[inline(always)]
pub fn weakened(fault: Fault, ordering: Ordering) -> Ordering {
    if injected(fault) { Ordering::Relaxed } else { ordering }
}

/// Whether `fault` was injected.
#[cfg(not(feature = "model"))]
#[inline(always)]
pub const fn injected(_fault: Fault) -> bool {
    false
}

#[cfg(feature = "model")]
pub use by_models::{inject, injected};

#[cfg(feature = "model")]
mod by_models {
    use super::Fault;
    use std::cell::Cell;

    // The models run all their threads on the test's own thread, so other tests are not affected.
    thread_local!(static INJECTED: Cell<Option<Fault>> = const { Cell::new(None) });

    /// Whether `fault` was injected.
    pub fn injected(fault: Fault) -> bool {
        INJECTED.get() == Some(fault)
    }

    /// Injects a fault for the rest of the calling test.
    pub fn inject(fault: Fault) {
        INJECTED.set(Some(fault));
    }
}
