//! The server's configuration: one struct, read from TOML and from flags.

mod file;
mod validate;
mod values;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::plugin::PluginSettings;
use crate::process_memory;
pub use file::{add_flags, given_flags};
use replay_core::memory::MemoryLimits;
use replay_core::schema::TableConfig;
use replay_link::error::{Error, Result, refuse};
use replay_link::stack::plugged::plugged_in;
use replay_link::stack::{Address, StackName};
use replay_wire::Role;
use replay_wire::auth::Tokens;
use replay_wire::auth::{self, Secret};
pub use validate::within;
pub use values::HttpAddress;
use values::{deserialize_bytes, deserialize_period, parse_bytes, parse_period, serialize_period};

/// Minimum of `max_bytes`, in frames of `max_frame_bytes`: two receive buffers and one stored frame.
const FRAMES: u64 = 3;

/// Frames of the default length that fit into the memory that a server may have, or more.
const FRAMES_IN_ROOM: u64 = 32;

/// Limit of I/O threads.
const MAX_IO_THREADS: u64 = 256;
/// Limit of connections: Linux's default for a process's open files (`fs.nr_open`).
const MAX_CONNECTIONS: u64 = 1 << 20;

/// Default share of the memory limit for tables, parameters and receive buffers. Unread replies and other processes of the machine, such
/// as learners, need some of the rest.
const SHARE_PERCENT: u8 = 50;

/// The configuration of a server. Each field is a key of the TOML file and, except for `tables`, a flag of the same name;
/// its documentation is the flag's help text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Parser)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Address to listen on, may be repeated: host:port, innet://host:port, innets://host:port (TLS) or unix:///path. With
    /// port 0 the system chooses a port. An address that other machines can reach needs a token and TLS, or
    /// --trusted-network.
    #[arg(long, value_name = "ADDRESS", default_value = "innet://127.0.0.1:7710")]
    pub listen: Vec<Address>,
    /// Address of statistics over HTTP: host:port, http://host:port or https://host:port (TLS). /metrics is for Prometheus, / a
    /// live page for browsers, /stats JSON, /healthz for supervisors. The rules of --listen apply; any of the tokens is the
    /// password, or the bearer token.
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<HttpAddress>,
    /// Network stack.
    #[arg(long, value_name = "STACK", default_value = "kernel", value_parser = stack_parser())]
    pub stack: StackName,
    /// Configuration file of a stack that is not the kernel.
    #[arg(long, value_name = "FILE")]
    pub stack_config: Option<PathBuf>,
    /// Threads that serve connections, at most 256; 0, the default, is one for every two cores. One thread moves gigabytes a second, and
    /// actors and learner often share the machine.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub io_threads: usize,
    /// Poll without sleeping: lower latency, but each I/O thread takes a whole core.
    #[arg(long)]
    pub spin: bool,
    /// Memory limit in bytes, such as 8GiB, for tables (their capacity_bytes and the index of their capacity), parameters and receive
    /// buffers (two frames of --max-frame-bytes); 0, the default, is half of the memory
    /// that the server may have: of the machine, or of what is left in its control group or address space.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0", hide_default_value = true)]
    #[serde(deserialize_with = "deserialize_bytes")]
    pub max_bytes: u64,
    /// Longest frame in either direction, in bytes: the limit for a push, a sampled batch and a version of parameters. 0, the default, is
    /// 256MiB, or a 32nd of the memory that the server may have where that is less.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0", hide_default_value = true)]
    #[serde(deserialize_with = "deserialize_bytes")]
    pub max_frame_bytes: u64,
    /// Limit of replies that clients have not read, in bytes, for all connections; 0 for four frames of max_frame_bytes.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "0")]
    #[serde(deserialize_with = "deserialize_bytes")]
    pub reply_bytes: u64,
    /// Limit of open connections; an actor has two, one of them for its writer. The limit of open files is raised
    /// accordingly, up to the hard limit.
    #[arg(long, value_name = "N", default_value_t = 2_048)]
    pub max_connections: u32,
    /// Limit of clients that are connecting: connections before the end of their handshake, which do not count for
    /// max_connections. A client over this limit or the next one tries again.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_handshakes: u32,
    /// Limit of clients that are connecting from one IP address.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_handshakes_per_address: u32,
    /// Time for a handshake in milliseconds, with TLS, after which the connection is closed.
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    pub handshake_deadline_ms: u64,
    /// Time in milliseconds for a client to read a reply, and for a frame to arrive once memory is reserved for it. A slower
    /// client is dropped, and the chunks that its reply pinned are released.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub write_deadline_ms: u64,
    /// Time in milliseconds for running requests to finish at a shutdown.
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub drain_deadline_ms: u64,
    /// Secret of at least 16 bytes that clients have to know; it is never sent. It allows every request: the next two tokens
    /// allow less. Other users of this machine can read the flag in the process list: prefer --token-file, or the
    /// environment variable INNET_TOKEN.
    #[arg(long)]
    pub token: Option<Secret>,
    /// File with the token, an alternative to --token.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Token of learners: it allows everything except emptying and dropping tables, dropping parameters, and snapshots on request.
    #[arg(long, value_name = "TOKEN")]
    pub learner_token: Option<Secret>,
    /// File with the token of learners, an alternative to --learner-token.
    #[arg(long, value_name = "FILE")]
    pub learner_token_file: Option<PathBuf>,
    /// Token of actors: it allows writing with writers of their own, and reading definitions, parameters and statistics.
    #[arg(long, value_name = "TOKEN")]
    pub actor_token: Option<Secret>,
    /// File with the token of actors, an alternative to --actor-token.
    #[arg(long, value_name = "FILE")]
    pub actor_token_file: Option<PathBuf>,
    /// Certificate chain for TLS, a PEM file; all TCP addresses then use TLS.
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key, a PEM file.
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Allow connections without a token or without TLS from other machines. Datagrams of extensions are neither encrypted nor
    /// authenticated: they need this setting also with a token and TLS.
    #[arg(long)]
    pub trusted_network: bool,
    /// Folder for snapshots of the memory; none by default. The newest that is not damaged is restored at the start; one is saved at
    /// SIGTERM, at intervals, and by `innet-replay snapshot`.
    #[arg(long, value_name = "DIR")]
    pub snapshot: Option<PathBuf>,
    /// Interval of the snapshots in --snapshot: 500ms, 5min or 1h; 60s by default. 0s saves on request and at SIGTERM alone.
    #[arg(long, value_name = "PERIOD", value_parser = parse_period)]
    #[serde(deserialize_with = "deserialize_period", serialize_with = "serialize_period")]
    pub snapshot_every: Option<Duration>,
    /// Lowest level of logged events.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
    /// Settings of plug-ins.
    #[arg(skip)]
    #[serde(skip)]
    pub plugins: PluginSettings,
    /// Tables made at the start. Clients cannot drop them, nor create them with another definition.
    #[arg(skip)]
    pub tables: Vec<TableConfig>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig::parse_from([""])
    }
}

