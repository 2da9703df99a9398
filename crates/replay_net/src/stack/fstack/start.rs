//! F-Stack's start. It can start once in a process, and ends the process by `exit` when it fails: so each start is tried
//! in a forked child first, whose last words become the error.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fstack_sys::fstack as ff;

use super::Fstack;
use super::handle::Handle;
use super::reactor::{Job, Reactor, end_loop};
use crate::stack::Stack;
use crate::stack::fstack_config::Config;
use replay_core::error::{Error, Result};

/// A trial that has not come to its end by then will not: hardware takes a few seconds.
const TRIAL: Duration = Duration::from_secs(60);

/// A trial that says this has succeeded, however it comes to its end.
const STARTED: &str = "innet: F-Stack has started";

/// Lines of a failed trial that the error quotes.
const LAST_WORDS: usize = 6;

/// The one F-Stack of this process.
enum State {
    NotStarted,
    Running(Running),
    /// It has ended, or its start failed after the trial had succeeded.
    Over,
}

struct Running {
    config: PathBuf,
    handle: Handle,
    thread: JoinHandle<()>,
    /// A forked child has the memory of this, but not the thread.
    process: u32,
}

static STATE: Mutex<State> = Mutex::new(State::NotStarted);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle of the reactor that runs in this process.
pub fn running() -> Option<Handle> {
    match &*state() {
        State::Running(running) if running.process == std::process::id() => {
            Some(running.handle.clone())
        }
        _ => None,
    }
}

/// Hands a job to the reactor, if it runs.
pub(super) fn on_reactor(job: Job) {
    if let Some(handle) = running() {
        // An error says that the reactor has ended, and its sockets with it.
        let _ = handle.hand_over(job);
    }
}

