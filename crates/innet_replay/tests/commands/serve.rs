//! The command line, as a process.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use base::wait::Wait;
use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::stack::Address;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;

use crate::messages::{push, table, writer};
use crate::support::{certificate, until};

const COMMAND: &str = env!("CARGO_BIN_EXE_innet-replay");

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(COMMAND);
    command.args(arguments).env_remove("INNET_TOKEN");
    command
}

fn output(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// A server process; its ready line, and what it says later.
pub struct Serving {
    child: Child,
    ready: String,
}

impl Serving {
    pub fn start(arguments: &[&str]) -> Self {
        Self::spawn(command(&[&["serve"], arguments].concat()))
    }

    /// With a limit of open files.
    fn start_limited(limit: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        let script = format!("ulimit {limit}; exec \"$0\" \"$@\"");
        command.args(["-c", &script, COMMAND, "serve"]);
        Self::spawn(command.args(arguments).env_remove("INNET_TOKEN"))
    }

    fn spawn(mut command: impl std::borrow::BorrowMut<Command>) -> Self {
        let mut child = command.borrow_mut().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        Serving { child, ready }
    }

    pub fn address(&self) -> &str {
        self.ready.trim().rsplit(' ').next().unwrap()
    }

    pub fn signal(&self, signal: &str) {
        let kill = ["-s", signal, &self.child.id().to_string()].map(str::to_owned);
        assert!(Command::new("kill").args(kill).status().unwrap().success());
    }

    /// Sends a signal and returns the exit code and the log.
    pub fn stop(mut self, signal: &str) -> (Option<i32>, String) {
        self.signal(signal);
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        (self.child.wait().unwrap().code(), log)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Only after a failed assertion is it still running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_ends_the_server_cleanly() {
    for signal in ["TERM", "INT"] {
        let serving = Serving::start(&["--listen", "127.0.0.1:0"]);
        let address = serving.address().to_owned();
        assert!(address.starts_with("innet://127.0.0.1:"), "{address}");
        let stats = output(&["stats", &address, "--json"]);
        assert!(stats.status.success());
        let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
        assert_eq!(stats["server"]["connections"], 1);
        let text = output(&["stats", &address]).stdout;
        assert!(String::from_utf8(text).unwrap().contains("connections_opened"));
        let (code, log) = serving.stop(signal);
        assert_eq!(code, Some(0));
        for part in [&format!("SIG{signal}"), "stopped", "connection opened"] {
            assert!(log.contains(part), "{log}");
        }
    }
}

#[test]
fn a_signal_in_the_middle_of_pushes_ends_the_server_cleanly() {
    let serving = Serving::start(&["--listen", "127.0.0.1:0"]);
    let address: Address = serving.address().parse().unwrap();
    let (applied, one_applied) = mpsc::channel();
    let pushing = std::thread::spawn(move || {
        let options = ConnectOptions { reconnect_for: Duration::ZERO, ..ConnectOptions::default() };
        let client = connect(&address, options).unwrap();
        let wait = Wait::forever();
        client.create_table(&table(), &wait).unwrap();
        let mut channel = client.open_writer("steps", writer(1), &wait).unwrap();
        for step in 0.. {
            let pushed = channel.push(push(1, 0, 0, step, &[1]).body, &wait);
            if let Err(error) = pushed.and_then(|()| channel.flush(&wait)) {
                return error;
            }
            // Nobody listens after the first.
            let _ = applied.send(());
        }
        unreachable!("pushes end with an error");
    });
    one_applied.recv().unwrap();
    let (code, log) = serving.stop("TERM");
    assert_eq!(code, Some(0));
    assert!(log.contains("stopped") && log.contains("writer 1"), "{log}");
    let error = pushing.join().unwrap();
    let expected = [ErrorCode::Closed, ErrorCode::Connect, ErrorCode::Disconnected];
    assert!(expected.contains(&error.code()), "{error}");
}

#[test]
fn a_client_that_fails_to_log_in_is_in_the_log() {
    let serving = Serving::start(&["--listen", "127.0.0.1:0", "--token", "secret of the tests"]);
    let address: Address = serving.address().parse().unwrap();
    for token in [Some("a guess of a stranger"), None] {
        let options =
            ConnectOptions { token: token.map(|token| Secret(token.to_owned())), ..ConnectOptions::default() };
        assert!(connect(&address, options).is_err());
    }
    let (_, log) = serving.stop("TERM");
    let line = log.lines().find(|line| line.contains("failed to log in"));
    let line = line.unwrap_or_else(|| panic!("no line says so: {log}"));
    assert!(line.contains("WARN") && line.contains("127.0.0.1:"), "{log}");
    assert!(line.contains("token"), "{log}");
}

#[test]
fn a_client_over_tls_that_leaves_in_peace_is_not_a_broken_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(folder.path());
    let (certificate, key) = (certificate.to_str().unwrap(), key.to_str().unwrap());
    let tls = ["--tls-cert", certificate, "--tls-key", key];
    let serving = Serving::start(&[&["--listen", "127.0.0.1:0"], &tls[..]].concat());
    let address: Address = serving.address().parse().unwrap();
    let options = ConnectOptions { tls_ca: Some(certificate.into()), ..ConnectOptions::default() };
    let client = connect(&address, options).unwrap();
    let wait = Wait::forever();
    client.create_table(&table(), &wait).unwrap();
    drop(client.open_writer("steps", writer(1), &wait).unwrap());
    drop(client);
    let (_, log) = serving.stop("TERM");
    assert_eq!(log.matches("connection closed").count(), 2, "{log}");
    assert!(!log.contains("eof") && !log.contains("broken"), "{log}");
}

#[test]
fn sighup_reads_token_and_certificate_again() {
    let folder = tempfile::tempdir().unwrap();
    let (certificate_file, key_file) = certificate(folder.path());
    let token_file = folder.path().join("token");
    let readable_by = |mode| std::fs::set_permissions(&token_file, Permissions::from_mode(mode)).unwrap();
    std::fs::write(&token_file, "the first of two tokens").unwrap();
    readable_by(0o600);
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let serving = Serving::start(&[
        "--listen=127.0.0.1:0",
        &format!("--token-file={}", path(&token_file)),
        &format!("--tls-cert={}", path(&certificate_file)),
        &format!("--tls-key={}", path(&key_file)),
    ]);
    let address: Address = serving.address().parse().unwrap();
    let login = |token: &str| {
        let options = ConnectOptions {
            token: Some(Secret(token.to_owned())),
            tls_ca: Some(certificate_file.clone()),
            ..ConnectOptions::default()
        };
        connect(&address, options)
    };
    let early = login("the first of two tokens").unwrap();
    // Both are new, and the client trusts the new certificate alone.
    certificate(folder.path());
    std::fs::write(&token_file, "the second of two tokens").unwrap();
    readable_by(0o644);
    assert!(login("the second of two tokens").is_err());
    serving.signal("HUP");
    until("the new token", || login("the second of two tokens").is_ok());
    assert!(login("the first of two tokens").is_err());
    early.stats(&Wait::forever()).unwrap();
    // What cannot be used is not taken over.
    std::fs::write(&token_file, "").unwrap();
    serving.signal("HUP");
    serving.signal("HUP");
    login("the second of two tokens").unwrap();
    let (code, log) = serving.stop("TERM");
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("read again"), "{log}");
    assert_eq!(log.matches("/token can be read by every user of this machine").count(), 1, "{log}");
}

#[test]
fn the_soft_limit_of_open_files_does_not_limit_connections() {
    let serving = Serving::start_limited("-Sn 32", &["--listen", "127.0.0.1:0"]);
    let address: Address = serving.address().parse().unwrap();
    let clients: Vec<_> = (0..64).map(|_| connect(&address, ConnectOptions::default()).unwrap()).collect();
    let wait = Wait::forever();
    assert!(clients.iter().all(|client| client.stats(&wait).is_ok()));
    assert_eq!(serving.stop("TERM").0, Some(0));
}

/// Idle clients have all connections: there are descriptors for snapshots, HTTP and the operator.
#[test]
fn the_hard_limit_of_open_files_lowers_connections() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = format!("--snapshot={}", folder.path().join("snapshots").display());
    let tokens = ["--token=token of the operator", "--actor-token=token of the actors"];
    let listen = ["--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--io-threads=1", &snapshot];
    let serving = Serving::start_limited("-n 80", &[&listen[..], &tokens].concat());
    let words: Vec<_> = serving.ready.split_whitespace().collect();
    let [.., address, _, http] = words[..] else { panic!("{words:?}") };
    let http = http.trim_start_matches("http://");
    let address: Address = address.parse().unwrap();
    let options = |token: &str| ConnectOptions {
        token: Some(Secret(token.to_owned())),
        connect_timeout: Duration::ZERO,
        ..ConnectOptions::default()
    };
    let mut clients = Vec::new();
    let refused = loop {
        match connect(&address, options("token of the actors")) {
            Ok(client) => clients.push(client),
            Err(error) => break error.to_string(),
        }
    };
    assert!(clients.len() > 1 && refused.contains("--max-connections"), "{}: {refused}", clients.len());
    let _strangers: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(http).unwrap()).collect();
    let mut supervisor = std::net::TcpStream::connect(http).unwrap();
    supervisor.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    supervisor.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    let operator = connect(&address, options("token of the operator")).unwrap();
    replay_link::Commands::command(&operator, replay_wire::RequestBody::Snapshot, &Wait::forever()).unwrap();
    let (code, log) = serving.stop("TERM");
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("max_connections and max_handshakes are lowered"), "{log}");
}

