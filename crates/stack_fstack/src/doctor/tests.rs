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
        release: Some("1.25"),
        library: None,
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
        (format!("{CARD}/class"), "0x020000\n"),
        (format!("{CARD}/driver"), "-> ../../../drivers/vfio-pci"),
        ("dev/vfio/vfio".into(), ""),
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

fn check<'a>(findings: &'a [Finding], name: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.check == name).unwrap()
}

#[test]
fn a_machine_with_everything() {
    let findings = changed(&[]);
    assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.to_do.is_empty()));
    let found = |name| check(&findings, name).found.clone();
    assert_eq!(found("hugepages"), "500 of 512 free, at /dev/hugepages");
    assert_eq!(found("network card"), "0000:03:00.0 (vfio-pci)");
}

/// A missing component: its name, what was found, how to install it.
fn missing(changes: &[(&str, &'static str)]) -> (&'static str, String, String) {
    let findings = changed(changes);
    let missing: Vec<&Finding> = findings.iter().filter(|finding| !finding.ok).collect();
    let [one] = missing[..] else {
        panic!("one check is to fail: {missing:?}");
    };
    (one.check, one.found.clone(), one.to_do.clone())
}

#[test]
fn each_part_that_is_missing_says_what_to_do() {
    let total = format!("{PAGES}/nr_hugepages");
    let free = format!("{PAGES}/free_hugepages");
    let driver = format!("{CARD}/driver");
    let class = format!("{CARD}/class");
    let user = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000002000\n";
    type Changes<'a> = &'a [(&'a str, &'static str)];
    let cases: [(Changes<'_>, &str, &str, &str); 7] = [
        (&[(&total, "0")], "hugepages", "of 0 free", "no_huge=1"),
        (&[(&free, "0")], "hugepages", "0 of 512", "end the processes"),
        (&[("proc/mounts", "gone")], "hugepages", "not mounted", "mount -t hugetlbfs"),
        (
            &[(&driver, "-> ../../../drivers/i40e")],
            "network card",
            "no network card: 0000:03:00.0 (i40e)",
            "--bind=vfio-pci ADDRESS",
        ),
        (&[(&class, "0x010000")], "network card", "none on PCI", "memif"),
        (&[("dev/vfio/vfio", "gone")], "network card", "without /dev/vfio/vfio", "give the container /dev/vfio"),
        (&[("proc/self/status", user)], "rights", "without cap_net_admin, cap_ipc_lock", "setcap"),
    ];
    for (changes, check, found, to_do) in cases {
        let told = missing(changes);
        assert_eq!(told.0, check);
        assert!(told.1.contains(found), "{told:?}");
        assert!(told.2.contains(to_do), "{told:?}");
    }
}

#[test]
fn each_driver_that_hands_a_card_over_does() {
    for (driver, ok) in [("igb_uio", true), ("uio_pci_generic", true), ("i40e", false)] {
        let link = match driver {
            "igb_uio" => "-> ../../../drivers/igb_uio",
            "uio_pci_generic" => "-> ../../../drivers/uio_pci_generic",
            _ => "-> ../../../drivers/i40e",
        };
        let findings = changed(&[(&format!("{CARD}/driver"), link)]);
        assert_eq!(check(&findings, "network card").ok, ok, "{driver}");
    }
}

#[test]
fn what_the_devices_do_not_need_is_not_missing() {
    let (_root, machine) = machine(&[]);
    let missing = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let findings = machine.findings(&Config::read(file.path()).unwrap());
        let missing = findings.iter().filter(|finding| !finding.ok);
        missing.map(|finding| finding.check).collect::<Vec<_>>()
    };
    let common = "[dpdk]\nlcore_mask=1\n[port0]\n[innet]\n";
    assert_eq!(missing(common), ["hugepages", "network card", "rights"]);
    let virtual_ones = "eal = --no-pci\neal = --vdev=net_af_packet0,iface=veth1\n";
    assert_eq!(missing(&format!("{common}{virtual_ones}")), ["hugepages", "rights"]);
    let small = format!("{common}{virtual_ones}[dpdk]\nno_huge=1\n");
    assert_eq!(missing(&small), ["rights"]);
}

#[test]
fn a_shared_fstack_is_the_one_that_this_program_was_built_with() {
    let maps = "7f00-7f01 r-xp 00000000 fe:00 1  /usr/lib/libc.so.6\n7f02-7f03 r--p 00000000 fe:00 2  /opt/f/lib/libfstack.so\n";
    let files = [("proc/self/maps", maps), ("opt/f/lib/libfstack.so", "a library")];
    let support = |files: &[(&str, &str)], built_with: Option<&str>| {
        let (_root, mut machine) = machine(files);
        machine.library = built_with.map(|library| crc32fast::hash(library.as_bytes()));
        let mut findings = machine.findings(&Config::default());
        let support = findings.remove(0);
        (support.ok, support.found, support.to_do)
    };
    let (ok, found, _) = support(&files, Some("a library"));
    assert!(ok && found.ends_with("F-Stack, release 1.25, which is /opt/f/lib/libfstack.so"), "{found}");
    // A static library is part of the program.
    assert!(support(&[], None).0);
    let gone = &files[..1];
    for (files, library, reason) in [
        (&files[..], "another", "/opt/f/lib/libfstack.so is not that library"),
        (gone, "a library", "/opt/f/lib/libfstack.so is not that library"),
        (&[], "a library", "/libfstack.so is not that library"),
    ] {
        let (ok, found, to_do) = support(files, Some(library));
        assert!(!ok && found.contains(reason) && to_do.contains("build this program again"), "{found}");
    }
}

#[test]
fn capabilities_do_for_the_rights_of_root() {
    let able = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000007000\n";
    let findings = changed(&[("proc/self/status", able)]);
    assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
}

#[test]
fn a_bare_machine_misses_all_but_what_it_is() {
    let (_root, mut machine) = machine(&[]);
    (machine.release, machine.cores) = (None, 1);
    let findings = machine.findings(&Config::default());
    assert!(findings.iter().all(|finding| !finding.ok && !finding.to_do.is_empty()));
    assert!(check(&findings, "F-Stack support").to_do.contains("feature `fstack`"));
    assert!(check(&findings, "cores").to_do.contains("idle_sleep"));
}

#[test]
fn this_machine_can_be_looked_at() {
    assert_eq!(Machine::this().findings(&Config::default()).len(), 5);
}
