//! Test machines made of files.

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
        files: MachineFiles { root: root.path().to_owned() },
        fstack: Some(Linked { release: Some("1.25"), shared: None }),
        cores: 4,
    };
    (root, machine)
}

const PAGES: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
const CARD: &str = "sys/bus/pci/devices/0000:03:00.0";

fn ready() -> Vec<(String, &'static str)> {
    vec![
        (format!("{PAGES}/nr_hugepages"), "512\n"),
        (format!("{PAGES}/free_hugepages"), "500\n"),
        ("proc/mounts".into(), "proc /proc proc rw 0 0\nhugetlbfs /dev/hugepages hugetlbfs rw 0 0\n"),
        (format!("sys/bus/pci/drivers/{VFIO}/"), ""),
        (VFIO_DEVICE.into(), ""),
        ("sys/kernel/iommu_groups/0/".into(), ""),
        ("sys/kernel/iommu_groups/1/".into(), ""),
        (format!("{CARD}/class"), "0x020000\n"),
        (format!("{CARD}/driver"), "-> ../../../drivers/vfio-pci"),
        ("sys/bus/pci/devices/0000:00:02.0/class".into(), "0x030000"),
        ("proc/self/status".into(), "Name:\tx\nUid:\t0\t0\t0\t0\nCapEff:\t0\n"),
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
    machine.findings(&Config::default())
}

fn part<'a>(findings: &'a [Finding], name: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.part == name).unwrap()
}

#[test]
fn a_machine_with_everything() {
    let findings = changed(&[]);
    assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.to_do.is_empty()));
    let found = |name| part(&findings, name).found.clone();
    assert_eq!(found("hugepages"), "500 of 512 free, at /dev/hugepages");
    assert_eq!(found("driver"), "vfio-pci");
    assert_eq!(found("devices"), "0000:03:00.0 (vfio-pci)");
}

/// A missing component: its name, what was found, how to install it.
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
    let vfio = format!("sys/bus/pci/drivers/{VFIO}/");
    let driver = format!("{CARD}/driver");
    let class = format!("{CARD}/class");
    let groups = [("sys/kernel/iommu_groups/0/", "gone"), ("sys/kernel/iommu_groups/1/", "gone")];
    let user = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000002000\n";
    type Changes<'a> = &'a [(&'a str, &'static str)];
    let cases: [(Changes<'_>, &str, &str, &str); 9] = [
        (&[(&total, "0")], "hugepages", "none are reserved", "nr_hugepages"),
        (&[(&free, "0")], "hugepages", "0 of 512", "end the processes"),
        (&[("proc/mounts", "gone")], "hugepages", "not mounted", "mount -t hugetlbfs"),
        (&[(&vfio, "gone")], "driver", "none of vfio-pci, igb_uio, uio_pci_generic", "modprobe vfio-pci"),
        (&[(VFIO_DEVICE, "gone")], "driver", "/dev/vfio/vfio is not there", "container"),
        (&groups, "driver", "there is no IOMMU", "enable_unsafe_noiommu_mode"),
        (&[(&driver, "-> ../../../drivers/i40e")], "devices", "0000:03:00.0 (i40e)", "--bind=vfio-pci 0000:03:00.0"),
        (&[(&class, "0x010000")], "devices", "no network card", "memif"),
        (&[("proc/self/status", user)], "rights", "without cap_net_admin, cap_ipc_lock", "setcap"),
    ];
    for (changes, part, found, to_do) in cases {
        let told = missing(changes);
        assert_eq!(told.0, part);
        assert!(told.1.contains(found), "{told:?}");
        assert!(told.2.contains(to_do), "{told:?}");
    }
}

#[test]
fn each_driver_that_hands_a_card_over_does() {
    const GROUPS: [&str; 2] = ["sys/kernel/iommu_groups/0/", "sys/kernel/iommu_groups/1/"];
    let without_iommu = GROUPS.map(|group| (group, "gone"));
    let igb = ("sys/bus/pci/drivers/igb_uio/", "");
    let generic = ("sys/bus/pci/drivers/uio_pci_generic/", "");
    let no_vfio = ("sys/bus/pci/drivers/vfio-pci/", "gone");
    let card = format!("{CARD}/driver");
    let kernels = (&*card, "-> ../../../drivers/i40e");
    let driver = |changes: &[(&str, &'static str)]| {
        let findings = changed(&[&without_iommu[..], changes].concat());
        let driver = part(&findings, "driver");
        assert!(driver.ok, "{driver:?}");
        (driver.found.clone(), part(&findings, "devices").to_do.clone())
    };
    let (found, to_do) = driver(&[no_vfio, igb, kernels]);
    assert_eq!(found, "igb_uio");
    assert!(to_do.contains("--bind=igb_uio"), "{to_do}");
    // The driver is loaded, but useless without an IOMMU.
    let (found, to_do) = driver(&[generic, kernels]);
    assert_eq!(found, "uio_pci_generic");
    assert!(to_do.contains("--bind=uio_pci_generic"), "{to_do}");
    let (found, to_do) = driver(&[(UNSAFE_MODE, "Y\n"), igb, kernels]);
    assert_eq!(found, "vfio-pci, igb_uio");
    assert!(to_do.contains("--bind=vfio-pci"), "{to_do}");
}

#[test]
fn what_the_devices_do_not_need_is_not_missing() {
    let (_root, machine) = machine(&[]);
    let missing = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let findings = machine.findings(&Config::read(file.path()).unwrap());
        let missing = findings.iter().filter(|finding| !finding.ok);
        missing.map(|finding| finding.part).collect::<Vec<_>>()
    };
    let common = "[dpdk]\nlcore_mask=1\n[port0]\n[innet]\n";
    assert_eq!(missing(common), ["hugepages", "driver", "devices", "rights"]);
    let virtual_ones = "eal = --no-pci\neal = --vdev=net_af_packet0,iface=veth1\n";
    assert_eq!(missing(&format!("{common}{virtual_ones}")), ["hugepages", "rights"]);
    let small = format!("{common}{virtual_ones}[dpdk]\nno_huge=1\n");
    assert_eq!(missing(&small), ["rights"]);
}

