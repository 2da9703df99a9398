//! Cores of the machine that this process may use.

use std::io;
use std::mem::{size_of, zeroed};

/// Numbers of the cores.
pub fn allowed() -> Vec<usize> {
    // SAFETY: all zeros is an empty set.
    let mut set: libc::cpu_set_t = unsafe { zeroed() };
    // SAFETY: a set on this stack, with its size.
    unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    // SAFETY: each number is below the size of the set.
    let has = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    (0..libc::CPU_SETSIZE as usize).filter(has).collect()
}

/// Pins this thread to a core.
///
/// # Errors
/// Errors of the operating system, such as for a core that this process may not use.
pub fn pin(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: all zeros is an empty set, and the number is below its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(core, &mut set);
        set
    };
    // SAFETY: a set on this stack, with its size; 0 is this thread.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
