//! DPDK's devices, their queues, and the packets that come and go there.

use std::ffi::{CString, c_int};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fstack_sys::dpdk as rte;

use super::eal;
use super::frame::{MAX_FRAME, Mac};
use replay_core::error::{Error, Result};

/// Packets taken or sent with one call.
pub const BURST: usize = 64;
/// Slots of a queue, where the device lets one choose.
const SLOTS: u16 = 1024;
/// Packets of a queue pair: those in its queues, and a burst of each direction.
const PER_QUEUE: usize = 2 * SLOTS as usize + 2 * BURST;
/// Packets of a core beside those: blank ones, what waits for it in memory, and DPDK's cache.
const PER_CORE: usize = BURST + PASSED + 2 * CACHE as usize;
const CACHE: u32 = 256;
/// Datagrams that may wait for another core.
pub const PASSED: usize = 16 * BURST;

const ROOM: u16 = rte::RTE_MBUF_DEFAULT_BUF_SIZE;
/// What DPDK keeps free before the data, and this program does not use.
const HEADROOM: usize = 128;
const _: () = assert!(MAX_FRAME <= ROOM as usize - HEADROOM);

/// Times that a full queue is tried.
const PATIENCE: usize = 1000;

const EMPTY: rte::innet_frame = rte::innet_frame {
    data: ptr::null_mut(),
    bytes: 0,
    segments: 0,
};

/// Memory for packets.
pub struct Pool(NonNull<rte::rte_mempool>);

// SAFETY: DPDK's pools are made for every thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// For `queues` queue pairs, and `cores` that use them.
    ///
    /// # Errors
    /// [`Error::Config`] where DPDK's memory is too small.
    pub fn new(queues: usize, cores: usize) -> Result<Arc<Self>> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // A number of its own is all that is needed: nothing else is published with it.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let count = PER_QUEUE * queues + PER_CORE * cores;
        let count = count.next_power_of_two() as u32 - 1;
        let name = CString::new(format!("innet-{number}")).unwrap_or_default();
        // SAFETY: EAL runs: whoever makes a pool has started it. A string with its end.
        let pool = unsafe {
            rte::rte_pktmbuf_pool_create(name.as_ptr(), count, CACHE, 0, ROOM, rte::SOCKET_ID_ANY)
        };
        let Some(pool) = NonNull::new(pool) else {
            // SAFETY: a function without arguments.
            let why = eal::describe(unsafe { rte::innet_errno() });
            let megabytes = (count as usize * usize::from(ROOM)).div_ceil(1 << 20);
            return Err(Error::Config(format!(
                "DPDK has no room for {count} packets of {ROOM} bytes ({why}): give it more than {megabytes} MB, with -m among its arguments or \
                 with hugepages"
            )));
        };
        Ok(Arc::new(Pool(pool)))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: every device and packet of it holds it, and so is gone.
        unsafe { rte::rte_mempool_free(self.0.as_ptr()) };
    }
}

/// A packet with a frame in it.
pub struct Packet {
    packet: NonNull<rte::rte_mbuf>,
    data: NonNull<u8>,
    bytes: u16,
    /// Whether the first segment is all of it.
    whole: bool,
    /// Whether DPDK does not know yet how long it is.
    fresh: bool,
}

// SAFETY: a packet belongs to whoever has it, on every thread.
unsafe impl Send for Packet {}

impl Packet {
    /// The frame, or `None` where it lies in several segments: then it is longer than any of this protocol.
    pub fn frame(&self) -> Option<&[u8]> {
        // SAFETY: so many bytes of the packet, which belongs to this.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.bytes.into()) };
        self.whole.then_some(bytes)
    }

    fn into_raw(self) -> *mut rte::rte_mbuf {
        ManuallyDrop::new(self).packet.as_ptr()
    }
}

impl Drop for Packet {
    fn drop(&mut self) {
        // SAFETY: this one's alone.
        unsafe { rte::innet_pktmbuf_free_bulk(&mut self.packet.as_ptr(), 1) };
    }
}

/// Packets without a frame yet.
pub struct Blanks {
    pool: Arc<Pool>,
    packets: [*mut rte::rte_mbuf; BURST],
    frames: [rte::innet_frame; BURST],
    left: usize,
}

