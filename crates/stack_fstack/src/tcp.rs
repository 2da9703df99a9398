//! F-Stack's TCP, which bypasses the kernel, on one reactor thread.
//!
//! | module | subject |
//! | --- | --- |
//! | `start` | F-Stack's start, once in a process |
//! | [`reactor`] | tasks, timers and events, run by F-Stack's loop |
//! | `readiness` | readiness of sockets for reading and writing |
//! | [`socket`] | streams and listeners |
//! | [`handle`] | calls to the reactor from other threads |
//!
//! F-Stack's functions crash on any thread but the reactor's. A [`Fstack`] and a [`socket::FstackStream`] may be moved to other
//! threads, but they look their reactor up by the current thread, and elsewhere fail with an error.

pub mod handle;
mod initialise;
pub mod reactor;
mod readiness;
pub mod socket;
mod start;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use base::wait::Wait;
use replay_link::error::{Result, io_error};
use replay_link::stack::plugged::{StackClient, StackFuture};
use replay_link::stack::{Address, ByteStream, ServerWait, Stack};
use replay_server::server::{JoinTask, ServeTask};

use crate::config::Config;
use crate::socket_address;
pub use handle::ReactorHandle;
pub use reactor::Fstack;
use reactor::{Reactor, Sleep};
use socket::{FstackListener, FstackStream};
pub use start::{running, start};

/// Serves on the reactor; starts it if it is not running.
pub(crate) fn serve(config: &Config, task: ServeTask) -> Result<JoinTask> {
    let reactor = start(config)?;
    let (end, ended) = mpsc::channel();
    reactor.spawn(move |stack| async move {
        task.run(stack).await;
        let _ = end.send(());
    })?;
    Ok(Box::new(move || ended.recv().is_ok()))
}

/// Creates a client for `address` over the reactor with this file; starts the reactor if it is not running.
pub(crate) fn client(address: &Address, file: &Path) -> Result<Arc<dyn StackClient>> {
    let peer = socket_address(address)?;
    let reactor = start(&Config::read(file)?)?;
    Ok(Arc::new(FstackClient { peer, reactor }))
}

struct FstackClient {
    peer: SocketAddr,
    reactor: ReactorHandle,
}

impl StackClient for FstackClient {
    fn connect(&self) -> StackFuture<'_, io::Result<Box<dyn ByteStream>>> {
        Box::pin(async {
            let stream = FstackStream::connect(self.peer).await?;
            Ok(Box::new(stream) as Box<dyn ByteStream>)
        })
    }

    fn run(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        server: &ServerWait,
        work: StackFuture<'_, ()>,
    ) -> Result<()> {
        self.reactor.run_blocking(wait, until, server, work)
    }
}

impl Stack for Fstack {
    type Stream = FstackStream;
    type Listener = FstackListener;
    type Incoming = FstackStream;

    fn listen(&self, address: &Address) -> Result<FstackListener> {
        FstackListener::bind(socket_address(address)?, address)
            .map_err(io_error(format!("cannot listen on {address} with F-Stack")))
    }

    fn address(&self, listener: &FstackListener) -> Address {
        listener.address.clone()
    }

    async fn accept(&self, listener: &mut FstackListener) -> io::Result<(FstackStream, String)> {
        let (stream, peer) = listener.accept().await?;
        Ok((stream, peer.to_string()))
    }

    fn open(&self, incoming: FstackStream) -> io::Result<FstackStream> {
        incoming.prepare()?;
        Ok(incoming)
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep_until(&self, deadline: Instant) -> impl Future<Output = ()> + 'static {
        Sleep::until(deadline)
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        // A no-op on other threads, where a `Stack` is not used.
        Reactor::with(|reactor| reactor.spawn(task));
    }
}
