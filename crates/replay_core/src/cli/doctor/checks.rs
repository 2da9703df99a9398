//! What a server on F-Stack needs of a machine, part by part. All but the rights and the number of cores is read from
//! files, so that tests can show a machine that they made up.

use std::fs;
use std::path::{Path, PathBuf};

use super::Finding;

/// Drivers through which DPDK has a card to itself.
const USER_SPACE_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// Where libraries are, on Debian and elsewhere.
const LIBRARY_FOLDERS: [&str; 8] = [
    "usr/local/lib/x86_64-linux-gnu",
    "usr/local/lib/aarch64-linux-gnu",
    "usr/local/lib64",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
];

/// Bits of `CapEff` in `/proc/self/status` (capabilities(7)).
const CAPABILITIES: [(u32, &str); 3] = [
    (12, "cap_net_admin"),
    (13, "cap_net_raw"),
    (14, "cap_ipc_lock"),
];

const NO_NIC: &str = "af_packet, af_xdp and memif devices need none";

/// A machine to look at.
pub struct Machine {
    /// In place of `/`.
    root: PathBuf,
    /// Whether this program was built with F-Stack.
    fstack: bool,
    /// Cores that this process may use.
    cores: usize,
}

impl Machine {
    /// The one that this runs on.
    pub fn this() -> Self {
        Machine {
            root: PathBuf::from("/"),
            fstack: cfg!(feature = "fstack"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Every part, in the order in which one would set them up.
    pub fn findings(&self) -> Vec<Finding> {
        vec![
            self.support(),
            self.dpdk(),
            self.hugepages(),
            self.vfio(),
            self.devices(),
            self.rights(),
            self.cores(),
        ]
    }

    fn support(&self) -> Finding {
        const PART: &str = "F-Stack support";
        if self.fstack {
            return Finding::ok(PART, "this program was built with it");
        }
        Finding::missing(
            PART,
            "this program was built without it",
            "install F-Stack (https://github.com/F-Stack/f-stack) and build again with the cargo feature `fstack`",
        )
    }

    fn dpdk(&self) -> Finding {
        const PART: &str = "DPDK";
        let library = LIBRARY_FOLDERS
            .iter()
            .flat_map(|folder| {
                names(&self.at(folder))
                    .into_iter()
                    .map(move |n| (folder, n))
            })
            .find(|(_, name)| name.starts_with("librte_eal.so"));
        match library {
            Some((folder, name)) => Finding::ok(PART, format!("{name} in /{folder}")),
            None => Finding::missing(
                PART,
                "librte_eal is in none of the folders for libraries",
                "install it (Debian: apt install libdpdk-dev)",
            ),
        }
    }

    fn hugepages(&self) -> Finding {
        const PART: &str = "hugepages";
        let mut reserved = Vec::new();
        let (mut total, mut free) = (0, 0);
        for size in names(&self.at("sys/kernel/mm/hugepages")) {
            let count = |what: &str| self.number(&format!("sys/kernel/mm/hugepages/{size}/{what}"));
            let (all, left) = (count("nr_hugepages"), count("free_hugepages"));
            (total, free) = (total + all, free + left);
            if all > 0 {
                let size = size.trim_start_matches("hugepages-");
                reserved.push(format!("{left} of {all} pages of {size} free"));
            }
        }
        if total == 0 {
            return Finding::missing(
                PART,
                "none are reserved",
                "echo 512 > /proc/sys/vm/nr_hugepages (1 GiB in pages of 2 MiB); or set no_huge=1 in the stack's \
                 configuration, which a network card may refuse",
            );
        }
        let found = reserved.join(", ");
        let Some(mount) = self.mount_of("hugetlbfs") else {
            return Finding::missing(
                PART,
                format!("{found}, not mounted"),
                "mkdir -p /dev/hugepages && mount -t hugetlbfs none /dev/hugepages",
            );
        };
        if free == 0 {
            return Finding::missing(
                PART,
                format!("{found}, at {mount}"),
                "end who uses them, or reserve more: echo 1024 > /proc/sys/vm/nr_hugepages",
            );
        }
        Finding::ok(PART, format!("{found}, at {mount}"))
    }

    fn vfio(&self) -> Finding {
        const PART: &str = "vfio";
        if !self.at("dev/vfio/vfio").exists() {
            return Finding::missing(
                PART,
                "/dev/vfio/vfio is not there",
                format!("modprobe vfio-pci; {NO_NIC}"),
            );
        }
        let unsafe_mode = self.text("sys/module/vfio/parameters/enable_unsafe_noiommu_mode") == "Y";
        match (
            names(&self.at("sys/kernel/iommu_groups")).len(),
            unsafe_mode,
        ) {
            (0, false) => Finding::missing(
                PART,
                "there, without an IOMMU",
                "start the kernel with intel_iommu=on or amd_iommu=on; on a machine without one (most virtual ones), \
                 echo 1 > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode",
            ),
            (0, true) => Finding::ok(PART, "without an IOMMU, in the unsafe mode"),
            (groups, _) => Finding::ok(PART, format!("{groups} IOMMU groups")),
        }
    }

    fn devices(&self) -> Finding {
        const PART: &str = "devices";
        let folder = self.at("sys/bus/pci/devices");
        let (mut ready, mut others) = (Vec::new(), Vec::new());
        for address in names(&folder) {
            let device = folder.join(&address);
            // PCI's class of network controllers.
            if !read(&device.join("class")).starts_with("0x02") {
                continue;
            }
            let driver = fs::read_link(device.join("driver"))
                .ok()
                .and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()))
                .unwrap_or_else(|| "no driver".to_owned());
            let told = format!("{address} ({driver})");
            match USER_SPACE_DRIVERS.contains(&driver.as_str()) {
                true => ready.push(told),
                false => others.push((address, told)),
            }
        }
        if !ready.is_empty() {
            return Finding::ok(PART, ready.join(", "));
        }
        let Some((address, _)) = others.first() else {
            return Finding::missing(PART, "no network card on PCI", NO_NIC);
        };
        let told: Vec<&str> = others.iter().map(|(_, told)| told.as_str()).collect();
        Finding::missing(
            PART,
            format!("no network card is DPDK's: {}", told.join(", ")),
            format!(
                "dpdk-devbind.py --bind=vfio-pci {address} takes it from the kernel: not the one that you are logged in \
                 through; {NO_NIC}"
            ),
        )
    }

    fn rights(&self) -> Finding {
        const PART: &str = "rights";
        let status = self.text("proc/self/status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map_or("", str::trim)
        };
        // Real, effective, saved and file system user.
        if field("Uid:").split_whitespace().nth(1) == Some("0") {
            return Finding::ok(PART, "root");
        }
        let effective = u64::from_str_radix(field("CapEff:"), 16).unwrap_or(0);
        let lacking: Vec<&str> = CAPABILITIES
            .iter()
            .filter(|(bit, _)| effective >> bit & 1 == 0)
            .map(|(_, name)| *name)
            .collect();
        if lacking.is_empty() {
            return Finding::ok(PART, "the capabilities for network and locked memory");
        }
        let all: Vec<&str> = CAPABILITIES.iter().map(|(_, name)| *name).collect();
        Finding::missing(
            PART,
            format!("not root, and without {}", lacking.join(", ")),
            format!(
                "run it as root, or setcap {}+ep on the program; for a card also: chown this user /dev/vfio/*",
                all.join(",")
            ),
        )
    }

    fn cores(&self) -> Finding {
        const PART: &str = "cores";
        let isolated = match self.text("sys/devices/system/cpu/isolated").as_str() {
            "" => "none of them isolated".to_owned(),
            list => format!("isolated: {list}"),
        };
        if self.cores < 2 {
            return Finding::missing(
                PART,
                "one",
                "F-Stack polls and takes a core whole: give it one of its own, or set idle_sleep in its configuration",
            );
        }
        Finding::ok(
            PART,
            format!(
                "{}, {isolated}; F-Stack polls and takes one whole",
                self.cores
            ),
        )
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn text(&self, path: &str) -> String {
        read(&self.at(path))
    }

    fn number(&self, path: &str) -> u64 {
        self.text(path).parse().unwrap_or(0)
    }

    fn mount_of(&self, kind: &str) -> Option<String> {
        let mounts = self.text("proc/mounts");
        mounts.lines().find_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let place = fields.next()?;
            (fields.next() == Some(kind)).then(|| place.to_owned())
        })
    }
}

