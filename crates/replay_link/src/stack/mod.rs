//! Network stacks of a server. Everything above (TLS, the protocol, connections) uses streams, clock and tasks of the trait
//! [`Stack`], so it runs unchanged on kernel sockets, in a simulation, and on a stack that another crate [plugs in](plugged).

pub mod address;
pub mod kernel;
pub mod plugged;

use std::future::Future;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{io, thread};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;

use base::wait::{Wait, lock};
use replay_core::error::WaitReason;
use replay_wire::{NO_REQUEST, Reply, ReplyBody};

use crate::error::{Error, Result, io_error};

pub use address::Address;
pub use plugged::{PluggedStack, StackName};

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

/// State of a wait for the server: the last reason that the server sent.
pub struct ServerWait {
    /// Name of the server, for errors.
    pub peer: String,
    /// Reason of the last [`ReplyBody::Waiting`]; `None` after an answer.
    reason: Mutex<Option<WaitReason>>,
}

impl ServerWait {
    /// Time after which a server that has not sent a reason is logged as not answering.
    const ARRIVES_WITHIN: Duration = Duration::from_secs(3);

    /// A server called `peer`, without a reason.
    pub fn new(peer: String) -> Self {
        ServerWait { peer, reason: Mutex::default() }
    }

    /// Logs a long wait for the server: see [`Wait::report`].
    pub fn report(&self, wait: &Wait<'_>, now: Instant) {
        if wait.notice.is_none() {
            return;
        }
        let reason = lock(&self.reason).clone();
        match reason {
            Some(reason) => reason.report(wait, now, Wait::REPORT_AFTER),
            None => {
                wait.awaits(None);
                wait.report(now, Wait::REPORT_AFTER + Self::ARRIVES_WITHIN, || {
                    format!("{} has not answered", self.peer)
                });
            }
        }
    }

    /// The error of a call without an answer: a deadline's error gets the server's reason, if there is one.
    pub fn explain(&self, late: Error) -> Error {
        match (late, lock(&self.reason).clone()) {
            (Error::Deadline { .. }, Some(reason)) => Error::deadline(reason),
            (late, _) => late,
        }
    }

    /// Records a reply: a reason, or an answer, which clears the reason.
    pub fn note(&self, reply: &Reply) {
        let mut reason = lock(&self.reason);
        match &reply.body {
            // A request's own reason is more specific.
            ReplyBody::Waiting(_) if reply.id == NO_REQUEST && reason.is_some() => {}
            ReplyBody::Waiting(because) => *reason = Some(because.clone()),
            _ => *reason = None,
        }
    }
}
