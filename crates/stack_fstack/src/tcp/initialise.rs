//! F-Stack's initialisation. It prints to standard error, and most failures end the process by `exit`.

use std::ffi::{CString, c_int, c_uint};
use std::io::{self, Write};
use std::path::PathBuf;
use std::ptr;
use std::sync::Mutex;

use fstack_sys::fstack as ff;

use crate::config::Config;
use base::wait::lock;
use replay_link::error::{Error, Result};

/// Configuration file of the start in progress, for [`explain_exit`].
static STARTING: Mutex<Option<PathBuf>> = Mutex::new(None);

// SAFETY: declared as in glibc's stdio.h.
unsafe extern "C" {
    /// C's standard output; glibc lets it be assigned.
    static mut stdout: *mut libc::FILE;
    /// C's standard error.
    static mut stderr: *mut libc::FILE;
}

/// Initialises F-Stack on this thread.
///
/// # Errors
/// [`Error::Config`] for a failure that does not end the process.
pub(super) fn initialise(config: &Config) -> Result<()> {
    *lock(&STARTING) = Some(config.path.clone());
    // Standard output belongs to the program.
    // SAFETY: `explain_exit` does not unwind; C's own streams, which stay open.
    let before = unsafe {
        libc::atexit(explain_exit);
        let before = stdout;
        stdout = stderr;
        before
    };
    let initialised = initialise_stages(config);
    // SAFETY: the stream that it was before.
    unsafe { stdout = before };
    *lock(&STARTING) = None;
    initialised
}

/// Says at the exit of the process that a failed start has caused it.
extern "C" fn explain_exit() {
    if let Some(path) = lock(&STARTING).take() {
        let path = path.display();
        // Ignores a closed standard error.
        let _ = writeln!(
            io::stderr(),
            "F-Stack cannot start with {path} and ends this process: change what its lines above name (innet-replay doctor --stack-config \
             {path} checks the machine)"
        );
    }
}

/// The four stages of `ff_init`, with the EAL arguments of the file's `[innet]` section after F-Stack's own.
fn initialise_stages(config: &Config) -> Result<()> {
    let failed = |stage: &str| {
        let path = config.path.display();
        Error::Config(format!("F-Stack cannot start with {path}: {stage} failed, as its lines on standard error say"))
    };
    let bytes = config.path.clone().into_os_string().into_encoded_bytes();
    let path = CString::new(bytes).map_err(|_| failed("its name"))?;
    // Never freed: F-Stack and EAL keep pointers to their arguments.
    let own = [c"innet-replay", c"--conf", path.as_c_str(), c"--proc-type=primary", c"--proc-id=0"];
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
    // SAFETY: a list of zero-terminated strings; the stages run once, in F-Stack's order, on one thread.
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

/// Lets the ports pass whole segments. The error names the failed stage.
///
/// # Safety
/// Called between `ff_dpdk_init` and `ff_freebsd_init`.
unsafe fn enable_whole_segments() -> std::result::Result<(), String> {
    // SAFETY: by the contract of this function.
    match unsafe { ff::innet_ff_whole_segments() } {
        0.. => Ok(()),
        error if error == -libc::ENOENT => Err("memif_segments (is each memif in port_list?)".to_owned()),
        error => {
            let reason = io::Error::from_raw_os_error(-error);
            Err(format!("memif_segments ({reason}; it takes 4 MB of [dpdk] memory)"))
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
