//! Challenge and response: both ends prove that they know the token, which is never sent. A proof covers the nonces of both ends,
//! so it cannot be replayed, and the TLS session, so it cannot be relayed into another one. The formula is in
//! `schema/innet.capnp`.
//!
//! # Invariant
//!
//! A proof is valid for one token, one side, the nonces of both ends and one TLS session. The token that verifies a client's proof
//! determines the client's role, which is checked before every request.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::error::Result;

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
}
