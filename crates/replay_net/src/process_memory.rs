//! Memory that this process may have: the machine's, or the limit of its control group.

use std::fs;
use std::path::{Path, PathBuf};

use replay_core::memory::MemoryShare;

/// A limit of the control group of this process, or of one above it.
pub(crate) struct GroupLimit {
    /// Bytes that all processes of the group may have.
    pub bytes: u64,
    /// Bytes that they have.
    pub used: u64,
}

/// `percent` of the memory that this process may have; `None` where that is not known.
pub fn share(percent: u8) -> Option<MemoryShare> {
    share_below(Path::new("/"), percent)
}

/// The same, of a system with its files below `root`.
fn share_below(root: &Path, percent: u8) -> Option<MemoryShare> {
    let share = |(of, whose)| MemoryShare { percent, of, whose };
    let machine = total(root).map(|bytes| (bytes, "the machine"));
    let groups = group_limits(root).into_iter();
    let groups = groups.map(|group| (group.bytes, "the control group of this process"));
    // The machine first: a group without a limit of its own may have one that is as large.
    machine
        .into_iter()
        .chain(groups)
        .min_by_key(|(bytes, _)| *bytes)
        .map(share)
}

/// Bytes of the machine's memory.
fn total(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let mut lines = text.lines();
    let total = lines.find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Limits of the control groups that this process is in, of both versions (`cgroups(7)`), for a system with its files below
/// `root`. A group without a limit has none here in version 2 (`max`), and one far above any machine's memory in version 1.
pub(crate) fn group_limits(root: &Path) -> Vec<GroupLimit> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = root.join("sys/fs/cgroup");
    // The groups of a container may be mounted without those above it, so that its own is the root.
    let mut limits: Vec<_> = limits_of(&mounts, "", &VERSION_2).collect();
    limits.extend(limits_of(&mounts.join("memory"), "", &VERSION_1));
    for line in text.lines() {
        // Number of the hierarchy, its controllers, and the group.
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

/// Files of a limit, and of the bytes in use.
type Files = [&'static str; 2];

const VERSION_1: Files = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
const VERSION_2: Files = ["memory.max", "memory.current"];

/// Limits of a group, an absolute path below its mount, and of those above it.
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

    const MACHINE: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n",
    );
    const GIB: u64 = 1 << 30;

    /// Bytes of which a system with these files takes a share, and whose they are.
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
        let found =
            |own_limit, above_limit| of(&[MACHINE, group, (own, own_limit), (above, above_limit)]);
        assert_eq!(found("max\n", "max\n"), Some((16 * GIB, "the machine")));
        assert_eq!(found("4294967296\n", "max\n"), group_of(4 * GIB));
        assert_eq!(found("4294967296\n", "2147483648\n"), group_of(2 * GIB));
        assert_eq!(
            found("99999999999999\n", "max\n"),
            Some((16 * GIB, "the machine"))
        );
        // A container, whose own group is the root of its mount.
        let container = [
            MACHINE,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1073741824\n"),
        ];
        assert_eq!(of(&container), group_of(GIB));
    }

    #[test]
    fn groups_of_version_1() {
        let groups = (
            "proc/self/cgroup",
            "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/other\n0::/\n",
        );
        let unlimited = "9223372036854771712\n";
        let own = "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes";
        let root = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        let group_of = |bytes| Some((bytes, "the control group of this process"));
        let found = |own_limit| of(&[MACHINE, groups, (own, own_limit), (root, unlimited)]);
        assert_eq!(found("3221225472\n"), group_of(3 * GIB));
        assert_eq!(found(unlimited), Some((16 * GIB, "the machine")));
        // A container that does not see its own path.
        assert_eq!(
            of(&[MACHINE, groups, (root, "1073741824\n")]),
            group_of(GIB)
        );
    }
}
