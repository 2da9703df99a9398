//! Numbers of a server's configuration: each has a bound, whose error names it, and a server starts with all that are let through.

use std::sync::Arc;

use replay_core::memory::{Memory, MemoryLimits};
use replay_server::config::ServerConfig;
use replay_server::server::Server;

/// The default configuration's keys with numbers.
fn numbers() -> Vec<String> {
    let config = toml::Table::try_from(ServerConfig::default()).unwrap();
    let numbers = config.into_iter().filter(|(_, value)| value.is_integer());
    numbers.map(|(key, _)| key).collect()
}

#[test]
fn absurd_numbers_are_refused_by_name_or_served_with() {
    let keys = numbers();
    assert!(keys.len() >= 10, "{keys:?}");
    for key in &keys {
        for value in [0, 1, 1 << 31, 1 << 40, i64::MAX, -1] {
            let text = format!("listen = [\"innet://127.0.0.1:0\"]\n{key} = {value}");
            let config = ServerConfig::from_toml(&text, "server.toml", toml::Table::new());
            let started = config.and_then(|config| {
                let memory = Memory::new(MemoryLimits { seed: None, ..config.memory_limits() });
                Server::start(&config, Arc::clone(&memory))
            });
            match started {
                Ok(server) => {
                    server.server().close();
                    server.wait().unwrap();
                }
                Err(error) => {
                    assert!(error.to_string().contains(key), "{key} = {value}: {error}");
                }
            }
        }
    }
}
