//! Machines made up of files.

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
        (format!("sys/bus/pci/drivers/{VFIO}/"), ""),
        (VFIO_DEVICE.into(), ""),
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
    machine.findings(Needs::A_CARD)
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
    assert_eq!(found("driver"), "vfio-pci with 2 IOMMU groups");
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
    let vfio = format!("sys/bus/pci/drivers/{VFIO}/");
    let driver = format!("{CARD}/driver");
    let class = format!("{CARD}/class");
    let groups = [
        ("sys/kernel/iommu_groups/0/", "gone"),
        ("sys/kernel/iommu_groups/1/", "gone"),
    ];
    let user = "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000002000\n";
    type Changes<'a> = &'a [(&'a str, &'static str)];
    let cases: [(Changes<'_>, &str, &str, &str); 10] = [
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
            &[(&vfio, "gone")],
            "driver",
            "none of vfio-pci, igb_uio, uio_pci_generic",
            "modprobe vfio-pci",
        ),
        (
            &[(VFIO_DEVICE, "gone")],
            "driver",
            "/dev/vfio/vfio is not there",
            "container",
        ),
        (
            &groups,
            "driver",
            "there is no IOMMU",
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
        (
            driver.found.clone(),
            part(&findings, "devices").to_do.clone(),
        )
    };
    let (found, to_do) = driver(&[no_vfio, igb, kernels]);
    assert_eq!(found, "igb_uio");
    assert!(to_do.contains("--bind=igb_uio"), "{to_do}");
    // Loaded, and of no use without an IOMMU.
    let (found, to_do) = driver(&[generic, kernels]);
    assert_eq!(found, "uio_pci_generic");
    assert!(to_do.contains("--bind=uio_pci_generic"), "{to_do}");
    let (found, to_do) = driver(&[(UNSAFE_MODE, "Y\n"), igb, kernels]);
    assert_eq!(
        found,
        "vfio-pci without an IOMMU, in the unsafe mode; igb_uio"
    );
    assert!(to_do.contains("--bind=vfio-pci"), "{to_do}");
}

#[test]
fn what_the_devices_do_not_need_is_not_missing() {
    let (_root, machine) = machine(&[]);
    let missing = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let findings = machine.findings(Needs::of(&Config::read(file.path()).unwrap()));
        let missing = findings.iter().filter(|finding| !finding.ok);
        missing.map(|finding| finding.part).collect::<Vec<_>>()
    };
    let common = "[dpdk]\nlcore_mask=1\n[port0]\n[innet]\n";
    assert_eq!(
        missing(common),
        ["DPDK", "hugepages", "driver", "devices", "rights"]
    );
    let virtual_ones = "eal = --no-pci\neal = --vdev=net_af_packet0,iface=veth1\n";
    assert_eq!(
        missing(&format!("{common}{virtual_ones}")),
        ["DPDK", "hugepages", "rights"]
    );
    let small = format!("{common}{virtual_ones}[dpdk]\nno_huge=1\n");
    assert_eq!(missing(&small), ["DPDK", "rights"]);
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
    (machine.fstack, machine.cores) = (false, 1);
    let findings = machine.findings(Needs::A_CARD);
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
    assert_eq!(Machine::this().findings(Needs::A_CARD).len(), 7);
}