#[test]
fn systemd_is_told_of_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let told = UnixDatagram::bind(&path).unwrap();
    told.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hear = |part: &str| {
        let mut all = Vec::new();
        loop {
            let mut message = [0; 1024];
            let bytes = told.recv(&mut message).unwrap_or_else(|error| panic!("{part}: {error}, {all:?}"));
            let message = String::from_utf8_lossy(&message[..bytes]).into_owned();
            all.push(message.clone());
            if message.contains(part) {
                return all.concat();
            }
        }
    };
    let mut serve = command(&["serve", "--listen=127.0.0.1:0"]);
    serve.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "100000");
    let serving = Serving::spawn(&mut serve);
    assert!(hear("READY=1").starts_with("EXTEND_TIMEOUT_USEC="));
    hear("WATCHDOG=1");
    serving.signal("HUP");
    assert!(hear("RELOADING=1").contains("MONOTONIC_USEC="));
    hear("READY=1");
    let (code, log) = serving.stop("TERM");
    assert!(hear("STOPPING=1").contains("EXTEND_TIMEOUT_USEC="));
    assert_eq!(code, Some(0), "{log}");
}

/// Flags that cannot be served with, a part of each error, and the exit code of a start.
fn broken_configurations(folder: &Path) -> Vec<(Vec<String>, &'static str, i32)> {
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (certificate_file, _) = certificate(folder);
    let certificate_file = certificate_file.display();
    let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
    let tables = "max_bytes = \"1GiB\"\nmax_frame_bytes = \"1MiB\"\n[[tables]]\nname = \"t\"\ncapacity = 1000000\n\
                  [[tables.columns]]\nname = \"a\"\ndtype = \"uint8\"\nshape = [84, 84]\n";
    let not_a_folder = file("file", "");
    vec![
        (
            vec![format!("--tls-cert={certificate_file}"), format!("--tls-key={}", file("other.pem", &other))],
            "is not the key",
            2,
        ),
        (vec!["--token-file=/nowhere/token".into()], "/nowhere/token", 2),
        (vec![format!("--config={}", file("server.toml", tables))], "capacity_bytes", 2),
        // What the system says may pass.
        (vec![format!("--snapshot={not_a_folder}/snapshots")], "cannot be saved", 1),
        (vec![format!("--listen=innet://{}:1", "a".repeat(64))], "does not name a host here", 1),
    ]
}

