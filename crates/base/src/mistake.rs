//! Mistakes that tests plant, to show that the simulated world finds them. Without the feature `simulated` they are compiled away.

macro_rules! mistakes {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// A mistake that the simulated world has to find.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mistake {
            $($(#[$doc])* $name,)+
        }

        impl Mistake {
            /// All mistakes.
            pub const ALL: &[Mistake] = &[$(Mistake::$name,)+];
        }
    };
}

mistakes! {
    /// A client sends pushes again, under new numbers, that were applied before the connection broke.
    ResentAsNew,
    /// A snapshot has an earlier sequence number of each writer.
    OldProgress,
    /// A snapshot ends after two chunks.
    ShortSnapshot,
    /// A snapshot's file is not synced.
    UnsyncedFile,
    /// The folder of a new snapshot is not synced.
    UnsyncedFolder,
    /// Earlier snapshots are removed before a new one is written.
    EarlyRemoval,
    /// The memory of a received frame is not returned.
    KeptReservation,
    /// The memory of a reply is not returned.
    KeptReply,
    /// A call that has ended keeps its place in the queue.
    KeptPlace,
    /// A sampled batch keeps a chunk.
    KeptPin,
    /// A server counts a connection that has ended.
    KeptConnection,
    /// A push that has to wait is acknowledged.
    EarlyReply,
    /// A client takes no notice of acknowledged steps that its server has lost.
    IgnoredLoss,
    /// A client skips a push after a broken connection.
    SkippedPush,
    /// A client takes an acknowledgement for one push too many.
    TakenAhead,
    /// `flush` does not wait.
    EarlyFlush,
    /// A reader of frames that was interrupted forgets what it has read.
    ForgottenBytes,
    /// A batch says that a window has one row less before its anchor.
    ShortWindow,
    /// An id has no generation, so that later items of its slot have the same.
    ForeignId,
    /// A sample draws from the first nine tenths of the sum of priorities.
    SkewedSample,
    /// The rate limiter admits every sample.
    LooseLimiter,
    /// A batch of several servers has the probabilities of each alone.
    LoneProbability,
    /// Parameters are stored as version 1 again.
    FirstVersion,
    /// A writer's older connection is not fenced off.
    UnfencedWriter,
    /// The rate limiter keeps the samples of a batch that was not delivered.
    KeptCredit,
    /// Items keep the samples of a batch that was not delivered.
    KeptSamples,
    /// Parameters that are sent again are stored again.
    RepeatedPut,
    /// Priorities of a snapshot get the exponent a second time.
    RaisedTwice,
    /// A chunk is freed while one pin is left.
    FreedPin,
    /// Emptying a table wakes no waiting push.
    SilentEmpty,
    /// A batch of several servers is divided by the sums of priorities of the batch before.
    OldTotal,
    /// A timer is asked before the future that it limits.
    TimerFirst,
    /// A write of no bytes is taken for the end of its frame.
    ZeroIsEnd,
}

/// Whether a [`Mistake`] was planted, or what happens then: `planted!(KeptReply => return)`.
#[macro_export]
macro_rules! planted {
    ($mistake:ident) => {
        $crate::mistake::planted($crate::mistake::Mistake::$mistake)
    };
    ($mistake:ident => $then:expr) => {
        if $crate::planted!($mistake) {
            $then;
        }
    };
}

/// Whether `mistake` was planted.
#[cfg(not(feature = "simulated"))]
#[inline(always)]
pub const fn planted(_mistake: Mistake) -> bool {
    false
}

#[cfg(feature = "simulated")]
pub use by_worlds::{plant, planted};

#[cfg(feature = "simulated")]
mod by_worlds {
    use super::Mistake;
    use std::cell::Cell;

    // A world runs on one thread, so other tests are not affected.
    thread_local!(static PLANTED: Cell<Option<Mistake>> = const { Cell::new(None) });

    /// Whether `mistake` was planted.
    pub fn planted(mistake: Mistake) -> bool {
        PLANTED.get() == Some(mistake)
    }

    /// Plants a mistake on this thread, or none.
    pub fn plant(mistake: Option<Mistake>) {
        PLANTED.set(mistake);
    }
}
