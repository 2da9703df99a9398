//! A parameter server, the baseline of the benchmarks.
//!
//! Every worker sends its whole vector over a TCP connection, and receives the sum when all vectors have arrived. Vectors are added up as they
//! arrive, by the aggregator's addition. A message is its length in bytes as u64, and float32 values, little-endian.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream as AsyncTcpStream;

use gradients::arithmetic;
use gradients::packet::PacketKind;

/// Bytes received at a time, few enough to be added from the cache.
const PIECE: usize = 128 << 10;
const LENGTH: usize = size_of::<u64>();

/// A server of some workers. Its thread ends when they disconnect.
pub struct ParameterServer {
    address: SocketAddr,
}

impl ParameterServer {
    /// Starts a server at `host` for `workers` connections, for vectors of at most `max_bytes`.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn start(host: IpAddr, workers: usize, max_bytes: usize) -> io::Result<Self> {
        let listener = TcpListener::bind((host, 0))?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        thread::Builder::new()
            .name("innet-parameter-server".to_owned())
            .spawn(
                move || match runtime.block_on(serve(listener, workers, max_bytes)) {
                    // The workers have disconnected.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                    Err(error) => tracing::warn!(%error, "the parameter server ended"),
                    Ok(never) => match never {},
                },
            )?;
        Ok(ParameterServer { address })
    }

    /// Its TCP address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn serve(
    listener: TcpListener,
    workers: usize,
    max_bytes: usize,
) -> io::Result<std::convert::Infallible> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut streams = Vec::with_capacity(workers);
    while streams.len() < workers {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        streams.push((stream, vec![0; PIECE]));
    }
    // Length and values, so that one write sends both.
    let mut reply: Vec<u8> = Vec::new();
    loop {
        let lengths = try_join_all(streams.iter_mut().map(|(stream, _)| length(stream))).await?;
        let bytes = lengths.first().copied().unwrap_or_default();
        if bytes > max_bytes || !bytes.is_multiple_of(4) || lengths.iter().any(|&l| l != bytes) {
            let text = format!(
                "vectors of {lengths:?} bytes: all have the same length, at most {max_bytes}"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        reply.clear();
        reply.extend((bytes as u64).to_le_bytes());
        reply.resize(LENGTH + bytes, 0);
        let sum = RefCell::new(&mut reply[LENGTH..]);
        let gathered = streams
            .iter_mut()
            .map(|(stream, piece)| gather(stream, piece, &sum));
        try_join_all(gathered).await?;
        let sent = join_all(
            streams
                .iter_mut()
                .map(|(stream, _)| stream.write_all(&reply)),
        )
        .await;
        sent.into_iter().collect::<io::Result<()>>()?;
    }
}

async fn length(stream: &mut AsyncTcpStream) -> io::Result<usize> {
    usize::try_from(stream.read_u64_le().await?).map_err(io::Error::other)
}

/// Adds one worker's vector to the sum as it arrives.
async fn gather(
    stream: &mut AsyncTcpStream,
    piece: &mut [u8],
    sum: &RefCell<&mut [u8]>,
) -> io::Result<()> {
    let bytes = sum.borrow().len();
    let (mut done, mut held) = (0, 0);
    while done < bytes {
        let end = piece.len().min(bytes - done);
        let count = stream.read(&mut piece[held..end]).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        held += count;
        // The last value may have arrived in part.
        let whole = held & !3;
        let part = &mut sum.borrow_mut()[done..done + whole];
        arithmetic::add(PacketKind::Float, part, &piece[..whole]);
        piece.copy_within(whole..held, 0);
        (done, held) = (done + whole, held - whole);
    }
    Ok(())
}

/// A worker of a [`ParameterServer`].
pub struct ParameterWorker {
    stream: TcpStream,
    message: Vec<u8>,
}

impl ParameterWorker {
    /// Connects to the server. No later call waits longer than `deadline` for a byte.
    ///
    /// # Errors
    /// Errors of the operating system.
    pub fn connect(address: SocketAddr, deadline: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(deadline))?;
        stream.set_write_timeout(Some(deadline))?;
        Ok(ParameterWorker {
            stream,
            message: Vec::new(),
        })
    }

    /// Replaces `values` by their sum over all workers.
    ///
    /// # Errors
    /// Errors of the operating system; an end of stream if the server is gone.
    pub fn sum(&mut self, values: &mut [f32]) -> io::Result<()> {
        self.message.clear();
        self.message.extend((4 * values.len() as u64).to_le_bytes());
        self.message.extend_from_slice(arithmetic::bytes_of(values));
        self.stream.write_all(&self.message)?;
        self.stream.read_exact(&mut self.message)?;
        arithmetic::read_floats(&self.message[LENGTH..], values);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn all_workers_get_the_sum_in_every_round() {
        const WORKERS: usize = 3;
        let server = ParameterServer::start(HERE, WORKERS, 1 << 20).unwrap();
        let work = |worker: usize| {
            let mut parameters =
                ParameterWorker::connect(server.address(), Duration::from_secs(30)).unwrap();
            for length in [1, 7, 100_003, 0, 50] {
                let mut values: Vec<f32> = (0..length).map(|i| (i * (worker + 1)) as f32).collect();
                parameters.sum(&mut values).unwrap();
                let expected: Vec<f32> = (0..length).map(|i| (i * 6) as f32).collect();
                assert_eq!(values, expected);
            }
        };
        thread::scope(|scope| {
            for worker in 0..WORKERS {
                scope.spawn(move || work(worker));
            }
        });
    }

    #[test]
    fn vectors_of_other_lengths_end_it() {
        let server = ParameterServer::start(HERE, 2, 100).unwrap();
        let sum = |length: usize| {
            let mut worker =
                ParameterWorker::connect(server.address(), Duration::from_secs(30)).unwrap();
            worker.sum(&mut vec![1.0; length])
        };
        thread::scope(|scope| {
            let other = scope.spawn(move || sum(3));
            assert!(sum(4).is_err());
            assert!(other.join().unwrap().is_err());
        });
    }
}
