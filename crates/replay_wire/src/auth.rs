//! The server's side of the handshake, without I/O, and challenge and response: both ends prove that they know the token, which is never sent. A proof covers the nonces of both ends,
//! so it cannot be replayed, and the TLS session, so it cannot be relayed into another one. The formula is in
//! `schema/innet.capnp`.
//!
//! # Invariant
//!
//! A proof is valid for one token, one side, the nonces of both ends and one TLS session. The token that verifies a client's proof
//! determines the client's role, which is checked before every request.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use base::system::random;

use crate::error::{Error, Result};
use crate::{Challenge, Hello, PROTOCOL, RELEASE, Role};

/// Shortest token in bytes. A fake server receives the client's proof, and could find a short token by brute force.
pub const MIN_TOKEN_BYTES: usize = 16;

/// Label of [`ChannelBinding`] among the exports of a TLS session (RFC 9266); the context is empty.
pub const CHANNEL_BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// Keying material of a TLS session: equal at both ends of the session, different in every other one.
pub type ChannelBinding = [u8; 32];

/// The proving end. Each side signs different bytes, so a proof cannot be reflected to its maker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client, in `Authenticate`.
    Client,
    /// The server, in `Welcome`.
    Server,
}

/// The connection that a proof is bound to.
#[derive(Debug, Clone, Copy)]
pub struct Transcript {
    /// Nonce of the client, from `Hello`.
    pub client_nonce: [u8; 32],
    /// Nonce of the server, from `Challenge`.
    pub server_nonce: [u8; 32],
    /// The TLS session; `None` without TLS.
    pub channel_binding: Option<ChannelBinding>,
}

/// A text that is hidden in logs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Secret(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A client's default token: the environment variable INNET_TOKEN without surrounding white space, as servers read it;
/// `None` if it is empty.
pub fn environment_token() -> Option<String> {
    let token = std::env::var("INNET_TOKEN").ok()?;
    let token = token.trim();
    (!token.is_empty()).then(|| token.to_owned())
}

/// Checks that a token is long enough.
///
/// # Errors
/// [`replay_core::Error::Config`], with a command that makes one.
pub fn check_token(token: &str) -> Result<()> {
    match token.len() {
        MIN_TOKEN_BYTES.. => Ok(()),
        length => Err(replay_core::Error::Config(format!(
            "a token has at least {MIN_TOKEN_BYTES} bytes, and this one has {length}: make a random one, for example with \
             `openssl rand -hex 32`, and give it to the server and its clients"
        )).into()),
    }
}

/// HMAC-SHA256 of side and transcript under the token.
pub fn proof(token: &str, side: Side, transcript: &Transcript) -> [u8; 32] {
    mac(token, side, transcript).finalize().into_bytes().into()
}

/// Whether `claimed` equals [`proof`], compared in constant time.
pub fn verify(token: &str, side: Side, transcript: &Transcript, claimed: &[u8; 32]) -> bool {
    mac(token, side, transcript).verify_slice(claimed).is_ok()
}

fn mac(token: &str, side: Side, transcript: &Transcript) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token.as_bytes()).expect("HMAC takes keys of any length");
    mac.update(match side {
        Side::Client => b"innet client",
        Side::Server => b"innet server",
    });
    mac.update(&transcript.client_nonce);
    mac.update(&transcript.server_nonce);
    if let Some(binding) = &transcript.channel_binding {
        mac.update(binding);
    }
    mac
}

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
        let proof = sent.map(|token| proof(token, Side::Client, &transcript));
        let authenticated = self.authenticate(&challenged, proof)?;
        Ok(authenticated.role)
    }

    /// Checks the client's proof. The token that verifies it determines the role.
    ///
    /// # Errors
    /// [`Error::Authentication`] when it is missing or wrong.
    pub fn authenticate(&self, challenged: &Challenged, sent: Option<[u8; 32]>) -> Result<Authenticated> {
        if !challenged.needs_token() {
            return Ok(Authenticated { role: Role::Operator, proof: None });
        }
        let refuse = |reason: &str| Err(Error::Authentication(reason.to_owned()));
        let Some(sent) = sent else {
            return refuse(
                "this server asks for a token, and the client gave none: pass one, or set the environment variable INNET_TOKEN",
            );
        };
        let transcript = &challenged.transcript;
        let proved = |(_, token): &&(Role, Secret)| verify(&token.0, Side::Client, transcript, &sent);
        match challenged.tokens.iter().find(proved) {
            Some((role, token)) => {
                Ok(Authenticated { role: *role, proof: Some(proof(&token.0, Side::Server, transcript)) })
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

    fn transcript(client: u8, server: u8, binding: Option<u8>) -> Transcript {
        Transcript {
            client_nonce: [client; 32],
            server_nonce: [server; 32],
            channel_binding: binding.map(|byte| [byte; 32]),
        }
    }

    #[test]
    fn a_proof_holds_for_its_token_side_and_transcript_alone() {
        let here = transcript(1, 2, Some(3));
        let good = proof("secret", Side::Client, &here);
        assert!(verify("secret", Side::Client, &here, &good));
        assert!(!verify("Secret", Side::Client, &here, &good));
        assert!(!verify("secret", Side::Server, &here, &good));
        for other in
            [transcript(2, 1, Some(3)), transcript(1, 1, Some(3)), transcript(1, 2, Some(4)), transcript(1, 2, None)]
        {
            assert!(!verify("secret", Side::Client, &other, &good));
        }
    }

    #[test]
    fn the_formula_is_that_of_the_schema() {
        let hex = |binding| -> String {
            let got = proof("token", Side::Server, &transcript(0, 255, binding));
            got.iter().map(|b| format!("{b:02x}")).collect()
        };
        // python: hmac.new(b"token", b"innet server" + bytes(32) + bytes([255] * 32), "sha256")
        let expected = "3c919fcd26f5bbb480067f92a25491492dac678f639cf5ac3b86a62f742d5d9c";
        assert_eq!(hex(None), expected);
        // ... + bytes([7] * 32)
        let expected = "aea3c474a8479f663194b4e0c2170fed6830b9b6ab653f5b9834262d4edecc4c";
        assert_eq!(hex(Some(7)), expected);
    }

    #[test]
    fn a_short_token_is_refused_with_the_way_to_a_good_one() {
        assert!(check_token("0123456789abcdef").is_ok());
        let error = check_token("0123456789abcde").unwrap_err().to_string();
        assert!(error.contains("15") && error.contains("openssl rand"), "{error}");
    }

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
