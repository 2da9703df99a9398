//! DPDK's environment abstraction layer (EAL): started once in a process; devices are hot-plugged afterwards.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::sync::{Mutex, mpsc};
use std::{io, ptr, thread};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use base::wait::lock;
use fstack_sys::dpdk as rte;

use crate::{Error, Result};

/// Arguments of every start: no files shared between processes, as each has its own devices, and no telemetry socket.
const ALWAYS: [&str; 3] = ["innet", "--no-shconf", "--no-telemetry"];

struct Started {
    arguments: Vec<String>,
    /// Process that started EAL. A forked child inherits its memory, but not its threads.
    process: u32,
    failed: Option<String>,
}

static STATE: Mutex<Option<Started>> = Mutex::new(None);

/// Starts EAL with `arguments` (such as `--no-huge`, `-m`, `256`) unless it was started with the same ones.
///
/// # Errors
/// [`Error::Config`] for arguments that EAL refuses or that differ from the first start's, and after a fork.
pub fn start(arguments: &[String]) -> Result<()> {
    let refuse = |reason: String| Err(Error::Config(reason));
    // A panic leaves the state set or unset: it is set by one assignment.
    let mut state = lock(&STATE);
    if let Some(started) = &*state {
        if started.process != std::process::id() {
            return refuse(format!(
                "DPDK was started by process {}, of which this is a fork: start processes that use it afresh \
                 (multiprocessing: \"spawn\")",
                started.process
            ));
        }
        if started.arguments != arguments {
            return refuse(format!(
                "DPDK can start once in a process, and here it was started with {:?}: use those, or another process for {arguments:?}",
                started.arguments
            ));
        }
        return started.failed.clone().map_or(Ok(()), refuse);
    }
    let failed = initialise(arguments).err();
    *state = Some(Started { arguments: arguments.to_vec(), process: std::process::id(), failed: failed.clone() });
    failed.map_or(Ok(()), refuse)
}

fn initialise(arguments: &[String]) -> std::result::Result<(), String> {
    let mut all: Vec<String> = ALWAYS.map(str::to_owned).to_vec();
    let options = ["-l", "-c", "-S", "--lcores"];
    let names_cores = |argument: &String| options.iter().any(|option| argument.starts_with(option));
    if !arguments.iter().any(names_cores) {
        // One core: by default EAL starts a thread for each, but this program starts its own polling threads.
        let first = allowed().first().copied().unwrap_or_default();
        all.push(format!("--lcores=0@{first}"));
    }
    // Prefix of the hugepage files.
    all.push(format!("--file-prefix=innet-{}", std::process::id()));
    all.extend_from_slice(arguments);
    let all: std::result::Result<Vec<CString>, _> = all.into_iter().map(CString::new).collect();
    let all = all.map_err(|_| "an argument for DPDK has a zero byte in it".to_owned())?;
    // A separate thread, as EAL pins the thread that starts it.
    let start = thread::Builder::new().name("innet-eal".into()).spawn(|| {
        // Never freed, as EAL keeps pointers to its arguments.
        let mut list: Vec<*mut c_char> = all.into_iter().map(CString::into_raw).collect();
        let count = list.len() as c_int;
        list.push(ptr::null_mut());
        // SAFETY: the list and its strings are leaked, so they live as long as EAL. `STATE`, locked by the caller, says that EAL was not
        // started before.
        let (taken, error) = unsafe {
            rte::innet_log_to_stderr();
            let taken = rte::rte_eal_init(count, list.leak().as_mut_ptr());
            (taken, rte::innet_errno())
        };
        if taken < 0 { Err(describe(error)) } else { Ok(()) }
    });
    let started = start.map_err(|error| error.to_string())?.join();
    let started = started.unwrap_or_else(|_| Err("its start panicked".into()));
    started.map_err(|reason| {
        format!(
            "DPDK does not start with {arguments:?}: {reason}; its own message is in standard error. Without hugepages give it --no-huge, \
             -m and megabytes, and without a network card --no-pci: enough for virtual devices"
        )
    })
}

/// DPDK's text for an error number. Negative numbers are accepted.
pub fn describe(error: c_int) -> String {
    // SAFETY: DPDK returns a terminated string, which this thread's next call may overwrite; it is copied at once.
    let text = unsafe { CStr::from_ptr(rte::rte_strerror(error.abs())) };
    text.to_string_lossy().into_owned()
}

/// Runs `work` on DPDK's interrupt thread and returns when it is done. memif opens and closes connections on that thread without a lock
/// (DPDK 22.11): closing one on another thread frees its memory twice if the peer closes it at the same time.
pub fn on_interrupt_thread<F: FnOnce() + Send>(work: F) {
    struct InterruptCall<F> {
        work: F,
        done: mpsc::Sender<()>,
    }
    unsafe extern "C" fn call<F: FnOnce()>(job: *mut c_void) {
        // SAFETY: `job` is the box leaked below, whose only pointer was passed to the alarm, and each alarm calls once.
        let InterruptCall { work, done } = *unsafe { Box::from_raw(job.cast::<InterruptCall<F>>()) };
        work();
        // The receiver waits until this message, so sending cannot fail.
        let _ = done.send(());
    }
    let (done, waited) = mpsc::channel();
    let job = Box::into_raw(Box::new(InterruptCall { work, done }));
    // SAFETY: the job is leaked until `call` takes it. Its borrows live until this function returns, which is after the message
    // that `call` sends at its end.
    if unsafe { rte::rte_eal_alarm_set(1, call::<F>, job.cast()) } == 0 {
        // The job always sends: a panic in it would abort the process.
        let _ = waited.recv();
    } else {
        // SAFETY: the alarm was not set, so this is the only use of the box.
        unsafe { call::<F>(job.cast()) };
    }
}

/// Registration of this thread with DPDK until dropped: gives it a cache of each packet pool.
pub struct Registered(PhantomData<*mut ()>);

impl Registered {
    /// `None` if DPDK has no free thread slot: the thread then works without caches, more slowly.
    pub fn new() -> Option<Self> {
        // SAFETY: EAL runs, as opening a device has started it.
        (unsafe { rte::rte_thread_register() } == 0).then_some(Registered(PhantomData))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: this thread registered itself: the pointer in the type keeps it from moving to another thread.
        unsafe { rte::rte_thread_unregister() };
    }
}

/// Numbers of the cores.
pub fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// Pins this thread to a core.
///
/// # Errors
/// Errors of the operating system, such as for a core that this process may not use.
pub fn pin(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}