#[test]
fn a_check_finds_what_a_start_finds_and_touches_no_server() {
    let folder = tempfile::tempdir().unwrap();
    for (flags, part, code) in broken_configurations(folder.path()) {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        for (command, code) in [(&["serve"][..], code), (&["serve", "--check"], 2)] {
            let output = output(&[command, &["--listen=127.0.0.1:0"], &flags].concat());
            let message = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(code), "{command:?}: {message}");
            assert!(message.contains(part), "{message}");
        }
        let doctor = output(&[&["doctor", "--listen=127.0.0.1:0"], &flags[..]].concat());
        let found = String::from_utf8(doctor.stdout).unwrap();
        assert_eq!(doctor.status.code(), Some(1));
        assert!(found.lines().next().is_some_and(|line| line.starts_with("missing") && line.contains(part)), "{found}");
    }
    let snapshot = format!("--snapshot={}", folder.path().join("snapshots").display());
    let serving = Serving::start(&["--listen=127.0.0.1:0", &snapshot]);
    let checked = output(&["serve", "--check", "--listen", serving.address(), &snapshot]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    assert_eq!(serving.stop("TERM").0, Some(0));
}

#[test]
fn a_start_that_fails_for_a_reason_that_may_pass_is_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (socket, snapshots) = (format!("unix://{}", at("s")), format!("--snapshot={}", at("snapshots")));
    let serving = Serving::start(&["--listen=127.0.0.1:0", "--listen", &socket, &snapshots]);
    let words: Vec<_> = serving.ready.split_whitespace().collect();
    let [.., tcp, _] = words[..] else { panic!("{words:?}") };
    for (flags, part) in [
        (["--listen=127.0.0.1:0", &*snapshots], "another server has locked it"),
        (["--listen", tcp], "cannot listen on"),
        (["--listen", &socket], "a server is running there"),
        // Of no machine (RFC 5737).
        (["--listen=192.0.2.1:0", "--trusted-network"], "cannot listen on"),
    ] {
        let refused = output(&[&["serve"], &flags[..]].concat());
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{message}");
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(serving.stop("TERM").0, Some(0));
}

