//! Forked processes have random numbers of their own. Alone in its process: a fork copies only the thread that calls it.

use std::io::{Read, Write};

use replay_core::memory::{Memory, MemoryLimits};
use replay_core::priority_index::PriorityIndex;
use replay_core::table::ids::IdSpace;

/// The result of `work` in a forked child.
fn in_a_child(work: impl FnOnce() -> u64) -> u64 {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the child calls nothing that another thread of this process could hold a lock of (glibc's allocator is usable
    // after a fork), and ends without running the test harness any further.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let written = writer.write_all(&work().to_ne_bytes());
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
fn children_have_random_numbers_of_their_own() {
    let incarnation = || Memory::new(MemoryLimits::default()).incarnation();
    let own = incarnation();
    let children = [(); 2].map(|()| in_a_child(incarnation));
    assert_ne!(children[0], children[1]);
    assert!(!children.contains(&own));

    let table_number = || u64::from(IdSpace::unused().number);
    let own = table_number();
    assert_eq!(table_number(), (own + 1) % (1 << 16));
    // Random numbers of 16 bits: four in a row are no accident.
    let children = [(); 4].map(|()| in_a_child(table_number));
    assert_ne!(children, [own + 2; 4]);
    assert_ne!(children, [children[0]; 4]);

    let of = |seed| PriorityIndex::new(1 << 16, 1.0, -19, seed).unwrap();
    let sampled = |index: &PriorityIndex| {
        index.update(&(0..1 << 16).collect::<Vec<_>>(), vec![1.0; 1 << 16]).unwrap();
        index.sample(1, 0.0).unwrap().indexes[0] as u64
    };
    let (unseeded, seeded) = (of(None), of(Some(7)));
    let made = [(); 4].map(|()| in_a_child(|| sampled(&of(None))));
    assert_ne!(made, [made[0]; 4]);
    let inherited = [(); 4].map(|()| in_a_child(|| sampled(&unseeded)));
    assert_ne!(inherited, [inherited[0]; 4]);
    let repeated = [(); 2].map(|()| in_a_child(|| sampled(&seeded)));
    assert_eq!(repeated, [sampled(&of(Some(7))); 2]);
}
