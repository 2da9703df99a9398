use super::*;

/// Starts a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// [`PROTOCOL`](crate::PROTOCOL) of the client.
    pub protocol: u32,
    /// [`RELEASE`](crate::RELEASE) of the client.
    pub release: String,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
}

/// The answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// [`PROTOCOL`](crate::PROTOCOL) of the server.
    pub protocol: u32,
    /// [`RELEASE`](crate::RELEASE) of the server.
    pub release: String,
    /// Random number, new at each start of the server.
    pub incarnation: u64,
    /// Random bytes of this connection.
    pub nonce: [u8; 32],
    /// Whether clients need a token.
    pub token_needed: bool,
    /// The server's [`FrameLimits::max_frame_bytes`](crate::FrameLimits::max_frame_bytes).
    pub max_frame_bytes: u64,
}

call!(Hello: Actor => Challenge, names: |_, _| {});

same_fields! {
    hello: Hello { protocol, release, nonce }
    challenge: Challenge { protocol, release, incarnation, nonce, token_needed, max_frame_bytes }
}
