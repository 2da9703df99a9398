//! The server's side of the handshake, without I/O: hello, challenge, authenticate, welcome. Both ends compare versions and
//! prove that they know a token, the client first.

use std::sync::{Arc, PoisonError, RwLock};

use crate::auth::{self, ChannelBinding, Secret, Side, Transcript};
use crate::error::{Error, Result};
use crate::{Challenge, Hello, PROTOCOL, RELEASE, Role};
use base::system::random;

/// Characters of an unauthenticated peer's release that errors and logs repeat.
const MAX_RELEASE: usize = 64;

/// A peer's release for errors and logs: short, and without control characters, which could forge lines of a log.
pub fn printable_release(release: &str) -> String {
    let start = release.chars().take(MAX_RELEASE);
    start.flat_map(char::escape_debug).collect()
}

/// Tokens of a server, one for each role that it serves. Without any, every client is an operator.
pub type Tokens = Vec<(Role, Secret)>;

/// A server's part of every handshake.
pub struct Handshake {
    tokens: RwLock<Arc<Tokens>>,
    incarnation: u64,
    max_frame_bytes: u64,
}

/// State of a challenge, to verify the client's proof.
pub struct Challenged {
    tokens: Arc<Tokens>,
    transcript: Transcript,
}

/// A client with a valid proof.
pub struct Authenticated {
    /// The role of its token.
    pub role: Role,
    /// The server's proof, `None` without a token.
    pub proof: Option<[u8; 32]>,
}

impl Challenged {
    /// Whether the client needs a token.
    pub fn needs_token(&self) -> bool {
        !self.tokens.is_empty()
    }
}

impl Handshake {
    /// Handshakes of a server.
    pub fn new(tokens: Tokens, incarnation: u64, max_frame_bytes: u64) -> Self {
        Handshake { tokens: RwLock::new(Arc::new(tokens)), incarnation, max_frame_bytes }
    }

    /// Replaces the tokens for later challenges.
    pub fn set_tokens(&self, tokens: Tokens) {
        *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tokens);
    }

    /// The reply to a hello on the TLS session of `channel_binding`, and the state for [`Handshake::authenticate`].
    ///
    /// # Errors
    /// [`Error::Version`] for a client of another protocol.
    pub fn challenge(&self, hello: &Hello, channel_binding: Option<ChannelBinding>) -> Result<(Challenge, Challenged)> {
        if hello.protocol != PROTOCOL {
            return Err(Error::Version {
                server: PROTOCOL,
                server_release: RELEASE.to_owned(),
                client: hello.protocol,
                client_release: printable_release(&hello.release),
            });
        }
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let challenged = Challenged {
            tokens: Arc::clone(&tokens),
            transcript: Transcript { client_nonce: hello.nonce, server_nonce: random(), channel_binding },
        };
        let challenge = Challenge {
            protocol: PROTOCOL,
            release: RELEASE.to_owned(),
            incarnation: self.incarnation,
            nonce: challenged.transcript.server_nonce,
            token_needed: challenged.needs_token(),
            max_frame_bytes: self.max_frame_bytes,
        };
        Ok((challenge, challenged))
    }

    /// Role of a plain token from an HTTP client. It is compared by its proof, which takes the same time for all wrong tokens.
    ///
    /// # Errors
    /// [`Error::Authentication`] when it is missing or wrong.
    pub fn role_of(&self, sent: Option<&str>) -> Result<Role> {
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
        let transcript = Transcript { client_nonce: random(), server_nonce: random(), channel_binding: None };
        let challenged = Challenged { tokens: Arc::clone(&tokens), transcript };
        drop(tokens);
        let proof = sent.map(|token| auth::proof(token, Side::Client, &transcript));
        let authenticated = self.authenticate(&challenged, proof)?;
        Ok(authenticated.role)
    }

    /// Checks the client's proof. The token that verifies it determines the role.
    ///
    /// # Errors
    /// [`Error::Authentication`] when it is missing or wrong.
    pub fn authenticate(&self, challenged: &Challenged, proof: Option<[u8; 32]>) -> Result<Authenticated> {
        if !challenged.needs_token() {
            return Ok(Authenticated { role: Role::Operator, proof: None });
        }
        let refuse = |reason: &str| Err(Error::Authentication(reason.to_owned()));
        let Some(proof) = proof else {
            return refuse(
                "this server asks for a token, and the client gave none: pass one, or set the environment variable INNET_TOKEN",
            );
        };
        let transcript = &challenged.transcript;
        let proved = |(_, token): &&(Role, Secret)| auth::verify(&token.0, Side::Client, transcript, &proof);
        match challenged.tokens.iter().find(proved) {
            Some((role, token)) => {
                Ok(Authenticated { role: *role, proof: Some(auth::proof(&token.0, Side::Server, transcript)) })
            }
            None if transcript.channel_binding.is_some() => refuse(
                "the server has another token than the client, or TLS ends at a relay between them: use a token that the server was started with, and connect to the server itself",
            ),
            None => {
                refuse("the server has another token than the client: use a token that the server was started with")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_is_sent_as_it_is_has_its_role() {
        let open = Handshake::new(Tokens::new(), 1, 1 << 20);
        assert_eq!(open.role_of(None).unwrap(), Role::Operator);
        let tokens = vec![(Role::Actor, Secret("secret of the tests".into()))];
        let guarded = Handshake::new(tokens, 1, 1 << 20);
        let role = guarded.role_of(Some("secret of the tests"));
        assert_eq!(role.unwrap(), Role::Actor);
        for wrong in [None, Some(""), Some("secret of the test")] {
            assert!(guarded.role_of(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_peers_release_cannot_forge_lines_of_a_log() {
        let handshakes = Handshake::new(Tokens::new(), 1, 1 << 20);
        let hello = Hello {
            protocol: PROTOCOL + 1,
            release: "1.0\n2026-01-01 INFO all is well\u{1b}[2J\u{202e}".into(),
            nonce: [0; 32],
        };
        let refused = handshakes.challenge(&hello, None);
        let message = refused.err().unwrap().to_string();
        let forbidden = |c: char| c.is_control() || c == '\u{202e}';
        assert!(!message.contains(forbidden), "{message}");
        assert!(message.contains("1.0\\n2026"), "{message}");
        assert!(printable_release(&"a".repeat(1000)).len() <= MAX_RELEASE);
    }
}
