//! Sockets that a forked child does not keep: with a copy of them open, an address stays taken and a peer sees no end.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Inode of the socket at each descriptor, 0 without one. Entries of closed sockets stay: what is there later has another inode.
///
/// Relaxed: the child has one thread, and everything that its parent had stored.
static SOCKETS: [AtomicU64; 1 << 16] = [const { AtomicU64::new(0) }; 1 << 16];

/// All entries are below it.
static END: AtomicUsize = AtomicUsize::new(0);

/// Closes the children's copies of a socket. Its owner must not drop it there.
pub fn close_in_children(socket: &impl AsFd) {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        // SAFETY: the handler only calls functions that are safe in a forked child. Out of memory, it is not registered.
        unsafe { libc::pthread_atfork(None, None, Some(close_sockets)) };
    });
    let descriptor = socket.as_fd().as_raw_fd();
    if let (Some(entry), Some(inode)) = (SOCKETS.get(descriptor as usize), inode(descriptor)) {
        entry.store(inode, Relaxed);
        END.fetch_max(descriptor as usize + 1, Relaxed);
    }
}

extern "C" fn close_sockets() {
    for (descriptor, entry) in SOCKETS[..END.load(Relaxed)].iter().enumerate() {
        let expected = entry.swap(0, Relaxed);
        if expected != 0 && inode(descriptor as i32) == Some(expected) {
            // SAFETY: it is the parent's socket, which nothing in the child uses or closes.
            unsafe { libc::close(descriptor as i32) };
        }
    }
}

/// The inode of the socket at a descriptor; `None` for another file.
fn inode(descriptor: i32) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `status` is valid for the call, which fills it on success.
    let status = unsafe { (libc::fstat(descriptor, status.as_mut_ptr()) == 0).then(|| status.assume_init()) };
    status.filter(|status| status.st_mode & libc::S_IFMT == libc::S_IFSOCK).map(|status| status.st_ino)
}
