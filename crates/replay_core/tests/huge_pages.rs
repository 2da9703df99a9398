//! Large memory is advised to be in huge pages.
#![cfg(target_os = "linux")]

use replay_core::processor::{HUGE_PAGES_FROM, advise_huge_pages};

#[test]
fn large_memory_is_advised_and_small_memory_is_not() {
    let advised = |memory: &[u8]| {
        let address = memory.as_ptr() as usize + memory.len() / 2;
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut within = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            if let Some((from, to)) = range {
                let [from, to] = [from, to].map(|at| usize::from_str_radix(at, 16).unwrap_or(0));
                within = (from..to).contains(&address);
            } else if within && line.starts_with("VmFlags:") {
                return line.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("no mapping holds the memory");
    };
    let large = vec![0_u8; 2 * HUGE_PAGES_FROM];
    assert!(!advised(&large));
    advise_huge_pages(&large);
    assert!(advised(&large));
    // Memory of its own, too small to be worth it.
    let small = vec![0_u8; HUGE_PAGES_FROM / 2];
    advise_huge_pages(&small);
    assert!(!advised(&small));
}
