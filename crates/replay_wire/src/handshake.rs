//! The server's side of the handshake, without I/O: hello, challenge, authenticate, welcome. Both ends compare versions and
//! prove that they know the token.

use crate::auth::{self, Role};
use crate::{Challenge, Hello, PROTOCOL, RELEASE};
use replay_core::error::{Error, Result};

/// Characters of an unauthenticated client's release that errors and logs repeat.
const MAX_RELEASE: usize = 64;

/// A server's part of every handshake.
pub struct Handshake {
    token: Option<String>,
    incarnation: u64,
    max_frame_bytes: u64,
}

/// Nonces of a challenge, to check the client's answer.
pub struct Challenged {
    client_nonce: [u8; 32],
    server_nonce: [u8; 32],
}

impl Handshake {
    /// Handshakes of a server; without a token every client is accepted.
    pub fn new(token: Option<String>, incarnation: u64, max_frame_bytes: u64) -> Self {
        Handshake {
            token,
            incarnation,
            max_frame_bytes,
        }
    }

    /// The reply to a hello, and the nonces for [`Handshake::authenticate`].
    ///
    /// # Errors
    /// [`Error::Version`] for a client of another protocol.
    pub fn challenge(&self, hello: &Hello) -> Result<(Challenge, Challenged)> {
        if hello.protocol != PROTOCOL {
            return Err(Error::Version {
                server: PROTOCOL,
                server_release: RELEASE.to_owned(),
                client: hello.protocol,
                client_release: hello.release.chars().take(MAX_RELEASE).collect(),
            });
        }
        let server_nonce = auth::nonce()?;
        let challenge = Challenge {
            protocol: PROTOCOL,
            release: RELEASE.to_owned(),
            incarnation: self.incarnation,
            nonce: server_nonce,
            token_needed: self.token.is_some(),
            proof: self
                .token
                .as_deref()
                .map(|token| auth::proof(token, Role::Server, &hello.nonce, &server_nonce)),
            max_frame_bytes: self.max_frame_bytes,
        };
        let challenged = Challenged {
            client_nonce: hello.nonce,
            server_nonce,
        };
        Ok((challenge, challenged))
    }

    /// Checks the client's proof.
    ///
    /// # Errors
    /// [`Error::Authentication`] when it is missing or wrong.
    pub fn authenticate(&self, challenged: &Challenged, proof: Option<[u8; 32]>) -> Result<()> {
        let Some(token) = &self.token else {
            return Ok(());
        };
        let Challenged {
            client_nonce,
            server_nonce,
        } = challenged;
        let refuse = |reason: &str| Err(Error::Authentication(reason.to_owned()));
        match proof {
            None => refuse(
                "this server asks for a token, and the client gave none: pass one, or set the environment variable INNET_TOKEN",
            ),
            Some(proof)
                if auth::verify(token, Role::Client, client_nonce, server_nonce, &proof) =>
            {
                Ok(())
            }
            Some(_) => {
                refuse("the client's token is not this server's: use the token it was started with")
            }
        }
    }
}
