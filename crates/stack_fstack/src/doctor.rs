//! Checks of a machine for a server on F-Stack, for `innet-replay doctor`. Reads everything but the number of cores from files, so that
//! tests can provide a machine.

use std::fs;
use std::path::Path;

use replay_server::plugin::{CheckResult, Finding, MachineFiles, missing};

use crate::config::Config;

/// Drivers that give DPDK access to a network card. The first needs an IOMMU, or its unsafe mode, to take one.
const USER_SPACE_DRIVERS: [&str; 3] = ["vfio-pci", "igb_uio", "uio_pci_generic"];

/// Bits of `CapEff` in `/proc/self/status` (capabilities(7)).
const CAPABILITIES: [(u32, &str); 3] = [(12, "cap_net_admin"), (13, "cap_net_raw"), (14, "cap_ipc_lock")];

/// A machine to check.
pub struct Machine {
    files: MachineFiles,
    /// Release of the F-Stack that this program was built with, if it was.
    release: Option<&'static str>,
    /// CRC-32 of the file of that F-Stack's shared library; `None` for a static library, which cannot differ.
    library: Option<u32>,
    /// Cores that this process may use.
    cores: usize,
}

impl Machine {
    /// The machine of this process.
    pub fn this() -> Self {
        #[cfg(feature = "fstack")]
        let library = fstack_sys::fstack::shared_library();
        #[cfg(not(feature = "fstack"))]
        let library = None;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Machine { files: MachineFiles::this(), release: crate::release(), library, cores }
    }

    /// Results of all checks, in the order of their setup, for a server with this configuration of F-Stack. Here is what F-Stack's own lines
    /// at its start do not explain.
    pub fn findings(&self, config: &Config) -> Vec<Finding> {
        let checks = [
            ("F-Stack support", self.support()),
            ("hugepages", self.hugepages(config)),
            ("network card", self.card(config)),
            ("rights", self.rights()),
            ("cores", self.cores(config)),
        ];
        checks.map(|(check, checked)| Finding::new(check, checked)).into()
    }

    /// A shared library has to be that of the build, whose headers define the layout of its structures.
    fn support(&self) -> CheckResult {
        let Some(release) = self.release else {
            return missing(
                "this program was built without it",
                "install F-Stack (https://github.com/F-Stack/f-stack) and build again with the cargo feature `fstack`",
            );
        };
        let built = format!("this program was built with F-Stack, release {release}");
        let Some(checksum) = self.library else {
            return Ok(built);
        };
        let maps = self.files.text("proc/self/maps");
        let mut paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
        let library = paths.find(|path| path.contains("/libfstack.so")).unwrap_or("/libfstack.so");
        match fs::read(self.files.at(&library[1..])) {
            Ok(bytes) if crc32fast::hash(&bytes) == checksum => Ok(format!("{built}, which is {library}")),
            _ => missing(
                format!("{built}, and {library} is not that library"),
                "build this program again, with the F-Stack that it is to run with",
            ),
        }
    }

    fn hugepages(&self, config: &Config) -> CheckResult {
        if config.no_huge {
            return Ok("not needed: the configuration says no_huge".to_owned());
        }
        let sizes = names(&self.files.at("sys/kernel/mm/hugepages"));
        let count = |file: &str| -> u64 {
            let of = |size| self.files.text(format!("sys/kernel/mm/hugepages/{size}/{file}")).parse().unwrap_or(0);
            sizes.iter().map(of).sum()
        };
        let (total, free) = (count("nr_hugepages"), count("free_hugepages"));
        let mounts = self.files.text("proc/mounts");
        // Of a line's fields, which begin with device, folder and type.
        let folder = mounts.lines().find_map(|line| Some(line.split_once(" hugetlbfs ")?.0.split_once(' ')?.1));
        let to_do = match (total, free, folder) {
            (0, ..) => {
                "echo 512 > /proc/sys/vm/nr_hugepages (1 GiB in pages of 2 MiB); or set no_huge=1 in the stack's configuration, which a \
                 network card may refuse"
            }
            (.., None) => "mkdir -p /dev/hugepages && mount -t hugetlbfs none /dev/hugepages",
            (_, 0, _) => "end the processes that use them, or reserve more: echo 1024 > /proc/sys/vm/nr_hugepages",
            (_, _, Some(folder)) => return Ok(format!("{free} of {total} free, at {folder}")),
        };
        let mounted = if folder.is_some() { "mounted" } else { "not mounted" };
        missing(format!("{free} of {total} free, {mounted}"), to_do)
    }

    /// A card that one of the drivers has: it is loaded then, with what it needs.
    fn card(&self, config: &Config) -> CheckResult {
        if config.virtual_only {
            return Ok("not needed: the configuration names virtual devices alone".to_owned());
        }
        let folder = self.files.at("sys/bus/pci/devices");
        let mut cards = Vec::new();
        for address in names(&folder) {
            let device = folder.join(&address);
            // PCI's class of network controllers.
            if self.files.text(device.join("class")).starts_with("0x02") {
                let link = fs::read_link(device.join("driver")).unwrap_or_default();
                let driver = link.file_name().map_or("no driver".into(), |name| name.to_string_lossy());
                let card = format!("{address} ({driver})");
                // A container sees the card of its host, with or without the device.
                if driver == "vfio-pci" && !self.files.at("dev/vfio/vfio").exists() {
                    return missing(format!("{card}, without /dev/vfio/vfio"), "give the container /dev/vfio");
                }
                if USER_SPACE_DRIVERS.contains(&&*driver) {
                    return Ok(card);
                }
                cards.push(card);
            }
        }
        missing(
            format!(
                "DPDK has no network card: {}",
                if cards.is_empty() { "none on PCI".into() } else { cards.join(", ") }
            ),
            "modprobe vfio-pci, which wants intel_iommu=on or amd_iommu=on of the kernel (uio_pci_generic on a machine without an IOMMU), then \
             dpdk-devbind.py --bind=vfio-pci ADDRESS, which takes a card from the kernel: not the one that you are logged in through; af_packet, af_xdp and memif devices need none \
             (--stack-config FILE looks for what FILE needs)",
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
        let status = self.files.text("proc/self/status");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map_or("", str::trim).to_owned()
    }
}

/// Sorted names of a folder's entries; empty without the folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests;
