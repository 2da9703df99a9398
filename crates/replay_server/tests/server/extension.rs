//! Services of other crates beside the memory: the least one, and one with settings, statistics and waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::wait::Wait;
use bytes::Bytes;
use event_listener::{Event, EventListener};
use replay_client::extension::ExtensionClient;
use replay_client::{Client, ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_core::table::Attempt;
use replay_link::error::{Error, Result};
use replay_server::config::ServerConfig;
use replay_server::plugin::*;
use replay_server::server::RunningServer;
use serde_json::{Value, json};

use crate::kernel::start;
use crate::suite::{config, table};
use crate::support::breaking::{BreakingRelay, Ending, patient};
use crate::support::{port, until};

/// Adds up numbers, each as one byte: zero is answered with the sum, once that is not zero.
#[derive(Default)]
struct Adder {
    sum: AtomicU64,
    members: AtomicU64,
    blocked: AtomicU64,
    changed: Event,
}

#[derive(clap::Args, serde::Serialize, serde::Deserialize, Default)]
#[serde(default)]
struct AdderConfig {
    /// Add up numbers.
    #[arg(long)]
    adder: bool,
}

struct Plug;

impl Plugin for Plug {
    fn name(&self) -> &'static str {
        "adder"
    }
    fn settings(&self) -> Option<SettingsType> {
        Some(SettingsType::of::<AdderConfig>())
    }
    fn absent(&self) -> String {
        "this server adds nothing up: start it with --adder".to_owned()
    }
    fn start(&self, config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>> {
        let started = config.plugins.get::<AdderConfig>("adder").is_ok_and(|own| own.adder);
        Ok(started.then(|| Arc::<Adder>::default() as Arc<dyn Extension>))
    }
}

impl Extension for Adder {
    fn name(&self) -> &'static str {
        "adder"
    }
    fn connect(self: Arc<Self>) -> Box<dyn ExtensionConnection> {
        self.members.fetch_add(1, Ordering::Relaxed);
        Box::new(Member(self))
    }
    fn stats(&self) -> Value {
        let members = self.members.load(Ordering::Relaxed);
        json!({"sum": self.sum.load(Ordering::Relaxed), "blocked": self.blocked.load(Ordering::Relaxed), "of": {"all": {"members": members}}})
    }
    fn metrics(&self) -> &'static [MetricGroup] {
        &[MetricGroup {
            prefix: "adder",
            pointer: "/of",
            label: Some("of"),
            metrics: &[(MetricType::Gauge, "members", "Members")],
        }]
    }
}

struct Member(Arc<Adder>);

impl ExtensionConnection for Member {
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>> {
        let [number] = message[..] else {
            return Err(Error::Extension("adder: one byte, please".to_owned()));
        };
        if number > 0 {
            self.0.sum.fetch_add(number.into(), Ordering::Relaxed);
            self.0.changed.notify(usize::MAX);
        }
        match (number, self.0.sum.load(Ordering::Relaxed)) {
            (0, 0) => {
                self.0.blocked.fetch_add(1, Ordering::Relaxed);
                Ok(Attempt::Blocked("nothing has been added".to_owned().into()))
            }
            (_, sum) => Ok(Attempt::Ready(vec![sum as u8].into())),
        }
    }
    fn changed(&self) -> EventListener {
        self.0.changed.listen()
    }
    fn end(&mut self) {
        self.0.members.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The least extension: it sends back what it gets.
mod echo {
    use super::*;

    pub struct Plug;
    struct Echo;

    impl Plugin for Plug {
        fn name(&self) -> &'static str {
            "echo"
        }
        fn start(&self, _: &ServerConfig) -> Result<Option<Arc<dyn Extension>>> {
            Ok(Some(Arc::new(Echo)))
        }
    }

    impl Extension for Echo {
        fn name(&self) -> &'static str {
            "echo"
        }
        fn connect(self: Arc<Self>) -> Box<dyn ExtensionConnection> {
            Box::new(Echo)
        }
        fn stats(&self) -> Value {
            json!({})
        }
    }

