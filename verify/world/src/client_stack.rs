//! The network stack of clients in a world, `innet+sim://`.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::{self, ThreadId};
use std::time::Instant;

use base::wait::Wait;
use replay_link::error::{Error, Result};
use replay_link::stack::plugged::{StackClient, StackFuture};
use replay_link::stack::{Address, ByteStream, PluggedStack, ServerWait, Stack, StackName, until};
use simulation::{SimStack, SimStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::process::{block_on, running};

/// The stack, for `register`.
pub struct Simulated;

impl PluggedStack for Simulated {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn title(&self) -> &'static str {
        "a simulated network"
    }

    fn help(&self) -> &'static str {
        "A simulated network"
    }

    fn client(&self, address: &Address, _file: Option<&Path>, _spin: bool) -> Result<Arc<dyn StackClient>> {
        let mut listening = address.clone();
        if let Address::Tcp { stack, .. } = &mut listening {
            *stack = StackName::KERNEL;
        }
        Ok(Arc::new(Client(OneThread::new((running(), listening)))))
    }
}

/// A value of the world's thread where a type has to be `Send`.
struct OneThread<T> {
    value: T,
    thread: ThreadId,
}

// SAFETY: every access goes through `get`, which panics on another thread than the one that made the value; a world is dropped on its
// own thread, with everything in it.
unsafe impl<T> Send for OneThread<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for OneThread<T> {}

impl<T> OneThread<T> {
    fn new(value: T) -> Self {
        OneThread { value, thread: thread::current().id() }
    }

    fn get(&self) -> &T {
        assert_eq!(self.thread, thread::current().id(), "a world has one thread");
        &self.value
    }

    fn get_mut(&mut self) -> &mut T {
        assert_eq!(self.thread, thread::current().id(), "a world has one thread");
        &mut self.value
    }
}

struct Client(OneThread<(SimStack, Address)>);

impl StackClient for Client {
    fn connect(&self) -> StackFuture<'_, io::Result<Box<dyn ByteStream>>> {
        Box::pin(async {
            let (stack, address) = self.0.get();
            let stream = stack.connect(address)?;
            Ok(Box::new(Stream(OneThread::new(stream))) as Box<dyn ByteStream>)
        })
    }

    fn run(
        &self,
        wait: &Wait<'_>,
        end: Option<Instant>,
        server: &ServerWait,
        mut work: StackFuture<'_, ()>,
    ) -> Result<()> {
        let (stack, _) = self.0.get();
        let mut slices = wait.slices(end);
        loop {
            let wake = slices.next_wake(stack.now())?;
            let done = block_on(until(stack, wake, &mut work));
            if done.ok_or(Error::Closed("the process"))?.is_some() {
                return Ok(());
            }
            let now = stack.now();
            if end.is_some_and(|end| now >= end) {
                return Ok(());
            }
            server.report(wait, now);
        }
    }
}

/// A client's end of a connection.
struct Stream(OneThread<SimStream>);

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(self.0.get_mut()).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.0.get_mut()).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.0.get_mut()).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.0.get_mut()).poll_shutdown(context)
    }
}
