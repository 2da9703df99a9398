//! Sockets and locked files that a forked child does not keep: with a copy of them open, an address stays taken, a peer sees no end,
//! and a lock is held.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};

/// Identity of the file at each descriptor, 0 without one. Entries of closed files stay: what is there later has another identity.
///
/// Relaxed: the child has one thread, and everything that its parent had stored.
static FILES: [AtomicU64; 1 << 16] = [const { AtomicU64::new(0) }; 1 << 16];

/// All entries are below it. Relaxed, as `FILES`: a fork between the two stores leaves that one file open.
static END: AtomicUsize = AtomicUsize::new(0);

/// Closes the children's copies of a socket, or of a regular file. Its owner must not drop it there.
pub fn close_in_children(file: &impl AsFd) {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the handler only calls functions that are safe in a forked child. Out of memory, it is not registered.
        unsafe { libc::pthread_atfork(None, None, Some(close_files)) };
    });
    let descriptor = file.as_fd().as_raw_fd();
    if let (Some(entry), Some(identity)) = (FILES.get(descriptor as usize), identity(descriptor)) {
        entry.store(identity, Relaxed);
        END.fetch_max(descriptor as usize + 1, Relaxed);
    }
}

extern "C" fn close_files() {
    for (descriptor, entry) in FILES[..END.load(Relaxed)].iter().enumerate() {
        let expected = entry.swap(0, Relaxed);
        if expected != 0 && identity(descriptor as RawFd) == Some(expected) {
            // SAFETY: it is the parent's file, which nothing in the child uses or closes.
            unsafe { libc::close(descriptor as RawFd) };
        }
    }
}

/// Device and inode of the socket or regular file at a descriptor; `None` for another file.
fn identity(descriptor: RawFd) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is valid for the call, which fills it on success.
    let status = unsafe { (libc::fstat(descriptor, status.as_mut_ptr()) == 0).then(|| status.assume_init()) };
    let kept = |status: &libc::stat| matches!(status.st_mode & libc::S_IFMT, libc::S_IFSOCK | libc::S_IFREG);
    status.filter(kept).map(|status| status.st_ino ^ status.st_dev.rotate_left(40))
}
