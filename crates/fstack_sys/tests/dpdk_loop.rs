//! Packets through DPDK, over a port whose send queue is its receive queue. Empty where there is no DPDK.
#![cfg(all(feature = "dpdk", dpdk_found))]

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use fstack_sys::dpdk::*;

const PACKETS: usize = 32;

/// EAL starts once in a process, so all of it is one test.
#[test]
fn a_burst_comes_back_as_it_was_sent() {
    // SAFETY: EAL has not been started; the strings live until the end of the process.
    unsafe {
        let version = CStr::from_ptr(rte_version()).to_str().unwrap();
        assert!(version.starts_with("DPDK "), "{version}");
        let arguments = "test --no-huge -m 64 --no-shconf --no-pci --no-telemetry --vdev=net_ring0";
        let mut arguments: Vec<*mut c_char> = arguments
            .split(' ')
            .map(|argument| CString::new(argument).unwrap().into_raw())
            .collect();
        assert!(rte_eal_init(arguments.len() as i32, arguments.as_mut_ptr()) >= 0);
        assert_eq!(rte_eth_dev_count_avail(), 1);
        let mut port = u16::MAX;
        assert_eq!(
            rte_eth_dev_get_port_by_name(c"net_ring0".as_ptr(), &mut port),
            0
        );
        let mut address = rte_ether_addr::default();
        assert_eq!(rte_eth_macaddr_get(port, &mut address), 0);

        let room = RTE_MBUF_DEFAULT_BUF_SIZE;
        let pool = rte_pktmbuf_pool_create(c"pool".as_ptr(), 1023, 0, 0, room, SOCKET_ID_ANY);
        assert!(!pool.is_null(), "error {}", innet_errno());
        assert_eq!(innet_eth_open(port, 1, 128, 128, pool), 0);

        let mut sent = [ptr::null_mut(); PACKETS];
        assert_eq!(
            innet_pktmbuf_alloc_bulk(pool, sent.as_mut_ptr(), PACKETS as u32),
            0
        );
        for (number, &packet) in sent.iter().enumerate() {
            let bytes = 64 + number;
            assert!(usize::from(innet_pktmbuf_room(packet)) >= bytes);
            ptr::write_bytes(innet_pktmbuf_data(packet).cast::<u8>(), number as u8, bytes);
            innet_pktmbuf_set_len(packet, bytes as u16);
        }
        let taken = innet_eth_tx_burst(port, 0, sent.as_mut_ptr(), PACKETS as u16);
        assert_eq!(usize::from(taken), PACKETS);

        let mut received = [ptr::null_mut(); 2 * PACKETS];
        let count = innet_eth_rx_burst(port, 0, received.as_mut_ptr(), received.len() as u16);
        assert_eq!(usize::from(count), PACKETS);
        for (number, &packet) in received[..PACKETS].iter().enumerate() {
            assert_eq!(innet_pktmbuf_segments(packet), 1);
            let bytes = usize::from(innet_pktmbuf_data_len(packet));
            let data = std::slice::from_raw_parts(innet_pktmbuf_data(packet).cast::<u8>(), bytes);
            assert_eq!(data, vec![number as u8; 64 + number]);
        }
        innet_pktmbuf_free_bulk(received.as_mut_ptr(), PACKETS as u32);
        // Every buffer is back: the whole pool can be had.
        let mut all = vec![ptr::null_mut(); 1023];
        assert_eq!(innet_pktmbuf_alloc_bulk(pool, all.as_mut_ptr(), 1023), 0);
        innet_pktmbuf_free_bulk(all.as_mut_ptr(), 1023);

        assert_eq!(rte_eth_dev_stop(port), 0);
        assert_eq!(rte_eth_dev_close(port), 0);
        rte_mempool_free(pool);
        assert_eq!(rte_eal_cleanup(), 0);
    }
}
