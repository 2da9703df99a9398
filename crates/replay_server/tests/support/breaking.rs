//! A relay whose connections break.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use replay_client::{Address, ConnectOptions};
use socket2::SockRef;

use super::until;

/// Longer than any test takes.
pub fn patient(options: ConnectOptions) -> ConnectOptions {
    let patience = Duration::from_secs(60);
    ConnectOptions { connect_timeout: patience, await_server: patience, ..options }
}

/// How a connection ends.
#[derive(Debug, Clone, Copy)]
pub enum Ending {
    End,
    Reset,
    Hang,
}

/// Forwards connections to a server. Each one with an even number, from 0, ends after so many bytes, counted over both directions.
pub struct BreakingRelay {
    port: u16,
    connections: Arc<AtomicUsize>,
    cut: Arc<AtomicBool>,
}

impl BreakingRelay {
    pub fn start(to: u16, bytes: usize, ending: Ending) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = BreakingRelay {
            port: listener.local_addr().unwrap().port(),
            connections: Arc::default(),
            cut: Arc::default(),
        };
        let (count, cut) = (relay.connections.clone(), relay.cut.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let number = count.fetch_add(1, Ordering::Relaxed);
                let bytes = if number % 2 == 0 { bytes } else { usize::MAX };
                let (client, cut) = (client.unwrap(), cut.clone());
                thread::spawn(move || forward(client, to, bytes, ending, &cut));
            }
        });
        relay
    }

    pub fn address(&self, scheme: &str) -> Address {
        format!("{scheme}://127.0.0.1:{}", self.port).parse().unwrap()
    }

    /// Ends the open connection.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
        until("a cut", || !self.cut.load(Ordering::Relaxed));
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

fn forward(client: TcpStream, to: u16, mut left: usize, ending: Ending, cut: &AtomicBool) {
    let server = TcpStream::connect(("127.0.0.1", to)).unwrap();
    let (mut client, server) = (&client, &server);
    client.set_nonblocking(true).unwrap();
    server.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    while left > 0 {
        if cut.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut idle = true;
        for (mut from, mut to) in [(client, server), (server, client)] {
            let most = left.min(buffer.len());
            match from.read(&mut buffer[..most]) {
                Ok(n @ 1..) => {
                    // Small enough for the socket's buffer.
                    if to.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                    left -= n;
                    idle = false;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
        if idle {
            thread::sleep(Duration::from_millis(1));
        }
    }
    match ending {
        Ending::End => drop(client.shutdown(Shutdown::Both)),
        Ending::Reset => drop(SockRef::from(client).set_linger(Some(Duration::ZERO))),
        Ending::Hang => {
            client.set_nonblocking(false).unwrap();
            while client.read(&mut buffer).is_ok_and(|n| n > 0) {}
        }
    }
}
