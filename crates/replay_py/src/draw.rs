//! One draw, from the request to arrays: what `Replay.sample` and `Replay.batches` share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use replay_core::error::{Error, Result};
use replay_core::replay::{Replay, SampleCredit, SampleRequest, Sampled, Wait};
use replay_core::view::{Batch, Decoder};

/// How long a draw takes at most to remove an item that does not decode from the memory.
const REPORT_WITHIN: Duration = Duration::from_secs(5);

/// What to draw, and how to make arrays of it.
pub struct Draw {
    pub replay: Arc<dyn Replay>,
    pub decoder: Arc<Decoder>,
    pub request: SampleRequest,
}

/// A batch on its way to the reader. Dropped before `delivered`, its draw does not count where the memory is in this
/// process; a server counts it as soon as it is sent, and the credit is `None` here.
pub struct Drawn {
    pub batch: Batch,
    credit: Option<Box<dyn SampleCredit>>,
}

impl Drawn {
    /// The batch, which now counts for the rate limiter.
    pub fn delivered(self) -> Batch {
        if let Some(credit) = self.credit {
            credit.delivered();
        }
        self.batch
    }
}

impl Draw {
    /// Draws with `sample`, again where of a draw no item decodes: a batch without items would be of no use. `beta`
    /// is asked for what weighs the batch when it is there.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the time is up without an item that decodes; [`Error::Interrupted`]; those of
    /// `sample` and [`Decoder::decode`].
    pub fn next(
        &self,
        wait: &Wait<'_>,
        beta: impl Fn() -> f64,
        mut sample: impl FnMut(&Wait<'_>) -> Result<Sampled>,
    ) -> Result<Drawn> {
        loop {
            let sampled = sample(wait)?;
            let drawn = self.decode(sampled, beta())?;
            let rejected = drawn.batch.rejected.len();
            if drawn.batch.len > 0 || rejected == 0 {
                return Ok(drawn);
            }
            wait.check()?;
            if wait.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Error::Deadline {
                    waited_for: format!(
                        "of {rejected} items drawn from table {:?} none decodes; waiting for others",
                        self.request.table
                    ),
                });
            }
        }
    }

    /// Makes arrays of a draw. Items that do not decode are left out, removed from the memory, and logged with
    /// the name of their writer.
    fn decode(&self, mut sampled: Sampled, beta: f64) -> Result<Drawn> {
        let credit = sampled.credit.take();
        let batch = self.decoder.decode(&sampled, beta)?;
        for rejected in &batch.rejected {
            let wait = Wait::until(Some(Instant::now() + REPORT_WITHIN));
            let table = &self.request.table;
            match self
                .replay
                .report_corrupt(table, rejected.key, &rejected.reason, &wait)
            {
                Ok(writer) => tracing::warn!(
                    table,
                    writer = writer.as_deref().unwrap_or("(already removed)"),
                    reason = rejected.reason,
                    "removed an item that does not decode"
                ),
                Err(error) => tracing::warn!(
                    table,
                    reason = rejected.reason,
                    %error,
                    "an item does not decode and could not be removed"
                ),
            }
        }
        Ok(Drawn { batch, credit })
    }
}
