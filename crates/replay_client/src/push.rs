//! A writer's pushes over a dedicated connection. Several are in flight at a time, and each is kept until it is acknowledged. After a
//! broken connection, unacknowledged pushes are resent with their sequence numbers, so each is applied exactly once.

use std::sync::Arc;
use std::time::Instant;

use super::dialer::Dialer;
use super::link::{self, Channel, Link};
use super::outage::retry;
use super::pipeline::{answer, expect, is_broken, is_closed, unexpected};
use base::system;
use base::wait::Wait;
use replay_core::error::WaitReason;
use replay_core::replay::{OpenWriter, Parameters, Push, PushBody, PushChannel, WriterOpened};
use replay_link::error::{Error, Result};
use replay_wire::{CloseWriter, ErrorCode, GetParameters, OpenOrResume, Reply, ReplyBody, RequestBody};

/// The pushes of one writer.
pub struct Pushes {
    /// Pushes after `applied`, in the order of their sequence numbers.
    link: Link<PushBody>,
    table: String,
    open: OpenWriter,
    epoch: u32,
    /// Sequence number of the last acknowledged push.
    applied: u64,
    /// Steps accepted by the server, as of the last acknowledgement.
    steps: u64,
    /// Rate limiter's reason for refusing the first pending push. While it is set, only the first push is sent.
    held_back: Option<Box<WaitReason>>,
    /// Error that ended the writer.
    failed: Option<(ErrorCode, String)>,
    closed: bool,
    /// Connected writers of the table when this one was opened, this one included.
    pub connected: u64,
    /// Index of the server among several.
    pub server: usize,
}

impl Pushes {
    /// Opens the writer.
    pub fn open(dialer: Arc<Dialer>, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<Self> {
        let mut channel = Pushes {
            link: Link::new(dialer.clone()),
            table: table.to_owned(),
            open,
            epoch: 0,
            applied: 0,
            steps: 0,
            held_back: None,
            failed: None,
            closed: false,
            connected: 0,
            server: 0,
        };
        let opened = retry(&dialer, wait, || channel.take_over(wait))?;
        (channel.applied, channel.steps) = (opened.last_sequence, opened.steps);
        channel.connected = opened.connected;
        Ok(channel)
    }

    /// Connects and takes over the writer: the server then refuses pushes over its earlier connections.
    fn take_over(&mut self, wait: &Wait<'_>) -> Result<WriterOpened> {
        let dialer = self.link.dialer.clone();
        let mut connection = dialer.dial(wait)?;
        let body = RequestBody::OpenWriter(OpenOrResume {
            open: self.open.clone(),
            // A writer that has sent nothing has nothing to resume, so a server that has forgotten it may open it anew.
            resume: self.applied > 0 || !self.link.is_empty(),
        });
        let reply = connection.call(dialer.options.grace, wait, Some(&self.table), body)?;
        let opened: WriterOpened = expect(reply)?;
        self.epoch = opened.epoch;
        self.link.send_all_over(connection);
        Ok(opened)
    }

    fn applied_up_to(&mut self, sequence: u64) {
        while self.applied < sequence {
            self.applied += 1;
            self.link.remove(0);
        }
    }

    /// Steps of the pushes that are not acknowledged.
    fn pending_steps(&self) -> u64 {
        let chunks = self.link.requests().flat_map(|body| &body.chunks);
        chunks.map(|chunk| u64::from(chunk.rows)).sum()
    }

    fn check(&self) -> Result<()> {
        self.link.dialer.check_process()?;
        match &self.failed {
            Some((code, message)) => Err(Error::Remote { code: *code, message: message.clone() }),
            None if self.closed => Err(Error::Closed("the writer")),
            None => Ok(()),
        }
    }

    /// Fails the writer for good: its steps have a gap that cannot be filled.
    fn fail(&mut self, code: ErrorCode, message: String) -> Error {
        self.link.disconnect();
        self.link.clear();
        self.failed = Some((code, message.clone()));
        Error::Remote { code, message }
    }
}

impl Channel for Pushes {
    type Request = PushBody;

    fn link(&mut self) -> &mut Link<PushBody> {
        &mut self.link
    }

    fn connect(&mut self, wait: &Wait<'_>) -> Result<()> {
        let opened = match self.take_over(wait) {
            // The server no longer knows which of the pending pushes were applied.
            Err(Error::Remote { code: ErrorCode::Expired, message }) => {
                let (acknowledged, pending) = (self.steps, self.pending_steps());
                let message =
                    format!("{message}; it had acknowledged {acknowledged} steps, {pending} more may be lost");
                return Err(self.fail(ErrorCode::Expired, message));
            }
            other => other?,
        };
        if opened.last_sequence < self.applied && !base::planted!(IgnoredLoss) {
            let writer = self.open.name.clone();
            let (lost, pending) = (self.steps - opened.steps.min(self.steps), self.pending_steps());
            return Err(self.fail(
                ErrorCode::Expired,
                format!(
                    "{}; it was started again from a snapshot without the last {lost} of the {} steps that it had \
                     acknowledged, and {pending} later ones that it had sent are lost with them",
                    replay_core::Error::Expired { writer },
                    self.steps,
                ),
            ));
        }
        self.steps = self.steps.max(opened.steps);
        base::planted!(ResentAsNew => self.applied = opened.last_sequence);
        self.applied_up_to(opened.last_sequence);
        base::planted!(SkippedPush => self.link.remove(0));
        Ok(())
    }

