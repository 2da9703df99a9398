//! A trial of F-Stack's start in a forked child: a failed start ends its process by `exit`, and there the last lines of its
//! output become the error.

use std::ffi::{c_int, c_void};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::ptr;
use std::time::{Duration, Instant};

use fstack_sys::fstack as ff;

use super::initialise::initialise;
use super::reactor::end_loop;
use crate::config::Config;
use replay_net::error::{Error, Result};

/// Longest trial; hardware starts within a few seconds.
const TRIAL: Duration = Duration::from_secs(60);

/// Line that marks a successful trial, whatever its exit status.
const STARTED: &str = "innet: F-Stack has started";

/// Lines of a failed trial that the error quotes.
const QUOTED_LINES: usize = 6;

/// Starts F-Stack in a forked child, runs one turn of its loop and ends it.
///
/// # Errors
/// [`Error::Config`] with the last lines of the child's output; [`Error::Io`] when there is no child.
pub(super) fn try_in_child(config: &Config) -> Result<()> {
    let failed = |error| replay_net::io_error("cannot try F-Stack's start in a child")(error);
    let (output, child_end) = io::pipe().map_err(failed)?;
    // SAFETY: the child calls only F-Stack and ends by `_exit`; glibc keeps its allocator usable across a fork.
    match unsafe { libc::fork() } {
        -1 => Err(failed(io::Error::last_os_error())),
        0 => trial(config, &child_end),
        child => {
            drop(child_end);
            let output = read_output(output, child);
            let status = wait_for(child);
            if output.contains(STARTED) {
                return Ok(());
            }
            let output = last_lines(&output);
            let how = match libc::WIFSIGNALED(status) {
                true => format!("was ended by signal {}", libc::WTERMSIG(status)),
                false => format!("exited with {}", libc::WEXITSTATUS(status)),
            };
            Err(Error::Config(format!(
                "F-Stack cannot start with {}: a trial in a child process {how}, and printed: {output}",
                config.path.display()
            )))
        }
    }
}

/// The child's part of a trial.
fn trial(config: &Config, output: &impl AsRawFd) -> ! {
    extern "C" fn leave(status: c_int, _: *mut c_void) {
        // SAFETY: ends this process without running the parent program's exit handlers.
        unsafe { libc::_exit(status) }
    }
    unsafe extern "C" fn once(_: *mut c_void) -> c_int {
        // SAFETY: called by F-Stack's loop, on its thread.
        unsafe { end_loop() };
        0
    }
    // Not `eprintln`, whose output a test harness captures.
    let print = |text: &str| drop(writeln!(io::stderr(), "{text}"));
    // SAFETY: open descriptors and C's own streams, in a process with one thread.
    unsafe {
        libc::dup2(output.as_raw_fd(), libc::STDOUT_FILENO);
        libc::dup2(output.as_raw_fd(), libc::STDERR_FILENO);
        // A new stream: the old one may hold unwritten output of the parent.
        let stream = libc::fdopen(libc::STDOUT_FILENO, c"w".as_ptr());
        if !stream.is_null() {
            libc::setvbuf(stream, ptr::null_mut(), libc::_IONBF, 0);
            stdout = stream;
        }
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
        // Handlers run in the reverse order of their registration, so this one runs first.
        on_exit(leave, ptr::null_mut());
    }
    let status = match initialise(config) {
        Ok(()) => {
            print(STARTED);
            // SAFETY: initialised on this thread; the loop ends after one turn and releases its devices.
            unsafe { ff::ff_run(once, ptr::null_mut()) };
            0
        }
        Err(error) => {
            print(&error.to_string());
            1
        }
    };
    // SAFETY: ends only this process.
    unsafe { libc::_exit(status) }
}

/// The child's output until it has ended; at the end of [`TRIAL`] the child is killed.
fn read_output(mut pipe: impl Read + AsRawFd, child: libc::pid_t) -> String {
    let until = Instant::now() + TRIAL;
    let mut output = Vec::new();
    loop {
        let mut ready = libc::pollfd { fd: pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let left = until.saturating_duration_since(Instant::now()).as_millis();
        // SAFETY: one entry, for an open descriptor.
        let polled = unsafe { libc::poll(&raw mut ready, 1, left as c_int) };
        let mut part = [0; 4096];
        match polled {
            0 => {
                // SAFETY: a child of this process that was not waited for, so the id is still its own.
                unsafe { libc::kill(child, libc::SIGKILL) };
                let seconds = TRIAL.as_secs();
                output.extend(format!("\nit was not ready after {seconds} s\n").bytes());
                break;
            }
            -1 => {}
            _ => match pipe.read(&mut part) {
                Ok(0) => break,
                Ok(count) => output.extend(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            },
        }
    }
    String::from_utf8_lossy(&output).into_owned()
}

/// Waits for the end of a child process and returns its status.
fn wait_for(child: libc::pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: a child of this process for which no other code waits.
    while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    status
}

/// The last lines of the output, joined to one.
fn last_lines(output: &str) -> String {
    // F-Stack prints its configuration as "[section]: key=value".
    let lines = output.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with('[')).collect();
    lines[lines.len().saturating_sub(QUOTED_LINES)..].join("; ")
}

// SAFETY: declared as in glibc's stdio.h and stdlib.h.
unsafe extern "C" {
    /// C's standard output; glibc lets it be assigned.
    static mut stdout: *mut libc::FILE;
    /// C's standard error; glibc lets it be assigned.
    static mut stderr: *mut libc::FILE;
    /// glibc's `atexit` with the exit status.
    fn on_exit(handler: unsafe extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// C's output streams, redirected to /dev/null until this is dropped: at their start F-Stack, DPDK and FreeBSD print
/// configuration and progress, some of it to standard output, which belongs to the program. Errors were shown by the trial.
pub(super) struct SilencedOutput {
    before: [*mut libc::FILE; 2],
    nowhere: *mut libc::FILE,
}

impl SilencedOutput {
    pub(super) fn begin() -> Self {
        // SAFETY: zero-terminated strings; the old streams stay open.
        unsafe {
            let nowhere = libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
            let before = [stdout, stderr];
            if !nowhere.is_null() {
                stdout = nowhere;
                stderr = nowhere;
            }
            SilencedOutput { before, nowhere }
        }
    }
}

impl Drop for SilencedOutput {
    fn drop(&mut self) {
        // SAFETY: `before` holds the original streams; `nowhere` is closed once, and no stream refers to it any more.
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
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    static INTERRUPTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn interrupted(_: c_int) {
        // Pairs with the load in the test; nothing else is published with it.
        INTERRUPTED.store(true, Relaxed);
    }

    #[test]
    fn a_child_is_waited_for_through_signals() {
        // Without SA_RESTART: an interrupted call returns EINTR.
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
        let (sender, receiver) = mpsc::channel();
        let waiting = thread::spawn(move || {
            // SAFETY: the names of this thread.
            sender.send(unsafe { (libc::gettid(), libc::pthread_self()) }).unwrap();
            wait_for(id)
        });
        let (task, thread) = receiver.recv().unwrap();
        // Asleep: it waits for the child.
        let state = format!("/proc/self/task/{task}/stat");
        while !fs::read_to_string(&state).unwrap().contains(") S ") {
            thread::yield_now();
        }
        // SAFETY: the thread lives until its child ends.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR2) };
        // Pairs with the store in the handler.
        while !INTERRUPTED.load(Relaxed) {
            thread::yield_now();
        }
        drop(child.stdin.take());
        assert_eq!(libc::WEXITSTATUS(waiting.join().unwrap()), 7);
        // The child was already waited for.
        assert!(child.wait().is_err());
    }
}
