//! Options of a connection.

use std::path::PathBuf;
use std::time::Duration;

use replay_wire::auth::Secret;

use crate::namespace::Namespace;

/// Options of a connection: credentials, timeouts and limits.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The server's token. It is never sent: both ends prove that they know it.
    pub token: Option<Secret>,
    /// For `innets://`: PEM file with the server's or its authority's certificate.
    pub tls_ca: Option<PathBuf>,
    /// Poll for answers without sleeping: lower latency, but a waiting call takes a whole core.
    pub spin: bool,
    /// For `innet+NAME://`: the configuration file of that stack, as the setting `stack_config` of a server.
    pub stack_config: Option<PathBuf>,
    /// Limit for the first connection with its handshake, including retries while the server is at a limit of connections, closes
    /// connections or does not answer. Zero means one attempt of at most [`grace`](ConnectOptions::grace).
    pub connect_timeout: Duration,
    /// Longest wait for an answer after a call's deadline. At the deadline the server replies with the reason of the wait; the grace covers
    /// the network, and bounds calls to a server that does not answer.
    pub grace: Duration,
    /// Longest time for which a call reconnects after its connection broke, even without a deadline.
    pub reconnect_for: Duration,
    /// Longest time for which the first connection is retried while connections are refused: the server may still be starting. If this
    /// exceeds `connect_timeout`, it also bounds other retries.
    pub await_server: Duration,
    /// Limits the client to the names of a namespace.
    pub namespace: Option<Namespace>,
    /// Largest frame accepted from the server, in bytes.
    pub max_frame_bytes: u64,
    /// Most pushes of one writer in flight, at least 1.
    pub pushes_in_flight: usize,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            token: None,
            tls_ca: None,
            spin: false,
            stack_config: None,
            connect_timeout: Duration::from_secs(10),
            grace: Duration::from_secs(5),
            reconnect_for: Duration::from_secs(60),
            await_server: Duration::ZERO,
            namespace: None,
            max_frame_bytes: 1 << 30,
            pushes_in_flight: 32,
        }
    }
}
