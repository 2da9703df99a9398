//! A writer's pushes over a dedicated connection. Several are in flight at a time, and each is kept until it is acknowledged. After a
//! broken connection, unacknowledged pushes are resent with their sequence numbers, so each is applied exactly once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{Connection, Dialer, deadline_ms};
use super::pipeline::{answer, expect_reply, is_broken, is_closed, unexpected};
use super::pool::retry;
use crate::error::{Error, Result};
use base::host;
use base::mistake::{Mistake, planted};
use base::wait::Wait;
use replay_core::cause::WaitReason;
use replay_core::replay::{OpenWriter, Push, PushBody, PushChannel, WriterOpened};
use replay_wire::ErrorCode;
use replay_wire::{CloseWriter, GetParameters, OpenOrResume, Pushed, Reply, ReplyBody, RequestBody};

/// The pushes of one writer.
pub struct Pushes {
    dialer: Arc<Dialer>,
    table: String,
    open: OpenWriter,
    connection: Option<Connection>,
    epoch: u32,
    /// Sequence number of the last acknowledged push.
    applied: u64,
    /// Steps accepted by the server, as of the last acknowledgement.
    steps: u64,
    /// Pushes after `applied`, in the order of their sequence numbers.
    pending: VecDeque<PendingPush>,
    pending_bytes: usize,
    /// Rate limiter's reason for refusing the first pending push. While it is set, only the first push is sent.
    held_back: Option<Box<WaitReason>>,
    /// Error that ended the writer.
    failed: Option<(ErrorCode, String)>,
    closed: bool,
    /// Connected writers of the table when this one was opened, this one included.
    pub connected: u64,
}

struct PendingPush {
    body: PushBody,
    bytes: usize,
    /// Its request on the current connection.
    sent: Option<SentPush>,
}

#[derive(Clone, Copy)]
struct SentPush {
    id: u64,
    /// Deadline in the request.
    deadline: Option<Instant>,
}

impl Pushes {
    /// Opens the writer.
    ///
    /// # Errors
    /// Errors of connecting, and the server's.
    pub fn open(dialer: Arc<Dialer>, table: &str, open: OpenWriter, wait: &Wait<'_>) -> Result<Self> {
        let mut channel = Pushes {
            dialer: dialer.clone(),
            table: table.to_owned(),
            open,
            connection: None,
            epoch: 0,
            applied: 0,
            steps: 0,
            pending: VecDeque::new(),
            pending_bytes: 0,
            held_back: None,
            failed: None,
            closed: false,
            connected: 0,
        };
        let opened = retry(&dialer, wait, || channel.connect(wait))?;
        (channel.applied, channel.steps) = (opened.last_sequence, opened.steps);
        channel.connected = opened.connected;
        Ok(channel)
    }

    /// Connects and takes over the writer: the server then refuses pushes over its earlier connections.
    fn connect(&mut self, wait: &Wait<'_>) -> Result<WriterOpened> {
        let mut connection = self.dialer.dial(wait)?;
        let body = RequestBody::OpenWriter(OpenOrResume {
            open: self.open.clone(),
            // A writer that has sent nothing has nothing to resume, so a server that has forgotten it may open it anew.
            resume: self.applied > 0 || !self.pending.is_empty(),
        });
        let reply = connection.call(&self.dialer, wait, Some(&self.table), body)?;
        let opened = expect_reply!(reply, ReplyBody::Writer(opened) => opened)?;
        self.epoch = opened.epoch;
        self.connection = Some(connection);
        for pending in &mut self.pending {
            pending.sent = None;
        }
        Ok(opened)
    }