/// A small file's text; none where it cannot be read.
fn read(path: &Path) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// What is in a folder, in order; nothing where there is none.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine of files; a path that ends in `/` is a folder.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path_there = root.path().join(path);
            if path.ends_with('/') {
                fs::create_dir_all(path_there).unwrap();
                continue;
            }
            fs::create_dir_all(path_there.parent().unwrap()).unwrap();
            match text.strip_prefix("-> ") {
                Some(target) => symlink(target, path_there).unwrap(),
                None => fs::write(path_there, text).unwrap(),
            }
        }
        let machine = Machine {
            root: root.path().to_owned(),
            fstack: true,
            cores: 4,
        };
        (root, machine)
    }

    const PAGES: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
    const CARD: &str = "sys/bus/pci/devices/0000:03:00.0";

    fn ready() -> Vec<(String, &'static str)> {
        vec![
            ("usr/lib/x86_64-linux-gnu/librte_eal.so.23".into(), ""),
            (format!("{PAGES}/nr_hugepages"), "512\n"),
            (format!("{PAGES}/free_hugepages"), "500\n"),
            (
                "proc/mounts".into(),
                "proc /proc proc rw 0 0\nhugetlbfs /dev/hugepages hugetlbfs rw 0 0\n",
            ),
            ("dev/vfio/vfio".into(), ""),
            ("sys/kernel/iommu_groups/0/".into(), ""),
            ("sys/kernel/iommu_groups/1/".into(), ""),
            (format!("{CARD}/class"), "0x020000\n"),
            (format!("{CARD}/driver"), "-> ../../../drivers/vfio-pci"),
            ("sys/bus/pci/devices/0000:00:02.0/class".into(), "0x030000"),
            ("sys/devices/system/cpu/isolated".into(), "2-3\n"),
            (
                "proc/self/status".into(),
                "Name:\tx\nUid:\t0\t0\t0\t0\nCapEff:\t0\n",
            ),
        ]
    }

    /// The ready machine with some files replaced, or left out where the text is "gone".
    fn changed(changes: &[(&str, &'static str)]) -> Vec<Finding> {
        let mut files = ready();
        for (path, text) in changes {
            files.retain(|(known, _)| known != path);
            if *text != "gone" {
                files.push(((*path).to_owned(), text));
            }
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, *text)).collect();
        let (_root, machine) = machine(&files);
        machine.findings()
    }

    fn part<'a>(findings: &'a [Finding], name: &str) -> &'a Finding {
        findings
            .iter()
            .find(|finding| finding.part == name)
            .unwrap()
    }

    #[test]
    fn a_machine_with_everything() {
        let findings = changed(&[]);
        assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
        assert!(findings.iter().all(|finding| finding.to_do.is_empty()));
        let found = |name| part(&findings, name).found.clone();
        assert_eq!(
            found("DPDK"),
            "librte_eal.so.23 in /usr/lib/x86_64-linux-gnu"
        );
        assert_eq!(
            found("hugepages"),
            "500 of 512 pages of 2048kB free, at /dev/hugepages"
        );
        assert_eq!(found("vfio"), "2 IOMMU groups");
        assert_eq!(found("devices"), "0000:03:00.0 (vfio-pci)");
        assert!(found("cores").contains("isolated: 2-3"));
    }

    /// What is missing after these changes: the one part, what was found, and what to do.
    fn missing(changes: &[(&str, &'static str)]) -> (&'static str, String, String) {
        let findings = changed(changes);
        let missing: Vec<&Finding> = findings.iter().filter(|finding| !finding.ok).collect();
        let [one] = missing[..] else {
            panic!("one part is to be missing: {missing:?}");
        };
        (one.part, one.found.clone(), one.to_do.clone())
    }

    #[test]
    fn each_part_that_is_missing_says_what_to_do() {
        let total = format!("{PAGES}/nr_hugepages");
        let free = format!("{PAGES}/free_hugepages");
        let driver = format!("{CARD}/driver");
        let class = format!("{CARD}/class");
        let groups = [
            ("sys/kernel/iommu_groups/0/", "gone"),
            ("sys/kernel/iommu_groups/1/", "gone"),
        ];
        let user = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000002000\n";
        type Changes<'a> = &'a [(&'a str, &'static str)];
        let cases: [(Changes<'_>, &str, &str, &str); 9] = [
            (
                &[("usr/lib/x86_64-linux-gnu/librte_eal.so.23", "gone")],
                "DPDK",
                "none of the folders",
                "libdpdk-dev",
            ),
            (
                &[(&total, "0")],
                "hugepages",
                "none are reserved",
                "nr_hugepages",
            ),
            (
                &[(&free, "0")],
                "hugepages",
                "0 of 512",
                "end who uses them",
            ),
            (
                &[("proc/mounts", "gone")],
                "hugepages",
                "not mounted",
                "mount -t hugetlbfs",
            ),
            (
                &[("dev/vfio/vfio", "gone")],
                "vfio",
                "not there",
                "modprobe vfio-pci",
            ),
            (
                &groups,
                "vfio",
                "without an IOMMU",
                "enable_unsafe_noiommu_mode",
            ),
            (
                &[(&driver, "-> ../../../drivers/i40e")],
                "devices",
                "0000:03:00.0 (i40e)",
                "--bind=vfio-pci 0000:03:00.0",
            ),
            (
                &[(&class, "0x010000")],
                "devices",
                "no network card",
                "memif",
            ),
            (
                &[("proc/self/status", user)],
                "rights",
                "without cap_net_admin, cap_ipc_lock",
                "setcap",
            ),
        ];
        for (changes, part, found, to_do) in cases {
            let told = missing(changes);
            assert_eq!(told.0, part);
            assert!(told.1.contains(found), "{told:?}");
            assert!(told.2.contains(to_do), "{told:?}");
        }
    }

    #[test]
    fn rights_and_unsafe_modes_that_do() {
        let able = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000007000\n";
        let findings = changed(&[
            ("proc/self/status", able),
            ("sys/kernel/iommu_groups/0/", "gone"),
            ("sys/kernel/iommu_groups/1/", "gone"),
            (
                "sys/module/vfio/parameters/enable_unsafe_noiommu_mode",
                "Y\n",
            ),
        ]);
        assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
    }

    #[test]
    fn a_bare_machine_misses_all_but_what_it_is() {
        let (_root, mut machine) = machine(&[]);
        (machine.fstack, machine.cores) = (false, 1);
        let findings = machine.findings();
        assert!(
            findings
                .iter()
                .all(|finding| !finding.ok && !finding.to_do.is_empty())
        );
        assert!(
            part(&findings, "F-Stack support")
                .to_do
                .contains("feature `fstack`")
        );
        assert!(part(&findings, "cores").to_do.contains("idle_sleep"));
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        assert_eq!(Machine::this().findings().len(), 7);
    }
}