/// Parser of `--stack`, with the names of all stacks in its help.
fn stack_parser() -> impl TypedValueParser<Value = StackName> {
    let plugged = plugged_in().into_iter();
    let plugged = plugged.map(|stack| PossibleValue::new(stack.name()).help(stack.help()));
    let kernel = PossibleValue::new("kernel").help("The kernel's TCP and Unix sockets");
    PossibleValuesParser::new([kernel].into_iter().chain(plugged)).try_map(|name| name.parse::<StackName>())
}

/// Lowest level of logged events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
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

/// Text of a token file without surrounding white space.
///
/// # Errors
/// [`Error::Config`] when the file cannot be read.
pub fn read_token_file(path: &Path) -> Result<String> {
    match fs::read_to_string(path) {
        Ok(token) => Ok(token.trim().to_owned()),
        Err(error) => refuse(format!("token_file {} cannot be read: {error}", path.display())),
    }
}

/// Whether every user can read the file. A pipe, as of a shell's `<(command)`, is read once.
fn is_open_to_others(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|there| there.is_file() && there.mode() & 0o004 != 0)
}

/// One role's token.
struct TokenSetting<'a> {
    role: Role,
    name: &'static str,
    token: &'a Option<Secret>,
    file: &'a Option<PathBuf>,
}

impl TokenSetting<'_> {
    fn read(&self) -> Result<Option<String>> {
        match (self.token, self.file) {
            (Some(token), _) => Ok(Some(token.0.trim().to_owned())),
            (None, Some(path)) => read_token_file(path).map(Some),
            (None, None) => Ok(None),
        }
    }
}

impl ServerConfig {
    /// Smallest `max_frame_bytes`, enough for a handshake or an error.
    pub const MIN_FRAME_BYTES: u64 = 64 << 10;

    /// Largest default of `max_frame_bytes`.
    pub const MOST_FRAME_BYTES: u64 = 256 << 20;

