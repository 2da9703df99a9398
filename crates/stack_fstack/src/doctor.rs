//! Checks of a machine for a server on F-Stack, for `innet-replay doctor`. Reads everything but the number of cores from files, so that
//! tests can provide a machine.

use std::fs;
use std::path::{Path, PathBuf};

use replay_server::findings::{CheckResult, Finding, MachineFiles, missing};

use crate::config::Config;

/// Drivers that give DPDK access to a network card, the preferred one first.
const USER_SPACE_DRIVERS: [&str; 3] = [VFIO, "igb_uio", "uio_pci_generic"];
/// Driver that needs an IOMMU or its unsafe mode.
const VFIO: &str = "vfio-pci";
const VFIO_DEVICE: &str = "dev/vfio/vfio";
const UNSAFE_MODE: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

/// Bits of `CapEff` in `/proc/self/status` (capabilities(7)).
const CAPABILITIES: [(u32, &str); 3] = [(12, "cap_net_admin"), (13, "cap_net_raw"), (14, "cap_ipc_lock")];

const NO_NIC: &str = "af_packet, af_xdp and memif devices need none (--stack-config FILE looks for what FILE needs)";
/// Advice for a different shared library: the build-time headers define its structures' layout.
const BUILD_AGAIN: &str = "build this program again, with the F-Stack that it is to run with";
const NOT_NEEDED: &str = "not needed: the configuration names virtual devices alone";

/// The F-Stack that this program was linked with.
struct Linked {
    /// `None` if unknown.
    release: Option<&'static str>,
    /// CRC-32 of the shared library's file; `None` for a static library, which cannot differ.
    shared: Option<u32>,
}

impl Linked {
    #[cfg(feature = "fstack")]
    fn here() -> Option<Self> {
        Some(Linked { release: fstack_sys::fstack::RELEASE, shared: fstack_sys::fstack::shared_library() })
    }

    #[cfg(not(feature = "fstack"))]
    fn here() -> Option<Self> {
        None
    }
}

/// A machine to check.
pub struct Machine {
    files: MachineFiles,
    /// F-Stack, if this program was built with it.
    fstack: Option<Linked>,
    /// Cores that this process may use.
    cores: usize,
}