// SAFETY: the packets belong to this.
unsafe impl Send for Blanks {}

impl Blanks {
    /// Takes packets from `pool` when they are needed.
    pub fn new(pool: Arc<Pool>) -> Self {
        Blanks {
            pool,
            packets: [ptr::null_mut(); BURST],
            frames: [EMPTY; BURST],
            left: 0,
        }
    }

    /// A packet with the frame that `write` puts into the room it is given; it says how long the frame is. `None` where `write` has none,
    /// or where all packets are in use.
    #[inline]
    pub fn fill(
        &mut self,
        write: impl FnOnce(&mut [u8; MAX_FRAME]) -> Option<usize>,
    ) -> Option<Packet> {
        if self.left == 0 {
            // SAFETY: room for as many as are asked for.
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
        // SAFETY: a packet that is fresh from the pool has at least so many bytes from here on, as is asserted above, and belongs to this.
        let bytes = write(unsafe { &mut *data.as_ptr().cast() })?.min(MAX_FRAME) as u16;
        self.left = at;
        Some(Packet {
            packet,
            data,
            bytes,
            whole: true,
            fresh: true,
        })
    }
}

impl Drop for Blanks {
    fn drop(&mut self) {
        // SAFETY: packets that nobody else has.
        unsafe { rte::innet_pktmbuf_free_bulk(self.packets.as_mut_ptr(), self.left as u32) };
    }
}

/// A device that is plugged in and runs, until it is dropped.
pub struct Device {
    claim: Claim,
    port: u16,
    mac: Mac,
    /// Held while a queue is sent to: cores may share one.
    sending: Vec<Mutex<()>>,
    _pool: Arc<Pool>,
}

impl Device {
    /// Plugs in `arguments` (`net_af_packet0,iface=eth0`, a PCI address), with `queues` queue pairs or as many as it has, and starts it.
    /// A receiver comes with each of them.
    ///
    /// # Errors
    /// [`Error::Config`] with DPDK's reason.
    pub fn open(
        arguments: &str,
        queues: usize,
        pool: &Arc<Pool>,
    ) -> Result<(Arc<Self>, Vec<Receiver>)> {
        let refuse = |step: &str, error: c_int| {
            Error::Config(format!(
                "the DPDK device {arguments:?}: {step}: {}; what DPDK said stands in standard error",
                eal::describe(error)
            ))
        };
        let check = |step: &str, result: c_int| match result {
            0.. => Ok(result),
            error => Err(refuse(step, error)),
        };
        let name = arguments.split(',').next().unwrap_or_default();
        let (devargs, port_name) = match (CString::new(arguments), CString::new(name)) {
            (Ok(devargs), Ok(name)) => (devargs, name),
            _ => return Err(refuse("a zero byte is in it", libc::EINVAL)),
        };
        let claim = Claim::new(name)?;
        // SAFETY: a string with its end; EAL runs, as there is a pool.
        match unsafe { rte::rte_dev_probe(devargs.as_ptr()) } {
            // EAL finds cards by itself.
            error if error == -libc::EEXIST && is_card(name) => {}
            result => drop(check("it cannot be plugged in", result)?),
        }
        let mut port = 0;
        // SAFETY: a string with its end, and room for the answer.
        check("it has no port of this name", unsafe {
            rte::rte_eth_dev_get_port_by_name(port_name.as_ptr(), &mut port)
        })?;
        let mut device = Device {
            claim,
            port,
            mac: Mac::default(),
            sending: Vec::new(),
            _pool: pool.clone(),
        };
        // SAFETY: a port, here and below.
        let most = check("its queues", unsafe { rte::innet_eth_max_queues(port) })?;
        let queues = queues.clamp(1, most.max(1) as usize);
        // SAFETY: the port is not started; the pool lives as long as the device.
        check("it does not start", unsafe {
            rte::innet_eth_open(port, queues as u16, SLOTS, SLOTS, pool.0.as_ptr())
        })?;
        let mut mac = rte::rte_ether_addr::default();
        // SAFETY: room for the answer.
        check("its address", unsafe {
            rte::rte_eth_macaddr_get(port, &mut mac)
        })?;
        device.mac = mac.addr_bytes;
        device.sending = (0..queues).map(|_| Mutex::new(())).collect();
        let device = Arc::new(device);
        let receiver = |queue| Receiver {
            device: device.clone(),
            queue,
            packets: [ptr::null_mut(); BURST],
            frames: [EMPTY; BURST],
            count: 0,
        };
        let receivers = (0..queues as u16).map(receiver).collect();
        Ok((device, receivers))
    }