    fn connect_again(&mut self, wait: &Wait<'_>) -> Result<()> {
        let opened = match self.connect(wait) {
            // The server no longer knows which of the pending pushes were applied.
            Err(Error::Remote { code: ErrorCode::Expired, message }) => {
                let (acknowledged, pending) = (self.steps, self.pending_steps());
                let message =
                    format!("{message}; it had acknowledged {acknowledged} steps, {pending} more may be lost");
                return Err(self.fail(ErrorCode::Expired, message));
            }
            other => other?,
        };
        if opened.last_sequence < self.applied && !planted(Mistake::IgnoredLoss) {
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
        if planted(Mistake::ResentAsNew) {
            self.applied = opened.last_sequence;
        }
        self.applied_up_to(opened.last_sequence);
        if planted(Mistake::SkippedPush) {
            self.pending.pop_front();
        }
        Ok(())
    }

    /// Sends pushes and receives acknowledgements until `done`, and reconnects after a broken connection. An interrupt closes the
    /// connection, which withdraws waiting pushes from the server's queue: the caller may never call again. A later call resends them.
    fn work(&mut self, wait: &Wait<'_>, done: impl Fn(&Self) -> bool) -> Result<()> {
        let dialer = self.dialer.clone();
        retry(&dialer, wait, || {
            let worked = self.work_on_this_connection(wait, &done);
            let ended = |e: &Error| matches!(e, Error::Interrupted) || is_broken(e) || is_closed(e);
            if worked.as_ref().is_err_and(ended) {
                self.connection = None;
            }
            worked
        })
    }

    fn work_on_this_connection(&mut self, wait: &Wait<'_>, done: &impl Fn(&Self) -> bool) -> Result<()> {
        if self.connection.is_none() {
            self.connect_again(wait)?;
        }
        while let Some(reply) = self.connection()?.arrived(wait)? {
            self.settle(reply)?;
        }
        loop {
            self.send_pending(wait.deadline)?;
            if done(self) {
                return Ok(());
            }
            // The grace covers the server's answer at the deadline. There is none if the request's deadline is later.
            let due = self.pending.front().and_then(|p| p.sent?.deadline);
            let grace = match due.is_some_and(|due| Some(due) <= wait.deadline) {
                true => self.dialer.options.grace,
                false => Duration::ZERO,
            };
            let until = wait.deadline.map(|d| d + grace);
            let late = self.late();
            let reply = self.connection()?.reply(wait, until, || late)?;
            self.settle(reply)?;
            if self.held_back.is_some() && wait.deadline.is_some_and(|d| host::now() >= d) && !done(self) {
                return Err(self.late());
            }
        }
    }

    fn send_pending(&mut self, deadline: Option<Instant>) -> Result<()> {
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        let most = match self.held_back {
            Some(_) => 1,
            None => self.pending.len(),
        };
        for (sequence, pending) in (self.applied + 1..).zip(self.pending.iter_mut().take(most)) {
            if pending.sent.is_some() {
                continue;
            }
            let push = RequestBody::Push(Push {
                writer: self.open.writer,
                epoch: self.epoch,
                sequence,
                body: pending.body.clone(),
            });
            match connection.send(deadline_ms(deadline), Some(&self.table), push) {
                Ok(id) => pending.sent = Some(SentPush { id, deadline }),
                Err(error) => return Err(self.fail(error.code(), error.to_string())),
            }
        }
        Ok(())
    }

    /// Handles the answer to a push.
    fn settle(&mut self, reply: Reply) -> Result<()> {
        let carries = |pending: &PendingPush| pending.sent.is_some_and(|sent| sent.id == reply.id);
        let Some(at) = self.pending.iter().position(carries) else {
            // Answer to a push that was in flight behind a refused one, and is resent.
            return Ok(());
        };
        match answer(reply.body) {
            Ok(ReplyBody::Pushed(Pushed { steps })) => {
                self.held_back = None;
                self.steps = steps;
                // Pushes are applied in order, so all earlier ones are applied.
                let ahead = u64::from(planted(Mistake::TakenAhead));
                self.applied_up_to(self.applied + 1 + at as u64 + ahead);
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            Err(Error::RemoteDeadline { waited_for } | Error::Renew { waited_for }) => {
                self.held_back = Some(waited_for);
                // The server refuses later pushes as out of order: resend them.
                for pending in self.pending.iter_mut().skip(at) {
                    pending.sent = None;
                }
                Ok(())
            }
            Err(error) if is_broken(&error) || is_closed(&error) => Err(error),
            Err(error) => {
                let behind = self.pending.len() - at - 1;
                let rest = match behind {
                    0 => String::new(),
                    n => format!("; {n} pushes behind it are lost with it"),
                };
                Err(self.fail(error.code(), error.to_string() + &rest))
            }
        }
    }

    fn applied_up_to(&mut self, sequence: u64) {
        while self.applied < sequence {
            self.applied += 1;
            if let Some(pending) = self.pending.pop_front() {
                self.pending_bytes -= pending.bytes;
            }
        }
    }

    /// Steps of the pushes that are not acknowledged.
    fn pending_steps(&self) -> u64 {
        let chunks = self.pending.iter().flat_map(|pending| &pending.body.chunks);
        chunks.map(|chunk| u64::from(chunk.rows)).sum()
    }

    fn fits_window(&self, bytes: usize) -> bool {
        let options = &self.dialer.options;
        self.pending.is_empty()
            || (self.pending.len() < options.push_window && self.pending_bytes + bytes <= options.push_window_bytes)
    }

    fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().ok_or(Error::Closed("the connection"))
    }

    fn check(&self) -> Result<()> {
        self.dialer.check_process()?;
        match &self.failed {
            Some((code, message)) => Err(Error::Remote { code: *code, message: message.clone() }),
            None if self.closed => Err(Error::Closed("the writer")),
            None => Ok(()),
        }
    }

    /// Fails the writer for good: its steps have a gap that cannot be filled.
    fn fail(&mut self, code: ErrorCode, message: String) -> Error {
        self.connection = None;
        self.pending.clear();
        self.pending_bytes = 0;
        self.failed = Some((code, message.clone()));
        Error::Remote { code, message }
    }

    fn late(&self) -> Error {
        match &self.held_back {
            Some(reason) => Error::RemoteDeadline { waited_for: reason.clone() },
            None => Error::deadline(format!(
                "{} has not acknowledged {} pushes of writer {:?} ({} bytes)",
                self.dialer.address,
                self.pending.len(),
                self.open.name,
                self.pending_bytes
            )),
        }
    }
}

/// Upper bound of a push's frame in bytes.
fn frame_bytes(body: &PushBody) -> usize {
    const FIXED: usize = 256;
    const CHUNK: usize = 24;
    const ITEM: usize = 24;
    FIXED + CHUNK * body.chunks.len() + ITEM * body.items.len() + body.payload.len()
}

impl PushChannel<Error> for Pushes {
    /// A push that fails with [`Error::Deadline`] or without a connection is not accepted. An accepted push is sent by this
    /// call or a later one.
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        let bytes = frame_bytes(&body);
        self.work(wait, |channel| channel.fits_window(bytes))?;
        self.connection()?.check_frame(bytes as u64)?;
        self.pending_bytes += bytes;
        self.pending.push_back(PendingPush { body, bytes, sent: None });
        self.send_pending(wait.deadline)?;
        self.connection()?.try_flush();
        Ok(())
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        if planted(Mistake::EarlyFlush) {
            return Ok(());
        }
        self.work(wait, |channel| channel.pending.is_empty())
    }