impl Machine {
    /// The machine of this process.
    pub fn this() -> Self {
        Machine {
            files: MachineFiles::this(),
            fstack: Linked::here(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Results of all checks, in the order of their setup, for a server with this configuration of F-Stack.
    pub fn findings(&self, config: &Config) -> Vec<Finding> {
        let parts = [
            ("F-Stack support", self.support()),
            ("hugepages", self.hugepages(config)),
            ("driver", self.driver(config)),
            ("devices", self.devices(config)),
            ("rights", self.rights()),
            ("cores", self.cores(config)),
        ];
        parts.map(|(part, checked)| Finding::new(part, checked)).into()
    }

    fn support(&self) -> CheckResult {
        let Some(linked) = &self.fstack else {
            return missing(
                "this program was built without it",
                "install F-Stack (https://github.com/F-Stack/f-stack) and build again with the cargo feature `fstack`",
            );
        };
        let release = linked.release.unwrap_or("of an unknown release");
        let built = format!("this program was built with F-Stack {release}");
        let Some(checksum) = linked.shared else {
            return Ok(built);
        };
        let maps = self.text("proc/self/maps");
        let library = maps.lines().find_map(|line| {
            let path = &line[line.find('/')?..];
            path.contains("/libfstack.so").then_some(path)
        });
        let Some(library) = library else {
            let found = format!("{built}, and has not loaded its libfstack.so");
            return missing(found, BUILD_AGAIN);
        };
        match fs::read(self.at(&library[1..])) {
            Ok(bytes) if crc32fast::hash(&bytes) == checksum => Ok(format!("{built}, which is {library}")),
            _ => missing(format!("{built}, and {library} is not that library"), BUILD_AGAIN),
        }
    }

    fn hugepages(&self, config: &Config) -> CheckResult {
        if config.no_huge {
            return Ok("not needed: the configuration says no_huge".to_owned());
        }
        let sizes = names(&self.at("sys/kernel/mm/hugepages"));
        let count = |file: &str| -> u64 {
            let of = |size| self.text(&format!("sys/kernel/mm/hugepages/{size}/{file}")).parse().unwrap_or(0);
            sizes.iter().map(of).sum()
        };
        let (total, free) = (count("nr_hugepages"), count("free_hugepages"));
        if total == 0 {
            return missing(
                "none are reserved",
                "echo 512 > /proc/sys/vm/nr_hugepages (1 GiB in pages of 2 MiB); or set no_huge=1 in the stack's \
                 configuration, which a network card may refuse",
            );
        }
        let found = format!("{free} of {total} free");
        let Some(mount) = self.mount_of("hugetlbfs") else {
            return missing(
                format!("{found}, not mounted"),
                "mkdir -p /dev/hugepages && mount -t hugetlbfs none /dev/hugepages",
            );
        };
        let found = format!("{found}, at {mount}");
        if free == 0 {
            return missing(
                found,
                "end the processes that use them, or reserve more: echo 1024 > /proc/sys/vm/nr_hugepages",
            );
        }
        Ok(found)
    }

    fn driver(&self, config: &Config) -> CheckResult {
        if config.virtual_only {
            return Ok(NOT_NEEDED.to_owned());
        }
        let ready = self.ready_drivers();
        if !ready.is_empty() {
            return Ok(ready.join(", "));
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
        missing(found, format!("{to_do}; {NO_NIC}"))
    }

    /// Loaded drivers that give DPDK access to a network card, the preferred one first.
    fn ready_drivers(&self) -> Vec<&'static str> {
        let groups = names(&self.at("sys/kernel/iommu_groups"));
        let iommu = !groups.is_empty() || self.text(UNSAFE_MODE) == "Y";
        let vfio = iommu && self.at(VFIO_DEVICE).exists();
        let ready = |driver: &&str| self.loaded(driver) && (*driver != VFIO || vfio);
        USER_SPACE_DRIVERS.into_iter().filter(ready).collect()
    }

    fn loaded(&self, driver: &str) -> bool {
        self.at("sys/bus/pci/drivers").join(driver).exists()
    }

    fn devices(&self, config: &Config) -> CheckResult {
        if config.virtual_only {
            return Ok(NOT_NEEDED.to_owned());
        }
        let folder = self.at("sys/bus/pci/devices");
        let (mut ready, mut others, mut first) = (Vec::new(), Vec::new(), None);
        for address in names(&folder) {
            let device = folder.join(&address);
            // PCI's class of network controllers.
            if !self.files.text(device.join("class")).starts_with("0x02") {
                continue;
            }
            let driver = fs::read_link(device.join("driver"))
                .ok()
                .and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()))
                .unwrap_or_else(|| "no driver".to_owned());
            let card = format!("{address} ({driver})");
            if USER_SPACE_DRIVERS.contains(&driver.as_str()) {
                ready.push(card);
            } else {
                others.push(card);
                first.get_or_insert(address);
            }
        }
        if !ready.is_empty() {
            return Ok(ready.join(", "));
        }
        let Some(address) = first else {
            return missing("no network card on PCI", NO_NIC);
        };
        missing(
            format!("no network card is DPDK's: {}", others.join(", ")),
            format!(
                "dpdk-devbind.py --bind={} {address} takes it from the kernel: not the one that you are logged in \
                 through; {NO_NIC}",
                self.ready_drivers().first().unwrap_or(&VFIO)
            ),
        )
    }

    fn rights(&self) -> CheckResult {
        // Fields: real, effective, saved and file system user.
        if self.status("Uid:").split_whitespace().nth(1) == Some("0") {
            return Ok("root".to_owned());
        }
        let effective = u64::from_str_radix(&self.status("CapEff:"), 16).unwrap_or(0);
        let lacking: Vec<&str> =
            CAPABILITIES.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name).collect();
        if lacking.is_empty() {
            return Ok("the capabilities for network and locked memory".to_owned());
        }
        missing(
            format!("not root, and without {}", lacking.join(", ")),
            format!(
                "run it as root, or setcap {}+ep on the program; for a card also: chown this user /dev/vfio/* (the uio \
                 drivers want root)",
                CAPABILITIES.map(|(_, name)| name).join(",")
            ),
        )
    }

    fn cores(&self, config: &Config) -> CheckResult {
        let online = self.text("sys/devices/system/cpu/online");
        let allowed = self.status("Cpus_allowed_list:");
        for core in &config.cores {
            if !contains_core(&online, *core) {
                return missing(
                    format!("lcore_mask names core {core}, and this machine has {online}"),
                    "name another one: lcore_mask is a hexadecimal mask, 1 for core 0, 2 for core 1, 10 for core 4",
                );
            }
            if !contains_core(&allowed, *core) {
                return missing(
                    format!("lcore_mask names core {core}, and this process may use {allowed}"),
                    "name one of those, or give the core to the process: taskset -c, AllowedCPUs= of a systemd unit, the \
                     cpuset of a container",
                );
            }
        }
        match self.cores < 2 && config.idle_sleep == 0 {
            true => missing(
                "one",
                "F-Stack polls and takes a core whole: give it one of its own, or set idle_sleep in its configuration",
            ),
            false => Ok(self.cores.to_string()),
        }
    }

    /// A field of this process's status; empty without it.
    fn status(&self, name: &str) -> String {
        let status = self.text("proc/self/status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("", str::trim).to_owned()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.files.at(path)
    }

    fn text(&self, path: &str) -> String {
        self.files.text(path)
    }

    fn mount_of(&self, kind: &str) -> Option<String> {
        let mounts = self.text("proc/mounts");
        mounts.lines().find_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let path = fields.next()?;
            (fields.next() == Some(kind)).then(|| path.to_owned())
        })
    }
}

/// Whether the kernel's list of cores (`0-3,8`) contains `core`; true for an unreadable list.
fn contains_core(list: &str, core: usize) -> bool {
    let has = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse().ok()?..=last.parse().ok()?;
        Some(range.contains(&core))
    };
    list.split(',').any(|part| has(part).unwrap_or(true))
}

/// Sorted names of a folder's entries; empty without the folder.
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
