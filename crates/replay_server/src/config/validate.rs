//! Checks of a server's configuration before the start.

use std::fmt::Display;
use std::net::ToSocketAddrs;
use std::time::Duration;

use super::{FRAMES, MAX_CONNECTIONS, MAX_IO_THREADS, ServerConfig};
use crate::plugin;
use replay_core::schema::DEFAULT_PRIORITY_EXPONENT;
use replay_link::error::{Error, Result, io_error, refuse};
use replay_link::stack::plugged::alternatives;
use replay_link::stack::{Address, StackName};

/// Limit of durations in milliseconds: 31 years, which any clock can add without overflow.
const MAX_MS: u64 = 1_000_000_000_000;

/// Checks that a number is in its range.
///
/// # Errors
/// [`Error::Config`] with the range.
pub fn within(name: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) { Ok(()) } else { refuse(format!("{name} is {least} to {most}, got {value}")) }
}

impl ServerConfig {
    /// Checks all fields that can be checked before the start.
    ///
    /// # Errors
    /// [`Error::Config`] for a field, [`replay_core::Error::Table`] for a table, with advice; [`Error::Io`] for a host without an address.
    pub fn validate(&self) -> Result<()> {
        if self.listen.is_empty() {
            return refuse("listen is empty: name at least one address");
        }
        let frame = self.effective_max_frame_bytes();
        if !(Self::MIN_FRAME_BYTES..=u64::from(u32::MAX)).contains(&frame) {
            return refuse(format!("max_frame_bytes is {} to {}, got {frame}", Self::MIN_FRAME_BYTES, u32::MAX));
        }
        if self.max_bytes > 0 && self.max_bytes / FRAMES < frame {
            return refuse(format!(
                "max_bytes {} is less than {FRAMES} frames of max_frame_bytes {frame}: raise max_bytes or lower max_frame_bytes",
                self.max_bytes
            ));
        }
        for (name, value, least, most) in [
            ("io_threads", self.io_threads as u64, 0, MAX_IO_THREADS),
            ("max_connections", self.max_connections.into(), 1, MAX_CONNECTIONS),
            ("max_handshakes", self.max_handshakes.into(), 1, MAX_CONNECTIONS),
            ("max_handshakes_per_address", self.max_handshakes_per_address.into(), 1, MAX_CONNECTIONS),
            ("handshake_deadline_ms", self.handshake_deadline_ms, 1, MAX_MS),
            ("write_deadline_ms", self.write_deadline_ms, 1, MAX_MS),
            ("drain_deadline_ms", self.drain_deadline_ms, 0, MAX_MS),
        ] {
            within(name, value, least, most)?;
        }
        match self.snapshot_every {
            Some(every) if every > Duration::from_millis(MAX_MS) => {
                return refuse(format!("snapshot_every is at most {}s, got {every:?}", MAX_MS / 1000));
            }
            Some(_) if self.snapshot.is_none() => {
                return refuse("snapshot_every is set, but snapshot, the folder, is not: set both, or leave it out");
            }
            _ => {}
        }
        for setting in self.token_settings() {
            if setting.token.is_some() && setting.file.is_some() {
                let name = setting.name;
                return refuse(format!("{name} and {name}_file are both set: keep one"));
            }
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return refuse("tls_cert and tls_key belong together: set both or none");
        }
        let is_file = |address: &Address| matches!(address, Address::Unix { .. });
        if self.tls_cert.is_some() && self.http.is_none() && self.listen.iter().all(is_file) {
            return refuse("tls_cert is set, but listen has only socket files, which TLS is not for: leave it out");
        }
        for address in &self.listen {
            self.validate_address(address, address)?;
        }
        if let Some(http) = &self.http {
            self.validate_address(&http.tcp(), http)?;
        }
        if self.stack == StackName::KERNEL && self.stack_config.is_some() {
            let other = alternatives(|stack| stack.name().to_owned());
            let other = other.map_or(String::new(), |names| format!("set stack to {names}, or "));
            return refuse(format!("stack_config is set, but stack is kernel: {other}leave stack_config out"));
        }
        plugin::of_server(self.stack).try_for_each(|plugin| plugin.check(self))?;
        for table in &self.tables {
            table.validate()?;
            // Not in `validate`, as snapshots may have such tables.
            let name = &table.name;
            if table.slack > 0.0 && table.samples_per_insert == 0.0 {
                return refuse(format!(
                    "slack of table {name:?} is set without samples_per_insert: set both, or leave it out"
                ));
            }
            if table.live_max_priority && !table.sampler.uses_priorities() {
                return refuse(format!(
                    "live_max_priority of table {name:?} is set, but its sampler uses no priorities: leave it out"
                ));
            }
            if !table.sampler.uses_exponent() && table.priority_exponent != DEFAULT_PRIORITY_EXPONENT {
                return refuse(format!(
                    "priority_exponent of table {name:?} is set, but its sampler uses none: leave it out"
                ));
            }
        }
        Ok(())
    }

