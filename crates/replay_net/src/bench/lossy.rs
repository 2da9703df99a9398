//! A UDP relay that loses datagrams in both directions, for tests and benchmarks.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::oneshot;

use gradients::packet::MAX_DATAGRAM;

type Socket = tokio::net::UdpSocket;

/// A relay between workers and an aggregator. Dropped, it ends.
pub struct LossyPath {
    address: SocketAddr,
    _end: oneshot::Sender<()>,
}

impl LossyPath {
    /// Relays datagrams from loopback to the aggregator at `to`, and its answers back. Each is lost with probability `loss`, by random numbers
    /// seeded with `seed`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn start(to: SocketAddr, loss: f64, seed: u64) -> io::Result<Self> {
        let front = UdpSocket::bind(("127.0.0.1", 0))?;
        front.set_nonblocking(true)?;
        let address = front.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let (end, ended) = oneshot::channel();
        thread::Builder::new()
            .name("innet-lossy-path".to_owned())
            .spawn(move || {
                let local = tokio::task::LocalSet::new();
                let carried = local.run_until(carry(front, Lossy { to, loss }, seed));
                runtime.block_on(async {
                    tokio::select! {
                        result = carried => if let Err(error) = result {
                            tracing::warn!(%error, "the lossy path ended");
                        },
                        _ = ended => {}
                    }
                });
            })?;
        Ok(LossyPath { address, _end: end })
    }

    /// Address for workers to send to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[derive(Clone, Copy)]
struct Lossy {
    to: SocketAddr,
    loss: f64,
}

async fn carry(front: UdpSocket, path: Lossy, seed: u64) -> io::Result<()> {
    let front = Arc::new(Socket::from_std(front)?);
    let mut random = StdRng::seed_from_u64(seed);
    let mut workers: HashMap<SocketAddr, Arc<Socket>> = HashMap::new();
    let mut datagram = [0; MAX_DATAGRAM + 1];
    loop {
        let (length, from) = front.recv_from(&mut datagram).await?;
        let back = match workers.get(&from) {
            Some(back) => back.clone(),
            None => {
                let back = Arc::new(Socket::bind(("127.0.0.1", 0)).await?);
                back.connect(path.to).await?;
                workers.insert(from, back.clone());
                let random = StdRng::seed_from_u64(random.random());
                tokio::task::spawn_local(answers(back.clone(), front.clone(), from, path, random));
                back
            }
        };
        if random.random_bool(path.loss) {
            continue;
        }
        // A datagram that cannot be sent is lost, too.
        let _ = back.send(&datagram[..length]).await;
    }
}

async fn answers(
    back: Arc<Socket>,
    front: Arc<Socket>,
    to: SocketAddr,
    path: Lossy,
    mut random: StdRng,
) {
    let mut datagram = [0; MAX_DATAGRAM + 1];
    loop {
        // ICMP errors of an aggregator that is restarted.
        let Ok(length) = back.recv(&mut datagram).await else {
            tokio::task::yield_now().await;
            continue;
        };
        if random.random_bool(path.loss) {
            continue;
        }
        let _ = front.send_to(&datagram[..length], to).await;
    }
}
