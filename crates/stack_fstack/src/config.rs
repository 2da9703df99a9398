//! F-Stack's configuration file, with an additional section that F-Stack ignores.
//!
//! ```ini
//! [innet]
//! eal = --no-pci
//! eal = --vdev=net_memif0,role=client,socket=/run/innet/memif.sock
//! memif_segments = 1
//! ```
//!
//! Each `eal` line is one argument for DPDK's environment abstraction layer (EAL), which names any device; F-Stack's own
//! `[vdevN]` sections only make virtio_user ones. `memif_segments` is for memifs between F-Stacks: segments in shared memory
//! need neither checksums nor division into packets.

use std::fs;
use std::path::{Path, PathBuf};

use replay_link::error::{Error, Result};

/// Buffer size for FreeBSD's longest frame, 65,516 bytes (`if_hw_tsomax`).
const SEGMENT_BUFFERS: &str = ",bsize=65535";

/// Ring size as a binary logarithm: 128 frames, 8 MB. A larger ring does not fit a core's cache (a tenth slower); a smaller one
/// overflows with one connection's window, 2 MB in frames of half a segment.
const SEGMENT_RING: &str = ",rsize=7";

/// Settings of the file that this program needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// Canonical path of the file.
    pub path: PathBuf,
    /// Arguments for EAL, after F-Stack's own.
    pub eal: Vec<String>,
    /// Whether all devices are virtual.
    pub virtual_only: bool,
    /// Whether F-Stack also makes devices from `[vdevN]` sections.
    pub vdev_sections: bool,
    /// Whether DPDK runs without hugepages.
    pub no_huge: bool,
    /// Memif devices of the client role, which connect to a socket; the server role listens there.
    pub memif_clients: Vec<String>,
    /// Whether segments of up to 64 KiB cross a memif undivided and without checksums; both ends need the same value.
    pub memif_segments: bool,
    /// Sleep of the idle loop in µs; 0 polls, which takes a whole core.
    pub idle_sleep: u32,
    /// Core mask of the loop, as in the file.
    pub lcore_mask: String,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Config`] with the file, the line and valid values.
    pub fn read(path: &Path) -> Result<Self> {
        let refuse = |reason: String| Error::Config(format!("F-Stack's configuration {}: {reason}", path.display()));
        let full = path.canonicalize().map_err(|error| refuse(error.to_string()))?;
        let text = fs::read_to_string(&full).map_err(|error| refuse(error.to_string()))?;
        let mut config = Config { path: full, ..Config::default() };
        config.parse(&text).map_err(refuse)?;
        config.virtual_only = config.eal.iter().any(|argument| argument == "--no-pci");
        config.size_segment_buffers().map_err(refuse)?;
        let memif = |argument: &String| {
            let (name, parameters) = argument.strip_prefix("--vdev=")?.split_once(',')?;
            let listens = parameters.split(',').any(|p| ["role=server", "role=master"].contains(&p));
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
                return Err(format!("line {number} is neither [section] nor key = value"));
            };
            let (key, value) = (key.trim(), value.trim());
            match (section, key) {
                ("innet", "eal") => self.eal.push(value.to_owned()),
                ("innet", "memif_segments") => {
                    self.memif_segments = match value {
                        "0" => false,
                        "1" => true,
                        _ => {
                            return Err(format!("line {number}: memif_segments is 0 or 1, got {value:?}"));
                        }
                    };
                }
                ("innet", _) => {
                    return Err(format!("line {number}: [innet] has no key {key:?}, only eal and memif_segments"));
                }
                ("dpdk", "idle_sleep") => {
                    self.idle_sleep = value
                        .parse()
                        .map_err(|_| format!("line {number}: idle_sleep is a number of microseconds, got {value:?}"))?;
                }
                ("dpdk", "nb_vdev") => self.vdev_sections = is_nonzero(value),
                ("dpdk", "no_huge") => self.no_huge = is_nonzero(value),
                ("dpdk", "lcore_mask") => value.clone_into(&mut self.lcore_mask),
                _ => {}
            }
        }
        if self.lcore_mask.is_empty() {
            return Err("[dpdk] needs lcore_mask: the core of the loop, 1 for the first".to_owned());
        }
        let digits = self.lcore_mask.trim_start_matches("0x").trim_start_matches("0X");
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) || digits.bytes().all(|digit| digit == b'0') {
            return Err(format!(
                "lcore_mask is a hexadecimal mask of cores, 1 for the first and 2 for the second, got {:?}",
                self.lcore_mask
            ));
        }
        if !ports {
            return Err("there is no [port0] with addr, netmask, broadcast and gateway".to_owned());
        }
        Ok(())
    }

    /// Sizes each memif's buffers for whole segments. Refuses other devices: a wire would drop such packets or, without a checksum, deliver
    /// them with errors.
    fn size_segment_buffers(&mut self) -> std::result::Result<(), String> {
        const MEMIFS: &str = "memif_segments = 1 is for memifs between F-Stacks";
        if !self.memif_segments {
            return Ok(());
        }
        // Devices named in these ways would bypass the check below.
        let unseen = self.vdev_sections || self.eal.iter().any(|a| a == "--vdev");
        let devices = self.eal.iter_mut().filter(|a| a.starts_with("--vdev="));
        let devices: Vec<&mut String> = devices.collect();
        if !self.virtual_only || devices.is_empty() || unseen {
            return Err(format!(
                "{MEMIFS}: name each by eal = --vdev=net_memif..., with eal = --no-pci, or take it out"
            ));
        }
        for device in devices {
            if !device.starts_with("--vdev=net_memif") {
                return Err(format!("{MEMIFS}: take it out, or {device}"));
            }
            for own in [",bsize=", ",zero-copy=yes"] {
                if device.contains(own) {
                    return Err(format!("memif_segments = 1 has buffers of its own: take {own} out of {device}"));
                }
            }
            device.push_str(SEGMENT_BUFFERS);
            if !device.contains(",rsize=") {
                device.push_str(SEGMENT_RING);
            }
        }
        Ok(())
    }
}

/// Whether a number is not 0, by the rules of F-Stack's `atoi`.
fn is_nonzero(value: &str) -> bool {
    value.parse().is_ok_and(|n: i32| n != 0)
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
    fn our_section_is_read_from_the_file() {
        let config = read(
            "# a comment\n[dpdk]\nlcore_mask=2\nidle_sleep = 20 ; microseconds\n[port0]\naddr=10.0.0.2\n[innet]\n\
             eal = --no-pci\neal = --vdev=net_af_packet0,iface=veth1\n",
        )
        .unwrap();
        assert_eq!(config.idle_sleep, 20);
        assert_eq!(config.lcore_mask, "2");
        assert_eq!(config.eal, ["--no-pci", "--vdev=net_af_packet0,iface=veth1"]);
        assert!(!config.no_huge);
        assert!(config.path.is_absolute() && config.virtual_only && config.memif_clients.is_empty());
        let config = read(
            "[dpdk]\nlcore_mask=1\nno_huge=1\n[port0]\n[innet]\neal=--vdev=net_memif0,role=server,socket=a\n\
             eal=--vdev=net_memif1,socket=b,role=client\n",
        )
        .unwrap();
        assert_eq!(config.memif_clients, ["net_memif1"]);
        assert!(config.no_huge && !config.virtual_only);
    }

    #[test]
    fn whole_segments_have_buffers() {
        let with = |more: &str| {
            let memif = "eal=--no-pci\neal=--vdev=net_memif0,socket=a";
            let text = format!("[dpdk]\nlcore_mask=1\n[port0]\n[innet]\n{memif}{more}\n");
            read(&text).unwrap().eal[1].clone()
        };
        let memif = "--vdev=net_memif0,socket=a";
        assert_eq!(with(""), memif);
        assert_eq!(with("\nmemif_segments = 0"), memif);
        assert_eq!(with("\nmemif_segments = 1"), format!("{memif},bsize=65535,rsize=7"));
        assert_eq!(with(",rsize=9\nmemif_segments = 1"), format!("{memif},rsize=9,bsize=65535"));
    }

    #[test]
    fn a_mask_is_a_hexadecimal_number() {
        for mask in ["1", "0x2", "C", "0x80000000000000001", &format!("1{:032}", 0)] {
            let config = read(&format!("[dpdk]\nlcore_mask={mask}\n[port0]\n")).unwrap();
            assert_eq!(config.lcore_mask, mask);
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
        assert!(refusal(&format!("{good}[innet]\nmemif_segments=yes\n")).contains("\"yes\""));
        let memif = "eal=--no-pci\neal=--vdev=net_memif0,socket=a\n";
        let whole = format!("{good}[innet]\nmemif_segments=1\n");
        for devices in [
            "eal=--no-pci\n",
            "eal=--vdev=net_memif0,socket=a\n",
            &memif.replace("socket=a", "socket=a,bsize=2048"),
            &memif.replace("socket=a", "socket=a,zero-copy=yes"),
            &format!("{memif}eal=--vdev\neal=net_af_packet0,iface=a\n"),
            &format!("{memif}[dpdk]\nnb_vdev=1\n"),
            &format!("{memif}eal=--vdev=net_af_packet0,iface=a\n"),
        ] {
            assert!(refusal(&format!("{whole}{devices}")).contains("memif_segments"));
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
