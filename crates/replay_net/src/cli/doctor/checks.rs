//! What a server on F-Stack needs of a machine, part by part. All but the rights and the number of cores is read from
//! files, so that tests can show a machine that they made up.

use std::fs;
use std::path::{Path, PathBuf};

use super::Finding;
use crate::stack::fstack_config::Config;

/// Drivers that hand a card to DPDK, the one to prefer first.
const USER_SPACE_DRIVERS: [&str; 3] = [VFIO, "igb_uio", "uio_pci_generic"];
/// It wants an IOMMU, or its unsafe mode.
const VFIO: &str = "vfio-pci";
const VFIO_DEVICE: &str = "dev/vfio/vfio";
const UNSAFE_MODE: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

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

const NO_NIC: &str =
    "af_packet, af_xdp and memif devices need none (--stack-config FILE looks for what FILE needs)";
/// A shared library's structures are laid out as the headers said when this program was built.
const BUILD_AGAIN: &str = "build this program again, with the F-Stack that it is to run with";
const NOT_NEEDED: &str = "not needed: the configuration names virtual devices alone";

/// What a stack needs.
pub struct Needs {
    card: bool,
    hugepages: bool,
    /// By their numbers.
    cores: Vec<usize>,
    /// Whether the loop sleeps when there is nothing to do.
    sleeps: bool,
}

impl Needs {
    /// A network card, on hugepages, and whichever core.
    pub const A_CARD: Needs = Needs {
        card: true,
        hugepages: true,
        cores: Vec::new(),
        sleeps: false,
    };

    /// What this configuration asks for.
    pub fn of(config: &Config) -> Self {
        Needs {
            card: !config.virtual_only,
            hugepages: config.hugepages,
            cores: config.cores.clone(),
            sleeps: config.idle_sleep > 0,
        }
    }
}

/// The F-Stack that this program was linked with.
struct Linked {
    /// Where it is known.
    release: Option<&'static str>,
    /// CRC-32 of a shared library's file. A static one cannot become another.
    shared: Option<u32>,
}

impl Linked {
    #[cfg(feature = "fstack")]
    fn here() -> Option<Self> {
        Some(Linked {
            release: fstack_sys::fstack::RELEASE,
            shared: fstack_sys::fstack::shared_library(),
        })
    }

    #[cfg(not(feature = "fstack"))]
    fn here() -> Option<Self> {
        None
    }
}

/// A machine to look at.
pub struct Machine {
    /// In place of `/`.
    root: PathBuf,
    /// F-Stack, where this program was built with it.
    fstack: Option<Linked>,
    /// Cores that this process may use.
    cores: usize,
}