    /// The tokens' settings, with their names.
    fn token_settings(&self) -> [TokenSetting<'_>; 3] {
        let setting = |role, name, token, file| TokenSetting { role, name, token, file };
        [
            setting(Role::Operator, "token", &self.token, &self.token_file),
            setting(Role::Learner, "learner_token", &self.learner_token, &self.learner_token_file),
            setting(Role::Actor, "actor_token", &self.actor_token, &self.actor_token_file),
        ]
    }

    /// Whether any token is set.
    pub(crate) fn has_token(&self) -> bool {
        let settings = self.token_settings();
        settings.iter().any(|setting| setting.token.is_some() || setting.file.is_some())
    }

    /// Warns of files with tokens and keys that every user of this machine can read.
    pub fn warn_of_open_secrets(&self) {
        let tokens = self.token_settings();
        let tokens = tokens.into_iter().map(|setting| (format!("{}_file", setting.name), setting.file));
        for (name, path) in tokens.chain([("tls_key".to_owned(), &self.tls_key)]) {
            if let Some(path) = path.as_deref().filter(|path| is_open_to_others(path)) {
                tracing::warn!("{name} {0} can be read by every user of this machine: chmod 600 {0}", path.display());
            }
        }
    }

    /// The tokens, from the fields or the files, without surrounding white space; the operator's first.
    ///
    /// # Errors
    /// [`Error::Config`] when a file cannot be read, a token is too short, or two roles have the same one.
    pub fn read_tokens(&self) -> Result<Tokens> {
        let mut tokens = Tokens::new();
        for setting in self.token_settings() {
            let TokenSetting { role, name, .. } = setting;
            let Some(token) = setting.read()? else {
                continue;
            };
            auth::check_token(&token).map_err(|error| Error::Config(format!("{name}: {error}")))?;
            if let Some((other, _)) = tokens.iter().find(|(_, one)| one.0 == token) {
                return refuse(format!(
                    "{name} is also the token of the role {}: give each role a token of its own",
                    other.name()
                ));
            }
            tokens.push((role, Secret(token)));
        }
        Ok(tokens)
    }

    /// Token with which plug-ins connect to other servers: of operators, or else of learners.
    ///
    /// # Errors
    /// Errors of [`Self::read_tokens`].
    pub fn token_for_servers(&self) -> Result<Option<Secret>> {
        let tokens = self.read_tokens()?;
        let uses = |&(role, _): &(Role, Secret)| role >= Role::Learner;
        Ok(tokens.into_iter().find(uses).map(|(_, token)| token))
    }

    /// Limits of the memory that `innet-replay serve` creates. Receive buffers get two frames: one for pushes, one for all other
    /// requests.
    pub fn memory_limits(&self) -> MemoryLimits {
        let frame = self.effective_max_frame_bytes();
        let mut limits = MemoryLimits {
            max_bytes: self.max_bytes,
            receive_bytes: frame.saturating_mul(2),
            ..MemoryLimits::default()
        };
        if self.max_bytes == 0 {
            limits.share = process_memory::share(SHARE_PERCENT);
            let bytes = limits.share.map_or(4 << 30, |share| share.bytes());
            limits.max_bytes = bytes.max(frame.saturating_mul(FRAMES));
        }
        limits
    }

    /// `max_frame_bytes`, with 0 replaced by its default: received frames and unread replies, six frames by default, take less than a
    /// fifth of the memory that the server may have.
    pub fn effective_max_frame_bytes(&self) -> u64 {
        match self.max_frame_bytes {
            0 => process_memory::left()
                .map_or(Self::MOST_FRAME_BYTES, |room| room.bytes / FRAMES_IN_ROOM)
                .clamp(Self::MIN_FRAME_BYTES, Self::MOST_FRAME_BYTES),
            bytes => bytes,
        }
    }

    /// `reply_bytes`, with 0 replaced by four frames of `frame_bytes`.
    pub fn effective_reply_bytes(&self, frame_bytes: u64) -> u64 {
        match self.reply_bytes {
            0 => frame_bytes.saturating_mul(4),
            bytes => bytes,
        }
    }

