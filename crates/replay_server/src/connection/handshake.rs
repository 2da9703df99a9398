//! The handshake on a connection: it reads and writes the messages of [`replay_wire::handshake`].

use tokio::io::{AsyncRead, AsyncWrite};

use super::ConnectionHandler;
use replay_link::error::{Error, Result};
use replay_link::framing::FrameReader;
use replay_link::stack::Stack;
use replay_wire::auth::ChannelBinding;
use replay_wire::handshake::Authenticated;
use replay_wire::role::Role;
use replay_wire::{NO_REQUEST, ReplyBody, RequestBody, decode_request};

impl<S: Stack> ConnectionHandler<'_, S> {
    /// Runs the handshake, bound to the TLS session of `channel_binding`. Returns the role of the client's token; `None` if the client left. Errors are also sent to the
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
        if let Err(busy) = self.slot.welcome(role) {
            self.context.service.counters.connections_refused.add(1);
            return Err(busy);
        }
        self.write_reply(write, *id, ReplyBody::Welcome(proof)).await?;
        Ok(Some(role))
    }
}