    /// While the rate limiter refuses the first push, the server would refuse later ones as out of order.
    fn send(&mut self, deadline: Option<Instant>) -> Result<()> {
        let most = self.held_back.as_ref().map_or(usize::MAX, |_| 1);
        let (writer, epoch, first) = (self.open.writer, self.epoch, self.applied + 1);
        let message = |index: usize, body: &PushBody| {
            let push = Push { writer, epoch, sequence: first + index as u64, body: body.clone() };
            (&*self.table, RequestBody::Push(push))
        };
        self.link.send(most, deadline, message).map_err(|error| match error {
            Error::Closed(_) => error,
            error => self.fail(error.code(), error.to_string()),
        })
    }

    /// Handles the answer to a push.
    fn settle(&mut self, reply: Reply) -> Result<()> {
        let Some(at) = self.link.answered(reply.id) else {
            // Answer to a push that was in flight behind a refused one, and is resent.
            return Ok(());
        };
        match answer(reply.body) {
            Ok(ReplyBody::Pushed(steps)) => {
                self.held_back = None;
                self.steps = steps;
                // Pushes are applied in order, so all earlier ones are applied.
                let ahead = u64::from(base::planted!(TakenAhead));
                self.applied_up_to(self.applied + 1 + at as u64 + ahead);
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            Err(Error::RemoteDeadline { waited_for }) => {
                self.held_back = Some(waited_for);
                // The server refuses later pushes as out of order: resend them.
                self.link.send_again_from(at);
                Ok(())
            }
            Err(error) if is_broken(&error) || is_closed(&error) => Err(error),
            Err(error) => {
                let behind = self.link.len() - at - 1;
                let rest = match behind {
                    0 => String::new(),
                    n => format!("; {n} pushes behind it are lost with it"),
                };
                Err(self.fail(error.code(), error.to_string() + &rest))
            }
        }
    }

    fn late(&self) -> Error {
        match &self.held_back {
            Some(reason) => Error::RemoteDeadline { waited_for: reason.clone() },
            None => Error::deadline(format!(
                "{} has not acknowledged {} pushes of writer {:?} ({} bytes)",
                self.link.dialer.address,
                self.link.len(),
                self.open.name,
                self.link.bytes
            )),
        }
    }

    /// A refused push is tried once more at the deadline, not after it.
    fn has_given_up(&self, deadline: Option<Instant>) -> bool {
        self.held_back.is_some() && deadline.is_some_and(|deadline| system::now() >= deadline)
    }

    /// An interrupt closes the connection, too, which withdraws waiting pushes from the server's queue: the caller may never call again.
    /// A later call sends them again.
    fn ends_connection(&self, error: &Error) -> bool {
        matches!(error, Error::Interrupted) || is_broken(error) || is_closed(error)
    }
}

/// Upper bound of a push's frame in bytes.
fn frame_bytes(body: &PushBody) -> usize {
    const FIXED: usize = 256;
    const CHUNK: usize = 32;
    const ITEM: usize = 24;
    FIXED + CHUNK * body.chunks.len() + ITEM * body.items.len() + body.payload.len()
}

impl PushChannel<Error> for Pushes {
    /// A push that fails with [`Error::Deadline`] or without a connection is not accepted. An accepted push is sent by this
    /// call or a later one.
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        let bytes = frame_bytes(&body);
        let most = self.link.dialer.options.pushes_in_flight;
        link::work(self, &mut None, wait, |channel| channel.link.has_room(most, bytes))?;
        self.link.connection()?.pipeline().check_frame(bytes as u64)?;
        self.link.queue(body, bytes);
        self.send(wait.deadline)?;
        self.link.connection()?.try_flush();
        Ok(())
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        base::planted!(EarlyFlush => return Ok(()));
        link::work(self, &mut None, wait, |channel| channel.link.is_empty())
    }

    /// Uses another connection, because this one's pushes may wait.
    fn end_steps(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        let dialer = self.link.dialer.clone();
        let body =
            RequestBody::GetParameters(GetParameters { name: String::new(), newer_than: 0, writer: self.open.writer });
        let table = Some(&*self.table);
        retry(&dialer, wait, || {
            let reply = dialer.dial(wait)?.call(dialer.options.grace, wait, table, body.clone())?;
            expect::<Option<Parameters>>(reply).map(drop)
        })
    }

    fn server(&self) -> usize {
        self.server
    }

    fn close(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        // Closes the connection, to withdraw waiting pushes.
        self.flush(wait).inspect_err(|_| self.link.disconnect())?;
        let dialer = self.link.dialer.clone();
        let closed = retry(&dialer, wait, || {
            let closed = self.close_on_this_connection(wait);
            self.link.disconnect();
            closed
        });
        match closed {
            // An expired writer counts as closed.
            Err(error) if error.code() != ErrorCode::Expired => return Err(error),
            _ => self.closed = true,
        }
        Ok(())
    }
}

impl Pushes {
    fn close_on_this_connection(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.link.connection().is_err() {
            self.connect(wait)?;
        }
        let body = RequestBody::CloseWriter(CloseWriter { writer: self.open.writer, epoch: self.epoch });
        let dialer = self.link.dialer.clone();
        let reply = self.link.connection()?.call(dialer.options.grace, wait, Some(&self.table), body)?;
        expect(reply)
    }
}

impl Drop for Pushes {
    fn drop(&mut self) {
        if !self.link.is_empty() {
            tracing::warn!(
                writer = self.open.name,
                pushes = self.link.len(),
                "dropped before its last pushes were acknowledged: call close() to wait for them"
            );
        }
    }
}
