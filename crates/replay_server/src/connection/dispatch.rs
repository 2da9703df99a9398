//! The handshake on a connection, with the messages of [`replay_wire::auth`], and where its requests go: to the service, within the connection's reply budget, or to a connection with an extension.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use bytes::Bytes;
use event_listener::EventListener;
use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use base::allocation::check_size;
use replay_core::error::WaitReason;
use replay_core::table::leases::Reader;
use replay_core::table::{Attempt, Turn};
use replay_link::error::{Error, Result};
use replay_link::framing::FrameReader;
use replay_link::stack::Stack;
use replay_wire::auth::{Authenticated, ChannelBinding};
use replay_wire::{Extension, NO_REQUEST, ReplyBody, ReplySize, RequestBody, Role, decode_request};

use super::{ConnectionHandler, Phase};
use crate::plugin::{ExtensionConnection, MAX_MESSAGE};
use crate::reply_budget::{NoRoom, UnreadReplies};
use crate::service::{NumberedTable, Service};

/// One connection's requests and extension connections.
pub struct Dispatcher<'a> {
    service: &'a Service,
    unread: Rc<UnreadReplies>,
    phase: watch::Receiver<Phase>,
    reader: Reader,
    /// Extension connections, by extension name.
    connections: RefCell<Vec<(&'static str, Box<dyn ExtensionConnection>)>>,
}

impl<'a> Dispatcher<'a> {
    /// For a new connection, which is `reader`, without connections.
    pub fn new(service: &'a Service, unread: Rc<UnreadReplies>, phase: watch::Receiver<Phase>, reader: Reader) -> Self {
        Dispatcher { service, unread, phase, reader, connections: RefCell::default() }
    }

    /// [`Service::attempt`] for this connection. Also blocked while the reply budget is full.
    ///
    /// # Errors
    /// Any error, which is the answer to the request.
    pub fn attempt(
        &self,
        request: &RequestBody,
        table: Option<&NumberedTable>,
        last: bool,
        turn: &mut Turn,
    ) -> Result<Attempt<ReplyBody>> {
        if let RequestBody::CallExtension(Extension { name, message }) = request {
            check_message(message, "send less")?;
            let attempt = self.with_extension(name, |connection| connection.attempt(message))??;
            if let Attempt::Ready(answer) = &attempt {
                check_message(answer, "this is a fault of the extension")?;
            }
            let name = name.clone();
            return Ok(attempt.map(|message| ReplyBody::Extension(Extension { name, message })));
        }
        let attempt = match self.check_room(request) {
            Err(full) => {
                // Requests behind it in the table's queue must not wait for this client to read.
                *turn = Turn::default();
                if matches!(full, NoRoom::Role(_)) {
                    self.unread.budget().press();
                }
                Attempt::Blocked(full.into())
            }
            Ok(()) => self.service.attempt(request, table, last, turn, &self.reader)?,
        };
        if turn.waits() {
            // Blocked by the table: passes the free reply memory on to the next request.
            self.unread.budget().pass_on();
        }
        Ok(attempt)
    }

    /// Completes after the next change that may unblock a blocked request. Listens from this call on, not from the first poll.
    ///
    /// # Errors
    /// [`Error::Internal`](replay_link::error::Error::Internal) for a request that never blocks.
    pub fn changed<'r>(
        &'r self,
        request: &'r RequestBody,
        turn: &Turn,
    ) -> Result<impl Future<Output = ()> + use<'r, 'a>> {
        if Self::waits_for_readers(request, turn) {
            return Ok(self.unread.room(|| self.check_room(request)).right_future());
        }
        let changed: EventListener = match request {
            RequestBody::CallExtension(Extension { name, .. }) => {
                self.with_extension(name, |connection| connection.changed())?
            }
            _ => turn.changed()?,
        };
        Ok(changed.left_future())
    }

    /// Whether a blocked request waits for unread replies, not for its table.
    pub fn waits_for_readers(request: &RequestBody, turn: &Turn) -> bool {
        request.reply_size() != ReplySize::Few && !turn.waits()
    }

    fn check_room(&self, request: &RequestBody) -> std::result::Result<(), NoRoom> {
        let large = self.service.large_reply(request);
        large.map_or(Ok(()), |large| self.unread.check(&large))
    }

    /// Calls `work` with the connection of an extension, which the first request starts.
    fn with_extension<T>(&self, name: &str, work: impl FnOnce(&mut dyn ExtensionConnection) -> T) -> Result<T> {
        let mut connections = self.connections.borrow_mut();
        let index = match connections.iter().position(|(of, _)| *of == name) {
            Some(index) => index,
            None => {
                let extension = self.service.extension(name)?.clone();
                connections.push((extension.name(), extension.connect()));
                connections.len() - 1
            }
        };
        Ok(work(&mut *connections[index].1))
    }
}

