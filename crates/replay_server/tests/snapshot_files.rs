//! A snapshot in a file: what was there stays until the new one is whole, and errors name it.

mod support;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use replay_core::Replay;
use replay_core::memory::{Memory, MemoryLimits};
use replay_link::error::Error;
use replay_server::snapshots::file::{LocalDisk, restore, save, save_server};
use support::*;

/// A memory with four steps.
fn memory() -> Arc<Memory> {
    let memory = Memory::new(MemoryLimits::default());
    memory.create_table(&queue("t")).unwrap();
    let replay: &dyn Replay = &*memory;
    let mut pushes = replay.open_writer("t", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 4), &soon()).unwrap();
    memory
}

/// For a child process that can write no file: the snapshot that it is to replace.
const REPLACED: &str = "INNET_TEST_REPLACED_SNAPSHOT";

#[test]
fn a_full_disk_leaves_the_snapshot_that_was_there() {
    if let Some(path) = std::env::var_os(REPLACED) {
        match save(&memory(), path.as_ref()).unwrap_err() {
            Error::Io(error) => {
                assert_eq!(error.source.kind(), std::io::ErrorKind::FileTooLarge);
            }
            other => panic!("{other}"),
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("replay.snapshot");
    save(&memory(), &path).unwrap();
    let before = fs::read(&path).unwrap();
    let child = std::process::Command::new("sh")
        .args(["-c", "ulimit -f 0; trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_full_disk_leaves_the_snapshot_that_was_there"])
        .env(REPLACED, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_save_that_is_stopped_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot");
    let bytes = save_server(&LocalDisk, &memory(), &path, &AtomicBool::new(false)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
    fs::remove_file(&path).unwrap();
    let stopped = save_server(&LocalDisk, &memory(), &path, &AtomicBool::new(true));
    assert!(stopped.unwrap_err().to_string().contains("stopped"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn errors_of_a_restore_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("altered");
    save(&memory(), &path).unwrap();
    let again = Memory::new(MemoryLimits::default());
    let refused = |path: &Path| restore(&LocalDisk, &again, path).unwrap_err();
    let mut bytes = fs::read(&path).unwrap();
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = refused(&path);
    assert!(matches!(error, Error::Snapshot { .. }), "{error}");
    let text = error.to_string();
    let named = format!("the snapshot {} cannot be used: ", path.display());
    assert!(text.starts_with(&named), "{text}");
    assert!(text.ends_with("; nothing was restored"), "{text}");
    for (missing, reason) in [("/nowhere/snapshot", "No such file"), ("/dev/null", "not a regular file")] {
        let error = refused(missing.as_ref());
        assert!(matches!(error, Error::Io(_)), "{error}");
        let named = format!("the snapshot {missing} cannot be read: ");
        let text = error.to_string();
        assert!(text.starts_with(&named) && text.contains(reason), "{text}");
    }
    bytes[20] ^= 1;
    fs::write(&path, &bytes).unwrap();
    restore(&LocalDisk, &again, &path).unwrap();
    assert_eq!(again.table("t").unwrap().stats()["steps"], 4);
}

#[test]
fn a_symbolic_link_in_place_of_the_temporary_file_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    let victim = folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, folder.path().join("memory.partial")).unwrap();
    let error = save(&memory(), &path).unwrap_err();
    assert!(matches!(error, Error::Io(_)), "{error}");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(!path.exists());
}

#[test]
fn two_processes_do_not_write_the_same_temporary_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory");
    let partial = folder.path().join("memory.partial");
    // A lock belongs to an opened file, so this one is as good as another process's.
    let other = File::create(&partial).unwrap();
    // SAFETY: the descriptor is open for the call, which touches no memory.
    assert_eq!(unsafe { libc::flock(other.as_raw_fd(), libc::LOCK_EX) }, 0);
    fs::write(&partial, "half of a snapshot").unwrap();
    let error = save(&memory(), &path).unwrap_err();
    assert!(error.to_string().contains("another process"), "{error}");
    assert_eq!(fs::read(&partial).unwrap(), b"half of a snapshot");
    // One that was killed in the middle leaves its file behind.
    drop(other);
    save(&memory(), &path).unwrap();
    assert!(path.exists() && !partial.exists());
}