impl Machine {
    /// The one that this runs on.
    pub fn this() -> Self {
        Machine {
            root: PathBuf::from("/"),
            fstack: Linked::here(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Every part, in the order in which one would set them up.
    pub fn findings(&self, needs: &Needs) -> Vec<Finding> {
        vec![
            self.support(),
            self.dpdk(),
            self.hugepages(needs),
            self.driver(needs),
            self.devices(needs),
            self.rights(),
            self.cores(needs),
        ]
    }

    fn support(&self) -> Finding {
        const PART: &str = "F-Stack support";
        let Some(linked) = &self.fstack else {
            return Finding::missing(
                PART,
                "this program was built without it",
                "install F-Stack (https://github.com/F-Stack/f-stack) and build again with the cargo feature `fstack`",
            );
        };
        let release = linked.release.unwrap_or("of an unknown release");
        let built = format!("this program was built with F-Stack {release}");
        let Some(checksum) = linked.shared else {
            return Finding::ok(PART, built);
        };
        let maps = self.text("proc/self/maps");
        let library = maps.lines().find_map(|line| {
            let path = &line[line.find('/')?..];
            path.contains("/libfstack.so").then_some(path)
        });
        let Some(library) = library else {
            return Finding::missing(
                PART,
                format!("{built}, and has not loaded its libfstack.so"),
                BUILD_AGAIN,
            );
        };
        match fs::read(self.at(&library[1..])) {
            Ok(bytes) if crc32fast::hash(&bytes) == checksum => {
                Finding::ok(PART, format!("{built}, which is {library}"))
            }
            _ => Finding::missing(
                PART,
                format!("{built}, and {library} is not that library"),
                BUILD_AGAIN,
            ),
        }
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

    fn hugepages(&self, needs: &Needs) -> Finding {
        const PART: &str = "hugepages";
        if !needs.hugepages {
            return Finding::ok(PART, "not needed: the configuration says no_huge");
        }
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

    fn driver(&self, needs: &Needs) -> Finding {
        const PART: &str = "driver";
        if !needs.card {
            return Finding::ok(PART, NOT_NEEDED);
        }
        let ready = self.ready_drivers();
        if !ready.is_empty() {
            let how = |driver: &&str| match (*driver, self.iommu_groups()) {
                (VFIO, 0) => "vfio-pci without an IOMMU, in the unsafe mode".to_owned(),
                (VFIO, groups) => format!("vfio-pci with {groups} IOMMU groups"),
                (uio, _) => uio.to_owned(),
            };
            let ready: Vec<String> = ready.iter().map(how).collect();
            return Finding::ok(PART, ready.join("; "));
        }
        let (found, to_do) = if !self.loaded(VFIO) {
            (
                format!("none of {} is loaded", USER_SPACE_DRIVERS.join(", ")),
                "modprobe vfio-pci, or uio_pci_generic on a machine without an IOMMU".to_owned(),
            )
        } else if !self.at(VFIO_DEVICE).exists() {
            (
                format!("vfio-pci is loaded, and /{VFIO_DEVICE} is not there"),
                "modprobe vfio; a container has to be given /dev/vfio".to_owned(),
            )
        } else {
            (
                "vfio-pci is loaded, and there is no IOMMU".to_owned(),
                format!(
                    "start the kernel with intel_iommu=on or amd_iommu=on; on a machine without one (most virtual \
                     ones), echo 1 > /{UNSAFE_MODE}, or modprobe uio_pci_generic"
                ),
            )
        };
        Finding::missing(PART, found, format!("{to_do}; {NO_NIC}"))
    }

    /// The drivers that can hand a card over, the one to prefer first.
    fn ready_drivers(&self) -> Vec<&'static str> {
        let iommu = self.iommu_groups() > 0 || self.text(UNSAFE_MODE) == "Y";
        let vfio = iommu && self.at(VFIO_DEVICE).exists();
        let ready = |driver: &&str| self.loaded(driver) && (*driver != VFIO || vfio);
        USER_SPACE_DRIVERS.into_iter().filter(ready).collect()
    }

    fn loaded(&self, driver: &str) -> bool {
        self.at("sys/bus/pci/drivers").join(driver).exists()
    }

    fn iommu_groups(&self) -> usize {
        names(&self.at("sys/kernel/iommu_groups")).len()
    }

    fn devices(&self, needs: &Needs) -> Finding {
        const PART: &str = "devices";
        if !needs.card {
            return Finding::ok(PART, NOT_NEEDED);
        }
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
                "dpdk-devbind.py --bind={} {address} takes it from the kernel: not the one that you are logged in \
                 through; {NO_NIC}",
                self.ready_drivers().first().unwrap_or(&VFIO)
            ),
        )
    }

    fn rights(&self) -> Finding {
        const PART: &str = "rights";
        let field = |name: &str| self.status(name);
        // Real, effective, saved and file system user.
        if field("Uid:").split_whitespace().nth(1) == Some("0") {
            return Finding::ok(PART, "root");
        }
        let effective = u64::from_str_radix(&field("CapEff:"), 16).unwrap_or(0);
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
                "run it as root, or setcap {}+ep on the program; for a card also: chown this user /dev/vfio/* (the uio \
                 drivers want root)",
                all.join(",")
            ),
        )
    }

    fn cores(&self, needs: &Needs) -> Finding {
        const PART: &str = "cores";
        let isolated = match self.text("sys/devices/system/cpu/isolated").as_str() {
            "" => "none of them isolated".to_owned(),
            list => format!("isolated: {list}"),
        };
        let online = self.text("sys/devices/system/cpu/online");
        let allowed = self.status("Cpus_allowed_list:");
        for core in &needs.cores {
            if !lists(&online, *core) {
                return Finding::missing(
                    PART,
                    format!("lcore_mask names core {core}, and this machine has {online}"),
                    "name another one: lcore_mask is a hexadecimal mask, 1 for core 0, 2 for core 1, 10 for core 4",
                );
            }
            if !lists(&allowed, *core) {
                return Finding::missing(
                    PART,
                    format!("lcore_mask names core {core}, and this process may use {allowed}"),
                    "name one of those, or give the core to the process: taskset -c, AllowedCPUs= of a systemd unit, the \
                     cpuset of a container",
                );
            }
        }
        if self.cores < 2 && !needs.sleeps {
            return Finding::missing(
                PART,
                "one",
                "F-Stack polls and takes a core whole: give it one of its own, or set idle_sleep in its configuration",
            );
        }
        let taken = match needs.cores.first() {
            Some(core) => format!("core {core}"),
            None => "one".to_owned(),
        };
        let how = match needs.sleeps {
            true => format!("F-Stack runs on {taken}, and sleeps when it is idle"),
            false => format!("F-Stack polls and takes {taken} whole"),
        };
        Finding::ok(PART, format!("{}, {isolated}; {how}", self.cores))
    }

    /// A field of this process's status; nothing where there is none.
    fn status(&self, name: &str) -> String {
        let status = self.text("proc/self/status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("", str::trim).to_owned()
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

/// Whether the kernel's list of cores (`0-3,8`) has this one. A list that cannot be read forbids none.
fn lists(list: &str, core: usize) -> bool {
    let has = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse().ok()?..=last.parse().ok()?;
        Some(range.contains(&core))
    };
    list.split(',').any(|part| has(part).unwrap_or(true))
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
mod tests;
