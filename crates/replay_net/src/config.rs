//! The server's configuration: one struct, read from TOML, with a flag of the same name for each field.

mod gradients;
mod size;
mod validate;

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::stack::{Address, StackName};
use replay_core::error::{Error, Result};
use replay_core::memory::MemoryLimits;
use replay_core::schema::TableConfig;
use size::{bytes, machine_memory};

/// Least number of frames of `max_frame_bytes` in `max_bytes`: two receive buffers and one stored frame.
const FRAMES: u64 = 3;

/// The configuration of a server. A missing field has its documented default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Addresses to listen on: `host:port`, `innet://host:port`, `innets://host:port` (TLS) or `unix:///path`. With port
    /// 0 the system chooses a port. An address that other machines can reach needs a token and TLS, or
    /// `trusted_network`. Default: `innet://127.0.0.1:7710`.
    pub listen: Vec<Address>,
    /// Network stack: `kernel`, or `fstack` (F-Stack over DPDK: needs a program built with that feature, serves TCP at the
    /// IP addresses of its ports, with one thread). Default: `kernel`.
    pub stack: StackName,
    /// F-Stack's configuration file, with an additional section `[innet]` for DPDK's arguments, one `eal` line each.
    /// Default: none.
    pub stack_config: Option<PathBuf>,
    /// Threads that serve connections. Default: 0, one for every two cores: a thread moves gigabytes a second, and actors
    /// and learner often share the machine.
    pub io_threads: usize,
    /// Poll without sleeping: lower latency, but each I/O thread takes a whole core. Default: false.
    pub spin: bool,
    /// Memory limit in bytes for tables (their `capacity_bytes` and the index of their `capacity`), parameters and receive
    /// buffers (two frames of `max_frame_bytes`): a number, or a text such as `"8GiB"`. Default: 0, half of the machine's
    /// memory.
    #[serde(deserialize_with = "bytes")]
    pub max_bytes: u64,
    /// Longest frame in either direction, in bytes: the limit for a push, a drawn batch and a version of parameters.
    /// Default: `"256MiB"`.
    #[serde(deserialize_with = "bytes")]
    pub max_frame_bytes: u64,
    /// Limit of open connections; an actor has two, one of them for its writer. The limit of open files is raised
    /// accordingly, up to the hard limit. Default: 2,048.
    pub max_connections: u32,
    /// Time for a handshake in milliseconds, after which the connection is closed. Default: 10,000.
    pub handshake_deadline_ms: u64,
    /// Time in milliseconds for a client to read a reply, and for a frame to arrive once memory is reserved for it. A
    /// slower client is dropped, and the chunks that its reply pinned are released. Default: 30,000.
    pub write_deadline_ms: u64,
    /// Time in milliseconds for running requests to finish at a shutdown. Default: 5,000.
    pub drain_deadline_ms: u64,
    /// Secret that clients have to know; it is never sent. Default: none.
    pub token: Option<Secret>,
    /// File with the token, in place of `token`. Default: none.
    pub token_file: Option<PathBuf>,
    /// Certificate chain for TLS, a PEM file; all TCP addresses then use TLS. Default: none.
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file. Default: none.
    pub tls_key: Option<PathBuf>,
    /// Listen without a token or without TLS where other machines can connect. Default: false.
    pub trusted_network: bool,
    /// Lowest level of logged events: `error`, `warn`, `info`, `debug` or `trace`. Default: `info`.
    pub log_level: LogLevel,
    /// Sum gradients of workers at this UDP address, `ip:port`; port 0 lets the system choose. Workers join over the
    /// addresses of `listen`. An IP address of all zeros is every address of this machine. Default: none.
    pub gradients: Option<SocketAddr>,
    /// Only sum gradients: there is no replay memory, and no parameters. Default: false.
    pub gradients_only: bool,
    /// Threads that sum, each with a socket of its own, at the port of `gradients` and those that follow. A job is summed by one of
    /// them: more than one is for several jobs. Default: 1.
    pub gradients_threads: usize,
    /// Most gradient jobs at a time; one takes up to `gradients_window` times 3.1 KB. Default: 16.
    pub gradients_jobs: usize,
    /// Segments (datagrams of up to 360 values) of a job that may be under way. Default: 256.
    pub gradients_window: u32,
    /// Sum on DPDK's devices in place of the kernel's UDP (a program built with the feature `dpdk`): their names and arguments as DPDK
    /// takes them, `net_af_packet0,iface=eth0`, or PCI addresses. `gradients` is then an IPv4 address that the kernel does not have. Two
    /// devices make a switch, which lets other frames through. Default: none.
    pub gradients_devices: Vec<String>,
    /// Arguments for DPDK's environment, with spaces between them: `--no-huge -m 512 --no-pci`. Default: none.
    pub gradients_eal: String,
    /// On DPDK's devices, bits of the network's part of the address. Default: 24.
    pub gradients_prefix: u8,
    /// On DPDK's devices, where datagrams for other networks go. Default: none.
    pub gradients_gateway: Option<Ipv4Addr>,
    /// On DPDK's devices, the core of each of `gradients_threads`. Default: none, the system chooses.
    pub gradients_cores: Vec<usize>,
    /// On DPDK's devices, microseconds that a thread sleeps when nothing comes. Default: 0, it polls and takes its core whole.
    pub gradients_idle_sleep_us: u64,
    /// Most bytes of the sums that an asynchronous gradient job keeps: its vector for each of S + 2 updates. Default: 128 MiB.
    pub gradients_job_bytes: usize,
    /// The server above this one, `innet://host:port`: jobs with more workers than come here (their `world`) go on there as one
    /// stream. It has to have this server's token. Default: none.
    pub parent: Option<Address>,
    /// For a parent at `innets://`: a PEM file with its certificate, or with that of its authority. Default: none.
    pub parent_tls_ca: Option<PathBuf>,
    /// This server's number among those that have its parent, from 0. Default: 0.
    pub rack: u16,
    /// How many servers have its parent, at least 2 with one. Default: 1.
    pub racks: u16,
    /// Tables made at the start. Clients cannot drop them, nor create them with another definition. Default: none.
    pub tables: Vec<TableConfig>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            listen: vec![Address::Tcp {
                host: "127.0.0.1".to_owned(),
                port: Address::DEFAULT_PORT,
                tls: false,
                stack: StackName::Kernel,
            }],
            stack: StackName::Kernel,
            stack_config: None,
            io_threads: 0,
            spin: false,
            max_bytes: 0,
            max_frame_bytes: 256 << 20,
            max_connections: 2_048,
            handshake_deadline_ms: 10_000,
            write_deadline_ms: 30_000,
            drain_deadline_ms: 5_000,
            token: None,
            token_file: None,
            tls_cert: None,
            tls_key: None,
            trusted_network: false,
            log_level: LogLevel::Info,
            gradients: None,
            gradients_only: false,
            gradients_threads: 1,
            gradients_jobs: 16,
            gradients_window: 256,
            gradients_devices: Vec::new(),
            gradients_eal: String::new(),
            gradients_prefix: 24,
            gradients_gateway: None,
            gradients_cores: Vec::new(),
            gradients_idle_sleep_us: 0,
            gradients_job_bytes: 128 << 20,
            parent: None,
            parent_tls_ca: None,
            rack: 0,
            racks: 1,
            tables: Vec::new(),
        }
    }
}

