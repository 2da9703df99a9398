//! Network stacks of a server. Everything above (TLS, the protocol, connections) uses streams, clock and tasks of the trait
//! [`Stack`], so it runs unchanged on kernel sockets, in a simulation, and on a stack that another crate [plugs in](plugged).

pub mod address;
pub mod kernel;
pub mod plugged;
pub mod server_wait;

use std::future::Future;
use std::io;
use std::thread;
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

pub use address::Address;
pub use plugged::{PluggedStack, StackName};

use crate::error::{Error, Result, io_error};

/// A connection of any kind, boxed as `Box<dyn ByteStream>`.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for S {}

/// Streams, time and tasks of one I/O thread. A value is used only on its own thread, so nothing it returns has to be `Send`,
/// except [`Stack::Incoming`] for a stack with several I/O threads.
pub trait Stack: Clone + 'static {
    /// An open connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;
    /// A bound address that accepts connections until it is dropped.
    type Listener: 'static;
    /// An accepted connection, to be handed to its I/O thread.
    type Incoming: 'static;

    /// Binds an address.
    fn listen(&self, address: &Address) -> Result<Self::Listener>;
    /// The bound address, with a chosen port for port 0.
    fn address(&self, listener: &Self::Listener) -> Address;
    /// Accepts the next connection; also returns its peer's name for logs. Cancel safe.
    fn accept(&self, listener: &mut Self::Listener) -> impl Future<Output = io::Result<(Self::Incoming, String)>>;
    /// Takes an accepted connection over to this thread.
    fn open(&self, incoming: Self::Incoming) -> io::Result<Self::Stream>;
    /// The time by this stack's clock.
    fn now(&self) -> Instant;
    /// Completes at `deadline` by this stack's clock.
    fn sleep_until(&self, deadline: Instant) -> impl Future<Output = ()> + 'static;
    /// Runs `task` on this thread until it completes or the thread's executor ends.
    fn spawn(&self, task: impl Future<Output = ()> + 'static);

    /// Runs `work` on a dedicated thread, to its end even if the returned future is dropped.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot start a thread, [`Error::Internal`] after a panic of `work`.
    fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Result<T>> {
        let (done, result) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("innet-work".to_owned())
            // An error means that the connection has ended.
            .spawn(move || drop(done.send(work())))
            .map_err(io_error("cannot start a thread"));
        async move {
            thread?;
            let panicked = |_| Error::Internal("a thread of the server panicked".into());
            result.await.map_err(panicked)
        }
    }
}

/// Runs `future` until `deadline` of the stack's clock; `None` if it did not complete.
pub async fn until<S: Stack, T>(stack: &S, deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    if base::planted!(TimerFirst) {
        return tokio::select! {
            biased;
            () = stack.sleep_until(deadline) => None,
            value = future => Some(value),
        };
    }
    tokio::select! {
        biased;
        value = future => Some(value),
        () = stack.sleep_until(deadline) => None,
    }
}