    /// `io_threads`, with 0 replaced by one for every two cores.
    pub fn effective_io_threads(&self) -> usize {
        match self.io_threads {
            0 => std::thread::available_parallelism()
                .map_or(1, |cores| (cores.get() / 2).clamp(1, MAX_IO_THREADS as usize)),
            threads => threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use replay_core::schema::Codec;

    use replay_core::view::{NStep, Padding, ViewSpec};

    use super::*;

    pub(super) fn read(text: &str) -> Result<ServerConfig> {
        ServerConfig::from_toml(text, "server.toml", toml::Table::new())
    }

    pub(super) fn refusal(text: &str) -> String {
        read(text).and_then(|config| config.validate()).unwrap_err().to_string()
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
        assert!(error.contains("server.toml") && error.contains("line 2"), "{error}");
    }

    /// As in Python: LZ4 from 64 bytes (vectors of floats: 1,024), unless the file names a codec.
    #[test]
    fn a_column_without_a_codec_has_the_default() {
        let column = |rest: &str| format!("[[tables.columns]]\nname = \"c\"\ndtype = \"uint8\"\n{rest}\n");
        let codec = |rest: &str| {
            let text = format!("[[tables]]\nname = \"t\"\ncapacity = 1\n{}", column(rest));
            let config = read(&text).unwrap();
            config.validate().unwrap();
            config.tables[0].columns[0].codec
        };
        assert_eq!(codec(""), Codec::None);
        assert_eq!(codec("shape = [63]"), Codec::None);
        assert_eq!(codec("shape = [8, 8]"), Codec::Lz4);
        assert_eq!(codec("shape = [8, 8]\ncodec = \"none\""), Codec::None);
        assert_eq!(codec("codec = \"zstd\""), Codec::Zstd);
    }

    #[test]
    fn a_table_may_have_a_view() {
        let columns =
            ["observation", "reward"].map(|name| format!("[[tables.columns]]\nname = {name:?}\ndtype = \"float32\"\n"));
        let view = |view: &str| {
            let text = format!("[[tables]]\nname = \"t\"\ncapacity = 9\nview = {view}\n{}", columns.concat());
            let config = read(&text)?;
            config.validate()?;
            Ok::<_, Error>(config.tables[0].view.clone().unwrap())
        };
        let three = view("{ n_step = { n = 3, padding = \"repeat\" } }").unwrap();
        let defaults = NStep { n: 3, padding: Padding::RepeatFirst, ..NStep::default() };
        assert_eq!(three, ViewSpec::NStep(defaults));
        let wrong = view("{ n_step = { steps = 3 } }").unwrap_err().to_string();
        assert!(wrong.contains("steps"), "{wrong}");
        assert!(view("{ n_step = { n = 0 } }").is_err());
    }

    #[test]
    fn overrides_replace_keys_of_the_file() {
        let mut flags = toml::Table::new();
        flags.insert("io_threads".into(), 3.into());
        let config = ServerConfig::from_toml("io_threads = 1\nmax_connections = 5", "a", flags).unwrap();
        assert_eq!((config.io_threads, config.max_connections), (3, 5));
    }

    #[test]
    fn the_token_is_trimmed_never_short_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "secret of the tests\n").unwrap();
        let config = |token: Option<&str>, file: Option<&PathBuf>| ServerConfig {
            token: token.map(|token| Secret(token.to_owned())),
            token_file: file.cloned(),
            ..ServerConfig::default()
        };
        let from_file = config(None, Some(&path)).read_tokens().unwrap();
        let secret = Secret("secret of the tests".into());
        assert_eq!(from_file, [(Role::Operator, secret)]);
        assert_eq!(config(None, None).read_tokens().unwrap(), []);
        assert!(config(Some(" "), None).read_tokens().is_err());
        let missing = config(None, Some(&"/nowhere/token".into())).read_tokens();
        assert!(missing.is_err());
        assert!(!format!("{:?}", config(Some("hidden"), None)).contains("hidden"));
    }

    #[test]
    fn each_role_has_a_token_of_its_own() {
        let secret = |text: &str| Some(Secret(text.to_owned()));
        let roles = ServerConfig {
            learner_token: secret("token of learners"),
            actor_token: secret("token of the actors"),
            ..ServerConfig::default()
        };
        let joining = roles.token_for_servers().unwrap();
        assert_eq!(joining, secret("token of learners"));
        let read = roles.read_tokens().unwrap();
        let read: Vec<Role> = read.iter().map(|(role, _)| *role).collect();
        assert_eq!(read, [Role::Learner, Role::Actor]);
        for (token, part) in [("token of learners", "role learner"), ("short", "openssl rand")] {
            let same = ServerConfig { actor_token: secret(token), ..roles.clone() };
            let error = same.read_tokens().unwrap_err().to_string();
            assert!(error.contains("actor_token") && error.contains(part), "{error}");
        }
    }
}
