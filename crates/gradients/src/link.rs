//! What a worker needs of a network, and how an exchange runs on it.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::Transmit;
use super::worker::{Exchange, Failure};
use replay_core::replay::Wait;

/// A worker's end of a network.
pub trait Link {
    /// What it sends through.
    type Out: Transmit;

    /// Hands to the network what was sent, then waits for datagrams, for at most `time`, and takes those that are there.
    ///
    /// # Errors
    /// Those of the system. A signal is none: then nothing has arrived.
    fn wait(&mut self, time: Duration) -> io::Result<()>;

    /// Gives `take` what the last [`Link::wait`] took, once: sources and datagrams, and what to send through.
    fn receive(&mut self, take: impl FnMut(SocketAddr, &[u8], &mut Self::Out));

    /// What to send through.
    fn out(&mut self) -> &mut Self::Out;

    /// Hands to the network what was sent.
    fn flush(&mut self);
}

/// Runs an exchange to its end.
pub fn drive<E: Exchange, L: Link>(
    mut exchange: E,
    link: &mut L,
    wait: &Wait<'_>,
) -> Result<E::Output, Failure> {
    let mut check = Instant::now() + Wait::CHECK_EVERY;
    loop {
        let now = Instant::now();
        if let Some(end) = exchange.poll(now, link.out()) {
            link.flush();
            return end;
        }
        if now >= check {
            wait.check().map_err(|_| Failure::Interrupted)?;
            check = now + Wait::CHECK_EVERY;
        }
        let time = exchange
            .next_wake()
            .min(check)
            .saturating_duration_since(now);
        link.wait(time)
            .map_err(|error| Failure::Io(error.to_string()))?;
        let now = Instant::now();
        link.receive(|from, datagram, out| exchange.receive(now, from, datagram, out));
    }
}