    /// Its Ethernet address.
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Receives what is addressed to others, too.
    ///
    /// # Errors
    /// [`Error::Config`] where it cannot.
    pub fn hear_everything(&self) -> Result<()> {
        // SAFETY: its port.
        match unsafe { rte::rte_eth_promiscuous_enable(self.port) } {
            // Those that cannot choose, such as a memif, receive everything.
            0 => Ok(()),
            error if error == -libc::ENOTSUP => Ok(()),
            error => Err(Error::Config(format!(
                "the DPDK device {:?} cannot receive what is addressed to others, as a switch does: {}",
                self.claim.0,
                eal::describe(error)
            ))),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let (port, name) = (self.port, self.claim.0.as_str());
        let close = || {
            // SAFETY: its port, which nobody uses any more: receivers and senders hold the device.
            unsafe {
                rte::rte_eth_dev_stop(port);
                rte::rte_eth_dev_close(port);
            }
            let name = CString::new(name).unwrap_or_default();
            if !is_card(&self.claim.0) {
                // SAFETY: strings with their ends.
                unsafe { rte::rte_eal_hotplug_remove(c"vdev".as_ptr(), name.as_ptr()) };
            }
        };
        match is_memif(name) {
            true => eal::on_interrupt_thread(close),
            false => close(),
        }
    }
}

/// Cards are named by their PCI address.
fn is_card(name: &str) -> bool {
    name.contains(':')
}

fn is_memif(name: &str) -> bool {
    name.starts_with("net_memif")
}

/// The right to a device's name in this process.
struct Claim(String);

static CLAIMED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Claim {
    fn new(name: &str) -> Result<Self> {
        // A panic while it was held has left it whole: it is changed by one call.
        let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
        if claimed.iter().any(|other| other == name) {
            return Err(Error::Config(format!(
                "the DPDK device {name:?} is in use by this process: give each of a kind another number (net_memif0, net_memif1)"
            )));
        }
        claimed.push(name.to_owned());
        Ok(Claim(name.to_owned()))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = CLAIMED.lock().unwrap_or_else(PoisonError::into_inner);
        claimed.retain(|other| *other != self.0);
    }
}

/// A receive queue, and the burst that was fetched from it last. There is one of each, so that one thread at a time takes from it.
pub struct Receiver {
    device: Arc<Device>,
    queue: u16,
    /// Null where a packet has been taken out.
    packets: [*mut rte::rte_mbuf; BURST],
    frames: [rte::innet_frame; BURST],
    count: usize,
}

// SAFETY: the packets belong to this.
unsafe impl Send for Receiver {}

impl Receiver {
    /// Fetches what has arrived, in place of the burst before: the number of packets.
    pub fn fetch(&mut self) -> usize {
        self.clear();
        // SAFETY: room for as many as are asked for; nobody else takes from this queue.
        let count = unsafe {
            rte::innet_eth_rx_frames(
                self.device.port,
                self.queue,
                self.packets.as_mut_ptr(),
                self.frames.as_mut_ptr(),
                BURST as u16,
            )
        };
        self.count = usize::from(count).min(BURST);
        self.count
    }

    /// Packets of the burst.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The frame of the burst's packet `at`. `None` where it was taken out, or lies in several segments: then it is longer than any of
    /// this protocol.
    #[inline]
    pub fn frame(&self, at: usize) -> Option<&[u8]> {
        let (packet, frame) = (self.packets[..self.count].get(at)?, self.frames.get(at)?);
        if packet.is_null() || frame.segments != 1 || frame.data.is_null() {
            return None;
        }
        // SAFETY: so many bytes of a packet that belongs to this.
        Some(unsafe { std::slice::from_raw_parts(frame.data.cast(), frame.bytes.into()) })
    }

