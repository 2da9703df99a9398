//! The handshake on a connection: it reads and writes what [`replay_wire::handshake`] decides.

use tokio::io::{AsyncRead, AsyncWrite};

use super::Connection;
use crate::framing::FrameReader;
use crate::stack::Stack;
use replay_core::error::{Error, Result};
use replay_wire::{NO_REQUEST, ReplyBody, Request, RequestBody};

impl<S: Stack> Connection<'_, S> {
    /// The handshake; `false` where the client left.
    pub(super) async fn welcome<R, W>(
        &self,
        frames: &mut FrameReader<R>,
        write: &mut W,
    ) -> Result<bool>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let handshake = &self.context.handshake;
        let Some(request) = self.handshake_request(frames, write).await? else {
            return Ok(false);
        };
        let challenged = match &request.body {
            RequestBody::Hello(hello) => handshake.challenge(hello),
            _ => Err(Error::Protocol(
                "the first request of a connection is hello".to_owned(),
            )),
        };
        let (challenge, challenged) = self.or_reply(write, request.id, challenged).await?;
        self.write_reply(write, request.id, ReplyBody::Challenge(challenge))
            .await?;
        let Some(request) = self.handshake_request(frames, write).await? else {
            return Ok(false);
        };
        let known = match request.body {
            RequestBody::Authenticate(proof) => handshake.authenticate(&challenged, proof),
            _ => Err(Error::Protocol(
                "the request after the challenge is authenticate".to_owned(),
            )),
        };
        self.or_reply(write, request.id, known).await?;
        self.write_reply(write, request.id, ReplyBody::Welcome)
            .await?;
        Ok(true)
    }

    async fn handshake_request<R, W>(
        &self,
        frames: &mut FrameReader<R>,
        write: &mut W,
    ) -> Result<Option<Request>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let request = match frames.frame().await {
            Ok(None) => return Ok(None),
            Ok(Some(frame)) => replay_wire::decode_request(frame),
            Err(error) => Err(error),
        };
        self.or_reply(write, NO_REQUEST, request).await.map(Some)
    }

    /// Replies with an error before it is passed on.
    async fn or_reply<T, W: AsyncWrite + Unpin>(
        &self,
        write: &mut W,
        id: u64,
        result: Result<T>,
    ) -> Result<T> {
        if let Err(error) = &result {
            self.count_bad_frame(error);
            // The connection ends with the first error, whether or not this one reaches the client.
            let _ = self.write_error(write, id, error).await;
        }
        result
    }
}
