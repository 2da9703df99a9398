//! Requests of a channel over a connection of its own. Pushes, updates and samples are such channels, and say what a request is, when it is
//! sent and what its answer means. After a break pushes and updates are sent again over the next connection; samples are asked for anew.
//!
//! # Invariant
//!
//! Requests are sent in the order in which they were queued, over each connection anew.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{Connection, deadline_ms};
use super::dialer::Dialer;
use super::outage::{retry_for, while_broken};
use super::pipeline::{RequestPipeline, is_broken, is_closed};
use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_wire::{Reply, RequestBody};

/// Most bytes of a channel's requests in flight, which are kept for sending them again.
const MAX_BYTES: usize = 16 << 20;

/// A channel's requests without an answer, and its connection.
pub struct Link<R> {
    /// Opens the connections.
    pub dialer: Arc<Dialer>,
    /// Longest time for which a call reconnects.
    pub reconnect_for: Duration,
    connection: Option<Connection>,
    /// In the order in which they were queued.
    pending: VecDeque<Pending<R>>,
    /// Bytes that the requests keep for sending them again.
    pub bytes: usize,
}

/// A request without an answer.
struct Pending<R> {
    request: R,
    /// Bytes that it keeps for sending it again.
    bytes: usize,
    /// How it was sent over the present connection; `None` before that.
    sent: Option<Sent>,
}

/// A request on a connection.
#[derive(Clone, Copy)]
pub struct Sent {
    id: u64,
    /// Deadline in the request.
    deadline: Option<Instant>,
    /// Time at which it was sent.
    pub at: Instant,
}

/// What a channel does with its [`Link`].
pub trait Channel: Sized {
    /// Its requests.
    type Request;

    /// Whether the server answers them in their order.
    const IN_ORDER: bool = true;

    /// Its link.
    fn link(&mut self) -> &mut Link<Self::Request>;

    /// Opens a connection, over which nothing has been sent yet.
    fn connect(&mut self, wait: &Wait<'_>) -> Result<()> {
        let connection = self.link().dialer.dial(wait)?;
        self.link().send_all_over(connection);
        Ok(())
    }

    /// Sends what is to be sent before the next answer.
    fn send(&mut self, deadline: Option<Instant>) -> Result<()>;

    /// Handles the answer to a request.
    ///
    /// # Errors
    /// The error of the answer, if the waiting call fails with it, too; [`Error::Protocol`](replay_wire::Error::Protocol).
    fn settle(&mut self, reply: Reply) -> Result<()>;

    /// Whether it takes no further answer before its next call.
    fn is_full(&self) -> bool {
        false
    }

    /// The error at the deadline of a call.
    fn late(&self) -> Error;

    /// Whether a call that is not done ends at its deadline, without the grace for an answer.
    fn has_given_up(&self, _deadline: Option<Instant>) -> bool {
        false
    }

    /// Whether a connection is not used after this error.
    fn ends_connection(&self, error: &Error) -> bool {
        is_broken(error) || is_closed(error)
    }
}

/// Sends requests and handles answers until `done`. After a break it connects again, for at most [`Link::reconnect_for`] since
/// `broken_since`.
pub fn work<C: Channel>(
    channel: &mut C,
    broken_since: &mut Option<Instant>,
    wait: &Wait<'_>,
    done: impl Fn(&C) -> bool,
) -> Result<()> {
    let (dialer, reconnect_for) = (channel.link().dialer.clone(), channel.link().reconnect_for);
    retry_for(while_broken(reconnect_for), broken_since, &dialer, wait, || {
        let worked = work_on_this_connection(channel, wait, &done);
        if worked.as_ref().is_err_and(|error| channel.ends_connection(error)) {
            channel.link().disconnect();
        }
        worked
    })
}

fn work_on_this_connection<C: Channel>(channel: &mut C, wait: &Wait<'_>, done: &impl Fn(&C) -> bool) -> Result<()> {
    if channel.link().connection.is_none() {
        channel.connect(wait)?;
    }
    while !channel.is_full()
        && let Some(reply) = channel.link().connection()?.arrived(wait)?
    {
        channel.settle(reply)?;
    }
    loop {
        channel.send(wait.deadline)?;
        if done(channel) {
            return Ok(());
        }
        let reply = next_reply(channel, wait)?;
        channel.settle(reply)?;
        if channel.has_given_up(wait.deadline) && !done(channel) {
            return Err(channel.late());
        }
    }
}

/// Waits for the next answer.
///
/// # Errors
/// [`Channel::late`] at the deadline; errors of [`RequestPipeline::reply`].
fn next_reply<C: Channel>(channel: &mut C, wait: &Wait<'_>) -> Result<Reply> {
    let link = channel.link();
    let until = link.until(wait.deadline, C::IN_ORDER);
    let mut connection = link.connection.take().ok_or(Error::Closed("the connection"))?;
    let reply = connection.run(wait, until, || channel.late(), RequestPipeline::reply);
    channel.link().connection = Some(connection);
    reply
}

