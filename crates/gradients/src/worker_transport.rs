//! A worker on a transport: blocking sums and controls, over UDP sockets or a DPDK device.

use std::io;
use std::time::{Duration, Instant};

use super::worker::{Control, Exchange, WorkerSession};
use super::{Error, JoinJob, Result, Round, Sum, Ticket, Transmit};
use base::wait::Wait;

/// Network access of one worker: it sends by [`Transmit`], which may queue datagrams until [`flush`](WorkerTransport::flush).
pub trait WorkerTransport: Transmit {
    /// Sends queued datagrams, waits up to `time` for others to arrive, and receives them.
    ///
    /// # Errors
    /// Errors of the operating system. A signal ends the wait without an error.
    fn wait(&mut self, time: Duration) -> io::Result<()>;

    /// Passes the datagrams of the last [`wait`](WorkerTransport::wait) to `exchange`, once.
    fn deliver<E: Exchange>(&mut self, now: Instant, exchange: &mut E);

    /// Sends queued datagrams.
    fn flush(&mut self);
}

/// A worker of a synchronous job, on any transport.
pub trait JobWorker: Send {
    /// Number of the next round.
    fn next_round(&self) -> u64;

    /// Replaces `values` by their sum over all workers, or by their mean. After an error some values are replaced and some are not.
    ///
    /// # Errors
    /// The failure of the sum; [`Error::Receive`], [`Error::Interrupted`].
    fn sum(&mut self, values: &mut [f32], mean: bool, deadline: Duration, wait: &Wait<'_>) -> Result<Sum>;

    /// Sends a control and waits for its answer.
    ///
    /// # Errors
    /// The answer of the aggregator, or [`Error::Silent`]; [`Error::Receive`], [`Error::Interrupted`].
    fn call(&mut self, control: Control, deadline: Duration, wait: &Wait<'_>) -> Result<()>;
}

/// A worker of a job, on a transport. Calls block until they are done, their deadline passes, or an interrupt arrives.
pub struct Worker<T> {
    session: WorkerSession,
    transport: T,
}

impl<T: WorkerTransport> Worker<T> {
    /// The worker that joined with `request` and was given `ticket`. Returns once the aggregator has
    /// validated the worker's UDP address.
    ///
    /// # Errors
    /// [`Error::Silent`] without an answer within `deadline`; [`Error::Receive`], [`Error::Interrupted`].
    pub fn join(transport: T, request: &JoinJob, ticket: &Ticket, deadline: Duration, wait: &Wait<'_>) -> Result<Self> {
        let session = WorkerSession::new(request, ticket);
        let mut worker = Worker { session, transport };
        let now = Instant::now();
        let call = worker.session.call(Control::Join, now, now + deadline);
        run(call, &mut worker.transport, wait)?;
        Ok(worker)
    }

    pub(super) fn into_parts(self) -> (WorkerSession, T) {
        (self.session, self.transport)
    }
}

impl<T: WorkerTransport + Send> JobWorker for Worker<T> {
    fn next_round(&self) -> u64 {
        self.session.next_round()
    }

    fn sum(&mut self, values: &mut [f32], mean: bool, deadline: Duration, wait: &Wait<'_>) -> Result<Sum> {
        let now = Instant::now();
        let round = Round::new(&mut self.session, values, mean, now, now + deadline);
        run(round, &mut self.transport, wait)
    }

    fn call(&mut self, control: Control, deadline: Duration, wait: &Wait<'_>) -> Result<()> {
        let now = Instant::now();
        let call = self.session.call(control, now, now + deadline);
        run(call, &mut self.transport, wait)
    }
}

/// Runs an exchange to its end.
fn run<E: Exchange, T: WorkerTransport>(mut exchange: E, transport: &mut T, wait: &Wait<'_>) -> Result<E::Output> {
    let mut slices = wait.slices(None);
    loop {
        let now = Instant::now();
        if let Some(result) = exchange.poll(now, transport) {
            transport.flush();
            return result;
        }
        wait.report(now, Wait::REPORT_AFTER, || exchange.waits_for(now));
        let wake = exchange.next_wake().min(slices.next_wake(now)?);
        transport.wait(wake.saturating_duration_since(now)).map_err(|error| Error::Receive(error.into()))?;
        transport.deliver(Instant::now(), &mut exchange);
    }
}
