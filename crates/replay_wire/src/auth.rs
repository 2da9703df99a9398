//! Challenge and response: both ends prove that they know the token, which is never sent. Each proof covers the nonces of
//! both ends, so it cannot be replayed. The formula is in `schema/innet.capnp`.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use replay_core::error::{Error, Result};

/// The proving end. Each role signs different bytes, so a proof cannot be reflected to its maker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The client, in `Authenticate`.
    Client,
    /// The server, in `Challenge`.
    Server,
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

/// HMAC-SHA256 of the role and both nonces under the token.
pub fn proof(
    token: &str,
    role: Role,
    client_nonce: &[u8; 32],
    server_nonce: &[u8; 32],
) -> [u8; 32] {
    mac(token, role, client_nonce, server_nonce)
        .finalize()
        .into_bytes()
        .into()
}

/// Whether `claimed` equals [`proof`], compared in constant time.
pub fn verify(
    token: &str,
    role: Role,
    client_nonce: &[u8; 32],
    server_nonce: &[u8; 32],
    claimed: &[u8; 32],
) -> bool {
    mac(token, role, client_nonce, server_nonce)
        .verify_slice(claimed)
        .is_ok()
}

/// 32 random bytes from the operating system.
///
/// # Errors
/// [`Error::Io`] when the operating system fails.
pub fn nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|e| Error::Io {
        what: "getting random bytes".into(),
        source: std::io::Error::other(e),
    })?;
    Ok(nonce)
}

fn mac(token: &str, role: Role, client_nonce: &[u8; 32], server_nonce: &[u8; 32]) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(token.as_bytes()).expect("HMAC takes keys of any length");
    mac.update(match role {
        Role::Client => b"innet client",
        Role::Server => b"innet server",
    });
    mac.update(client_nonce);
    mac.update(server_nonce);
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_token_role_and_nonces_alone() {
        let (client, server) = ([1; 32], [2; 32]);
        let good = proof("secret", Role::Client, &client, &server);
        assert!(verify("secret", Role::Client, &client, &server, &good));
        assert!(!verify("Secret", Role::Client, &client, &server, &good));
        assert!(!verify("secret", Role::Server, &client, &server, &good));
        assert!(!verify("secret", Role::Client, &server, &client, &good));
        assert!(!verify("secret", Role::Client, &client, &client, &good));
    }

    #[test]
    fn the_formula_is_that_of_the_schema() {
        // python: hmac.new(b"token", b"innet server" + bytes(32) + bytes([255] * 32), "sha256")
        let expected = "3c919fcd26f5bbb480067f92a25491492dac678f639cf5ac3b86a62f742d5d9c";
        let got = proof("token", Role::Server, &[0; 32], &[255; 32]);
        let hex: String = got.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, expected);
    }

    #[test]
    fn nonces_differ() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
