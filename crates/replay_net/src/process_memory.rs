//! Memory limit of this process: the machine's memory, or the limit of its control group.

use std::fs;
use std::path::{Path, PathBuf};

use replay_core::memory::MemoryShare;

/// Memory limit of a control group: of this process's group, or of an ancestor.
pub(crate) struct GroupLimit {
    /// Limit of all processes in the group, in bytes.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
}

/// `percent` of the memory limit of this process; `None` if the limit is unknown.
pub fn share(percent: u8) -> Option<MemoryShare> {
    share_below(Path::new("/"), percent)
}

/// [`share`] on a system whose files are below `root`.
fn share_below(root: &Path, percent: u8) -> Option<MemoryShare> {
    let share = |(of, whose)| MemoryShare { percent, of, whose };
    let machine = total(root).map(|bytes| (bytes, "the machine"));
    let groups = group_limits(root).into_iter();
    let groups = groups.map(|group| (group.bytes, "the control group of this process"));
    // The machine is first, so that it wins a tie: a group without a limit may report the machine's memory.
    machine.into_iter().chain(groups).min_by_key(|(bytes, _)| *bytes).map(share)
}

/// Bytes of the machine's memory.
fn total(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let mut lines = text.lines();
    let total = lines.find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Memory limits of this process's control groups, of both versions (`cgroups(7)`), on a system whose files are below `root`. Version 2
/// marks a group without a limit by `max`, version 1 by a value above any machine's memory.
pub(crate) fn group_limits(root: &Path) -> Vec<GroupLimit> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = root.join("sys/fs/cgroup");
    // A container may mount its own group as the root, without the ancestors.
    let mut limits: Vec<_> = limits_of(&mounts, "", &VERSION_2).collect();
    limits.extend(limits_of(&mounts.join("memory"), "", &VERSION_1));
    for line in text.lines() {
        // Fields: hierarchy number, controllers, group.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else {
            continue;
        };
        if controllers.is_empty() {
            limits.extend(limits_of(&mounts, group, &VERSION_2));
        } else if controllers.split(',').any(|name| name == "memory") {
            limits.extend(limits_of(&mounts.join("memory"), group, &VERSION_1));
        }
    }
    limits
}

/// File names of a limit, and of the bytes in use.
type Files = [&'static str; 2];

const VERSION_1: Files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const VERSION_2: Files = ["memory.max", "memory.current"];

/// Limits of a group and its ancestors. `group` is an absolute path below the mount.
fn limits_of(mount: &Path, group: &str, [limit, used]: &Files) -> impl Iterator<Item = GroupLimit> {
    let group = PathBuf::from(group.trim_start_matches('/'));
    let folders: Vec<_> = group.ancestors().map(|group| mount.join(group)).collect();
    let read = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse().ok();
    let (limit, used) = (*limit, *used);
    folders.into_iter().filter_map(move |folder| {
        let bytes = read(folder.join(limit))?;
        let used = read(folder.join(used)).unwrap_or(0);
        Some(GroupLimit { bytes, used })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n");
    const GIB: u64 = 1 << 30;

    /// Memory of which a system with these files takes a share, and its owner.
    fn of(files: &[(&str, &str)]) -> Option<(u64, &'static str)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let share = share_below(root.path(), 80)?;
        assert_eq!(share.bytes(), share.of / 100 * 80);
        Some((share.of, share.whose))
    }

    #[test]
    fn a_machine_without_groups() {
        assert_eq!(of(&[MACHINE]), Some((16 * GIB, "the machine")));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("proc/meminfo", "MemTotal: much\n")]), None);
    }

    #[test]
    fn the_least_limit_of_the_group_and_those_above_it() {
        let group = ("proc/self/cgroup", "0::/user.slice/job.scope\n");
        let own = "sys/fs/cgroup/user.slice/job.scope/memory.max";
        let above = "sys/fs/cgroup/user.slice/memory.max";
        let group_of = |bytes| Some((bytes, "the control group of this process"));
        let found = |own_limit, above_limit| of(&[MACHINE, group, (own, own_limit), (above, above_limit)]);
        assert_eq!(found("max\n", "max\n"), Some((16 * GIB, "the machine")));
        assert_eq!(found("4294967296\n", "max\n"), group_of(4 * GIB));
        assert_eq!(found("4294967296\n", "2147483648\n"), group_of(2 * GIB));
        assert_eq!(found("99999999999999\n", "max\n"), Some((16 * GIB, "the machine")));
        // A container, whose own group is the root of its mount.
        let container = [MACHINE, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "1073741824\n")];
        assert_eq!(of(&container), group_of(GIB));
    }

    #[test]
    fn groups_of_version_1() {
        let groups = ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/other\n0::/\n");
        let unlimited = "9223372036854771712\n";
        let own = "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes";
        let root = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        let group_of = |bytes| Some((bytes, "the control group of this process"));
        let found = |own_limit| of(&[MACHINE, groups, (own, own_limit), (root, unlimited)]);
        assert_eq!(found("3221225472\n"), group_of(3 * GIB));
        assert_eq!(found(unlimited), Some((16 * GIB, "the machine")));
        // A container that does not see its own path.
        assert_eq!(of(&[MACHINE, groups, (root, "1073741824\n")]), group_of(GIB));
    }
}
