//! `innet-replay serve`: configuration from flags and a file, a server until a signal.

use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

use super::log;
use crate::config::{LogLevel, Secret, ServerConfig};
use crate::server::Server;
use crate::stack::{Address, StackName};
use replay_core::error::{Error, Result};
use replay_core::memory::Memory;
use replay_wire::RELEASE;

/// Serve a replay memory, and sums of gradients, until SIGTERM or SIGINT.
///
/// Flags override the keys of the same name in the file; tables stand in the file alone.
#[derive(Args, Serialize)]
pub struct Flags {
    /// A TOML file with the configuration.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// Address to listen on, may be repeated: innet://host:port, innets://host:port (TLS) or unix:///path
    /// [default: innet://127.0.0.1:7710]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    listen: Vec<Address>,
    /// Whose TCP to use: fstack is F-Stack over DPDK, where this program was built with it [default: kernel]
    #[arg(long, value_name = "STACK")]
    stack: Option<StackName>,
    /// F-Stack's configuration file, for --stack fstack
    #[arg(long, value_name = "FILE")]
    stack_config: Option<PathBuf>,
    /// Threads that serve connections [default: one for every two cores]
    #[arg(long, value_name = "N")]
    io_threads: Option<u32>,
    /// Look for work without sleeping: lower latency, and each I/O thread takes a core whole
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    spin: bool,
    /// Most bytes of tables, parameters and receive buffers, such as 8GiB [default: half of the machine's memory]
    #[arg(long, value_name = "BYTES")]
    max_bytes: Option<String>,
    /// Longest frame in either direction [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    max_frame_bytes: Option<String>,
    /// Most connections at a time [default: 2048]
    #[arg(long, value_name = "N")]
    max_connections: Option<u32>,
    /// Close a connection that is not welcome after this time [default: 10000]
    #[arg(long, value_name = "MS")]
    handshake_deadline_ms: Option<u32>,
    /// Drop a client that takes longer than this to take a reply [default: 30000]
    #[arg(long, value_name = "MS")]
    write_deadline_ms: Option<u32>,
    /// Time for requests under way to finish at the end [default: 5000]
    #[arg(long, value_name = "MS")]
    drain_deadline_ms: Option<u32>,
    /// The secret that clients prove to know. Others on this machine can read it from the process list:
    /// better --token-file, or the environment variable INNET_TOKEN
    #[arg(long)]
    token: Option<String>,
    /// A file with the token in it
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// The certificate chain for TLS, a PEM file
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Listen where other machines can connect without a token or without TLS
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    trusted_network: bool,
    /// What is logged [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<LogLevel>,
    /// Sum gradients of workers at this UDP address; they join over the addresses of --listen
    #[arg(long, value_name = "IP:PORT")]
    gradients: Option<SocketAddr>,
    /// Only sum gradients, without a replay memory
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    gradients_only: bool,
    /// Threads that sum, each at a port of its own, from that of --gradients on; a job has one of them [default: 1]
    #[arg(long, value_name = "N")]
    gradients_threads: Option<u32>,
    /// Most gradient jobs at a time [default: 16]
    #[arg(long, value_name = "N")]
    gradients_jobs: Option<u32>,
    /// Segments of a gradient job that may be under way [default: 256]
    #[arg(long, value_name = "N")]
    gradients_window: Option<u32>,
    /// Sum on this DPDK device in place of the kernel's UDP: net_af_packet0,iface=eth0, or a PCI address; may be given several times, and
    /// two make a switch
    #[arg(long, value_name = "DEVICE")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gradients_devices: Vec<String>,
    /// Arguments for DPDK, in quotes: "--no-huge -m 512 --no-pci"
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    gradients_eal: Option<String>,
    /// On DPDK's devices, bits of the network's part of the address [default: 24]
    #[arg(long, value_name = "BITS")]
    gradients_prefix: Option<u8>,
    /// On DPDK's devices, where datagrams for other networks go
    #[arg(long, value_name = "IP")]
    gradients_gateway: Option<Ipv4Addr>,
    /// On DPDK's devices, the core of each of --gradients-threads, with commas between them
    #[arg(long, value_name = "CORES", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gradients_cores: Vec<usize>,
    /// On DPDK's devices, microseconds that a thread sleeps when nothing comes [default: 0, it takes its core whole]
    #[arg(long, value_name = "US")]
    gradients_idle_sleep_us: Option<u32>,
    /// Most bytes of the sums that an asynchronous gradient job keeps [default: 134217728]
    #[arg(long, value_name = "N")]
    gradients_job_bytes: Option<u64>,
    /// The server above this one: sums of jobs with more workers than come here go on there as one stream
    #[arg(long, value_name = "ADDRESS")]
    parent: Option<Address>,
    /// The certificate that signs the parent's, a PEM file, for innets://
    #[arg(long, value_name = "FILE")]
    parent_tls_ca: Option<PathBuf>,
    /// This server's number among those that have its parent [default: 0]
    #[arg(long, value_name = "N")]
    rack: Option<u16>,
    /// How many servers have its parent, 2 to 64
    #[arg(long, value_name = "N")]
    racks: Option<u16>,
}

impl Flags {
    /// The file's configuration, overridden by these flags. Without a token in either, INNET_TOKEN is the token.
    fn config(&self, environment_token: Option<String>) -> Result<ServerConfig> {
        let (text, origin) = match &self.config {
            Some(path) => {
                let text = fs::read_to_string(path).map_err(|error| {
                    Error::Config(format!("{} cannot be read: {error}", path.display()))
                })?;
                (text, path.display().to_string())
            }
            None => (String::new(), "command line".to_owned()),
        };
        let flags = toml::Table::try_from(self)
            .map_err(|error| Error::Config(format!("command line: {error}")))?;
        let mut config = ServerConfig::from_toml(&text, &origin, flags)?;
        if config.token.is_none() && config.token_file.is_none() {
            config.token = environment_token.map(Secret);
        }
        Ok(config)
    }
}

