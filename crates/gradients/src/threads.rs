//! Threads of transports, which end with their owner.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Threads that are stopped and joined on drop.
#[derive(Default)]
pub struct Threads {
    stop: StopFlag,
    handles: Vec<JoinHandle<()>>,
}

/// Stop request.
#[derive(Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    #[inline]
    pub fn is_set(&self) -> bool {
        // Pairs with the store in `Threads::drop`. Relaxed: the flag carries no data.
        self.0.load(Ordering::Relaxed)
    }
}

impl Threads {
    /// Starts a thread that runs `run`, which has to check the flag regularly.
    pub fn start(&mut self, name: impl Into<String>, run: impl FnOnce(StopFlag) + Send + 'static) -> io::Result<()> {
        let stop = self.stop.clone();
        let thread = thread::Builder::new().name(name.into());
        self.handles.push(thread.spawn(move || run(stop))?);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Pairs with the load in `StopFlag::is_set`. Relaxed: the flag carries no data.
        self.stop.0.store(true, Ordering::Relaxed);
        for thread in self.handles.drain(..) {
            let name = thread.thread().name().map(str::to_owned);
            if thread.join().is_err() {
                tracing::error!(name, "a thread for gradients panicked");
            }
        }
    }
}
