//! Packets through DPDK, over a port whose send queue is its receive queue. Empty where there is no DPDK.
#![cfg(all(feature = "dpdk", dpdk_found))]

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use fstack_sys::dpdk::*;

const PACKETS: usize = 32;
const EMPTY: innet_frame = innet_frame { data: ptr::null_mut(), bytes: 0, segments: 0 };

// SAFETY: the signatures equal DPDK 22.11's headers.
unsafe extern "C" {
    fn rte_version() -> *const c_char;
    fn rte_eal_cleanup() -> i32;
}

/// EAL starts once in a process, so all of it is one test.
#[test]
fn a_burst_comes_back_as_it_was_sent() {
    // SAFETY: EAL has not been started; the strings live until the end of the process.
    unsafe {
        let version = CStr::from_ptr(rte_version()).to_str().unwrap();
        assert!(version.starts_with("DPDK "), "{version}");
        let arguments = "test --no-huge -m 64 --no-shconf --no-pci --no-telemetry --vdev=net_ring0";
        let mut arguments: Vec<*mut c_char> =
            arguments.split(' ').map(|argument| CString::new(argument).unwrap().into_raw()).collect();
        assert!(rte_eal_init(arguments.len() as i32, arguments.as_mut_ptr()) >= 0);
        assert_eq!(rte_eth_dev_count_avail(), 1);
        let mut port = u16::MAX;
        assert_eq!(rte_eth_dev_get_port_by_name(c"net_ring0".as_ptr(), &mut port), 0);
        let mut address = rte_ether_addr::default();
        assert_eq!(rte_eth_macaddr_get(port, &mut address), 0);

        let bytes = RTE_MBUF_DEFAULT_BUF_SIZE;
        let pool = rte_pktmbuf_pool_create(c"pool".as_ptr(), 1023, 0, 0, bytes, SOCKET_ID_ANY);
        assert!(!pool.is_null(), "error {}", innet_errno());
        assert_eq!(innet_eth_open(port, 1, 128, 128, pool), 0);

        let (mut sent, mut frames) = ([ptr::null_mut(); PACKETS], [EMPTY; PACKETS]);
        let count = PACKETS as u32;
        assert_eq!(innet_pktmbuf_alloc_frames(pool, sent.as_mut_ptr(), frames.as_mut_ptr(), count), 0);
        let lengths: [u16; PACKETS] = std::array::from_fn(|number| 64 + number as u16);
        for (number, frame) in frames.iter().enumerate() {
            assert_eq!((frame.bytes, frame.segments), (0, 1));
            ptr::write_bytes(frame.data.cast::<u8>(), number as u8, lengths[number].into());
        }
        innet_pktmbuf_set_lengths(sent.as_ptr(), lengths.as_ptr(), count);
        let taken = innet_eth_tx_burst(port, 0, sent.as_mut_ptr(), PACKETS as u16);
        assert_eq!(usize::from(taken), PACKETS);

        let mut received = [ptr::null_mut(); 2 * PACKETS];
        let mut frames = [EMPTY; 2 * PACKETS];
        let most = received.len() as u16;
        let count = innet_eth_rx_frames(port, 0, received.as_mut_ptr(), frames.as_mut_ptr(), most);
        assert_eq!(usize::from(count), PACKETS);
        for (number, frame) in frames[..PACKETS].iter().enumerate() {
            assert_eq!(frame.segments, 1);
            let data = std::slice::from_raw_parts(frame.data.cast::<u8>(), frame.bytes.into());
            assert_eq!(data, vec![number as u8; 64 + number]);
        }
        innet_pktmbuf_free_bulk(received.as_mut_ptr(), PACKETS as u32);
        // All buffers are in the pool again.
        let (mut all, mut frames) = (vec![ptr::null_mut(); 1023], vec![EMPTY; 1023]);
        assert_eq!(innet_pktmbuf_alloc_frames(pool, all.as_mut_ptr(), frames.as_mut_ptr(), 1023), 0);
        innet_pktmbuf_free_bulk(all.as_mut_ptr(), 1023);

        assert_eq!(rte_eth_dev_stop(port), 0);
        assert_eq!(rte_eth_dev_close(port), 0);
        rte_mempool_free(pool);
        assert_eq!(rte_eal_cleanup(), 0);
    }
}
