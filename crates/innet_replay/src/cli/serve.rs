//! `innet-replay serve`: configuration from flags and a file, a server until a signal. It tells systemd about its state (`sd_notify(3)`) where
//! the environment variable NOTIFY_SOCKET is set.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, Args};
use sd_notify::NotifyState;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinError;

use replay_core::memory::Memory;
use replay_link::error::{Error, Result, io_error};
use replay_link::stack::Address;
use replay_server::config::{ServerConfig, given_flags};
use replay_server::server::{RunningServer, Server};
use replay_wire::RELEASE;
use replay_wire::auth::Secret;

use crate::log;

/// Serve a replay memory until SIGTERM or SIGINT.
///
/// A second signal ends it without the last snapshot. SIGHUP reads the files with the tokens and the certificate again, for new
/// connections. Flags override the keys of the same names in the file; tables are in the file only. It tells systemd when it is
/// ready, reloads and stops (Type=notify).
#[derive(Args)]
pub struct ServeFlags {
    /// Check the configuration and the files that it names as a start does, without listening or restoring, and exit: 0, or 2 with
    /// the reason.
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    configured: ConfigFlags,
}

/// The configuration of a server, as `serve` and `doctor` take it.
#[derive(Args)]
pub struct ConfigFlags {
    /// TOML file with the configuration.
    #[arg(long = "config", value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    settings: ServerConfig,
}

impl ConfigFlags {
    /// The file's configuration, overridden by the flags given in `matches`. Without a token in either, INNET_TOKEN is the
    /// token.
    pub(super) fn config(&self, matches: &ArgMatches, environment_token: Option<String>) -> Result<ServerConfig> {
        let (text, origin) = match &self.file {
            Some(path) => {
                let text = fs::read_to_string(path)
                    .map_err(|error| Error::Config(format!("{} cannot be read: {error}", path.display())))?;
                (text, path.display().to_string())
            }
            None => (String::new(), "command line".to_owned()),
        };
        let mut config = ServerConfig::from_toml(&text, &origin, given_flags(&self.settings, matches)?)?;
        if config.token.is_none() && config.token_file.is_none() {
            config.token = environment_token.map(Secret);
        }
        Ok(config)
    }
}

/// Serves until a signal: the first one lets running requests finish, a second one stops at once. Or checks the configuration. Returns
/// the exit code. `matches` are the arguments that `flags` were parsed from.
pub fn run(flags: &ServeFlags, matches: &ArgMatches) -> Result<u8> {
    let config = flags.configured.config(matches, std::env::var("INNET_TOKEN").ok())?;
    log::start(config.log_level);
    if flags.check {
        return Ok(check(&config));
    }
    let served = serve(&config);
    log::flush();
    served.map(|()| 0)
}

fn check(config: &ServerConfig) -> u8 {
    match Server::check(config) {
        Ok(()) => {
            // Ignores a closed standard output: the exit status still counts.
            let _ = writeln!(io::stdout(), "the configuration can be served");
            log::flush();
            0
        }
        Err(error) => {
            log::print(&format!("innet-replay: {error}"));
            2
        }
    }
}

fn panicked(error: JoinError) -> Error {
    Error::Internal(error.to_string())
}

fn serve(config: &ServerConfig) -> Result<()> {
    let runtime =
        runtime::Builder::new_current_thread().enable_all().build().map_err(io_error("cannot make a runtime"))?;
    runtime.block_on(async {
        let every = watchdog_interval();
        let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        tell(&[EXTEND]);
        // Before there are handlers, so that a signal ends a restore.
        let given = config.clone();
        let start = move || Server::start(&given, Memory::new(given.memory_limits()));
        let mut starting = tokio::task::spawn_blocking(start);
        let running = loop {
            tokio::select! {
                biased;
                _ = ticks.tick() => tell(&[EXTEND]),
                started = &mut starting => break started.map_err(panicked)??,
            }
        };
        let handler = |kind| signal(kind).map_err(io_error("cannot handle signals"));
        let mut terminate = handler(SignalKind::terminate())?;
        let mut interrupt = handler(SignalKind::interrupt())?;
        let mut hang_up = handler(SignalKind::hangup())?;
        announce(&running);
        tell(&[NotifyState::Ready]);
        let server = running.server().clone();
        let mut end = tokio::task::spawn_blocking(move || running.wait());
        let mut asked = false;
        loop {
            let signal = tokio::select! {
                biased;
                ended = &mut end => {
                    ended.map_err(panicked)??;
                    tracing::info!("stopped");
                    return Ok(());
                }
                Some(()) = terminate.recv() => "SIGTERM",
                Some(()) = interrupt.recv() => "SIGINT",
                Some(()) = hang_up.recv() => {
                    tell_reloading();
                    match server.reload(config) {
                        Ok(()) => tracing::info!("SIGHUP: tokens and certificate were read again"),
                        Err(error) => tracing::error!(%error, "SIGHUP: tokens and certificate are kept"),
                    }
                    tell(if asked { &[NotifyState::Stopping] } else { &[NotifyState::Ready] });
                    continue;
                }
                _ = ticks.tick() => {
                    if asked {
                        // The last snapshot of a large memory takes minutes.
                        tell(&[EXTEND]);
                    }
                    let server = server.clone();
                    tokio::spawn(async move {
                        server.threads_answer().await;
                        tell(&[NotifyState::Watchdog]);
                    });
                    continue;
                }
            };
            if asked {
                tracing::warn!(signal, "stopping at once");
                server.stop();
                if let Ok(snapshots) = server.service().snapshots() {
                    snapshots.stop();
                }
            } else {
                tracing::info!(signal, "shutting down; running requests are finished");
                server.shut_down();
            }
            tell(&[NotifyState::Stopping, EXTEND]);
            asked = true;
        }
    })
}

