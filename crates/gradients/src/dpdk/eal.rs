//! DPDK's environment (EAL): it starts once in a process, and devices are plugged in afterwards.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use fstack_sys::dpdk as rte;

use super::cores;
use replay_core::error::{Error, Result};

/// What every start has: no files that processes share (each has its own devices), and no socket for questions.
const ALWAYS: [&str; 3] = ["innet", "--no-shconf", "--no-telemetry"];

struct Started {
    arguments: Vec<String>,
    /// A forked child has the memory of this, but not the threads.
    process: u32,
    failed: Option<String>,
}

static STATE: Mutex<Option<Started>> = Mutex::new(None);

/// Starts EAL with `arguments` (such as `--no-huge`, `-m`, `256`), or finds that it was started so.
///
/// # Errors
/// [`Error::Config`] for arguments that EAL refuses, for others than at the first start, and after a fork.
pub fn start(arguments: &[String]) -> Result<()> {
    let refuse = |reason: String| Err(Error::Config(reason));
    // A panic while it was held has left a whole state or none.
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
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
    *state = Some(Started {
        arguments: arguments.to_vec(),
        process: std::process::id(),
        failed: failed.clone(),
    });
    failed.map_or(Ok(()), refuse)
}

fn initialise(arguments: &[String]) -> std::result::Result<(), String> {
    let mut all: Vec<String> = ALWAYS.map(str::to_owned).to_vec();
    let places = ["-l", "-c", "-S", "--lcores"];
    let placed = |argument: &String| places.iter().any(|place| argument.starts_with(place));
    if !arguments.iter().any(placed) {
        // Otherwise it starts a thread for each core. Threads that poll are this program's own.
        let first = cores::allowed().first().copied().unwrap_or_default();
        all.push(format!("--lcores=0@{first}"));
    }
    // Of the files of huge pages, where there are some.
    all.push(format!("--file-prefix=innet-{}", std::process::id()));
    all.extend_from_slice(arguments);
    let all: std::result::Result<Vec<CString>, _> = all.into_iter().map(CString::new).collect();
    let all = all.map_err(|_| "an argument for DPDK has a zero byte in it".to_owned())?;
    // A thread of its own: EAL pins the one that starts it.
    let start = thread::Builder::new().name("innet-eal".into()).spawn(|| {
        // EAL keeps pointers to its arguments, so none is ever freed.
        let mut list: Vec<*mut c_char> = all.into_iter().map(CString::into_raw).collect();
        let count = list.len() as c_int;
        list.push(ptr::null_mut());
        // SAFETY: a list of strings that live until the end; EAL was not started before, as `STATE` says.
        let (taken, error) = unsafe {
            rte::innet_log_to_stderr();
            let taken = rte::rte_eal_init(count, list.leak().as_mut_ptr());
            (taken, rte::innet_errno())
        };
        if taken < 0 {
            Err(describe(error))
        } else {
            Ok(())
        }
    });
    let started = start.map_err(|error| error.to_string())?.join();
    let started = started.unwrap_or_else(|_| Err("its start panicked".into()));
    started.map_err(|reason| {
        format!(
            "DPDK does not start with {arguments:?}: {reason}; what it said stands in standard error. Without hugepages give it --no-huge, \
             -m and megabytes, and --no-pci where there is no card: enough for virtual devices"
        )
    })
}

/// DPDK's text for an error number, of either sign.
pub fn describe(error: c_int) -> String {
    // SAFETY: a string of DPDK's, of this thread until its next call.
    let text = unsafe { CStr::from_ptr(rte::rte_strerror(error.abs())) };
    text.to_string_lossy().into_owned()
}

/// Does `work` on DPDK's interrupt thread, and returns when it is done. There memif makes and ends its connections, without a lock against
/// other threads (DPDK 22.11): what ends them elsewhere frees their memory twice when the other end goes at that moment.
pub fn on_interrupt_thread<F: FnOnce() + Send>(work: F) {
    struct Job<F> {
        work: F,
        done: mpsc::Sender<()>,
    }
    unsafe extern "C" fn call<F: FnOnce()>(job: *mut c_void) {
        // SAFETY: of the box below, which is given away with the alarm; each alarm calls once.
        let Job { work, done } = *unsafe { Box::from_raw(job.cast::<Job<F>>()) };
        work();
        // Whoever waits is there: it returns after this alone.
        let _ = done.send(());
    }
    let (done, waited) = mpsc::channel();
    let job = Box::into_raw(Box::new(Job { work, done }));
    // SAFETY: the job lives until it is called; what it borrows lives until this function returns, which waits for it.
    if unsafe { rte::rte_eal_alarm_set(1, call::<F>, job.cast()) } == 0 {
        // An error is as good: the sender has gone with the job.
        let _ = waited.recv();
    } else {
        // SAFETY: nobody else was given it.
        unsafe { call::<F>(job.cast()) };
    }
}

/// This thread's share in the caches of DPDK's pools, until it is dropped.
pub struct Registered(PhantomData<*mut ()>);

impl Registered {
    /// Without one everything works, more slowly.
    pub fn new() -> Option<Self> {
        // SAFETY: EAL runs: whoever has a device has started it.
        (unsafe { rte::rte_thread_register() } == 0).then_some(Registered(PhantomData))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered by this thread, which a type with a pointer in it does not leave.
        unsafe { rte::rte_thread_unregister() };
    }
}