#[test]
fn an_expired_certificate_is_a_warning_with_its_date() {
    let folder = tempfile::tempdir().unwrap();
    let write = |years: [i32; 2]| {
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        [params.not_before, params.not_after] = years.map(|year| rcgen::date_time_ymd(year, 1, 1));
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(folder.path().join("c"), params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(folder.path().join("k"), key.serialize_pem()).unwrap();
    };
    let [certificate, key] = ["c", "k"].map(|name| folder.path().join(name).display().to_string());
    let [with_certificate, with_key] = [format!("--tls-cert={certificate}"), format!("--tls-key={key}")];
    let flags = [&*with_certificate, &*with_key, "--listen=127.0.0.1:0"];
    // The first second of all.
    write([1970, 3000]);
    let checked = output(&[&["serve", "--check"], &flags[..]].concat());
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    assert!(!String::from_utf8(checked.stderr).unwrap().contains("the certificate"));
    write([2000, 2001]);
    let doctor = output(&[&["doctor"], &flags[..]].concat());
    let found = String::from_utf8(doctor.stdout).unwrap();
    assert!(found.contains("missing  certificate: a certificate of tls_cert expired on Mon, 01 Jan 2001"), "{found}");
    let checked = output(&[&["serve", "--check"], &flags[..]].concat());
    assert_eq!(checked.status.code(), Some(0), "clients may trust it as it is");
    assert!(String::from_utf8(checked.stderr).unwrap().contains("expired on Mon, 01 Jan 2001"));
    let serving = Serving::start(&flags);
    let address: Address = serving.address().parse().unwrap();
    let options = || ConnectOptions { tls_ca: Some(certificate.clone().into()), ..ConnectOptions::default() };
    let expires = || {
        let stats = connect(&address, options()).and_then(|client| client.stats(&Wait::forever()));
        stats.map_or(0, |stats| stats["tls"]["certificate_expires_s"].as_i64().unwrap())
    };
    assert!(expires() < 0);
    write([2999, 3000]);
    serving.signal("HUP");
    until("another certificate", || expires() > 0);
    let (_, log) = serving.stop("TERM");
    for part in ["expired on Mon, 01 Jan 2001", "not valid before Tue, 01 Jan 2999"] {
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(part)), "{log}");
    }
}

#[test]
fn arguments_that_cannot_be_used_are_exit_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.toml");
    std::fs::write(&path, "io_thread = 1").unwrap();
    for (arguments, part) in [
        (vec!["serve", "--listen", "0.0.0.0:0"], "token"),
        (vec!["serve", "--config", path.to_str().unwrap()], "io_thread"),
        (vec!["serve", "--no-such-flag"], "--no-such-flag"),
        (vec!["drop", "innet://127.0.0.1:7999"], "the name of the table: NAME innet://127.0.0.1:7999"),
    ] {
        let output = output(&arguments);
        assert_eq!(output.status.code(), Some(2));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_server_that_is_not_there_is_exit_code_1() {
    let output = output(&["stats", "unix:///nowhere/a.sock"]);
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains("is `innet-replay serve` running there?"), "{message}");
}

#[test]
fn the_version_is_the_release() {
    let output = output(&["--version"]);
    assert!(output.status.success());
    let version = String::from_utf8(output.stdout).unwrap();
    assert_eq!(version.trim(), format!("innet-replay {}", replay_wire::RELEASE));
}
