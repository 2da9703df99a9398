//! Runs the futures of a connection: by a tokio runtime without a thread of its own, which runs only inside blocking calls, or on the
//! thread of a plugged-in stack, which runs each call while the caller waits.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Runtime;

use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result, io_error};
use replay_link::stack::kernel;
use replay_link::stack::plugged::StackClient;
use replay_link::stack::server_wait::ServerWait;

/// Runs a connection's futures.
pub enum Driver {
    /// On the calling thread.
    Runtime(ClientRuntime),
    /// On the thread of a plugged-in stack, while the calling thread waits.
    Plugged(Arc<dyn StackClient>),
}

/// A runtime whose drop does not block. A log call inside another runtime may run Python code that garbage-collects a client, and blocking
/// is not allowed there. `None` once dropped.
pub struct ClientRuntime(Option<Runtime>);

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Driver {
    /// A driver on the calling thread. It polls without sleeping if it is to `spin`.
    pub fn runtime(spin: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(io_error("starting a connection's runtime"))?;
        if spin {
            runtime.spawn(kernel::spin());
        }
        Ok(Driver::Runtime(ClientRuntime(Some(runtime))))
    }

    /// Runs `work` until it is done, `until` passes (then the error is `late`) or the call is interrupted. Polls it at
    /// least once. A long wait for `server` is logged.
    pub fn drive<T: Send>(
        &self,
        wait: &Wait<'_>,
        until: Option<Instant>,
        late: impl FnOnce() -> Error,
        server: &ServerWait,
        work: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        match self {
            Driver::Plugged(stack) => {
                let mut done = None;
                let work = Box::pin(async { done = Some(work.await) });
                stack.run(wait, until, server, work)?;
                done.unwrap_or_else(|| Err(server.explain(late())))
            }
            Driver::Runtime(ClientRuntime(None)) => Err(Error::Internal("the connection's runtime is gone".into())),
            Driver::Runtime(ClientRuntime(Some(runtime))) => {
                let mut work = pin!(work);
                let mut slices = wait.slices(until);
                loop {
                    // The interrupt check and the log may run any Python code, which may drop another connection or make a call. So they
                    // run outside the runtime.
                    let wake = slices.next_wake(system::now())?;
                    let done = runtime.block_on(async {
                        tokio::select! {
                            biased;
                            done = &mut work => Some(done),
                            () = tokio::time::sleep_until(wake.into()) => None,
                        }
                    });
                    if let Some(done) = done {
                        return done;
                    }
                    let now = system::now();
                    if until.is_some_and(|until| now >= until) {
                        return Err(server.explain(late()));
                    }
                    server.report(wait, now);
                }
            }
        }
    }
}
