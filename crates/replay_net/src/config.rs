//! The server's configuration: one struct, read from TOML, with a flag of the same name for each field.

mod gradients;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::stack::{Address, StackName};
use replay_core::error::{Error, Result};
use replay_core::memory::MemoryLimits;
use replay_core::schema::TableConfig;

/// Frames of `max_frame_bytes` that `max_bytes` has room for, at least: two being received, and one that is kept.
const FRAMES: u64 = 3;

/// The configuration of a server. A field that is not given has the default its documentation names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Addresses to listen on: `host:port`, `innet://host:port`, `innets://host:port` (TLS) or
    /// `unix:///path`; port 0 lets the system choose. An address that other machines reach needs a token and
    /// TLS, or `trusted_network`. Default: `innet://127.0.0.1:7710`.
    pub listen: Vec<Address>,
    /// Whose TCP the server uses: `kernel`, or `fstack` (F-Stack over DPDK; a program built with that feature, TCP at
    /// the IP addresses of its ports alone, one thread). Default: `kernel`.
    pub stack: StackName,
    /// F-Stack's configuration file: its own format, and a section `[innet]` with arguments for DPDK, one to an `eal`
    /// line. Default: none.
    pub stack_config: Option<PathBuf>,
    /// Threads that serve connections. Default: 0, one for every two cores: a thread moves gigabytes a
    /// second, and the other cores belong to the actors and the learner that often share the machine.
    pub io_threads: usize,
    /// I/O threads look for work without sleeping: replies leave without a wake-up, and each thread takes a core whole.
    /// Default: false.
    pub spin: bool,
    /// Most bytes of tables (their `capacity_bytes` and the index of their `capacity`), parameters and receive buffers
    /// (two frames of `max_frame_bytes`); a number, or a text such as `"8GiB"`. Default: 0, half of the machine's memory.
    #[serde(deserialize_with = "bytes")]
    pub max_bytes: u64,
    /// Longest frame, in bytes, in either direction: bounds one push, one drawn batch and one version of
    /// parameters. Default: `"256MiB"`.
    #[serde(deserialize_with = "bytes")]
    pub max_frame_bytes: u64,
    /// Most connections at a time; an actor has two, one of them for its writer. Default: 2,048; the limit of open files is
    /// raised for them as far as the process may.
    pub max_connections: u32,
    /// A connection that is not welcome after this many milliseconds is closed. Default: 10,000.
    pub handshake_deadline_ms: u64,
    /// A reader that has not taken a reply after this many milliseconds is dropped, and what the reply pinned comes
    /// free; so is a client whose frame has begun, has room, and has not arrived by then. Default: 30,000.
    pub write_deadline_ms: u64,
    /// At the end, requests under way have this many milliseconds to finish. Default: 5,000.
    pub drain_deadline_ms: u64,
    /// The secret that clients prove to know; it never travels. Default: none.
    pub token: Option<Secret>,
    /// A file with the token in it, in place of `token`. Default: none.
    pub token_file: Option<PathBuf>,
    /// The certificate chain for TLS, a PEM file; TCP addresses then speak TLS alone. Default: none.
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file. Default: none.
    pub tls_key: Option<PathBuf>,
    /// Listen where other machines can connect without a token or without TLS. Default: false.
    pub trusted_network: bool,
    /// What is logged: `error`, `warn`, `info`, `debug` or `trace`. Default: `info`.
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
    /// Tables made at the start; a client that asks for one of them with another definition gets an error, and
    /// no client can drop them. Default: none.
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

/// What is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What went wrong here.
    Error,
    /// What somebody should look at.
    Warn,
    /// One line for each important event.
    Info,
    /// Also requests that failed.
    Debug,
    /// Everything.
    Trace,
}