    impl ExtensionConnection for Echo {
        fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>> {
            Ok(Attempt::Ready(message.clone()))
        }
    }
}

#[test]
fn a_service_takes_thirty_lines() {
    plug_in(&echo::Plug);
    let server = serve("");
    let client = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    let answer = ask(&mut open(&client, "echo"), b"anything", Duration::ZERO).unwrap();
    assert_eq!(answer[..], b"anything"[..]);
}

fn serve(settings: &str) -> RunningServer {
    plug_in(&Plug);
    let text = format!("listen = [\"innet://127.0.0.1:0\"]\n{settings}");
    let read = ServerConfig::from_toml(&text, "server.toml", toml::Table::new()).unwrap();
    start(&ServerConfig { tables: config(table()).tables, ..read }).unwrap()
}

fn ask(extension: &mut ExtensionClient, number: &'static [u8], within: Duration) -> Result<Bytes> {
    let until = Instant::now() + Duration::from_secs(60);
    let due = Instant::now() + within;
    let late = || Error::Interrupted;
    extension.call(&number.into(), due, until, &Wait::forever(), late)
}

fn open(client: &Client, extension: &'static str) -> ExtensionClient {
    let until = Instant::now() + Duration::from_secs(60);
    ExtensionClient::open(client.dialer(), extension, until, &Wait::forever()).unwrap()
}

#[test]
fn another_crates_service_answers_beside_the_memory() {
    let server = serve("adder = true");
    let client = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    let stats = || client.stats(&Wait::forever()).unwrap();
    let (mut one, mut other) = (open(&client, "adder"), open(&client, "adder"));
    let now = Duration::ZERO;
    let late = ask(&mut one, &[0], now).unwrap_err().to_string();
    assert!(late.contains("nothing has been added"), "{late}");
    let failed = ask(&mut one, b"12", now).unwrap_err().to_string();
    assert_eq!(failed, "adder: one byte, please");
    let long = ask(&mut one, &[0; 1 + MAX_MESSAGE as usize], now).unwrap_err().to_string();
    assert!(long.contains("16384"), "{long}");
    let blocked = || stats()["adder"]["blocked"].as_u64().unwrap();
    let before = blocked();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| ask(&mut one, &[0], Duration::from_secs(60)));
        until("a blocked attempt", || blocked() > before);
        ask(&mut other, &[7], now).unwrap();
        assert_eq!(waits.join().unwrap().unwrap()[..], [7]);
    });
    assert_eq!(stats()["adder"]["of"]["all"]["members"], 2);
    // Other tests of this process may have plugged in theirs.
    assert_eq!(stats()["extensions"]["adder"], json!(["/of"]));
    other.end(Instant::now() + Duration::from_secs(60), &Wait::forever()).unwrap();
    until("its end", || stats()["adder"]["of"]["all"]["members"] == 1);
    assert!(stats()["tables"].is_object());
}

#[test]
fn a_server_without_a_service_says_how_to_get_it() {
    let server = serve("");
    let client = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    let error = ask(&mut open(&client, "adder"), &[1], Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("start it with --adder"), "{error}");
    let wrong = ServerConfig::from_toml("\nadder = 3", "server.toml", toml::Table::new());
    let wrong = wrong.unwrap_err().to_string();
    assert!(wrong.contains("line 2") && wrong.contains("server.toml"), "{wrong}");
}

#[test]
fn a_connection_whose_handshake_breaks_begins_all_the_same() {
    let server = serve("adder = true");
    for ending in [Ending::End, Ending::Reset, Ending::Hang] {
        let relay = BreakingRelay::start(port(&server), 100, ending);
        let options = patient(ConnectOptions::default());
        let client = connect(&relay.address("innet"), options).unwrap();
        assert_eq!(relay.connections(), 2);
        let mut extension = open(&client, "adder");
        assert_eq!(relay.connections(), 4);
        ask(&mut extension, &[1], Duration::ZERO).unwrap();
    }
}
