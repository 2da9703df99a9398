//! DPDK's packet I/O: EAL, devices, ports and their queues, packet buffers, bursts. Names are DPDK's; `innet_` stands where a function
//! is inline in its headers and `c/dpdk.c` makes a real one of it.

#![allow(non_camel_case_types)]

use std::marker::{PhantomData, PhantomPinned};

use libc::{c_char, c_int, c_uint, c_void};

/// A packet buffer, or one segment of it. Only pointers to it exist here.
#[repr(C)]
pub struct rte_mbuf {
    _opaque: [u8; 0],
    _not_send: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A pool of packet buffers. Only pointers to it exist here.
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

/// What a packet has in its first segment.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct innet_frame {
    /// Its first byte.
    pub data: *mut c_void,
    /// Bytes there are.
    pub bytes: u16,
    /// Segments of the packet.
    pub segments: u16,
}

/// Room of a packet buffer for data, and before them for headers: what [`rte_pktmbuf_pool_create`] is commonly given.
pub const RTE_MBUF_DEFAULT_BUF_SIZE: u16 = 2048 + 128;
/// Any NUMA node.
pub const SOCKET_ID_ANY: c_int = -1;

// SAFETY: the signatures are those of DPDK 22.11's headers, and of c/dpdk.c; the compiler compares the former, and the project's tests over DPDK's devices call them.
unsafe extern "C" {
    /// Starts EAL, once in a process; the arguments taken, or -1.
    pub fn rte_eal_init(argc: c_int, argv: *mut *mut c_char) -> c_int;
    /// Ends EAL; it cannot be started again.
    pub fn rte_eal_cleanup() -> c_int;
    /// A text for an error number.
    pub fn rte_strerror(error: c_int) -> *const c_char;
    /// DPDK's name and release.
    pub fn rte_version() -> *const c_char;
    /// Sends DPDK's log to standard error; before EAL is started.
    pub fn innet_log_to_stderr() -> c_int;
    /// Gives this thread, which EAL did not start, a number and with it a share in the caches of pools; 0, or -1.
    pub fn rte_thread_register() -> c_int;
    /// Takes the number back.
    pub fn rte_thread_unregister();

    /// Calls `callback` with `argument` on the interrupt thread, after so many microseconds, at least 1; 0, or a negative error.
    pub fn rte_eal_alarm_set(
        microseconds: u64,
        callback: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> c_int;

    /// Plugs a device in, by its name and arguments, such as `net_af_packet0,iface=eth0`; 0, or a negative error.
    pub fn rte_dev_probe(devargs: *const c_char) -> c_int;
    /// Unplugs a device of a bus; 0, or a negative error.
    pub fn rte_eal_hotplug_remove(bus: *const c_char, device: *const c_char) -> c_int;

    /// Ports there are.
    pub fn rte_eth_dev_count_avail() -> u16;
    /// The number of the port with this name; 0, or a negative error.
    pub fn rte_eth_dev_get_port_by_name(name: *const c_char, port: *mut u16) -> c_int;
    /// The port's Ethernet address.
    pub fn rte_eth_macaddr_get(port: u16, address: *mut rte_ether_addr) -> c_int;
    /// Receives what is addressed to others, too.
    pub fn rte_eth_promiscuous_enable(port: u16) -> c_int;
    /// Most queue pairs of a port, or a negative error.
    pub fn innet_eth_max_queues(port: u16) -> c_int;
    /// Whether there is a peer: 1 or 0, or a negative error.
    pub fn innet_eth_link_is_up(port: u16) -> c_int;
    /// Starts a stopped port.
    pub fn rte_eth_dev_start(port: u16) -> c_int;
    /// Stops a port.
    pub fn rte_eth_dev_stop(port: u16) -> c_int;
    /// Closes a stopped port for good.
    pub fn rte_eth_dev_close(port: u16) -> c_int;

    /// A pool of `count` packet buffers of `room` bytes each, or null: then see [`innet_errno`].
    pub fn rte_pktmbuf_pool_create(
        name: *const c_char,
        count: c_uint,
        cache: c_uint,
        private: u16,
        room: u16,
        socket: c_int,
    ) -> *mut rte_mempool;
    /// Frees a pool.
    pub fn rte_mempool_free(pool: *mut rte_mempool);

    /// Sets a port up with so many receive and send queues, over which it spreads flows if it can, and starts it; 0, or a
    /// negative error.
    pub fn innet_eth_open(
        port: u16,
        queues: u16,
        receive_slots: u16,
        send_slots: u16,
        pool: *mut rte_mempool,
    ) -> c_int;
    /// Takes up to `count` packets that have arrived; they belong to the caller.
    pub fn innet_eth_rx_burst(
        port: u16,
        queue: u16,
        packets: *mut *mut rte_mbuf,
        count: u16,
    ) -> u16;
    /// The same, and what is in them.
    pub fn innet_eth_rx_frames(
        port: u16,
        queue: u16,
        packets: *mut *mut rte_mbuf,
        frames: *mut innet_frame,
        count: u16,
    ) -> u16;
    /// Sends up to `count` packets; those that were taken belong to the port.
    pub fn innet_eth_tx_burst(
        port: u16,
        queue: u16,
        packets: *mut *mut rte_mbuf,
        count: u16,
    ) -> u16;
    /// Takes `count` packet buffers from the pool, or none: then a negative error.
    pub fn innet_pktmbuf_alloc_bulk(
        pool: *mut rte_mempool,
        packets: *mut *mut rte_mbuf,
        count: c_uint,
    ) -> c_int;
    /// The same, and where their data go; they have none yet.
    pub fn innet_pktmbuf_alloc_frames(
        pool: *mut rte_mempool,
        packets: *mut *mut rte_mbuf,
        frames: *mut innet_frame,
        count: c_uint,
    ) -> c_int;
    /// Gives packet buffers back, with all their segments.
    pub fn innet_pktmbuf_free_bulk(packets: *mut *mut rte_mbuf, count: c_uint);
    /// The first byte of the first segment.
    pub fn innet_pktmbuf_data(packet: *const rte_mbuf) -> *mut c_void;
    /// Bytes in the first segment.
    pub fn innet_pktmbuf_data_len(packet: *const rte_mbuf) -> u16;
    /// Bytes that the first segment may hold.
    pub fn innet_pktmbuf_room(packet: *const rte_mbuf) -> u16;
    /// Segments of the packet.
    pub fn innet_pktmbuf_segments(packet: *const rte_mbuf) -> u16;
    /// Sets the length of a packet of one segment.
    pub fn innet_pktmbuf_set_len(packet: *mut rte_mbuf, bytes: u16);
    /// Sets the lengths of packets of one segment, but for those whose length is 0 here.
    pub fn innet_pktmbuf_set_lengths(
        packets: *const *mut rte_mbuf,
        bytes: *const u16,
        count: c_uint,
    );
    /// The error of the last call on this thread that tells one by null.
    pub fn innet_errno() -> c_int;
}
