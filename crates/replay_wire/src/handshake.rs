//! The server's side of the handshake, without I/O: hello, challenge, authenticate, welcome. Both ends compare versions and
//! prove that they know the token.

use std::sync::{Arc, PoisonError, RwLock};

use crate::auth::{self, Role};
use crate::{Challenge, Hello, PROTOCOL, RELEASE};
use replay_core::error::{Error, Result};

/// Characters of an unauthenticated peer's release that errors and logs repeat.
const MAX_RELEASE: usize = 64;

/// A peer's release for errors and logs: short, and without control characters, which could forge lines of a log.
pub fn printable_release(release: &str) -> String {
    let start = release.chars().take(MAX_RELEASE);
    start.flat_map(char::escape_debug).collect()
}

/// A server's part of every handshake.
pub struct Handshake {
    token: RwLock<Option<Arc<str>>>,
    incarnation: u64,
    max_frame_bytes: u64,
}

/// Token and nonces of a challenge, to check the client's answer.
pub struct Challenged {
    token: Option<Arc<str>>,
    client_nonce: [u8; 32],
    server_nonce: [u8; 32],
}

impl Challenged {
    /// Whether the client needs a token.
    pub fn needs_token(&self) -> bool {
        self.token.is_some()
    }
}

impl Handshake {
    /// Handshakes of a server; without a token every client is accepted.
    pub fn new(token: Option<String>, incarnation: u64, max_frame_bytes: u64) -> Self {
        Handshake {
            token: RwLock::new(token.map(Arc::from)),
            incarnation,
            max_frame_bytes,
        }
    }

    /// Sets the token of challenges from now on.
    pub fn set_token(&self, token: Option<String>) {
        let mut current = self.token.write().unwrap_or_else(PoisonError::into_inner);
        *current = token.map(Arc::from);
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
                client_release: printable_release(&hello.release),
            });
        }
        let token = self.token.read().unwrap_or_else(PoisonError::into_inner);
        let token = token.clone();
        let server_nonce = auth::nonce()?;
        let challenge = Challenge {
            protocol: PROTOCOL,
            release: RELEASE.to_owned(),
            incarnation: self.incarnation,
            nonce: server_nonce,
            token_needed: token.is_some(),
            proof: token
                .as_deref()
                .map(|token| auth::proof(token, Role::Server, &hello.nonce, &server_nonce)),
            max_frame_bytes: self.max_frame_bytes,
        };
        let challenged = Challenged {
            token,
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
        let Challenged {
            token: Some(token),
            client_nonce,
            server_nonce,
        } = challenged
        else {
            return Ok(());
        };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_release_cannot_forge_lines_of_a_log() {
        let handshakes = Handshake::new(None, 1, 1 << 20);
        let refused = handshakes.challenge(&Hello {
            protocol: PROTOCOL + 1,
            release: "1.0\n2026-01-01 INFO all is well\u{1b}[2J\u{202e}".into(),
            nonce: [0; 32],
        });
        let message = refused.err().unwrap().to_string();
        let forbidden = |c: char| c.is_control() || c == '\u{202e}';
        assert!(!message.contains(forbidden), "{message}");
        assert!(message.contains("1.0\\n2026"), "{message}");
        assert!(printable_release(&"a".repeat(1000)).len() <= MAX_RELEASE);
    }
}