/// A text that no log shows.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl ServerConfig {
    /// Smallest `max_frame_bytes`: less would not hold a handshake or an error.
    pub const MIN_FRAME_BYTES: u64 = 64 << 10;

    /// Reads a TOML file's text; `origin` stands in errors. `overrides` replaces keys of the same name.
    ///
    /// # Errors
    /// [`Error::Config`] names the line and the key: an unknown one too.
    pub fn from_toml(text: &str, origin: &str, overrides: toml::Table) -> Result<Self> {
        let refuse = |error: toml::de::Error| Error::Config(format!("{origin}: {error}"));
        // Read alone first: an error in the file can then point at its line.
        toml::from_str::<ServerConfig>(text).map_err(refuse)?;
        let mut table: toml::Table = toml::from_str(text).map_err(refuse)?;
        table.extend(overrides);
        table.try_into().map_err(refuse)
    }

    /// Checks every field that can be checked before the start.
    ///
    /// # Errors
    /// [`Error::Config`] says what is wrong and what would be right; [`Error::Table`] for a table.
    pub fn validate(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config(reason));
        if self.listen.is_empty() {
            return refuse("listen is empty: name at least one address".to_owned());
        }
        if !(Self::MIN_FRAME_BYTES..=u64::from(u32::MAX)).contains(&self.max_frame_bytes) {
            return refuse(format!(
                "max_frame_bytes is {} to {}, got {}",
                Self::MIN_FRAME_BYTES,
                u32::MAX,
                self.max_frame_bytes
            ));
        }
        if self.max_bytes > 0 && self.max_bytes / FRAMES < self.max_frame_bytes {
            return refuse(format!(
                "max_bytes {} is less than {FRAMES} frames of max_frame_bytes {}: raise the one or lower the other",
                self.max_bytes, self.max_frame_bytes
            ));
        }
        for (name, value) in [
            ("max_connections", u64::from(self.max_connections)),
            ("handshake_deadline_ms", self.handshake_deadline_ms),
            ("write_deadline_ms", self.write_deadline_ms),
        ] {
            if value == 0 {
                return refuse(format!("{name} is at least 1"));
            }
        }
        if self.token.is_some() && self.token_file.is_some() {
            return refuse("token and token_file are both set: keep one".to_owned());
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return refuse("tls_cert and tls_key belong together: set both or none".to_owned());
        }
        for address in &self.listen {
            self.validate_address(address)?;
        }
        self.validate_stack()?;
        self.validate_gradients()?;
        self.tables.iter().try_for_each(TableConfig::validate)
    }

    fn validate_stack(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config(reason));
        match (self.stack, &self.stack_config) {
            (StackName::Kernel, None) => return Ok(()),
            (StackName::Kernel, Some(_)) => {
                return refuse(
                    "stack_config is set, and stack is kernel: set stack to fstack, or take it out"
                        .to_owned(),
                );
            }
            (StackName::Fstack, None) => {
                return refuse(
                    "stack is fstack: name F-Stack's configuration file in stack_config".to_owned(),
                );
            }
            (StackName::Fstack, Some(_)) => {}
        }
        if self.spin {
            return refuse(
                "spin is for the kernel's sockets; F-Stack polls unless idle_sleep is set in its file: leave spin out"
                    .to_owned(),
            );
        }
        if self.io_threads > 1 {
            return refuse(format!(
                "F-Stack has one thread in a process, and io_threads is {}: leave it out",
                self.io_threads
            ));
        }
        for address in &self.listen {
            let Address::Tcp { host, .. } = address else {
                return refuse(format!(
                    "{address} is a socket file, which F-Stack cannot serve"
                ));
            };
            match host.parse::<IpAddr>() {
                Ok(ip) if ip.is_loopback() => {
                    return refuse(format!(
                        "{address} is this machine alone, where F-Stack is not: listen on the address of one of its ports \
                         (addr in stack_config)"
                    ));
                }
                Ok(_) => {}
                Err(_) => {
                    return refuse(format!(
                        "{address} names a host; with F-Stack write its IP address"
                    ));
                }
            }
        }
        Ok(())
    }

    fn validate_address(&self, address: &Address) -> Result<()> {
        let Address::Tcp {
            host,
            port,
            tls,
            stack,
        } = address
        else {
            return Ok(());
        };
        if *stack != StackName::Kernel {
            return Err(Error::Config(format!(
                "{address} is an address for clients: a server listens on innet:// or innets://, and takes its stack from \
                 --stack"
            )));
        }
        if *tls && self.tls_cert.is_none() {
            return Err(Error::Config(format!(
                "{address} asks for TLS: set tls_cert and tls_key"
            )));
        }
        let mut resolved = (host.as_str(), *port).to_socket_addrs().map_err(|error| {
            Error::Config(format!("{address} does not name a host here: {error}"))
        })?;
        if resolved.all(|address| address.ip().is_loopback()) {
            return Ok(());
        }
        self.validate_reach(address)
    }

    /// Checks what an address needs that other machines reach.
    fn validate_reach(&self, address: impl fmt::Display) -> Result<()> {
        if self.trusted_network {
            return Ok(());
        }
        let missing = match (self.has_token(), self.tls_cert.is_some()) {
            (true, true) => return Ok(()),
            (true, false) => "TLS (tls_cert and tls_key)",
            (false, true) => "a token (token_file, or INNET_TOKEN)",
            (false, false) => "a token (token_file, or INNET_TOKEN) and TLS (tls_cert and tls_key)",
        };
        Err(Error::Config(format!(
            "{address} can be reached from other machines and needs {missing}; \
             set trusted_network where everyone who can connect may read and write"
        )))
    }

    fn has_token(&self) -> bool {
        self.token.is_some() || self.token_file.is_some()
    }

    /// The token, from the field or from the file (without white space around it).
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

    /// The limits of the memory that `innet-replay serve` makes. Tables and parameters leave room for two frames: a
    /// push, and one that is none.
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

