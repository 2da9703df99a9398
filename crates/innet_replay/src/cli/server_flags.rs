//! Flags of commands that ask a server, and the connection to it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use base::wait::Wait;
use replay_client::{Client, ConnectOptions, Namespace};
use replay_link::error::Result;
use replay_link::stack::Address;
use replay_server::config::read_token_file;
use replay_wire::auth::{self, Secret};

/// Limit for connecting, and for one call.
const PATIENCE: Duration = Duration::from_secs(10);

/// Address and credentials of a server.
#[derive(Args)]
pub struct ServerFlags {
    /// Address of the server: innet://host:port, innets://host:port, unix:///path, or innet+NAME://address:port over the network stack NAME
    #[arg(default_value = "innet://127.0.0.1:7710")]
    address: Address,
    /// Token of the server; prefer --token-file, or the environment variable INNET_TOKEN
    #[arg(long)]
    token: Option<String>,
    /// File with the server's token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    token_file: Option<PathBuf>,
    /// PEM file with the certificate of the server or of its authority, for innets://
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Configuration file of the network stack, for innet+NAME://
    #[arg(long, value_name = "FILE")]
    stack_config: Option<PathBuf>,
}

/// A server, and the namespace that its memory is seen from.
#[derive(Args)]
pub struct MemoryFlags {
    #[command(flatten)]
    server: ServerFlags,
    /// Show and take the names inside of this namespace, without the namespace; all names of the server by default
    #[arg(long, value_name = "NAME")]
    namespace: Option<Namespace>,
}

impl MemoryFlags {
    /// Connects.
    ///
    /// # Errors
    /// Errors of [`ServerFlags::connect`].
    pub fn connect(&self) -> Result<Client> {
        self.server.connect(self.namespace.clone())
    }
}

impl ServerFlags {
    /// Connects.
    ///
    /// # Errors
    /// Errors of [`Client::connect`] and of reading the token.
    pub fn connect(&self, namespace: Option<Namespace>) -> Result<Client> {
        let options = ConnectOptions {
            token: self.token(auth::environment_token())?.map(Secret),
            tls_ca: self.tls_ca.clone(),
            stack_config: self.stack_config.clone(),
            connect_timeout: PATIENCE,
            namespace,
            ..ConnectOptions::default()
        };
        Client::connect(&self.address, options, &patience())
    }

    /// Token of the flags, or else of the environment.
    fn token(&self, environment: Option<String>) -> Result<Option<String>> {
        match &self.token_file {
            Some(path) => read_token_file(path).map(Some),
            None => Ok(self.token.clone().or(environment)),
        }
    }
}

/// Deadline of one call.
pub fn patience() -> Wait<'static> {
    Wait::until(Some(Instant::now() + PATIENCE))
}