/// Starts F-Stack and its reactor, or returns the one that this process has started with the same file. It ends with
/// [`Handle::stop`], or in order when the process ends.
///
/// # Errors
/// [`Error::Config`] for a file that cannot be used, for a start that would have ended this process (with what F-Stack
/// said), and for a second start.
pub fn start(config: &Config) -> Result<Handle> {
    let mut state = state();
    let refuse = |reason: String| Err(Error::Config(reason));
    match &*state {
        State::NotStarted => {}
        State::Over => {
            return refuse(
                "F-Stack can start once in a process, and here it has ended: start another process"
                    .to_owned(),
            );
        }
        State::Running(running) if running.process != std::process::id() => {
            return refuse(format!(
                "F-Stack was started by process {}, of which this is a fork: start processes that use it afresh \
                 (multiprocessing: \"spawn\")",
                running.process
            ));
        }
        State::Running(running) if running.config != config.path => {
            return refuse(format!(
                "F-Stack can start once in a process, and here it runs with {}: use that, or another process for {}",
                running.config.display(),
                config.path.display()
            ));
        }
        State::Running(running) => return Ok(running.handle.clone()),
    }
    try_in_child(config)?;
    *state = State::Over;
    let (jobs, taken) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let handle = Handle::new(jobs, stop.clone());
    let (tell, told) = mpsc::channel();
    let thread = {
        let config = config.clone();
        // A thread of its own: F-Stack pins the one that starts it.
        thread::Builder::new()
            .name("innet-fstack".to_owned())
            .spawn(move || {
                let quiet = Quiet::begin();
                let started = initialise(&config);
                drop(quiet);
                let reactor = started.and_then(|()| {
                    // SAFETY: initialised on this thread just now.
                    unsafe { Reactor::enter(taken, stop) }.map_err(|source| Error::Io {
                        what: "F-Stack has no event queue".to_owned(),
                        source,
                    })
                });
                match reactor {
                    Ok(reactor) => {
                        let _ = tell.send(Ok(()));
                        if reactor.run() {
                            tracing::error!("the F-Stack reactor panicked and has ended");
                        }
                    }
                    Err(error) => drop(tell.send(Err(error))),
                }
            })
            .map_err(|source| Error::Io {
                what: "cannot start the F-Stack thread".to_owned(),
                source,
            })?
    };
    told.recv()
        .map_err(|_| Error::Internal("the F-Stack thread ended at its start".to_owned()))??;
    // SAFETY: a function without arguments, for the end of the process.
    unsafe { libc::atexit(stop_at_exit) };
    announce(config);
    for name in config.memif_clients.clone() {
        handle.spawn(|stack| find_peer_again(stack, name))?;
    }
    *state = State::Running(Running {
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

/// A memif of the role client connects when its port starts, and never again: here it starts again for as long as it
/// has no peer, so that it finds one that was started anew.
async fn find_peer_again(stack: Fstack, name: String) {
    const EVERY: Duration = Duration::from_millis(500);
    let Ok(name) = CString::new(name) else { return };
    loop {
        stack.sleep_until(Instant::now() + EVERY).await;
        let (mut port, mut link) = (0, ff::rte_eth_link::default());
        // SAFETY: on the reactor thread, between bursts; a string with its end, and room for each answer.
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

/// Ends the reactor before the libraries it uses are taken down.
extern "C" fn stop_at_exit() {
    let running = std::mem::replace(&mut *state(), State::Over);
    if let State::Running(running) = running
        && running.process == std::process::id()
        && running.thread.thread().id() != thread::current().id()
    {
        running.handle.stop();
        let _ = running.thread.join();
    }
}

/// The four steps of `ff_init`, with EAL's arguments from the file's `[innet]` section after F-Stack's own.
fn initialise(config: &Config) -> Result<()> {
    let failed = |step: &str| {
        let path = config.path.display();
        Error::Config(format!("F-Stack did not start with {path}: {step} failed"))
    };
    let bytes = config.path.clone().into_os_string().into_encoded_bytes();
    let path = CString::new(bytes).map_err(|_| failed("its name"))?;
    // F-Stack and EAL keep pointers to their arguments, so none is ever freed.
    let own = [
        c"innet-replay",
        c"--conf",
        path.as_c_str(),
        c"--proc-type=primary",
        c"--proc-id=0",
    ];
    let own = own.map(|argument| argument.to_owned().into_raw());
    // SAFETY: strings with their ends; nothing of F-Stack runs in this process yet.
    if unsafe { ff::ff_load_config(own.len() as c_int, own.as_ptr()) } < 0 {
        return Err(failed("reading it"));
    }
    // SAFETY: filled by `ff_load_config`, and changed by nobody else.
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
        // SAFETY: the function keeps to the contract of a delay, but for waits that only links need.
        unsafe { ff::rte_delay_us_callback_register(wait_for_no_link) };
    }
    // SAFETY: a list of strings; the steps are taken once and in F-Stack's order, on one thread.
    unsafe {
        if ff::ff_dpdk_init(count, arguments) < 0 {
            return Err(failed("starting DPDK"));
        }
        if config.memif_segments {
            make_room_for_segments().map_err(|reason| failed(&reason))?;
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

/// Lets whole segments through the ports; what was tried, where it failed.
///
/// # Safety
/// Between the first two steps and the third.
unsafe fn make_room_for_segments() -> std::result::Result<(), String> {
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

/// F-Stack waits up to 9 seconds, 100 ms at a time, for the links of all ports. That of a memif comes up with its
/// peer, which may come later.
extern "C" fn wait_for_no_link(microseconds: c_uint) {
    const LINK_CHECK: c_uint = 100_000;
    if microseconds != LINK_CHECK {
        // SAFETY: DPDK's own.
        unsafe { ff::rte_delay_us_block(microseconds) };
    }
}

/// Starts F-Stack in a forked child, turns its loop once and ends it.
fn try_in_child(config: &Config) -> Result<()> {
    let failed = |source| Error::Io {
        what: "cannot try F-Stack's start in a child".to_owned(),
        source,
    };
    let (words, child_end) = io::pipe().map_err(failed)?;
    // SAFETY: the child calls F-Stack alone and leaves by `_exit`; glibc keeps its allocator usable across a fork.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => trial(config, &child_end),
        child => {
            drop(child_end);
            let said = all_words(words, child);
            let status = end_of(child);
            if said.contains(STARTED) {
                return Ok(());
            }
            let said = last_words(&said);
            let how = match libc::WIFSIGNALED(status) {
                true => format!("was ended by signal {}", libc::WTERMSIG(status)),
                false => format!("exited with {}", libc::WEXITSTATUS(status)),
            };
            Err(Error::Config(format!(
                "F-Stack cannot start with {}: a trial in a child {how}, and said: {said}",
                config.path.display()
            )))
        }
    }
}

/// The child's part: it never returns.
fn trial(config: &Config, words: &impl AsRawFd) -> ! {
    extern "C" fn leave(status: c_int, _: *mut c_void) {
        // SAFETY: ends the process without the handlers of the program that it is a copy of.
        unsafe { libc::_exit(status) }
    }
    unsafe extern "C" fn once(_: *mut c_void) -> c_int {
        // SAFETY: called by the loop.
        unsafe { end_loop() };
        0
    }
    // Not by `eprintln`, which a test's process may have sent elsewhere.
    let say = |text: &str| drop(writeln!(io::stderr(), "{text}"));
    // SAFETY: open descriptors and C's own streams, in a process of one thread.
    unsafe {
        libc::dup2(words.as_raw_fd(), libc::STDOUT_FILENO);
        libc::dup2(words.as_raw_fd(), libc::STDERR_FILENO);
        // What the program had not written yet stays in the old stream.
        let stream = libc::fdopen(libc::STDOUT_FILENO, c"w".as_ptr());
        if !stream.is_null() {
            libc::setvbuf(stream, ptr::null_mut(), libc::_IONBF, 0);
            stdout = stream;
        }
        let no_core = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
        // Handlers run in the reverse order of their registration, so this is the first.
        on_exit(leave, ptr::null_mut());
    }
    let status = match initialise(config) {
        Ok(()) => {
            say(STARTED);
            // SAFETY: initialised on this thread; the loop ends after one turn, and gives its devices back.
            unsafe { ff::ff_run(once, ptr::null_mut()) };
            0
        }
        Err(error) => {
            say(&error.to_string());
            1
        }
    };
    // SAFETY: ends this process alone.
    unsafe { libc::_exit(status) }
}

/// What the child says until it has ended or its time is over; then it is killed.
fn all_words(mut words: impl Read + AsRawFd, child: libc::pid_t) -> String {
    let until = Instant::now() + TRIAL;
    let mut said = Vec::new();
    loop {
        let mut ready = libc::pollfd {
            fd: words.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let left = until.saturating_duration_since(Instant::now()).as_millis();
        // SAFETY: one descriptor.
        let polled = unsafe { libc::poll(&raw mut ready, 1, left as c_int) };
        let mut part = [0; 4096];
        match polled {
            0 => {
                // SAFETY: a child of this process that has not been waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
                let seconds = TRIAL.as_secs();
                said.extend(format!("\nit was not ready after {seconds} s\n").bytes());
                break;
            }
            -1 => {}
            _ => match words.read(&mut part) {
                Ok(0) => break,
                Ok(count) => said.extend(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            },
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Waits until a child of this process has ended, and returns its status.
fn end_of(child: libc::pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: a child of this process that nobody else waits for.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    status
}

/// The end of what was said, on one line.
fn last_words(said: &str) -> String {
    // Its configuration comes first, as "[section]: key=value".
    let lines = said.lines().map(str::trim);
    let lines: Vec<&str> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('['))
        .collect();
    lines[lines.len().saturating_sub(LAST_WORDS)..].join("; ")
}

// SAFETY: as glibc declares them in stdio.h and stdlib.h.
unsafe extern "C" {
    /// C's standard output; glibc lets it be assigned.
    static mut stdout: *mut libc::FILE;
    /// C's standard error; glibc lets it be assigned.
    static mut stderr: *mut libc::FILE;
    /// glibc's `atexit` with the exit status.
    fn on_exit(handler: unsafe extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Sends what C prints nowhere: F-Stack, DPDK and FreeBSD print their configuration and their progress at the start,
/// some of it to standard output, which is the program's own. The trial has said what went wrong, if anything does.
struct Quiet {
    before: [*mut libc::FILE; 2],
    nowhere: *mut libc::FILE,
}

impl Quiet {
    fn begin() -> Self {
        // SAFETY: strings with their ends; the old streams stay open.
        unsafe {
            let nowhere = libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
            let before = [stdout, stderr];
            if !nowhere.is_null() {
                stdout = nowhere;
                stderr = nowhere;
            }
            Quiet { before, nowhere }
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the streams there were before; the other one is closed once, after nothing refers to it.
        unsafe {
            [stdout, stderr] = self.before;
            if !self.nowhere.is_null() {
                libc::fclose(self.nowhere);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    static INTERRUPTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn interrupted(_: c_int) {
        // Pairs with the load in the test; nothing else is published with it.
        INTERRUPTED.store(true, Relaxed);
    }

    #[test]
    fn a_child_is_waited_for_through_signals() {
        // Without SA_RESTART: what a handler interrupts says so.
        // SAFETY: a handler that stores to an atomic, for a signal that nothing else here uses.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = interrupted as extern "C" fn(c_int) as usize;
            libc::sigaction(libc::SIGUSR2, &raw const action, ptr::null_mut());
        }
        let mut shell = Command::new("sh");
        shell.args(["-c", "read line; exit 7"]);
        let mut child = shell.stdin(Stdio::piped()).spawn().unwrap();
        let id = child.id().cast_signed();
        let (tell, told) = mpsc::channel();
        let waiting = thread::spawn(move || {
            // SAFETY: the names of this thread.
            tell.send(unsafe { (libc::gettid(), libc::pthread_self()) })
                .unwrap();
            end_of(id)
        });
        let (task, thread) = told.recv().unwrap();
        // Asleep: it waits for the child.
        let state = format!("/proc/self/task/{task}/stat");
        while !fs::read_to_string(&state).unwrap().contains(") S ") {
            thread::yield_now();
        }
        // SAFETY: the thread goes on until its child ends.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
        // Pairs with the store in the handler.
        while !INTERRUPTED.load(Relaxed) {
            thread::yield_now();
        }
        drop(child.stdin.take());
        assert_eq!(libc::WEXITSTATUS(waiting.join().unwrap()), 7);
        // It has been waited for already.
        assert!(child.wait().is_err());
    }
}