    /// Checks an address to listen on, which errors call `name`.
    fn validate_address(&self, address: &Address, name: &dyn Display) -> Result<()> {
        let Address::Tcp { host, port, tls, stack } = address else {
            return Ok(());
        };
        if *stack != StackName::KERNEL {
            return Err(Error::Config(format!(
                "{address} is an address for clients: write innet:// or innets://, and choose the stack by --stack"
            )));
        }
        if *tls && self.tls_cert.is_none() {
            return Err(Error::Config(format!("{name} asks for TLS: set tls_cert and tls_key")));
        }
        // An error of the system: the network may come later.
        let unknown = io_error(format!("{name} does not name a host here"));
        let mut resolved = (host.as_str(), *port).to_socket_addrs().map_err(unknown)?;
        if resolved.all(|address| address.ip().is_loopback()) {
            return Ok(());
        }
        self.validate_reach(name)
    }

    /// Checks that an address which other machines can reach has a token and TLS, or a trusted network.
    fn validate_reach(&self, name: &dyn Display) -> Result<()> {
        if self.trusted_network {
            return Ok(());
        }
        let everyone = "everyone who can connect may read and write";
        let (missing, trust) = match (self.has_token(), self.tls_cert.is_some()) {
            (true, true) => return Ok(()),
            (true, false) => ("TLS (tls_cert and tls_key)", "no other host can read or change what clients send"),
            (false, true) => ("a token (token_file, or INNET_TOKEN)", everyone),
            (false, false) => ("a token (token_file, or INNET_TOKEN) and TLS (tls_cert and tls_key)", everyone),
        };
        Err(Error::Config(format!(
            "{name} can be reached from other machines and needs {missing}; set trusted_network if {trust}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, refusal};

    /// Begins a table, which further lines continue.
    const TABLE: &str = "[[tables]]\nname = \"a\"\ncapacity = 9\ncolumns = [{ name = \"b\", dtype = \"uint8\" }]\n";

    #[test]
    fn an_open_address_needs_a_token_and_tls_or_trust() {
        let open = "listen = [\"innet://0.0.0.0:1\"]\n";
        let tls = "tls_cert = \"c\"\ntls_key = \"k\"\n";
        let token = "token = \"x\"\n";
        let refused = |rest: &[&str]| refusal(&[&[open], rest].concat().concat());
        assert!(refused(&[]).contains("needs a token"));
        assert!(refused(&[token]).contains("needs TLS"));
        assert!(refused(&[token]).contains("trusted_network if no other host"));
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
            ("tls_cert = \"a\"\ntls_key = \"b\"\nlisten = [\"unix:///a\"]", "only socket files"),
            (&format!("{TABLE}slack = 4"), "slack of table \"a\" is set without samples_per_insert"),
            (&format!("{TABLE}sampler = \"uniform\"\nlive_max_priority = true"), "its sampler uses no priorities"),
            (
                &format!("{TABLE}sampler = \"uniform\"\npriority_exponent = 0.5"),
                "priority_exponent of table \"a\" is set",
            ),
            (
                &format!("{TABLE}sampler = \"max_heap\"\npriority_exponent = 0"),
                "priority_exponent of table \"a\" is set",
            ),
            ("snapshot_every = \"60s\"", "snapshot, the folder, is not"),
            ("token = \"a\"\ntoken_file = \"b\"", "keep one"),
            ("actor_token = \"a\"\nactor_token_file = \"b\"", "actor_token and"),
            ("max_frame_bytes = 1", "max_frame_bytes is"),
            ("max_frame_bytes = \"5GiB\"", "max_frame_bytes is"),
            ("max_connections = 0", "max_connections is 1 to 1048576, got 0"),
            ("max_bytes = \"2GiB\"\nmax_frame_bytes = \"1GiB\"", "less than 3 frames"),
            ("[[tables]]\nname = \"a\"\ncolumns = []\ncapacity = 1", "cannot be made"),
        ] {
            let error = refusal(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