impl<R> Link<R> {
    /// A link without a connection.
    pub fn new(dialer: Arc<Dialer>) -> Self {
        let reconnect_for = dialer.options.reconnect_for;
        Link { dialer, reconnect_for, connection: None, pending: VecDeque::new(), bytes: 0 }
    }

    /// The connection.
    ///
    /// # Errors
    /// [`Error::Closed`] without one.
    pub fn connection(&mut self) -> Result<&mut Connection> {
        self.connection.as_mut().ok_or(Error::Closed("the connection"))
    }

    /// Uses a new connection, over which each request is sent again.
    pub fn send_all_over(&mut self, connection: Connection) {
        self.connection = Some(connection);
        self.send_again_from(0);
    }

    /// Closes the connection, which withdraws what waits at the server.
    pub fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Count of requests without an answer.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether all requests are answered.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether `most` requests and [`MAX_BYTES`] leave room for one of `bytes`. The first one always has room.
    pub fn has_room(&self, most: usize, bytes: usize) -> bool {
        self.pending.is_empty() || (self.pending.len() < most && self.bytes + bytes <= MAX_BYTES)
    }

    /// Queues a request, which the next [`Self::send`] sends.
    pub fn queue(&mut self, request: R, bytes: usize) {
        self.bytes += bytes;
        self.pending.push_back(Pending { request, bytes, sent: None });
    }

    /// Removes a request.
    pub fn remove(&mut self, index: usize) -> Option<R> {
        let pending = self.pending.remove(index)?;
        self.bytes -= pending.bytes;
        Some(pending.request)
    }

    /// Removes the request with the answer of this id; `None` if there is none.
    pub fn take(&mut self, id: u64) -> Option<(Sent, R)> {
        let index = self.answered(id)?;
        let sent = self.pending[index].sent?;
        Some((sent, self.remove(index)?))
    }

    /// The requests.
    pub fn requests(&self) -> impl Iterator<Item = &R> {
        self.pending.iter().map(|pending| &pending.request)
    }

    /// [`Self::requests`], without their connection.
    pub fn into_requests(self) -> Vec<R> {
        self.pending.into_iter().map(|pending| pending.request).collect()
    }

    /// The requests, to change them.
    pub fn requests_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.pending.iter_mut().map(|pending| &mut pending.request)
    }

    /// Removes the request that was queued last, which cannot be sent.
    pub fn take_back(&mut self) {
        self.remove(self.pending.len() - 1);
    }

    /// Removes all requests.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.bytes = 0;
    }

    /// Sends the request of this index and all later ones again.
    pub fn send_again_from(&mut self, index: usize) {
        self.pending.iter_mut().skip(index).for_each(|pending| pending.sent = None);
    }

    /// Sends the requests that were not sent yet, among the first `most`. `message` makes the table and the message from a request and its
    /// index.
    ///
    /// # Errors
    /// Errors of [`RequestPipeline::send`], which leave the request and later ones unsent.
    pub fn send<'r>(
        &'r mut self,
        most: usize,
        deadline: Option<Instant>,
        message: impl Fn(usize, &'r R) -> (&'r str, RequestBody),
    ) -> Result<()> {
        let connection = self.connection.as_mut().ok_or(Error::Closed("the connection"))?;
        for (index, pending) in self.pending.iter_mut().take(most).enumerate() {
            if pending.sent.is_some() {
                continue;
            }
            let (table, body) = message(index, &pending.request);
            let id = connection.pipeline().send(deadline_ms(deadline), Some(table), body)?;
            pending.sent = Some(Sent { id, deadline, at: system::now() });
        }
        Ok(())
    }

    /// The index of the request with the answer of this id; `None` if it was withdrawn.
    pub fn answered(&self, id: u64) -> Option<usize> {
        self.pending.iter().position(|pending| pending.sent.is_some_and(|sent| sent.id == id))
    }

    /// Time until which a call waits for the next answer, which is the first request's where they come `in_order`. The grace covers the
    /// server's answer at the deadline. There is none if the request's deadline is later.
    pub fn until(&self, deadline: Option<Instant>, in_order: bool) -> Option<Instant> {
        let next = if in_order { 1 } else { usize::MAX };
        let due =
            |pending: &Pending<R>| pending.sent.and_then(|sent| sent.deadline).is_some_and(|d| Some(d) <= deadline);
        let grace = match self.pending.iter().take(next).any(due) {
            true => self.dialer.options.grace,
            false => Duration::ZERO,
        };
        deadline.map(|deadline| deadline + grace)
    }
}