/// Prints the only line of standard output, with the addresses: scripts wait for it.
fn announce(running: &RunningServer) {
    let addresses = running.addresses().iter();
    let mut addresses: Vec<String> = addresses.map(Address::to_string).collect();
    addresses.extend(running.extension_addresses());
    addresses.extend(running.http().map(|address| format!("statistics {address}")));
    // Ignores errors: standard output may be closed.
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "innet-replay {RELEASE} ready on {}", addresses.join(" "));
    let _ = out.flush();
}

/// Time that a start or an end may take after each message, whatever the unit's limit.
const EXTEND_BY: Duration = Duration::from_secs(30);

/// Extends the time of a start or an end.
pub const EXTEND: NotifyState<'_> = NotifyState::ExtendTimeoutUsec(EXTEND_BY.as_micros() as u32);

/// Interval of messages: a third of the extension, or half of the watchdog's time.
pub fn watchdog_interval() -> Duration {
    let watchdog = sd_notify::watchdog_enabled().map(|time| (time / 2).max(Duration::from_millis(1)));
    watchdog.into_iter().chain([EXTEND_BY / 3]).fold(Duration::MAX, Duration::min)
}

/// Sends a message.
pub fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd does not hear of the state of this server (NOTIFY_SOCKET)");
    }
}

/// Announces a reload; [`NotifyState::Ready`] follows once it is done.
pub fn tell_reloading() {
    // An error means that the machine has no monotonic clock.
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        tell(&[NotifyState::Reloading, now]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::{CommandFactory, FromArgMatches, Parser};

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: ConfigFlags,
    }

    fn config(arguments: &[&str], token: Option<String>) -> Result<ServerConfig> {
        let matches = Line::command().get_matches_from([&["serve"], arguments].concat());
        let line = Line::from_arg_matches(&matches).unwrap();
        line.flags.config(&matches, token)
    }

    #[test]
    fn flags_override_the_file_and_the_file_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.toml");
        fs::write(&path, "max_bytes = \"1GiB\"\nmax_connections = 7\nlisten = [\"unix:///tmp/a\"]").unwrap();
        let file = ["--config", path.to_str().unwrap()];
        let line = ["--max-bytes=2GiB", "--listen=innet://[::1]:1", "--listen=unix:///tmp/b"];
        let config = config(&[&file[..], &line[..]].concat(), None).unwrap();
        assert_eq!(config.max_bytes, 2 << 30);
        assert_eq!(config.max_connections, 7);
        let listen: Vec<String> = config.listen.iter().map(Address::to_string).collect();
        assert_eq!(listen, ["innet://[::1]:1", "unix:///tmp/b"]);
    }

    #[test]
    fn a_flag_overrides_the_file_with_a_default_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("server.toml");
        fs::write(&path, "io_threads = 4\nmax_connections = 3").unwrap();
        let file = ["--config", path.to_str().unwrap()];
        let config = config(&[&file[..], &["--io-threads=0"]].concat(), None).unwrap();
        assert_eq!((config.io_threads, config.max_connections), (0, 3));
    }

    #[test]
    fn without_flags_the_defaults_apply() {
        assert_eq!(config(&[], None).unwrap(), ServerConfig::default());
    }

    #[test]
    fn the_environment_gives_the_token_that_nothing_else_does() {
        let environment = || Some("from the environment".to_owned());
        let token = |arguments: &[&str]| {
            let config = config(arguments, environment()).unwrap();
            config.token.map(|token| token.0)
        };
        assert_eq!(token(&[]).as_deref(), Some("from the environment"));
        assert_eq!(token(&["--token=a"]).as_deref(), Some("a"));
        assert_eq!(token(&["--token-file=a"]), None);
    }

    #[test]
    fn the_example_of_a_configuration_can_be_used() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/server.toml");
        let config = config(&["--config", path], None).unwrap();
        config.validate().unwrap();
        let tables: Vec<&str> = config.tables.iter().map(|t| t.name.as_str()).collect();
        assert_eq!((config.listen.len(), tables), (2, vec!["cartpole"]));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let error = |arguments: &[&str]| config(arguments, None).unwrap_err().to_string();
        assert!(error(&["--config=/nowhere/a.toml"]).contains("/nowhere/a.toml"));
        for (flag, part) in [("--max-bytes=lots", "lots"), ("--listen=ftp://a", "unknown scheme")] {
            let refused = Line::try_parse_from(["serve", flag]).err().unwrap();
            assert!(refused.to_string().contains(part), "{refused}");
        }
    }

    #[test]
    fn every_field_of_the_configuration_has_a_flag_of_its_name() {
        let filled = ServerConfig {
            http: Some("127.0.0.1:1".parse().unwrap()),
            stack_config: Some("a".into()),
            token: Some(Secret("a".into())),
            token_file: Some("a".into()),
            learner_token: Some(Secret("a".into())),
            learner_token_file: Some("a".into()),
            actor_token: Some(Secret("a".into())),
            actor_token_file: Some("a".into()),
            tls_cert: Some("a".into()),
            tls_key: Some("a".into()),
            snapshot: Some("a".into()),
            snapshot_every: Some(Duration::from_secs(1)),
            ..ServerConfig::default()
        };
        let mut fields: Vec<String> = toml::Table::try_from(filled).unwrap().keys().cloned().collect();
        fields.retain(|field| field != "tables");
        fields.push("file".to_owned());
        let mut flags: Vec<String> =
            Line::command().get_arguments().map(|argument| argument.get_id().to_string()).collect();
        fields.sort();
        flags.sort();
        assert_eq!(flags, fields);
    }
}