#[test]
fn the_cores_of_a_mask_are_there_and_this_process_may_use_them() {
    let status = "Name:\tx\nUid:\t0\t0\t0\t0\nCpus_allowed_list:\t0-1,3\n";
    let (_root, machine) = machine(&[("sys/devices/system/cpu/online", "0-3,8\n"), ("proc/self/status", status)]);
    let cores = |mask: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("[dpdk]\nlcore_mask={mask}\n[port0]\n");
        fs::write(file.path(), text).unwrap();
        let findings = machine.findings(&Config::read(file.path()).unwrap());
        let cores = part(&findings, "cores");
        (cores.ok, cores.found.clone(), cores.to_do.clone())
    };
    for mask in ["1", "2", "8", "a"] {
        let (ok, found, _) = cores(mask);
        assert!(ok, "{mask}: {found}");
    }
    // A missing core; a core that this process may not use; the second core of a mask.
    for (mask, found, to_do) in [
        ("10", "core 4, and this machine has 0-3,8", "hexadecimal"),
        ("4", "core 2, and this process may use 0-1,3", "taskset"),
        ("100", "core 8, and this process may use 0-1,3", "taskset"),
        ("6", "core 2, and this process may use 0-1,3", "taskset"),
    ] {
        let told = cores(mask);
        assert!(!told.0 && told.1.contains(found) && told.2.contains(to_do), "{told:?}");
    }
}

#[test]
fn a_shared_fstack_is_the_one_that_this_program_was_built_with() {
    let maps = "7f00-7f01 r-xp 00000000 fe:00 1  /usr/lib/libc.so.6\n7f02-7f03 r--p 00000000 fe:00 2  /opt/f/lib/libfstack.so\n";
    let files = [("proc/self/maps", maps), ("opt/f/lib/libfstack.so", "a library")];
    let support = |files: &[(&str, &str)], built_with: Option<&str>| {
        let (_root, mut machine) = machine(files);
        machine.fstack = Some(Linked {
            release: Some("1.25"),
            shared: built_with.map(|library| crc32fast::hash(library.as_bytes())),
        });
        let mut findings = machine.findings(&Config::default());
        let support = findings.remove(0);
        (support.ok, support.found, support.to_do)
    };
    let (ok, found, _) = support(&files, Some("a library"));
    assert!(ok && found.ends_with("F-Stack 1.25, which is /opt/f/lib/libfstack.so"), "{found}");
    // A static library is part of the program.
    assert!(support(&[], None).0);
    let gone = &files[..1];
    for (files, library, reason) in [
        (&files[..], "another", "/opt/f/lib/libfstack.so is not that library"),
        (gone, "a library", "/opt/f/lib/libfstack.so is not that library"),
        (&[], "a library", "has not loaded"),
    ] {
        let (ok, found, to_do) = support(files, Some(library));
        assert!(!ok && found.contains(reason) && to_do.contains("build this program again"), "{found}");
    }
}

#[test]
fn rights_and_unsafe_modes_that_do() {
    let able = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000007000\n";
    let findings = changed(&[
        ("proc/self/status", able),
        ("sys/kernel/iommu_groups/0/", "gone"),
        ("sys/kernel/iommu_groups/1/", "gone"),
        (UNSAFE_MODE, "Y\n"),
    ]);
    assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
}

#[test]
fn a_bare_machine_misses_all_but_what_it_is() {
    let (_root, mut machine) = machine(&[]);
    (machine.fstack, machine.cores) = (None, 1);
    let findings = machine.findings(&Config::default());
    assert!(findings.iter().all(|finding| !finding.ok && !finding.to_do.is_empty()));
    assert!(part(&findings, "F-Stack support").to_do.contains("feature `fstack`"));
    assert!(part(&findings, "cores").to_do.contains("idle_sleep"));
}

#[test]
fn this_machine_can_be_looked_at() {
    assert_eq!(Machine::this().findings(&Config::default()).len(), 6);
}
