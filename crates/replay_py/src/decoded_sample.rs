//! One sampled batch, from the request to arrays, shared by `Replay.sample` and `Replay.batches`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use replay_core::error::{Error, Result};
use replay_core::replay::{Replay, SampleCredit, SampleRequest, Sampled, Wait};
use replay_core::view::{Batch, Decoder};

/// Longest time to remove an item from the memory that cannot be decoded.
const REPORT_WITHIN: Duration = Duration::from_secs(5);

/// A request for samples, and the decoder for their arrays.
pub struct DecodedSampler {
    pub replay: Arc<dyn Replay>,
    pub decoder: Arc<Decoder>,
    pub request: SampleRequest,
}

/// A batch for the reader. If it is dropped before `delivered`, the rate limiter of a memory in this process does not count its
/// sample. A server counts a batch when it is sent, and the credit is `None`.
pub struct DecodedSample {
    pub batch: Batch,
    credit: Option<Box<dyn SampleCredit>>,
}

impl DecodedSample {
    /// The batch, which now counts for the rate limiter.
    pub fn delivered(self) -> Batch {
        if let Some(credit) = self.credit {
            credit.delivered();
        }
        self.batch
    }
}

impl DecodedSampler {
    /// Calls `sample` until at least one item of its batch can be decoded. `beta` returns the exponent of the
    /// weights and is called when the batch is there.
    ///
    /// # Errors
    /// [`Error::Deadline`] at the deadline without a decoded item; [`Error::Interrupted`]; errors of `sample` and
    /// [`Decoder::decode`].
    pub fn next(
        &self,
        wait: &Wait<'_>,
        beta: impl Fn() -> f64,
        mut sample: impl FnMut(&Wait<'_>) -> Result<Sampled>,
    ) -> Result<DecodedSample> {
        loop {
            let sampled = sample(wait)?;
            let sampled = self.decode(sampled, beta())?;
            let rejected = sampled.batch.rejected.len();
            if sampled.batch.len > 0 || rejected == 0 {
                return Ok(sampled);
            }
            wait.check()?;
            if wait.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(Error::Deadline {
                    waited_for: format!(
                        "none of {rejected} items sampled from table {:?} could be decoded; waiting for others",
                        self.request.table
                    ),
                });
            }
        }
    }

    /// Makes arrays of a sample. Items that cannot be decoded are left out, removed from the memory, and logged with the name of
    /// their writer.
    fn decode(&self, mut sampled: Sampled, beta: f64) -> Result<DecodedSample> {
        let credit = sampled.credit.take();
        let batch = self.decoder.decode(&sampled, beta)?;
        for rejected in &batch.rejected {
            let wait = Wait::until(Some(Instant::now() + REPORT_WITHIN));
            let table = &self.request.table;
            match self
                .replay
                .report_corrupt(table, rejected.id, &rejected.reason, &wait)
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
        Ok(DecodedSample { batch, credit })
    }
}