    /// Uses another connection, because this one's pushes may wait.
    fn end_steps(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.check()?;
        let dialer = self.dialer.clone();
        let body =
            RequestBody::GetParameters(GetParameters { name: String::new(), newer_than: 0, writer: self.open.writer });
        let table = Some(&*self.table);
        retry(&dialer, wait, || {
            let reply = dialer.dial(wait)?.call(&dialer, wait, table, body.clone())?;
            expect_reply!(reply, ReplyBody::Parameters(_) => ())
        })
    }

    fn close(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        // Closes the connection, to withdraw waiting pushes.
        self.flush(wait).inspect_err(|_| self.connection = None)?;
        let dialer = self.dialer.clone();
        let closed = retry(&dialer, wait, || {
            let closed = self.close_on_this_connection(wait);
            self.connection = None;
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
        if self.connection.is_none() {
            self.connect_again(wait)?;
        }
        let body = RequestBody::CloseWriter(CloseWriter { writer: self.open.writer, epoch: self.epoch });
        let connection = (self.connection.as_mut()).ok_or(Error::Closed("the connection"))?;
        let reply = connection.call(&self.dialer, wait, Some(&self.table), body)?;
        expect_reply!(reply, ReplyBody::Done => ())
    }
}

impl Drop for Pushes {
    fn drop(&mut self) {
        if !self.pending.is_empty() {
            tracing::warn!(
                writer = self.open.name,
                pushes = self.pending.len(),
                "dropped before its last pushes were acknowledged: call close() to wait for them"
            );
        }
    }
}
