//! DPDK's packets (mbufs) and their memory pool.

use std::ffi::CString;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fstack_sys::dpdk as rte;

use super::eal;
use crate::ethernet::MAX_FRAME;
use crate::{Error, Result};

/// Packets received or sent by one call.
pub const BURST: usize = 64;
/// Descriptors of a queue, if the device lets one choose.
pub(super) const DESCRIPTORS: u16 = 1024;
/// Packets of a queue pair: its descriptors, and a burst in each direction.
const PER_QUEUE: usize = 2 * DESCRIPTORS as usize + 2 * BURST;
/// Other packets of a core: allocated but unused ones, its handover queue, and DPDK's cache.
const PER_CORE: usize = BURST + HANDOVER_QUEUE + 2 * CORE_CACHE as usize;
/// Free packets that DPDK caches for each core.
const CORE_CACHE: u32 = 256;
/// Datagrams that may wait in the handover queue of a core.
pub const HANDOVER_QUEUE: usize = 16 * BURST;

/// Bytes of a packet's buffer.
const BUFFER: u16 = rte::RTE_MBUF_DEFAULT_BUF_SIZE;
/// Bytes that DPDK reserves before the frame, which this program does not use.
const HEADROOM: usize = 128;
const _: () = assert!(MAX_FRAME <= BUFFER as usize - HEADROOM);

/// A frame without packet.
pub(super) const EMPTY: rte::innet_frame = rte::innet_frame { data: ptr::null_mut(), bytes: 0, segments: 0 };

/// Memory for packets (DPDK's mempool).
pub struct PacketPool(pub(super) NonNull<rte::rte_mempool>);

// SAFETY: DPDK's pools may be used by every thread.
unsafe impl Send for PacketPool {}
// SAFETY: as above.
unsafe impl Sync for PacketPool {}

impl PacketPool {
    /// Memory for `queues` queue pairs, and for the `cores` that use them.
    ///
    /// # Errors
    /// [`Error::Config`] if DPDK's memory is too small.
    pub fn new(queues: usize, cores: usize) -> Result<Arc<Self>> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // Relaxed: the number only has to be unique.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let count = PER_QUEUE * queues + PER_CORE * cores;
        let count = count.next_power_of_two() as u32 - 1;
        let name = CString::new(format!("innet-{number}")).unwrap_or_default();
        // SAFETY: EAL runs, as callers start it first; the name is a terminated string.
        let pool =
            unsafe { rte::rte_pktmbuf_pool_create(name.as_ptr(), count, CORE_CACHE, 0, BUFFER, rte::SOCKET_ID_ANY) };
        let Some(pool) = NonNull::new(pool) else {
            // SAFETY: it takes no arguments and reads this thread's error number.
            let why = eal::describe(unsafe { rte::innet_errno() });
            let megabytes = (count as usize * usize::from(BUFFER)).div_ceil(1 << 20);
            return Err(Error::Config(format!(
                "DPDK has not enough free memory for {count} packets of {BUFFER} bytes ({why}): give it more than {megabytes} MB, with -m among its arguments or \
                 with hugepages"
            )));
        };
        Ok(Arc::new(PacketPool(pool)))
    }
}

impl Drop for PacketPool {
    fn drop(&mut self) {
        // SAFETY: every device and every holder of its packets has a reference to the pool, so all of them are gone.
        unsafe { rte::rte_mempool_free(self.0.as_ptr()) };
    }
}

/// A packet (DPDK's mbuf) with a frame.
pub struct Packet {
    pub(super) packet: NonNull<rte::rte_mbuf>,
    pub(super) data: NonNull<u8>,
    pub(super) bytes: u16,
    /// Whether the frame is in one segment.
    pub(super) whole: bool,
    /// Whether the length is still to be written to the mbuf.
    pub(super) fresh: bool,
}

// SAFETY: a packet has one owner, and mbufs may be used on every thread.
unsafe impl Send for Packet {}

impl Packet {
    /// The frame; `None` if it spans several segments, which frames of this protocol never do.
    pub fn frame(&self) -> Option<&[u8]> {
        // SAFETY: `data` has `bytes` initialised bytes, in a packet that this value owns.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.bytes.into()) };
        self.whole.then_some(bytes)
    }

    pub(super) fn into_raw(self) -> *mut rte::rte_mbuf {
        ManuallyDrop::new(self).packet.as_ptr()
    }
}

impl Drop for Packet {
    fn drop(&mut self) {
        // SAFETY: this value owns the packet.
        unsafe { rte::innet_pktmbuf_free_bulk(&mut self.packet.as_ptr(), 1) };
    }
}

/// Allocated packets without a frame.
pub struct FreePackets {
    pool: Arc<PacketPool>,
    packets: [*mut rte::rte_mbuf; BURST],
    frames: [rte::innet_frame; BURST],
    left: usize,
}

// SAFETY: this value owns its packets, and mbufs may be used on every thread.
unsafe impl Send for FreePackets {}

impl FreePackets {
    /// Allocates packets from `pool`, a burst at a time.
    pub fn new(pool: Arc<PacketPool>) -> Self {
        FreePackets { pool, packets: [ptr::null_mut(); BURST], frames: [EMPTY; BURST], left: 0 }
    }

    /// A packet with the frame that `write` puts into the buffer, returning its length. `None` if `write` returns `None`, or if all packets
    /// are in use.
    #[inline]
    pub fn fill(&mut self, write: impl FnOnce(&mut [u8; MAX_FRAME]) -> Option<usize>) -> Option<Packet> {
        if self.left == 0 {
            // SAFETY: both arrays have space for `BURST` entries.
            let failed = unsafe {
                rte::innet_pktmbuf_alloc_frames(
                    self.pool.0.as_ptr(),
                    self.packets.as_mut_ptr(),
                    self.frames.as_mut_ptr(),
                    BURST as u32,
                )
            };
            if failed != 0 {
                return None;
            }
            self.left = BURST;
        }
        let at = self.left - 1;
        let packet = NonNull::new(self.packets[at])?;
        let data = NonNull::new(self.frames[at].data.cast::<u8>())?;
        // SAFETY: the buffer of a fresh packet has at least `MAX_FRAME` bytes from `data` on, as is asserted above; they are initialised, as
        // pools are made of cleared pages; this value owns the packet.
        let bytes = write(unsafe { &mut *data.as_ptr().cast() })?.min(MAX_FRAME) as u16;
        self.left = at;
        Some(Packet { packet, data, bytes, whole: true, fresh: true })
    }
}

impl Drop for FreePackets {
    fn drop(&mut self) {
        // SAFETY: this value owns the first `left` packets.
        unsafe { rte::innet_pktmbuf_free_bulk(self.packets.as_mut_ptr(), self.left as u32) };
    }
}