/// Bytes of memory that this process may use: the machine's, or its control group's where that is less; where
/// neither can be read, 8 GiB.
fn machine_memory() -> u64 {
    let read = |path| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| {
        let total = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    });
    let group = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok());
    machine.into_iter().chain(group).min().unwrap_or(8 << 30)
}

/// A number of bytes: digits alone, or with `KB`, `MB`, `GB` (powers of 1000), `KiB`, `MiB`, `GiB` (of 1024).
///
/// # Errors
/// Says what a size looks like.
pub fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let factor: u64 = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 0,
    };
    match digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(factor))
    {
        Some(bytes) if factor > 0 => Ok(bytes),
        _ => Err(format!(
            "{text:?} is not a size in bytes: write 1000000, 500MB or 8GiB"
        )),
    }
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "a size in bytes: 1000000, \"500MB\" or \"8GiB\""
    )]
    enum Size {
        Number(u64),
        Text(String),
    }
    match Size::deserialize(deserializer)? {
        Size::Number(bytes) => Ok(bytes),
        Size::Text(text) => parse_bytes(&text).map_err(serde::de::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ServerConfig> {
        ServerConfig::from_toml(text, "server.toml", toml::Table::new())
    }

    fn refusal(text: &str) -> String {
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
    fn sizes_are_numbers_or_texts() {
        let config = read("max_bytes = \"8GiB\"\nmax_frame_bytes = 1000000").unwrap();
        assert_eq!(config.max_bytes, 8 << 30);
        assert_eq!(config.max_frame_bytes, 1_000_000);
        for text in [
            "8G",
            "GiB",
            "1.5GiB",
            "-1",
            "99999999999999999999",
            "20000000000GiB",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
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
    fn an_open_address_needs_a_token_and_tls_or_trust() {
        let open = "listen = [\"innet://0.0.0.0:1\"]\n";
        let tls = "tls_cert = \"c\"\ntls_key = \"k\"\n";
        let token = "token = \"x\"\n";
        let refused = |rest: &[&str]| refusal(&[&[open], rest].concat().concat());
        assert!(refused(&[]).contains("needs a token"));
        assert!(refused(&[token]).contains("needs TLS"));
        assert!(refused(&[tls]).contains("needs a token"));
        for rest in [[token, tls].concat(), "trusted_network = true".to_owned()] {
            read(&[open, &rest].concat()).unwrap().validate().unwrap();
        }
    }

    #[test]
    fn fields_that_contradict_each_other_are_refused() {
        for (text, part) in [
            ("listen = []", "at least one"),
            ("listen = [\"innets://127.0.0.1:1\"]", "tls_cert"),
            ("tls_cert = \"a\"", "belong together"),
            ("token = \"a\"\ntoken_file = \"b\"", "keep one"),
            ("max_frame_bytes = 1", "max_frame_bytes is"),
            ("max_frame_bytes = \"5GiB\"", "max_frame_bytes is"),
            ("max_connections = 0", "at least 1"),
            (
                "max_bytes = \"2GiB\"\nmax_frame_bytes = \"1GiB\"",
                "less than 3 frames",
            ),
            (
                "[[tables]]\nname = \"a\"\ncolumns = []\ncapacity = 1",
                "cannot be made",
            ),
        ] {
            let error = refusal(text);
            assert!(error.contains(part), "{text}: {error}");
        }
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
