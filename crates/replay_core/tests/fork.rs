//! Forked processes sample numbers of their own. Alone in its process: a fork copies only the thread that calls it.

use std::io::{Read, Write};

use replay_core::memory::{Memory, MemoryLimits};

/// The incarnation of a memory that a forked child makes.
fn incarnation_in_a_child() -> u64 {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the child calls nothing that another thread of this process could hold a lock of (glibc's allocator is usable
    // after a fork), and ends without running the test harness any further.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let incarnation = Memory::new(MemoryLimits::default()).incarnation();
        let written = writer.write_all(&incarnation.to_ne_bytes());
        // SAFETY: `_exit` ends the child at once.
        unsafe { libc::_exit(i32::from(written.is_err())) };
    }
    drop(writer);
    let mut bytes = [0; 8];
    reader.read_exact(&mut bytes).unwrap();
    let mut status = 0;
    // SAFETY: `status` is valid for the call.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    u64::from_ne_bytes(bytes)
}

#[test]
fn memories_of_two_children_have_two_incarnations() {
    let own = Memory::new(MemoryLimits::default()).incarnation();
    let children = [(); 2].map(|()| incarnation_in_a_child());
    assert_ne!(children[0], children[1]);
    assert!(!children.contains(&own));
}