fn check_message(message: &Bytes, advice: &'static str) -> Result<()> {
    let bytes = message.len() as u64;
    Ok(check_size("a message of an extension, in bytes,", bytes, MAX_MESSAGE, advice)?)
}

impl From<NoRoom> for WaitReason {
    fn from(full: NoRoom) -> Self {
        let sentence = match full {
            NoRoom::Own(bytes) => format!(
                "{bytes} bytes of replies wait for this client to read them, and a connection has a quarter of its role's share of \
                 --reply-bytes"
            ),
            NoRoom::Role(bytes) => format!(
                "{bytes} bytes of replies wait for clients of this role to read them, which is their share of the server's limit \
                 (--reply-bytes)"
            ),
        };
        sentence.into()
    }
}

impl Drop for Dispatcher<'_> {
    fn drop(&mut self) {
        // Not at a shutdown, which ends all connections.
        if *self.phase.borrow() == Phase::Serving {
            let connections = self.connections.get_mut().iter_mut();
            connections.for_each(|(_, connection)| connection.end());
        }
    }
}

impl<S: Stack> ConnectionHandler<'_, S> {
    /// Runs the handshake, bound to the TLS connection of `channel_binding`. Returns the role of the client's token; `None` if the client left. Errors are also sent to the
    /// client.
    pub(super) async fn welcome<R, W>(
        &self,
        frames: &mut FrameReader<R>,
        write: &mut W,
        channel_binding: Option<ChannelBinding>,
    ) -> Result<Option<Role>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut id = NO_REQUEST;
        let welcomed = self.shake_hands(frames, write, channel_binding, &mut id).await;
        if let Err(error) = &welcomed {
            self.count_bad_frame(error);
            // The connection ends with this error, even if the client does not receive it.
            let _ = self.write_reply(write, id, error.into()).await;
        }
        welcomed
    }

    /// Sets `id` to the current request's id, for an error reply.
    async fn shake_hands<R, W>(
        &self,
        frames: &mut FrameReader<R>,
        write: &mut W,
        channel_binding: Option<ChannelBinding>,
        id: &mut u64,
    ) -> Result<Option<Role>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let handshake = &self.context.handshake;
        let Some(frame) = frames.frame().await? else {
            return Ok(None);
        };
        let request = decode_request(frame)?;
        *id = request.id;
        let RequestBody::Hello(hello) = &request.body else {
            let reason = "the first request of a connection is hello";
            return Err(Error::protocol(reason.to_owned()));
        };
        let (challenge, challenged) = handshake.challenge(hello, channel_binding)?;
        self.write_reply(write, *id, ReplyBody::Challenge(challenge)).await?;
        *id = NO_REQUEST;
        let frame = match frames.frame().await {
            Ok(Some(frame)) => frame,
            // A client without a token disconnects here.
            Ok(None) | Err(Error::Disconnected { .. }) if challenged.needs_token() => {
                return Err(Error::authentication(
                    "the client left without a proof that it knows the token: it has none".to_owned(),
                ));
            }
            Ok(None) => return Ok(None),
            Err(error) => return Err(error),
        };
        let request = decode_request(frame)?;
        *id = request.id;
        let RequestBody::Authenticate(proof) = request.body else {
            let reason = "the request after the challenge is authenticate";
            return Err(Error::protocol(reason.to_owned()));
        };
        let Authenticated { role, proof } = handshake.authenticate(&challenged, proof)?;
        if let Err(busy) = self.permit.welcome(role) {
            self.context.service.counters.connections_refused.add(1);
            return Err(busy);
        }
        self.write_reply(write, *id, ReplyBody::Welcome(proof)).await?;
        Ok(Some(role))
    }
}
