//! The folder of a server's snapshots: what is there when its server starts and saves.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use replay_core::Replay;
use replay_core::memory::{Memory, MemoryLimits};
use replay_link::error::Result;
use replay_server::snapshots::Snapshots;
use replay_server::snapshots::file::LocalDisk;
use support::*;

/// Starts a server's memory with the folder.
fn open(folder: &Path) -> Result<(Arc<Memory>, Arc<Snapshots>)> {
    let memory = Memory::new(MemoryLimits::default());
    let snapshots = Snapshots::open(memory.clone(), Box::new(LocalDisk), folder)?;
    Ok((memory, snapshots))
}

/// Saves a memory with one table, once with it empty and once with four steps.
fn save_two(folder: &Path) {
    let (memory, snapshots) = open(folder).unwrap();
    memory.create_table(&queue("t")).unwrap();
    snapshots.save().unwrap();
    let replay: &dyn Replay = &*memory;
    let mut pushes = replay.open_writer("t", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 4), &soon()).unwrap();
    snapshots.save().unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

fn change_byte(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_snapshot_that_cannot_be_read_is_renamed_and_never_removed() {
    let folder = tempfile::tempdir().unwrap();
    save_two(folder.path());
    change_byte(&folder.path().join("0000000002.snapshot"), 30);
    let unreadable = "0000000002.snapshot.unreadable";
    for last in [4, 6] {
        let (memory, snapshots) = open(folder.path()).unwrap();
        assert_eq!(memory.table("t").unwrap().stats()["steps"], 0, "the one before it is restored");
        snapshots.save().unwrap();
        snapshots.save().unwrap();
        let kept = [last - 1, last].map(|number| format!("{number:010}.snapshot"));
        let mut expected = vec![unreadable.to_owned()];
        expected.extend(kept);
        assert_eq!(names(folder.path()), expected);
    }
    // A number is not used again, even where the file of it was the newest.
    for number in [5, 6] {
        fs::remove_file(folder.path().join(format!("{number:010}.snapshot"))).unwrap();
    }
    open(folder.path()).unwrap().1.save().unwrap();
    assert_eq!(names(folder.path()), [unreadable, "0000000003.snapshot"]);
}

/// World 2548: a flipped number of the format looked like that of a later release, which refuses the start.
#[test]
fn a_snapshot_whose_format_number_is_damaged_is_replaced_by_the_one_before() {
    for at in 8..12 {
        let folder = tempfile::tempdir().unwrap();
        save_two(folder.path());
        change_byte(&folder.path().join("0000000002.snapshot"), at);
        let (memory, _snapshots) = open(folder.path()).unwrap();
        assert_eq!(memory.table("t").unwrap().stats()["steps"], 0);
    }
}

#[test]
fn damaged_snapshots_alone_keep_their_names() {
    let folder = tempfile::tempdir().unwrap();
    save_two(folder.path());
    let before = names(folder.path());
    before.iter().for_each(|name| change_byte(&folder.path().join(name), 30));
    for _ in 0..2 {
        let refused = open(folder.path()).err().unwrap().to_string();
        assert!(refused.contains("every snapshot in"), "{refused}");
        assert_eq!(names(folder.path()), before);
    }
}

#[test]
fn a_snapshot_of_a_later_release_refuses_the_start() {
    let folder = tempfile::tempdir().unwrap();
    save_two(folder.path());
    let before = names(folder.path());
    let newest = folder.path().join("0000000002.snapshot");
    let mut bytes = fs::read(&newest).unwrap();
    // The number of the format and its complement.
    bytes[8] ^= 0x80;
    bytes[10] ^= 0x80;
    let format = format!("format {}", bytes[8]);
    fs::write(&newest, bytes).unwrap();
    for part in ["0000000002.snapshot", &format, "start the release that has saved it, or move that file out of"] {
        let refused = open(folder.path()).err().unwrap().to_string();
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(names(folder.path()), before);
}

#[test]
fn only_the_servers_user_can_read_its_files() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("snapshots");
    save_two(&folder);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    let files = ["lock", "0000000001.snapshot", "0000000002.snapshot"];
    for name in files {
        assert_eq!(mode(&folder.join(name)), 0o600, "{name}");
    }
    // A folder that is there keeps its permissions.
    let listed = outer.path().join("listed");
    fs::create_dir(&listed).unwrap();
    fs::set_permissions(&listed, fs::Permissions::from_mode(0o755)).unwrap();
    save_two(&listed);
    assert_eq!(mode(&listed), 0o755);
    for name in files {
        assert_eq!(mode(&listed.join(name)), 0o600, "{name}");
    }
}

#[test]
fn a_folder_that_was_made_again_belongs_to_the_server_that_made_it() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("snapshots");
    let (_, first) = open(&folder).unwrap();
    first.save().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    for _ in 0..2 {
        let refused = first.save().unwrap_err().to_string();
        assert!(
            refused.contains("0000000002.snapshot cannot be written: its folder was removed or replaced"),
            "{refused}"
        );
    }
    let (_, second) = open(&folder).unwrap();
    second.save().unwrap();
    assert!(first.save().is_err());
    assert_eq!(names(&folder), ["0000000001.snapshot"]);
    second.save().unwrap();
}