    /// Takes the burst's packet `at` out of it.
    pub fn take(&mut self, at: usize) -> Option<Packet> {
        let frame = self.frames.get(at)?;
        let packet = self.packets[..self.count].get_mut(at)?;
        let (packet, data) = (
            NonNull::new(std::mem::replace(packet, ptr::null_mut()))?,
            NonNull::new(frame.data.cast())?,
        );
        Some(Packet {
            packet,
            data,
            bytes: frame.bytes,
            whole: frame.segments == 1,
            fresh: false,
        })
    }

    fn clear(&mut self) {
        let count = std::mem::take(&mut self.count) as u32;
        // SAFETY: packets that nobody else has, or null.
        unsafe { rte::innet_pktmbuf_free_bulk(self.packets.as_mut_ptr(), count) };
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Lets a memif that connects to another one (`role=client`) try again: it does so when it starts, and never later. `receivers` are all of
/// one device.
pub fn look_for_peer(receivers: &mut [Receiver]) {
    let Some(Receiver { device, .. }) = receivers.first() else {
        return;
    };
    let all = receivers.len() == device.sending.len()
        && receivers
            .iter()
            .all(|other| Arc::ptr_eq(&other.device, device));
    // SAFETY: its port.
    let up = || unsafe { rte::innet_eth_link_is_up(device.port) } != 0;
    if !all || !is_memif(&device.claim.0) || up() {
        return;
    }
    let _nobody_sends: Vec<_> = device.sending.iter().map(|queue| queue.lock()).collect();
    // SAFETY: its port; nobody sends, and nobody receives, as all receivers are here.
    eal::on_interrupt_thread(|| unsafe {
        rte::rte_eth_dev_stop(device.port);
        rte::rte_eth_dev_start(device.port);
    });
}

/// One core's way to a send queue.
pub struct Sender {
    device: Arc<Device>,
    queue: u16,
    packets: [*mut rte::rte_mbuf; BURST],
    /// Of packets whose length DPDK does not know yet, 0 of the others.
    bytes: [u16; BURST],
    count: usize,
    /// Packets that the device took.
    pub sent: u64,
    /// Packets that it did not: they are lost, as others are on their way.
    pub refused: u64,
}

// SAFETY: the packets belong to this.
unsafe impl Send for Sender {}

impl Sender {
    /// Sends from `device`; cores with the same `queue`, of as many as there are, take turns.
    pub fn new(device: Arc<Device>, queue: usize) -> Self {
        Sender {
            queue: (queue % device.sending.len()) as u16,
            device,
            packets: [ptr::null_mut(); BURST],
            bytes: [0; BURST],
            count: 0,
            sent: 0,
            refused: 0,
        }
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Sends a packet, with the next burst.
    #[inline]
    pub fn send(&mut self, packet: Packet) {
        if self.count == BURST {
            self.flush();
        }
        self.bytes[self.count] = if packet.fresh { packet.bytes } else { 0 };
        self.packets[self.count] = packet.into_raw();
        self.count += 1;
    }

    /// Hands everything to the device.
    pub fn flush(&mut self) {
        if self.count == 0 {
            return;
        }
        let mut left = &mut self.packets[..self.count];
        // SAFETY: packets that nobody else has, of one segment where there is a length, of which so many bytes have been written: the rest
        // of their room is initialised, too, as pools are made of cleared pages.
        unsafe {
            rte::innet_pktmbuf_set_lengths(left.as_ptr(), self.bytes.as_ptr(), left.len() as u32);
        }
        self.count = 0;
        let turn = &self.device.sending[usize::from(self.queue)];
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // A queue that is full gets as long as its other end may need to empty it, and no longer: that one may be gone.
        for _ in 0..PATIENCE {
            // SAFETY: packets that nobody else has; it is this core's turn.
            let taken = unsafe {
                rte::innet_eth_tx_burst(
                    self.device.port,
                    self.queue,
                    left.as_mut_ptr(),
                    left.len() as u16,
                )
            };
            self.sent += u64::from(taken);
            left = &mut left[usize::from(taken)..];
            if left.is_empty() {
                return;
            }
            std::hint::spin_loop();
        }
        self.refused += left.len() as u64;
        // SAFETY: packets that the device did not take.
        unsafe { rte::innet_pktmbuf_free_bulk(left.as_mut_ptr(), left.len() as u32) };
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.flush();
    }
}
