//! Large memory that is read here and there costs a walk of the page table at nearly every access; with pages of 2 MB
//! instead of 4 KB the processor remembers where they are. Linux gives such pages to who asks, where
//! `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` (the usual default) or `always`.

/// Smaller memory is left alone: it would have no huge page, or pay for one that it does not fill.
const LEAST_BYTES: usize = 4 << 20;

/// Asks for huge pages under memory that has just been allocated and not been touched. It is advice: where there are
/// none, nothing happens.
pub fn advise<T>(memory: &[T]) {
    let bytes = size_of_val(memory);
    if bytes < LEAST_BYTES {
        return;
    }
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4 << 10;
        let start = memory.as_ptr() as usize;
        let first = start.next_multiple_of(PAGE);
        let last = (start + bytes) / PAGE * PAGE;
        // SAFETY: the pages lie within the slice, and the advice does not change what is in them.
        unsafe {
            libc::madvise(
                first as *mut libc::c_void,
                last - first,
                libc::MADV_HUGEPAGE,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn large_memory_is_advised_and_small_memory_is_not() {
        let advised = |memory: &[u8]| {
            let address = memory.as_ptr() as usize + memory.len() / 2;
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut within = false;
            for line in maps.lines() {
                let range = line
                    .split_once(' ')
                    .and_then(|(range, _)| range.split_once('-'));
                if let Some((from, to)) = range {
                    let [from, to] =
                        [from, to].map(|at| usize::from_str_radix(at, 16).unwrap_or(0));
                    within = (from..to).contains(&address);
                } else if within && line.starts_with("VmFlags:") {
                    return line.split(' ').any(|flag| flag == "hg");
                }
            }
            panic!("no mapping holds the memory");
        };
        let large = vec![0_u8; 2 * LEAST_BYTES];
        assert!(!advised(&large));
        advise(&large);
        assert!(advised(&large));
        // Memory of its own, too small to be worth it.
        let small = vec![0_u8; LEAST_BYTES / 2];
        advise(&small);
        assert!(!advised(&small));
    }
}