/// Lowest level of logged events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures of this program.
    Error,
    /// Also problems that need attention.
    Warn,
    /// Also one line for each important event.
    Info,
    /// Also failed requests.
    Debug,
    /// All events.
    Trace,
}

/// A text that is hidden in logs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl ServerConfig {
    /// Smallest `max_frame_bytes`, enough for a handshake or an error.
    pub const MIN_FRAME_BYTES: u64 = 64 << 10;

    /// Reads the text of a TOML file. Errors name the file by `origin`; `overrides` replaces keys of the same name.
    ///
    /// # Errors
    /// [`Error::Config`] with line and key, also for unknown keys.
    pub fn from_toml(text: &str, origin: &str, overrides: toml::Table) -> Result<Self> {
        let refuse = |error: toml::de::Error| Error::Config(format!("{origin}: {error}"));
        // Parsed without the overrides first, so that an error names its line in the file.
        toml::from_str::<ServerConfig>(text).map_err(refuse)?;
        let mut table: toml::Table = toml::from_str(text).map_err(refuse)?;
        table.extend(overrides);
        table.try_into().map_err(refuse)
    }

    fn has_token(&self) -> bool {
        self.token.is_some() || self.token_file.is_some()
    }

    /// The token, from the field or the file, without surrounding white space.
    ///
    /// # Errors
    /// [`Error::Config`] when the file cannot be read or the token is empty.
    pub fn read_token(&self) -> Result<Option<String>> {
        let token = match (&self.token, &self.token_file) {
            (Some(token), _) => token.0.clone(),
            (None, Some(path)) => std::fs::read_to_string(path).map_err(|error| {
                Error::Config(format!(
                    "token_file {} cannot be read: {error}",
                    path.display()
                ))
            })?,
            (None, None) => return Ok(None),
        };
        match token.trim() {
            "" => Err(Error::Config(
                "the token is empty: use a long random one, for example from `openssl rand -hex 32`"
                    .to_owned(),
            )),
            token => Ok(Some(token.to_owned())),
        }
    }

    /// Limits of the memory that `innet-replay serve` makes. The receive buffers have two frames: one for pushes, one for all
    /// other requests.
    pub fn memory_limits(&self) -> MemoryLimits {
        MemoryLimits {
            max_bytes: match self.max_bytes {
                0 => (machine_memory() / 2).max(FRAMES * self.max_frame_bytes),
                bytes => bytes,
            },
            receive_bytes: 2 * self.max_frame_bytes,
            seed: None,
        }
    }

    /// `io_threads`, with 0 replaced by one for every two cores.
    pub fn effective_io_threads(&self) -> usize {
        match self.io_threads {
            0 => std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1)),
            threads => threads,
        }
    }

    /// `handshake_deadline_ms` as a duration.
    pub fn handshake_deadline(&self) -> Duration {
        Duration::from_millis(self.handshake_deadline_ms)
    }

    /// `write_deadline_ms` as a duration.
    pub fn write_deadline(&self) -> Duration {
        Duration::from_millis(self.write_deadline_ms)
    }

    /// `drain_deadline_ms` as a duration.
    pub fn drain_deadline(&self) -> Duration {
        Duration::from_millis(self.drain_deadline_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn read(text: &str) -> Result<ServerConfig> {
        ServerConfig::from_toml(text, "server.toml", toml::Table::new())
    }

    pub(super) fn refusal(text: &str) -> String {
        read(text)
            .and_then(|config| config.validate())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn an_empty_file_is_the_default() {
        let config = read("").unwrap();
        assert_eq!(config, ServerConfig::default());
        config.validate().unwrap();
    }

    #[test]
    fn unknown_and_wrong_keys_are_named() {
        assert!(refusal("lisen = []").contains("lisen"));
        assert!(refusal("listen = [\"nowhere:x\"]").contains("nowhere:x"));
        assert!(refusal("max_bytes = \"much\"").contains("much"));
        let error = refusal("\nio_threads = \"two\"");
        assert!(
            error.contains("server.toml") && error.contains("line 2"),
            "{error}"
        );
        let table = "[[tables]]\nname = \"a\"\ncolums = []";
        assert!(refusal(table).contains("colums"));
    }

    #[test]
    fn overrides_replace_keys_of_the_file() {
        let mut flags = toml::Table::new();
        flags.insert("io_threads".into(), 3.into());
        let config =
            ServerConfig::from_toml("io_threads = 1\nmax_connections = 5", "a", flags).unwrap();
        assert_eq!((config.io_threads, config.max_connections), (3, 5));
    }

    #[test]
    fn the_token_is_trimmed_never_empty_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "secret\n").unwrap();
        let config = |token: Option<&str>, file: Option<&PathBuf>| ServerConfig {
            token: token.map(|token| Secret(token.to_owned())),
            token_file: file.cloned(),
            ..ServerConfig::default()
        };
        let from_file = config(None, Some(&path)).read_token().unwrap();
        assert_eq!(from_file.as_deref(), Some("secret"));
        assert_eq!(config(None, None).read_token().unwrap(), None);
        assert!(config(Some(" "), None).read_token().is_err());
        assert!(
            config(None, Some(&"/nowhere/token".into()))
                .read_token()
                .is_err()
        );
        assert!(!format!("{:?}", config(Some("hidden"), None)).contains("hidden"));
    }
}
