//! The configuration file: F-Stack's own, with one more section that F-Stack does not look at.
//!
//! ```ini
//! [innet]
//! eal = --no-pci
//! eal = --vdev=net_memif0,role=client,socket=/run/innet/memif.sock
//! memif_checksums = 0
//! ```
//!
//! Each `eal` line is one argument for DPDK's environment: F-Stack's own `[vdevN]` sections know virtio_user alone,
//! this way any device can be named. `memif_checksums` is for a memif between two F-Stacks: what moves through shared memory
//! needs none.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// What this program has to know of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file, by its full name.
    pub path: PathBuf,
    /// Arguments for EAL, after those that F-Stack makes from its own sections.
    pub eal: Vec<String>,
    /// Whether it names virtual devices alone.
    pub virtual_only: bool,
    /// Whether DPDK's memory is of hugepages.
    pub hugepages: bool,
    /// The devices that connect to a memif socket; the other role listens there.
    pub memif_clients: Vec<String>,
    /// Whether packets have checksums: both ends of a memif leave them out, or none does.
    pub memif_checksums: bool,
    /// Microseconds that the loop sleeps when there is nothing to do; with 0 it takes its whole core.
    pub idle_sleep: u32,
    /// The core of the loop, as the file has it.
    pub lcore_mask: String,
    /// The cores of [`lcore_mask`](Self::lcore_mask), in order. The loop is on the first.
    pub cores: Vec<usize>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Config`] names the file, the line and what would be right.
    pub fn read(path: &Path) -> Result<Self> {
        let refuse = |reason: String| {
            Error::Config(format!(
                "F-Stack's configuration {}: {reason}",
                path.display()
            ))
        };
        let full = path
            .canonicalize()
            .map_err(|error| refuse(error.to_string()))?;
        let text = fs::read_to_string(&full).map_err(|error| refuse(error.to_string()))?;
        let mut config = Config {
            path: full,
            eal: Vec::new(),
            virtual_only: false,
            hugepages: true,
            memif_clients: Vec::new(),
            memif_checksums: true,
            idle_sleep: 0,
            lcore_mask: String::new(),
            cores: Vec::new(),
        };
        config.parse(&text).map_err(refuse)?;
        config.virtual_only = config.eal.iter().any(|argument| argument == "--no-pci");
        config.check_checksums().map_err(refuse)?;
        let memif = |argument: &String| {
            let (name, parameters) = argument.strip_prefix("--vdev=")?.split_once(',')?;
            let listens = parameters
                .split(',')
                .any(|p| ["role=server", "role=master"].contains(&p));
            (name.starts_with("net_memif") && !listens).then(|| name.to_owned())
        };
        config.memif_clients = config.eal.iter().filter_map(memif).collect();
        Ok(config)
    }

    fn parse(&mut self, text: &str) -> std::result::Result<(), String> {
        let mut section = "";
        let mut ports = false;
        for (number, line) in (1..).zip(text.lines()) {
            let line = match line.split_once(" ;") {
                Some((line, _)) => line.trim(),
                None => line.trim(),
            };
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                section = name;
                ports |= section.starts_with("port");
                continue;
            }
            let Some((key, value)) = line.split_once(['=', ':']) else {
                return Err(format!(
                    "line {number} is neither [section] nor key = value"
                ));
            };
            let (key, value) = (key.trim(), value.trim());
            match (section, key) {
                ("innet", "eal") => self.eal.push(value.to_owned()),
                ("innet", "memif_checksums") => {
                    self.memif_checksums = match value {
                        "0" => false,
                        "1" => true,
                        _ => {
                            return Err(format!(
                                "line {number}: memif_checksums is 0 or 1, got {value:?}"
                            ));
                        }
                    };
                }
                ("innet", _) => {
                    return Err(format!(
                        "line {number}: [innet] has no key {key:?}, only eal and memif_checksums"
                    ));
                }
                ("dpdk", "idle_sleep") => {
                    self.idle_sleep = value.parse().map_err(|_| {
                        format!(
                            "line {number}: idle_sleep is a number of microseconds, got {value:?}"
                        )
                    })?;
                }
                // As F-Stack takes it, by `atoi`.
                ("dpdk", "no_huge") => self.hugepages = !value.parse().is_ok_and(|n: i32| n != 0),
                ("dpdk", "lcore_mask") => value.clone_into(&mut self.lcore_mask),
                _ => {}
            }
        }
        if self.lcore_mask.is_empty() {
            return Err(
                "[dpdk] needs lcore_mask: the core of the loop, 1 for the first".to_owned(),
            );
        }
        self.cores = cores_of(&self.lcore_mask).ok_or_else(|| {
            format!(
                "lcore_mask is a hexadecimal mask of cores, 1 for the first and 2 for the second, got {:?}",
                self.lcore_mask
            )
        })?;
        if !ports {
            return Err("there is no [port0] with addr, netmask, broadcast and gateway".to_owned());
        }
        Ok(())
    }

    /// On a wire, packets without checksums would be dropped, or worse, taken.
    fn check_checksums(&self) -> std::result::Result<(), String> {
        let devices = self.eal.iter().filter_map(|a| a.strip_prefix("--vdev="));
        let (memif, others): (Vec<_>, Vec<_>) = devices.partition(|d| d.starts_with("net_memif"));
        match !self.memif_checksums && (memif.len() != 1 || !others.is_empty() || !self.virtual_only) {
            true => Err(
                "memif_checksums = 0 is for one memif between two F-Stacks: with other devices, or more of them, take it out"
                    .to_owned(),
            ),
            false => Ok(()),
        }
    }
}

/// The places of the bits that are set, of which there is at least one.
fn cores_of(mask: &str) -> Option<Vec<usize>> {
    let digits = mask.trim_start_matches("0x").trim_start_matches("0X");
    let mut cores = Vec::new();
    for (place, digit) in digits.chars().rev().enumerate() {
        let bits = digit.to_digit(16)?;
        let set = (0..4).filter(|bit| bits >> bit & 1 == 1);
        cores.extend(set.map(|bit| 4 * place + bit));
    }
    (!cores.is_empty()).then_some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fstack.ini");
        fs::write(&path, text).unwrap();
        Config::read(&path)
    }

    #[test]
    fn the_section_that_is_ours_is_taken_from_the_file() {
        let config = read(
            "# a comment\n[dpdk]\nlcore_mask=2\nidle_sleep = 20 ; microseconds\n[port0]\naddr=10.0.0.2\n[innet]\n\
             eal = --no-pci\neal = --vdev=net_af_packet0,iface=veth1\n",
        )
        .unwrap();
        assert_eq!(config.idle_sleep, 20);
        assert_eq!(config.lcore_mask, "2");
        assert_eq!(
            config.eal,
            ["--no-pci", "--vdev=net_af_packet0,iface=veth1"]
        );
        assert!(config.hugepages);
        assert!(
            config.path.is_absolute() && config.virtual_only && config.memif_clients.is_empty()
        );
        let config = read(
            "[dpdk]\nlcore_mask=1\nno_huge=1\n[port0]\n[innet]\neal=--vdev=net_memif0,role=server,socket=a\n\
             eal=--vdev=net_memif1,socket=b,role=client\n",
        )
        .unwrap();
        assert_eq!(config.memif_clients, ["net_memif1"]);
        assert!(!config.hugepages && !config.virtual_only);
    }

    #[test]
    fn a_mask_names_cores_by_hexadecimal_bits() {
        for (mask, cores) in [
            ("1", vec![0]),
            ("0x2", vec![1]),
            ("C", vec![2, 3]),
            ("0x80000000000000001", vec![0, 67]),
        ] {
            let config = read(&format!("[dpdk]\nlcore_mask={mask}\n[port0]\n")).unwrap();
            assert_eq!((config.lcore_mask.as_str(), config.cores), (mask, cores));
        }
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let refusal = |text: &str| read(text).unwrap_err().to_string();
        let good = "[dpdk]\nlcore_mask=1\n[port0]\n";
        assert!(read(good).is_ok());
        assert!(refusal("[dpdk]\nlcore_mask=1\n").contains("[port0]"));
        assert!(refusal("[port0]\naddr=10.0.0.2\n").contains("lcore_mask"));
        assert!(refusal(&format!("{good}[innet]\nvdev=a\n")).contains("line 5"));
        assert!(refusal(&format!("{good}[innet]\nmemif_checksums=yes\n")).contains("\"yes\""));
        let memif = "eal=--no-pci\neal=--vdev=net_memif0,socket=a\n";
        let without = format!("{good}[innet]\nmemif_checksums=0\n");
        assert!(!read(&format!("{without}{memif}")).unwrap().memif_checksums);
        for devices in [
            "eal=--no-pci\n",
            "eal=--vdev=net_memif0,socket=a\n",
            &format!("{memif}eal=--vdev=net_memif1,socket=b\n"),
            &format!("{memif}eal=--vdev=net_af_packet0,iface=a\n"),
        ] {
            assert!(refusal(&format!("{without}{devices}")).contains("memif_checksums"));
        }
        assert!(refusal("[dpdk]\nidle_sleep=soon\n").contains("soon"));
        for mask in ["core 1", "0", "0x", "1g"] {
            let text = format!("[dpdk]\nlcore_mask={mask}\n[port0]\n");
            assert!(refusal(&text).contains(&format!("{mask:?}")));
        }
        assert!(refusal("lcore_mask\n").contains("line 1"));
        let missing = Config::read(Path::new("/nowhere/fstack.ini")).unwrap_err();
        assert!(missing.to_string().contains("/nowhere/fstack.ini"));
    }
}
