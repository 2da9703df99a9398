//! Memory that this process may have: all of the machine, or what is left of its control group or of its address space.

use std::fs;
use std::path::{Path, PathBuf};

use base::allocation::{self, MemoryLeft};
use replay_core::memory::MemoryShare;

/// Makes this process compare its large allocations with [`left`].
pub fn guard_allocations() {
    allocation::measure_by(left);
}

/// Makes this process allocate from one arena where its address space is limited: glibc reserves 64 MiB of it for each other thread that
/// allocates, at any time. Called before the first thread starts, by a program that is all ours.
pub fn spare_addresses() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if addresses_left(Path::new("/")).is_some() {
        // SAFETY: mallopt takes the allocator's own locks and moves no allocation.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Memory that this process may still have; `None` if no limit is known.
pub fn left() -> Option<MemoryLeft> {
    left_below(Path::new("/"))
}

/// `percent` of [`left`].
pub fn share(percent: u8) -> Option<MemoryShare> {
    left().map(|of| MemoryShare { percent, of })
}

/// [`left`] on a system whose files are below `root`.
fn left_below(root: &Path) -> Option<MemoryLeft> {
    let machine = total(root).map(|bytes| MemoryLeft { bytes, whose: "of the machine" });
    let groups = left_in_groups(root)
        .into_iter()
        .map(|bytes| MemoryLeft { bytes, whose: "left in the control group of this process" });
    let addresses = addresses_left(root)
        .map(|bytes| MemoryLeft { bytes, whose: "left in the address space of this process (ulimit -v)" });
    // The machine is first, so that it wins a tie: a group without a limit may report the machine's memory.
    machine.into_iter().chain(groups).chain(addresses).min_by_key(|room| room.bytes)
}

/// Bytes of address space that this process may still reserve; `None` without a limit.
fn addresses_left(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/self/limits")).ok()?;
    let limit = text.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    // "unlimited" is no number.
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
    let used = kibibytes(&fs::read_to_string(root.join("proc/self/status")).ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

/// Bytes of the machine's memory.
fn total(root: &Path) -> Option<u64> {
    kibibytes(&fs::read_to_string(root.join("proc/meminfo")).ok()?, "MemTotal:")
}

/// Bytes of the line `name`, which is in kibibytes.
pub fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Bytes left in this process's control groups that have a memory limit, of both versions (`cgroups(7)`), on a system whose files are below
/// `root`. Version 2 marks a group without a limit by `max`, version 1 by a value above any machine's memory. Copies of files do not count as
/// used: the kernel gives them up first.
pub fn left_in_groups(root: &Path) -> Vec<u64> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = root.join("sys/fs/cgroup");
    // Fields: hierarchy number, controllers, group.
    let groups = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    // A container may mount its own group as the root, without the ancestors.
    let groups = [("", ""), ("memory", "")].into_iter().chain(groups);
    let left = groups.map(|(controllers, group)| match controllers {
        "" => left_in(&mounts, group, VERSION_2),
        _ if controllers.split(',').any(|name| name == "memory") => left_in(&mounts.join("memory"), group, VERSION_1),
        _ => Vec::new(),
    });
    left.flatten().collect()
}

/// File names of a limit, and of the bytes in use.
type Files = [&'static str; 2];

const VERSION_1: Files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const VERSION_2: Files = ["memory.max", "memory.current"];

/// In version 1 a limit of this many bytes means none.
const UNLIMITED: u64 = 1 << 62;

/// Bytes left in a group and in its ancestors, as far as they have a limit. `group` is an absolute path below the mount.
fn left_in(mount: &Path, group: &str, [limit, used]: Files) -> Vec<u64> {
    let read = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse().ok();
    let left = |group: &Path| {
        let folder = mount.join(group);
        let bytes = read(folder.join(limit)).filter(|&bytes| bytes < UNLIMITED)?;
        let used = read(folder.join(used)).unwrap_or(0);
        Some(bytes.saturating_sub(used.saturating_sub(copies_of_files(&folder))))
    };
    Path::new(group.trim_start_matches('/')).ancestors().filter_map(left).collect()
}

/// Bytes of a group and those below it that are copies of files.
fn copies_of_files(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let of = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    // Version 1 counts the group alone without `total_`.
    let all = ["inactive_file ", "active_file "].map(|name| of(&format!("total_{name}")).or(of(name)).unwrap_or(0));
    all.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n");
    const GIB: u64 = 1 << 30;
    const MACHINES: &str = "of the machine";
    const GROUPS: &str = "left in the control group of this process";

    /// Memory that a process may have on a system with these files, and its limit.
    fn of(files: &[(&str, &str)]) -> Option<(u64, &'static str)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        left_below(root.path()).map(|room| (room.bytes, room.whose))
    }

    #[test]
    fn a_machine_without_groups() {
        assert_eq!(of(&[MACHINE]), Some((16 * GIB, MACHINES)));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("proc/meminfo", "MemTotal: much\n")]), None);
    }

    #[test]
    fn the_least_limit_of_the_group_and_those_above_it() {
        let group = ("proc/self/cgroup", "0::/user.slice/job.scope\n");
        let own = "sys/fs/cgroup/user.slice/job.scope/memory.max";
        let above = "sys/fs/cgroup/user.slice/memory.max";
        let group_of = |bytes| Some((bytes, GROUPS));
        let found = |own_limit, above_limit| of(&[MACHINE, group, (own, own_limit), (above, above_limit)]);
        assert_eq!(found("max\n", "max\n"), Some((16 * GIB, MACHINES)));
        assert_eq!(found("4294967296\n", "max\n"), group_of(4 * GIB));
        assert_eq!(found("4294967296\n", "2147483648\n"), group_of(2 * GIB));
        assert_eq!(found("99999999999999\n", "max\n"), Some((16 * GIB, MACHINES)));
        // A container, whose own group is the root of its mount.
        let container = [MACHINE, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "1073741824\n")];
        assert_eq!(of(&container), group_of(GIB));
        // What others in the group use is not left, except for copies of files.
        let used = [
            ("sys/fs/cgroup/memory.current", "746586112\n"),
            ("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 104857600\nactive_file 104857600\nfile 9\n"),
        ];
        assert_eq!(of(&[&container[..], &used].concat()), group_of(GIB / 2));
    }

    #[test]
    fn the_address_space() {
        let status = ("proc/self/status", "VmPeak:\t 9999999 kB\nVmSize:\t 1048576 kB\n");
        let found = |limit: &str| {
            let limits = format!("Max open files            1024      4096      files\n{limit}\n");
            of(&[MACHINE, status, ("proc/self/limits", &limits)])
        };
        let left = Some((GIB, "left in the address space of this process (ulimit -v)"));
        assert_eq!(found("Max address space         2147483648           unlimited            bytes"), left);
        assert_eq!(found("Max address space         unlimited            unlimited            bytes"), of(&[MACHINE]));
    }

    #[test]
    fn groups_of_version_1() {
        let groups = ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/other\n0::/\n");
        let unlimited = "9223372036854771712\n";
        let own = "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes";
        let root = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        let group_of = |bytes| Some((bytes, GROUPS));
        let found = |own_limit| of(&[MACHINE, groups, (own, own_limit), (root, unlimited)]);
        assert_eq!(found("3221225472\n"), group_of(3 * GIB));
        assert_eq!(found(unlimited), Some((16 * GIB, MACHINES)));
        // A container that does not see its own path.
        assert_eq!(of(&[MACHINE, groups, (root, "1073741824\n")]), group_of(GIB));
    }
}
