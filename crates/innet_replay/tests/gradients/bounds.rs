//! Numbers of the settings: each has a bound, whose error names it, and a server starts with all that are let through.

use gradients_net::{GradientsConfig, plug_in};
use replay_core::memory::{Memory, MemoryLimits};
use replay_server::config::ServerConfig;
use replay_server::server::Server;

#[test]
fn absurd_numbers_are_refused_by_name_or_served_with() {
    plug_in();
    let defaults = toml::Table::try_from(GradientsConfig::default()).unwrap();
    let numbers = defaults.into_iter().filter(|(_, value)| value.is_integer());
    let keys: Vec<String> = numbers.map(|(key, _)| key).collect();
    assert_eq!(keys.len(), 9, "{keys:?}");
    for key in &keys {
        for value in [0, 1, 1 << 31, 1 << 40, i64::MAX, -1] {
            let text = format!("listen = [\"innet://127.0.0.1:0\"]\ngradients = \"127.0.0.1:0\"\n{key} = {value}");
            let config = ServerConfig::from_toml(&text, "server.toml", toml::Table::new());
            let started = config.and_then(|config| Server::start(&config, Memory::new(MemoryLimits::default())));
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
