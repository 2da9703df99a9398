//! A stack of another crate: its name in settings and addresses, and a server and a client over it. This one has the kernel's
//! sockets on threads of its own.

mod support;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::CommandFactory;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

use base::wait::Wait;
use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::error::Result;
use replay_link::error::refuse;
use replay_link::stack::ServerWait;
use replay_link::stack::kernel::Kernel;
use replay_link::stack::plugged::{PluggedStack, StackClient, StackFuture};
use replay_link::stack::{Address, ByteStream, StackName};
use replay_server::config::ServerConfig;
use replay_server::plugin::{Finding, MachineFiles};
use replay_server::plugin::{Plugin, plug_in};
use replay_server::server::{JoinTask, ServeTask};
use replay_wire::ErrorCode;

use support::*;

struct Threads;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

impl PluggedStack for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn title(&self) -> &'static str {
        "Threads"
    }

    fn help(&self) -> &'static str {
        "A thread for each call"
    }

    fn client(&self, address: &Address, _: Option<&Path>, _: bool) -> Result<Arc<dyn StackClient>> {
        let Address::Tcp { host, port, .. } = address else {
            return refuse("no TCP");
        };
        Ok(Arc::new(Way { peer: format!("{host}:{port}"), runtime: runtime() }))
    }
}

impl Plugin for Threads {
    fn name(&self) -> &'static str {
        PluggedStack::name(self)
    }

    fn log_targets(&self) -> &'static [&'static str] {
        &[env!("CARGO_CRATE_NAME")]
    }

    fn stack(&self) -> Option<&'static dyn PluggedStack> {
        Some(&Threads)
    }

    fn check(&self, config: &ServerConfig) -> Result<()> {
        match config.spin {
            true => refuse("threads do not spin"),
            false => Ok(()),
        }
    }

    fn findings(&self, _: &ServerConfig, _: &MachineFiles) -> Result<Vec<Finding>> {
        Ok(vec![Finding::new("threads", Ok("as many as calls".into()))])
    }

    fn serve(&self, _: &ServerConfig, task: ServeTask) -> Result<JoinTask> {
        let serve = move || LocalSet::new().block_on(&runtime(), task.run(Kernel));
        let thread = thread::spawn(serve);
        Ok(Box::new(|| thread.join().is_ok()))
    }
}

struct Way {
    peer: String,
    runtime: Runtime,
}

impl StackClient for Way {
    fn connect(&self) -> StackFuture<'_, io::Result<Box<dyn ByteStream>>> {
        Box::pin(async {
            let stream = TcpStream::connect(&self.peer).await?;
            Ok(Box::new(stream) as Box<dyn ByteStream>)
        })
    }

    fn run(&self, _: &Wait<'_>, until: Option<Instant>, _: &ServerWait, work: StackFuture<'_, ()>) -> Result<()> {
        let late = until.unwrap_or(Instant::now() + Duration::from_secs(60));
        let work = async {
            tokio::select! {
                biased;
                () = work => {}
                () = tokio::time::sleep_until(late.into()) => {}
            }
        };
        thread::scope(|scope| scope.spawn(|| self.runtime.block_on(work)).join()).unwrap();
        Ok(())
    }
}

fn options() -> ConnectOptions {
    ConnectOptions { connect_timeout: Duration::ZERO, ..ConnectOptions::default() }
}

#[test]
fn a_server_and_a_client_are_over_it() {
    plug_in(&Threads);
    let server = serve(&["innet://127.0.0.1:0"], |config| {
        config.stack = "threads".parse().unwrap();
    });
    let address = format!("innet+threads://127.0.0.1:{}", port(&server));
    let client = connect(&address.parse().unwrap(), options()).unwrap();
    client.create_table(&queue("steps"), &soon()).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 10), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(drain(&client, "steps"), (0..10).collect::<Vec<_>>());
    drop(server);
    let late = Wait::until(Some(Instant::now() + Duration::from_millis(50)));
    let gone = client.stats(&late).unwrap_err();
    assert_eq!(gone.code(), ErrorCode::Connect, "{gone}");
}

#[test]
fn a_server_that_does_not_answer_is_late() {
    plug_in(&Threads);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("innet+threads://{}", silent.local_addr().unwrap());
    let options = ConnectOptions { grace: Duration::from_millis(50), ..options() };
    let error = connect(&address.parse().unwrap(), options).err();
    assert!(error.unwrap().to_string().contains("no answer within"));
}

#[test]
fn its_name_is_in_settings_addresses_and_messages() {
    plug_in(&Threads);
    plug_in(&Threads);
    let read = |text: &str| {
        let config = ServerConfig::from_toml(text, "server.toml", toml::Table::new())?;
        config.validate().map(|()| config)
    };
    let config = read("stack = \"threads\"\nstack_config = \"a\"").unwrap();
    assert_eq!(config.stack.name(), "threads");
    let help = ServerConfig::command().render_long_help().to_string();
    assert!(help.contains("threads") && help.contains("A thread for each call"));
    for text in ["innet+threads://10.0.0.2:7710", "innets+threads://[::1]:1"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    let errors = [
        read("stack = \"thread\"").map(drop),
        read("stack = \"threads\"\nspin = true").map(drop),
        read("stack_config = \"a\"").map(drop),
        read("listen = [\"innet+threads://127.0.0.1:1\"]").map(drop),
        "innet+thread://a:1".parse::<Address>().map(drop),
        "unix+threads:///a".parse::<Address>().map(drop),
        "thread".parse::<StackName>().map(drop),
        connect(
            &"innet://127.0.0.1:1".parse().unwrap(),
            ConnectOptions { stack_config: Some("a".into()), ..options() },
        )
        .map(drop),
    ];
    let parts = [
        "no network stack \"thread\", only kernel or threads",
        "threads do not spin",
        "set stack to threads, or leave stack_config out",
        "choose the stack by --stack",
        "unix:///path, or innet+threads://address:port for a client over Threads",
        "unknown scheme",
        "only kernel or threads",
        "write innet+threads://address:port, or leave the file out",
    ];
    for (error, part) in errors.into_iter().zip(parts) {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}
