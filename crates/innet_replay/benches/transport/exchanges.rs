//! Transport time: first byte of a request to last byte of its reply, over one connection.

use std::env;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::FutureExt;
use replay_link::stack::kernel::{Kernel, spin};
use replay_link::stack::{Address, Stack};
use serde_json::{Value, json};
use stack_fstack::config::Config;
use stack_fstack::tcp::{self, Fstack, socket::FstackStream};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::runtime::{self, Runtime};
use tokio::task::LocalSet;

use super::ends::{self, BARE_KERNEL, KERNEL};

/// Bytes of request and reply, and how often they are exchanged in a round.
const CELLS: [(usize, usize, usize); 11] = [
    (64, 64, 40_000),
    (1_024, 64, 40_000),
    (4_096, 64, 20_000),
    (64, 4_096, 20_000),
    (65_536, 64, 4_000),
    (64, 65_536, 4_000),
    (1 << 20, 64, 400),
    (64, 1 << 20, 400),
    (13_170_000, 64, 40),
    (64, 13_170_000, 40),
    (13_170_000, 13_170_000, 20),
];

/// Of both directions.
const LARGEST: usize = 13_170_000;

/// A request begins with its own length and that of its reply.
const HEADER: usize = 16;

/// One round: the cells that a client measured.
pub fn run(way: &str, folder: &Path) -> Value {
    let here = env::current_exe().unwrap();
    let mut server = ends::at_server(&here);
    server.args(["serve", way]).arg(ends::server_config(folder, way));
    let mut client = ends::at_client(&here);
    client.args(["exchange", way]).arg(ends::client_config(folder, way));
    ends::run(server, client)
}

/// The server's process, until its client has gone.
pub fn serve(way: &str, config: &Path) {
    let at = ends::server(way);
    match way {
        KERNEL => LocalSet::new().block_on(&spinning_runtime(), accept(Kernel, at)),
        BARE_KERNEL => {
            let listener = TcpListener::bind(at).unwrap();
            println!("ready");
            let stream = Spinning::new(listener.accept().unwrap().0);
            answer(stream).now_or_never().unwrap();
        }
        _ => on_reactor(config, move |stack| accept(stack, at)),
    }
}

async fn accept<S: Stack>(stack: S, at: &str) {
    let address: Address = format!("innet://{at}").parse().unwrap();
    let mut listener = stack.listen(&address).unwrap();
    println!("ready");
    let (incoming, _) = stack.accept(&mut listener).await.unwrap();
    answer(stack.open(incoming).unwrap()).await;
}

async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut buffer = vec![1; LARGEST];
    let mut head = [0; HEADER];
    while stream.read_exact(&mut head).await.is_ok() {
        let length = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap()) as usize;
        let (request, reply) = (length(&head[..8]), length(&head[8..]));
        let rest = &mut buffer[..request - HEADER];
        stream.read_exact(rest).await.unwrap();
        stream.write_all(&buffer[..reply]).await.unwrap();
    }
}

/// The client's process: returns its measurements.
pub fn measure(way: &str, config: &Path) -> Vec<Value> {
    let server: SocketAddr = ends::server(way).parse().unwrap();
    match way {
        KERNEL => spinning_runtime().block_on(async {
            let stream = tokio::net::TcpStream::connect(server).await.unwrap();
            stream.set_nodelay(true).unwrap();
            exchange(stream).await
        }),
        BARE_KERNEL => {
            let stream = Spinning::new(TcpStream::connect(server).unwrap());
            exchange(stream).now_or_never().unwrap()
        }
        _ => on_reactor(config, move |_| async move { exchange(FstackStream::connect(server).await.unwrap()).await }),
    }
}

async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Vec<Value> {
    let mut sent = vec![2; LARGEST];
    let mut received = vec![0; LARGEST];
    let mut cells = Vec::new();
    for (request, reply, count) in CELLS {
        sent[..8].copy_from_slice(&(request as u64).to_le_bytes());
        sent[8..HEADER].copy_from_slice(&(reply as u64).to_le_bytes());
        let warm = ends::warm_up(count);
        let mut times = Vec::with_capacity(count);
        for number in 0..warm + count {
            let begun = Instant::now();
            stream.write_all(&sent[..request]).await.unwrap();
            stream.read_exact(&mut received[..reply]).await.unwrap();
            if number >= warm {
                times.push(begun.elapsed());
            }
        }
        cells.push(ends::cell(json!({"request": request, "reply": reply}), times));
    }
    cells
}

/// The runtime of an I/O thread of `serve --spin`, and of a connection of a client with `spin`.
fn spinning_runtime() -> Runtime {
    let mut runtime = runtime::Builder::new_current_thread();
    let runtime = runtime.enable_io().enable_time().build().unwrap();
    runtime.spawn(spin());
    runtime
}

/// Runs `work` on F-Stack's reactor.
fn on_reactor<T: Send + 'static, F: Future<Output = T> + 'static>(
    config: &Path,
    work: impl FnOnce(Fstack) -> F + Send + 'static,
) -> T {
    let reactor = tcp::start(&Config::read(config).unwrap()).unwrap();
    let (end, ended) = mpsc::channel();
    let work = |stack| async move { end.send(work(stack).await).unwrap() };
    reactor.spawn(work).unwrap();
    ended.recv().unwrap()
}

/// A kernel socket that nothing drives: it is never pending, but polls until it is ready.
struct Spinning(TcpStream);

impl Spinning {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        Spinning(stream)
    }
}

/// Tries until the operation would no longer block.
fn spin_until_ready<T>(mut operation: impl FnMut() -> io::Result<T>) -> Poll<io::Result<T>> {
    loop {
        match operation() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            done => return Poll::Ready(done),
        }
    }
}

impl AsyncRead for Spinning {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = buffer.initialize_unfilled();
        spin_until_ready(|| self.0.read(room)).map_ok(|count| buffer.advance(count))
    }
}

impl AsyncWrite for Spinning {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        spin_until_ready(|| self.0.write(bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
