//! F-Stack's start and its end. F-Stack starts at most once in a process, and a failed start ends the process by `exit`:
//! `trial` tries each start in a forked child first.

use std::ffi::{CString, c_int, c_uint};
use std::io;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fstack_sys::fstack as ff;

use super::Fstack;
use super::handle::ReactorHandle;
use super::reactor::{Reactor, Submission};
use super::trial::{SilencedOutput, try_in_child};
use crate::io_error;
use crate::stack::Stack;
use crate::stack::fstack_config::Config;
use replay_core::error::{Error, Result};

/// State of F-Stack in this process.
enum Lifecycle {
    NotStarted,
    Running(RunningReactor),
    /// Ended, or not started although the trial succeeded.
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
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handle to this process's reactor, if it runs.
pub fn running() -> Option<ReactorHandle> {
    match &*state() {
        Lifecycle::Running(running) if running.process == std::process::id() => {
            Some(running.handle.clone())
        }
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
/// [`Error::Config`] for an invalid file, for a start that fails (with the last lines of F-Stack's output), and for a
/// second start with another file.
pub fn start(config: &Config) -> Result<ReactorHandle> {
    let mut state = state();
    let refuse = |reason: String| Err(Error::Config(reason));
    match &*state {
        Lifecycle::NotStarted => {}
        Lifecycle::Over => {
            return refuse(
                "F-Stack can start once in a process, and in this one it has ended: start another process"
                    .to_owned(),
            );
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
    try_in_child(config)?;
    *state = Lifecycle::Over;
    let (submissions, taken) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let handle = ReactorHandle::new(submissions, stop.clone());
    let (result, started) = mpsc::channel();
    let thread = {
        let config = config.clone();
        // On a new thread, because F-Stack pins its thread to a core.
        thread::Builder::new()
            .name("innet-fstack".to_owned())
            .spawn(move || {
                let quiet = SilencedOutput::begin();
                let started = initialise(&config);
                drop(quiet);
                let reactor = started.and_then(|()| {
                    // SAFETY: `initialise` has succeeded on this thread, and the loop has not run yet.
                    unsafe { Reactor::enter(taken, stop) }
                        .map_err(io_error("F-Stack has no event queue"))
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
    started
        .recv()
        .map_err(|_| Error::Internal("the F-Stack thread ended at its start".to_owned()))??;
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

/// The four steps of `ff_init`, with the EAL arguments of the file's `[innet]` section after F-Stack's own.
pub(super) fn initialise(config: &Config) -> Result<()> {
    let failed = |step: &str| {
        let path = config.path.display();
        Error::Config(format!("F-Stack did not start with {path}: {step} failed"))
    };
    let bytes = config.path.clone().into_os_string().into_encoded_bytes();
    let path = CString::new(bytes).map_err(|_| failed("its name"))?;
    // Never freed: F-Stack and EAL keep pointers to their arguments.
    let own = [
        c"innet-replay",
        c"--conf",
        path.as_c_str(),
        c"--proc-type=primary",
        c"--proc-id=0",
    ];
    let own = own.map(|argument| argument.to_owned().into_raw());
    // SAFETY: zero-terminated strings; F-Stack does not run in this process yet.
    if unsafe { ff::ff_load_config(own.len() as c_int, own.as_ptr()) } < 0 {
        return Err(failed("reading it"));
    }
    // SAFETY: written by `ff_load_config` alone, which has returned.
    let (count, made) = unsafe { (ff::dpdk_argc, ff::dpdk_argv) };
    let mut arguments = made[..count as usize].to_vec();
    for argument in &config.eal {
        let argument = CString::new(argument.as_str()).map_err(|_| failed("an eal line"))?;
        arguments.push(argument.into_raw());
    }
    let count = arguments.len() as c_int;
    arguments.push(ptr::null_mut());
    let arguments = arguments.leak().as_mut_ptr();
    if config.virtual_only {
        // SAFETY: the function waits as DPDK's own does, except for 100 ms, the length that only link checks use.
        unsafe { ff::rte_delay_us_callback_register(skip_link_checks) };
    }
    // SAFETY: a list of zero-terminated strings; the steps run once, in F-Stack's order, on one thread.
    unsafe {
        if ff::ff_dpdk_init(count, arguments) < 0 {
            return Err(failed("starting DPDK"));
        }
        if config.memif_segments {
            enable_whole_segments().map_err(|reason| failed(&reason))?;
        }
        if ff::ff_freebsd_init() < 0 {
            return Err(failed("starting FreeBSD's stack"));
        }
        if ff::ff_dpdk_if_up() < 0 {
            return Err(failed("bringing the ports up"));
        }
        ff::rte_delay_us_callback_register(ff::rte_delay_us_block);
    }
    Ok(())
}

/// Lets the ports pass whole segments; the error names the failed step.
///
/// # Safety
/// Called between `ff_dpdk_init` and `ff_freebsd_init`.
unsafe fn enable_whole_segments() -> std::result::Result<(), String> {
    // SAFETY: by the contract of this function.
    match unsafe { ff::innet_ff_whole_segments() } {
        0.. => Ok(()),
        error if error == -libc::ENOENT => {
            Err("memif_segments (is each memif in port_list?)".to_owned())
        }
        error => {
            let reason = io::Error::from_raw_os_error(-error);
            Err(format!(
                "memif_segments ({reason}; it takes 4 MB of [dpdk] memory)"
            ))
        }
    }
}

/// DPDK's delay without F-Stack's link checks: F-Stack waits up to 9 s, 100 ms at a time, for the links of all ports, but a
/// memif's link is up only once its peer has started.
extern "C" fn skip_link_checks(microseconds: c_uint) {
    const LINK_CHECK: c_uint = 100_000;
    if microseconds != LINK_CHECK {
        // SAFETY: DPDK's own delay function.
        unsafe { ff::rte_delay_us_block(microseconds) };
    }
}