/// Serves until a signal: the first one lets running requests finish, a second one stops at once.
pub fn run(flags: &Flags) -> Result<()> {
    let config = flags.config(std::env::var("INNET_TOKEN").ok())?;
    log::start(config.log_level);
    let failed = |what: &str| {
        let what = what.to_owned();
        move |source| Error::Io { what, source }
    };
    let runtime = runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(failed("cannot make a runtime"))?;
    runtime.block_on(async {
        let handler = |kind| signal(kind).map_err(failed("cannot handle signals"));
        let mut terminate = handler(SignalKind::terminate())?;
        let mut interrupt = handler(SignalKind::interrupt())?;
        let running = Server::start(&config, Memory::new(config.memory_limits()))?;
        announce(running.addresses(), running.gradients());
        let server = running.server().clone();
        let mut end = tokio::task::spawn_blocking(move || running.wait());
        let mut asked = false;
        loop {
            let signal = tokio::select! {
                biased;
                ended = &mut end => {
                    ended.map_err(|error| Error::Internal(error.to_string()))??;
                    tracing::info!("stopped");
                    return Ok(());
                }
                Some(()) = terminate.recv() => "SIGTERM",
                Some(()) = interrupt.recv() => "SIGINT",
            };
            if asked {
                tracing::warn!(signal, "stopping at once");
                server.stop();
            } else {
                tracing::info!(signal, "shutting down; running requests are finished");
                server.shut_down();
            }
            asked = true;
        }
    })
}

/// Prints the only line of standard output, with the chosen ports: scripts wait for it.
fn announce(addresses: &[Address], gradients: Option<SocketAddr>) {
    let mut addresses: Vec<String> = addresses.iter().map(Address::to_string).collect();
    addresses.extend(gradients.map(|address| format!("gradients {address}")));
    // An error is ignored: standard output may be closed.
    let mut out = io::stdout().lock();
    let _ = writeln!(
        out,
        "innet-replay {RELEASE} ready on {}",
        addresses.join(" ")
    );
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn flags(arguments: &[&str]) -> Flags {
        Line::try_parse_from([&["serve"], arguments].concat())
            .unwrap()
            .flags
    }

    #[test]
    fn every_field_of_the_configuration_has_a_flag_of_its_name() {
        let filled = ServerConfig {
            stack_config: Some("a".into()),
            gradients: Some(([127, 0, 0, 1], 1).into()),
            gradients_gateway: Some([10, 0, 0, 1].into()),
            parent: Some("innet://a".parse().unwrap()),
            parent_tls_ca: Some("a".into()),
            token: Some(Secret("a".into())),
            token_file: Some("a".into()),
            tls_cert: Some("a".into()),
            tls_key: Some("a".into()),
            ..ServerConfig::default()
        };
        let mut fields: Vec<String> = toml::Table::try_from(filled)
            .unwrap()
            .keys()
            .cloned()
            .collect();
        fields.retain(|field| field != "tables");
        fields.push("config".to_owned());
        let mut flags: Vec<String> = Line::command()
            .get_arguments()
            .map(|argument| argument.get_id().to_string())
            .collect();
        fields.sort();
        flags.sort();
        assert_eq!(flags, fields);
    }

    #[test]
    fn flags_override_the_file_and_the_file_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.toml");
        fs::write(
            &path,
            "max_bytes = \"1GiB\"\nmax_connections = 7\nlisten = [\"unix:///tmp/a\"]",
        )
        .unwrap();
        let file = ["--config", path.to_str().unwrap()];
        let line = [
            "--max-bytes=2GiB",
            "--listen=innet://[::1]:1",
            "--listen=unix:///tmp/b",
        ];
        let config = flags(&[&file[..], &line[..]].concat())
            .config(None)
            .unwrap();
        assert_eq!(config.max_bytes, 2 << 30);
        assert_eq!(config.max_connections, 7);
        let listen: Vec<String> = config.listen.iter().map(Address::to_string).collect();
        assert_eq!(listen, ["innet://[::1]:1", "unix:///tmp/b"]);
        assert_eq!(flags(&[]).config(None).unwrap(), ServerConfig::default());
    }

    #[test]
    fn the_environment_gives_the_token_that_nothing_else_does() {
        let environment = || Some("from the environment".to_owned());
        let token = |arguments: &[&str]| {
            flags(arguments)
                .config(environment())
                .unwrap()
                .token
                .map(|token| token.0)
        };
        assert_eq!(token(&[]).as_deref(), Some("from the environment"));
        assert_eq!(token(&["--token=a"]).as_deref(), Some("a"));
        assert_eq!(token(&["--token-file=a"]), None);
    }

    #[test]
    fn the_example_of_a_configuration_can_be_used() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/server.toml");
        let config = flags(&["--config", path]).config(None).unwrap();
        config.validate().unwrap();
        let tables: Vec<&str> = config.tables.iter().map(|t| t.name.as_str()).collect();
        assert_eq!((config.listen.len(), tables), (2, vec!["apex"]));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let error = |arguments: &[&str]| flags(arguments).config(None).unwrap_err().to_string();
        assert!(error(&["--config=/nowhere/a.toml"]).contains("/nowhere/a.toml"));
        assert!(error(&["--max-bytes=lots"]).contains("lots"));
        let listen = Line::try_parse_from(["serve", "--listen=ftp://a"])
            .err()
            .unwrap();
        assert!(listen.to_string().contains("unknown scheme"));
    }
}
