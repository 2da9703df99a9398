//! F-Stack's start and its end. F-Stack starts at most once in a process.

use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fstack_sys::fstack as ff;

use super::handle::ReactorHandle;
use super::initialise::initialise;
use super::reactor::{Fstack, Reactor, Submission};
use crate::config::Config;
use base::wait::lock;
use replay_link::error::{Error, Result, io_error, refuse};
use replay_link::stack::Stack;

/// State of F-Stack in this process.
enum Lifecycle {
    NotStarted,
    Running(RunningReactor),
    /// Ended, or its start failed.
    Over,
}

/// The running reactor and its thread.
struct RunningReactor {
    config: PathBuf,
    handle: ReactorHandle,
    thread: JoinHandle<()>,
    /// The process that started it: a forked child has a copy of this, but no thread.
    process: u32,
}

static STATE: Mutex<Lifecycle> = Mutex::new(Lifecycle::NotStarted);

fn state() -> MutexGuard<'static, Lifecycle> {
    lock(&STATE)
}

/// Handle to this process's reactor, if it runs.
pub fn running() -> Option<ReactorHandle> {
    match &*state() {
        Lifecycle::Running(running) if running.process == std::process::id() => Some(running.handle.clone()),
        _ => None,
    }
}

/// Submits a call to the reactor, if it runs.
pub(super) fn submit_to_reactor(submission: Submission) {
    if let Some(handle) = running() {
        // An error means that the reactor has ended, and its sockets with it.
        let _ = handle.submit(submission);
    }
}

/// Starts F-Stack and its reactor, or returns the running one if it was started with the same file. The reactor ends by
/// [`ReactorHandle::stop`] or at the exit of the process.
///
/// # Errors
/// [`Error::Config`] for an invalid file, for a start that fails, and for a second start with another file. Most failures of a start end the
/// process.
pub fn start(config: &Config) -> Result<ReactorHandle> {
    let mut state = state();
    match &*state {
        Lifecycle::NotStarted => {}
        Lifecycle::Over => {
            return refuse("F-Stack can start once in a process, and in this one it has ended: start another process");
        }
        Lifecycle::Running(running) if running.process != std::process::id() => {
            return refuse(format!(
                "F-Stack was started by process {}, and this is its fork: start processes that use F-Stack with \
                 multiprocessing's \"spawn\" method",
                running.process
            ));
        }
        Lifecycle::Running(running) if running.config != config.path => {
            return refuse(format!(
                "F-Stack can start once in a process, and in this one it runs with {}: use that file, or another \
                 process for {}",
                running.config.display(),
                config.path.display()
            ));
        }
        Lifecycle::Running(running) => return Ok(running.handle.clone()),
    }
    *state = Lifecycle::Over;
    let (submissions, taken) = mpsc::channel();
    let handle = ReactorHandle(submissions);
    let (result, started) = mpsc::channel();
    let thread = {
        let config = config.clone();
        // On a new thread, because F-Stack pins its thread to a core.
        thread::Builder::new()
            .name("innet-fstack".to_owned())
            .spawn(move || {
                let reactor = initialise(&config).and_then(|()| {
                    // SAFETY: `initialise` has succeeded on this thread, and the loop has not run yet.
                    unsafe { Reactor::enter(taken) }.map_err(io_error("F-Stack has no event queue"))
                });
                match reactor {
                    Ok(reactor) => {
                        let _ = result.send(Ok(()));
                        if reactor.run() {
                            tracing::error!("the F-Stack reactor panicked and has ended");
                        }
                    }
                    Err(error) => drop(result.send(Err(error))),
                }
            })
            .map_err(io_error("cannot start the F-Stack thread"))?
    };
    started.recv().map_err(|_| Error::Internal("the F-Stack thread ended at its start".to_owned()))??;
    // SAFETY: `stop_at_exit` has C's calling convention, takes no arguments and does not unwind.
    unsafe { libc::atexit(stop_at_exit) };
    announce(config);
    for name in config.memif_clients.clone() {
        handle.spawn(|stack| reconnect_memif(stack, name))?;
    }
    *state = Lifecycle::Running(RunningReactor {
        config: config.path.clone(),
        handle: handle.clone(),
        thread,
        process: std::process::id(),
    });
    Ok(handle)
}

fn announce(config: &Config) {
    let (path, cores) = (config.path.display(), &config.lcore_mask);
    match config.idle_sleep {
        0 => tracing::warn!(
            config = %path,
            lcore_mask = cores,
            "F-Stack polls: it takes a whole core, busy or idle; set idle_sleep in [dpdk] to share it"
        ),
        microseconds => tracing::info!(
            config = %path,
            lcore_mask = cores,
            idle_sleep_us = microseconds,
            "F-Stack runs, and sleeps when idle"
        ),
    }
}

/// Restarts the port of a memif client while it has no peer. The driver connects only when the port starts, so a peer
/// that restarts would never be found.
async fn reconnect_memif(stack: Fstack, name: String) {
    const EVERY: Duration = Duration::from_millis(500);
    let Ok(name) = CString::new(name) else { return };
    loop {
        stack.sleep_until(Instant::now() + EVERY).await;
        let (mut port, mut link) = (0, ff::rte_eth_link::default());
        // SAFETY: on the reactor thread, between bursts; the name ends with a zero, and both results have memory.
        unsafe {
            if ff::rte_eth_dev_get_port_by_name(name.as_ptr(), &raw mut port) == 0
                && ff::rte_eth_link_get_nowait(port, &raw mut link) == 0
                && !link.is_up()
            {
                ff::rte_eth_dev_stop(port);
                ff::rte_eth_dev_start(port);
            }
        }
    }
}

/// Ends the reactor before its libraries are unloaded.
extern "C" fn stop_at_exit() {
    let running = std::mem::replace(&mut *state(), Lifecycle::Over);
    if let Lifecycle::Running(running) = running
        && running.process == std::process::id()
        && running.thread.thread().id() != thread::current().id()
    {
        running.handle.stop();
        let _ = running.thread.join();
    }
}
