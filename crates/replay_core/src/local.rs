//! The in-process `Replay`: calls go straight to the memory, and block until it admits them.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::replay::{
    Listing, OpenWriter, Parameters, Push, PushBody, PushChannel, ReadSteps, Replay, SampleChannel, SampleRequest,
    Sampled, StepsRead, UpdateReceipt, WriterId,
};
use crate::schema::TableConfig;
use crate::sync::Listener;
use crate::table::{Attempt, PendingCall, Table, Turn, WriterConnection};
use base::system;
use base::wait::Wait;

/// Repeats `attempt` until it is ready, the deadline has passed or the caller is interrupted. Its argument is `true` in the
/// last attempt before the deadline's error.
fn block_on<T>(wait: &Wait<'_>, mut attempt: impl FnMut(bool, &mut Turn) -> Result<Attempt<T>>) -> Result<T> {
    let mut call = PendingCall::new(Turn::default(), wait.deadline, Error::deadline);
    let mut slices = wait.slices(wait.deadline);
    loop {
        match call.step(system::now, Turn::changed, &mut attempt)? {
            Attempt::Ready(done) => return Ok(done),
            Attempt::Blocked((reason, changed)) => {
                let now = system::now();
                reason.report(wait, now, Wait::REPORT_AFTER);
                // Retries after a change, and at the end of the slice.
                let _ = changed.wait_deadline(slices.next_wake(now)?);
            }
        }
    }
}

impl<E: From<Error>> Replay<E> for Memory {
    fn create_table(&self, config: &TableConfig, _wait: &Wait<'_>) -> Result<(), E> {
        Memory::create_table(self, config)?;
        Ok(())
    }

    fn table_config(&self, table: &str, _wait: &Wait<'_>) -> Result<Arc<TableConfig>, E> {
        Ok(self.table(table)?.config().clone())
    }

    fn drop_table(&self, table: &str, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(Memory::drop_table(self, table)?)
    }

    fn open_writer(&self, table: &str, open: OpenWriter, _wait: &Wait<'_>) -> Result<Box<dyn PushChannel<E>>, E> {
        let table = self.table(table)?;
        let opened = table.open_writer(&open)?;
        let connection = Arc::default();
        table.writers().attach(open.writer, &connection);
        Ok(Box::new(LocalPushes {
            table,
            writer: open.writer,
            epoch: opened.epoch,
            last_sequence: opened.last_sequence,
            connection,
        }))
    }

    fn sample(&self, table: &str, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled, E> {
        let table = self.table(table)?;
        Ok(block_on(wait, |last, turn| table.try_sample(request, last, turn))?)
    }

    /// Each `next` samples: no requests are in flight between calls.
    fn sampler(&self, table: &str, request: SampleRequest, _in_flight: usize) -> Result<Box<dyn SampleChannel<E>>, E> {
        let table = self.table(table)?;
        Ok(Box::new(LocalSamples { table, request, counted: false }))
    }

    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        _wait: &Wait<'_>,
    ) -> Result<UpdateReceipt, E> {
        Ok(self.table(table)?.update_priorities(ids, priorities)?)
    }

    fn read_steps(&self, table: &str, request: &ReadSteps, _wait: &Wait<'_>) -> Result<StepsRead, E> {
        Ok(self.table(table)?.read_steps(request)?)
    }

    fn report_corrupt(&self, table: &str, id: u64, reason: &str, _wait: &Wait<'_>) -> Result<Option<String>, E> {
        Ok(self.table(table)?.report_corrupt(id, reason))
    }

    fn put_parameters(&self, name: &str, bytes: Bytes, _wait: &Wait<'_>) -> Result<u64, E> {
        Ok(self.parameters().put(name, 0, bytes)?)
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        _wait: &Wait<'_>,
    ) -> Result<Option<Parameters>, E> {
        // A dropped table has no writers.
        let table = writer.and_then(|id| self.table(&id.table).ok());
        let writer = table.as_deref().zip(writer.map(|id| id.writer));
        Ok(Memory::get_parameters(self, name, newer_than, writer))
    }

    fn list(&self, _wait: &Wait<'_>) -> Result<Listing, E> {
        Ok(Memory::list(self))
    }

    fn stats(&self, _wait: &Wait<'_>) -> Result<serde_json::Value, E> {
        Ok(Memory::stats(self))
    }
}

/// A writer's pushes, each applied at once. Dropped without [`PushChannel::close`], the writer is disconnected: it may be taken over.
struct LocalPushes {
    table: Arc<Table>,
    writer: u64,
    epoch: u32,
    last_sequence: u64,
    connection: Arc<WriterConnection>,
}

impl Drop for LocalPushes {
    fn drop(&mut self) {
        self.connection.end(system::now());
    }
}

impl<E: From<Error>> PushChannel<E> for LocalPushes {
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<(), E> {
        let push = Push { writer: self.writer, epoch: self.epoch, sequence: self.last_sequence + 1, body };
        block_on(wait, |_, turn| self.table.try_push(&push, turn))?;
        self.last_sequence = push.sequence;
        Ok(())
    }

    fn flush(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(())
    }

    fn end_steps(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        self.table.writers().has_parameters(self.writer, "", 0);
        Ok(())
    }

    fn close(&mut self, _wait: &Wait<'_>) -> Result<(), E> {
        Ok(self.table.writers().close(self.writer, self.epoch)?)
    }
}

struct LocalSamples {
    table: Arc<Table>,
    request: SampleRequest,
    /// Whether the wait for the next batch is counted: a call that meets its deadline is continued by the next one.
    counted: bool,
}

impl<E: From<Error>> SampleChannel<E> for LocalSamples {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled, E> {
        Ok(block_on(wait, |last, turn| {
            turn.counted |= self.counted;
            let attempt = self.table.try_sample(&self.request, last, turn)?;
            self.counted = turn.counted && matches!(attempt, Attempt::Blocked(_));
            Ok(attempt)
        })?)
    }
}
