//! A server and its client on one thread, in turns: the server runs until it has nothing left to do whenever the
//! client waits for it. So every count is the same in every run, on every machine.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use base::wait::Wait;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use replay_client::dialer::Dialer;
use replay_client::{Client, ConnectOptions};
use replay_core::memory::Memory;
use replay_link::error::Result;
use replay_link::stack::{Address, Stack};
use replay_server::config::ServerConfig;
use replay_server::server::Server;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop::unconstrained;

use crate::pipe::{self, End};
use crate::tally::as_server;

type Task = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    /// The server that [`Near`] streams run. A client's streams have to be `Send`, so they cannot hold it.
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

struct World {
    tasks: FuturesUnordered<Task>,
    shared: SharedTasks,
    woken: Arc<Woken>,
}

/// New tasks and connections of a server, for the world.
#[derive(Clone, Default)]
struct SharedTasks(Rc<RefCell<Left>>);

#[derive(Default)]
struct Left {
    spawned: Vec<Task>,
    connections: VecDeque<End>,
    listener: Option<Waker>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        // Nothing is published with it: there is one thread.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts a server of `memory` and connects a client to it.
pub fn connect(memory: Arc<Memory>) -> Result<Client> {
    let server = Arc::new(Server::new(&ServerConfig::default(), memory)?);
    let stack = Counted { started: Instant::now(), shared: SharedTasks::default() };
    let world = World {
        tasks: FuturesUnordered::new(),
        shared: stack.shared.clone(),
        woken: Arc::new(Woken(AtomicBool::new(false))),
    };
    stack.spawn(server.run(stack.clone(), vec![stack.shared.clone()], Vec::new()));
    WORLD.set(Some(world));
    let address: Address = "unix:///counted".parse()?;
    let dialer = Dialer::over(address, ConnectOptions::default(), Box::new(|| Ok(Box::new(Near(open())))))?;
    Client::through(dialer, &Wait::forever())
}

fn open() -> End {
    let (near, far) = pipe::connection();
    WORLD.with_borrow(|world| {
        let world = world.as_ref().expect("a server was started");
        let mut left = world.shared.0.borrow_mut();
        left.connections.push_back(far);
        if let Some(listener) = left.listener.take() {
            listener.wake();
        }
    });
    near
}

/// Lets the server run until all of it waits.
fn serve() {
    WORLD.with_borrow_mut(|world| {
        let world = world.as_mut().expect("a server was started");
        as_server(|| world.run());
    });
}

impl World {
    fn run(&mut self) {
        let waker = Waker::from(self.woken.clone());
        let mut context = Context::from_waker(&waker);
        loop {
            let spawned = std::mem::take(&mut self.shared.0.borrow_mut().spawned);
            self.tasks.extend(spawned);
            self.woken.0.store(false, Ordering::Relaxed);
            while let Poll::Ready(Some(())) = self.tasks.poll_next_unpin(&mut context) {}
            let idle = !self.woken.0.load(Ordering::Relaxed);
            if idle && self.shared.0.borrow().spawned.is_empty() {
                return;
            }
        }
    }
}

/// A stack whose streams are counted and whose clock stands still.
#[derive(Clone)]
struct Counted {
    started: Instant,
    shared: SharedTasks,
}

impl Stack for Counted {
    type Stream = End;
    type Listener = SharedTasks;
    type Incoming = End;

    fn listen(&self, _: &Address) -> Result<SharedTasks> {
        Ok(self.shared.clone())
    }

    fn address(&self, _: &SharedTasks) -> Address {
        Address::Unix { path: "/counted".into() }
    }

    async fn accept(&self, listener: &mut SharedTasks) -> io::Result<(End, String)> {
        std::future::poll_fn(|context| {
            let mut left = listener.0.borrow_mut();
            match left.connections.pop_front() {
                Some(end) => Poll::Ready(Ok((end, "a client".to_owned()))),
                None => {
                    left.listener = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn open(&self, incoming: End) -> io::Result<End> {
        Ok(incoming)
    }

    fn now(&self) -> Instant {
        self.started
    }

    fn sleep_until(&self, _: Instant) -> impl Future<Output = ()> + 'static {
        std::future::pending()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // It runs inside the client's runtime, whose budget for one turn is not for the server.
        let task = Box::pin(unconstrained(task));
        self.shared.0.borrow_mut().spawned.push(task);
    }
}

/// The client's end: where it would wait, the server gets its turn.
struct Near(End);

impl Near {
    fn turns<T>(&mut self, mut attempt: impl FnMut(Pin<&mut End>) -> Poll<T>) -> Poll<T> {
        match attempt(Pin::new(&mut self.0)) {
            Poll::Pending => {
                serve();
                attempt(Pin::new(&mut self.0))
            }
            ready => ready,
        }
    }
}

impl AsyncRead for Near {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.turns(|end| end.poll_read(context, buffer))
    }
}

impl AsyncWrite for Near {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.turns(|end| end.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.turns(|end| end.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
