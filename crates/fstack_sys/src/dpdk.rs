//! DPDK's packet I/O: EAL, devices, ports and their queues, packet buffers, bursts. Names are DPDK's; functions with the prefix `innet_` are
//! in `c/dpdk.c`, which wraps inline functions of the headers.

#![allow(non_camel_case_types)]

use std::marker::{PhantomData, PhantomPinned};

use libc::{c_char, c_int, c_uint, c_void};

/// A packet buffer, or one segment of it, behind a pointer.
#[repr(C)]
pub struct rte_mbuf {
    _opaque: [u8; 0],
    _not_send: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A pool of packet buffers, behind a pointer.
#[repr(C)]
pub struct rte_mempool {
    _opaque: [u8; 0],
    _not_send: PhantomData<(*mut u8, PhantomPinned)>,
}

/// An Ethernet address.
#[repr(C, align(2))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct rte_ether_addr {
    /// In the order of transmission.
    pub addr_bytes: [u8; 6],
}

/// First segment of a packet.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct innet_frame {
    /// Its first byte.
    pub data: *mut c_void,
    /// Length in bytes.
    pub bytes: u16,
    /// Segments of the packet.
    pub segments: u16,
}

/// Default bytes of a packet buffer: 128 of headroom, then the data.
pub const RTE_MBUF_DEFAULT_BUF_SIZE: u16 = 2048 + 128;
/// Any NUMA node.
pub const SOCKET_ID_ANY: c_int = -1;

// SAFETY: the signatures equal DPDK 22.11's headers and c/dpdk.c; tests over DPDK's devices call the functions.
unsafe extern "C" {
    /// Starts EAL, once in a process; returns the number of parsed arguments, or -1.
    pub fn rte_eal_init(argc: c_int, argv: *mut *mut c_char) -> c_int;
    /// Text of an error number.
    pub fn rte_strerror(error: c_int) -> *const c_char;
    /// Sends DPDK's log to standard error; before EAL is started.
    pub fn innet_log_to_stderr() -> c_int;
    /// Registers this thread, which EAL did not start, so that it gets mempool caches; 0, or -1.
    pub fn rte_thread_register() -> c_int;
    /// Ends the thread's registration.
    pub fn rte_thread_unregister();

    /// Calls `callback` with `argument` on the interrupt thread, after at least 1 µs; 0, or a negative error.
    pub fn rte_eal_alarm_set(
        microseconds: u64,
        callback: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> c_int;

    /// Plugs in a device with arguments, such as `net_af_packet0,iface=eth0`; 0, or a negative error.
    pub fn rte_dev_probe(devargs: *const c_char) -> c_int;
    /// Unplugs a device of a bus; 0, or a negative error.
    pub fn rte_eal_hotplug_remove(bus: *const c_char, device: *const c_char) -> c_int;

    /// Number of ports.
    pub fn rte_eth_dev_count_avail() -> u16;
    /// Finds the port with this name; 0, or a negative error.
    pub fn rte_eth_dev_get_port_by_name(name: *const c_char, port: *mut u16) -> c_int;
    /// Reads the port's Ethernet address.
    pub fn rte_eth_macaddr_get(port: u16, address: *mut rte_ether_addr) -> c_int;
    /// Enables promiscuous mode.
    pub fn rte_eth_promiscuous_enable(port: u16) -> c_int;
    /// Most queue pairs of a port, or a negative error.
    pub fn innet_eth_max_queues(port: u16) -> c_int;
    /// Whether the link is up: 1 or 0, or a negative error.
    pub fn innet_eth_link_is_up(port: u16) -> c_int;
    /// Starts a stopped port.
    pub fn rte_eth_dev_start(port: u16) -> c_int;
    /// Stops a port.
    pub fn rte_eth_dev_stop(port: u16) -> c_int;
    /// Closes a stopped port for good.
    pub fn rte_eth_dev_close(port: u16) -> c_int;

    /// A pool of `count` packet buffers of `bytes` bytes each, or null with an error in [`innet_errno`].
    pub fn rte_pktmbuf_pool_create(
        name: *const c_char,
        count: c_uint,
        cache: c_uint,
        private: u16,
        bytes: u16,
        socket: c_int,
    ) -> *mut rte_mempool;
    /// Frees a pool.
    pub fn rte_mempool_free(pool: *mut rte_mempool);

    /// Configures a port with `queues` receive and send queues (receive-side scaling where supported) and starts it; 0, or a negative
    /// error.
    pub fn innet_eth_open(port: u16, queues: u16, receive_slots: u16, send_slots: u16, pool: *mut rte_mempool)
    -> c_int;
    /// Receives up to `count` packets, with their frames; they belong to the caller.
    pub fn innet_eth_rx_frames(
        port: u16,
        queue: u16,
        packets: *mut *mut rte_mbuf,
        frames: *mut innet_frame,
        count: u16,
    ) -> u16;
    /// Sends up to `count` packets; accepted packets belong to the port.
    pub fn innet_eth_tx_burst(port: u16, queue: u16, packets: *mut *mut rte_mbuf, count: u16) -> u16;
    /// Allocates `count` empty packet buffers, with the address of their data, or none and a negative error.
    pub fn innet_pktmbuf_alloc_frames(
        pool: *mut rte_mempool,
        packets: *mut *mut rte_mbuf,
        frames: *mut innet_frame,
        count: c_uint,
    ) -> c_int;
    /// Frees packet buffers, with all their segments.
    pub fn innet_pktmbuf_free_bulk(packets: *mut *mut rte_mbuf, count: c_uint);
    /// Sets the lengths of packets of one segment, except where the length is 0.
    pub fn innet_pktmbuf_set_lengths(packets: *const *mut rte_mbuf, bytes: *const u16, count: c_uint);
    /// Error of this thread's last call that returned null.
    pub fn innet_errno() -> c_int;
}
