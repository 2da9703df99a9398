//! DPDK devices, and their receive and transmit queues.

use std::ffi::{CString, c_int};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use fstack_sys::dpdk as rte;

use super::eal;
use super::packets::{BURST, DESCRIPTORS, EMPTY, Packet, PacketPool};
use crate::ethernet::Mac;
use crate::{Error, Result};
use base::wait::lock;

/// Attempts to send to a full queue.
const SEND_ATTEMPTS: usize = 1000;

/// Devices are plugged in and unplugged one at a time: the driver of memifs has a table of all their sockets, without a lock.
static PLUGGING: Mutex<()> = Mutex::new(());

/// A started device. Dropped, it is stopped and unplugged.
pub struct Device {
    claim: DeviceClaim,
    port: u16,
    mac: Mac,
    /// Lock of each transmit queue, as cores may share one.
    sending: Vec<Mutex<()>>,
    _pool: Arc<PacketPool>,
}

impl Device {
    /// Plugs in and starts the device `arguments` (`net_af_packet0,iface=eth0`, a PCI address) with `queues` queue pairs, or fewer if it
    /// has fewer. Also returns its receive queues.
    ///
    /// # Errors
    /// [`Error::Config`] with DPDK's reason.
    pub fn open(arguments: &str, queues: usize, pool: &Arc<PacketPool>) -> Result<(Arc<Self>, Vec<RxQueue>)> {
        let refuse = |failed: &str, error: c_int| {
            Error::Config(format!(
                "the DPDK device {arguments:?}: {failed}: {}; DPDK's own message is in standard error",
                eal::describe(error)
            ))
        };
        let check = |failed: &str, result: c_int| match result {
            0.. => Ok(result),
            error => Err(refuse(failed, error)),
        };
        let name = arguments.split(',').next().unwrap_or_default();
        let (devargs, port_name) = match (CString::new(arguments), CString::new(name)) {
            (Ok(devargs), Ok(name)) => (devargs, name),
            _ => return Err(refuse("a zero byte is in it", libc::EINVAL)),
        };
        let claim = DeviceClaim::new(name)?;
        let plugging = lock(&PLUGGING);
        // SAFETY: a terminated string; EAL runs, as there is a pool.
        let probed = unsafe { rte::rte_dev_probe(devargs.as_ptr()) };
        drop(plugging);
        match probed {
            // EAL has already probed a network card when it started.
            error if error == -libc::EEXIST && is_card(name) => {}
            result => drop(check("it cannot be plugged in", result)?),
        }
        let mut port = 0;
        // SAFETY: a terminated string, and a port number to write to.
        check("it has no port of this name", unsafe {
            rte::rte_eth_dev_get_port_by_name(port_name.as_ptr(), &mut port)
        })?;
        let mut device = Device { claim, port, mac: Mac::default(), sending: Vec::new(), _pool: pool.clone() };
        // SAFETY: `port` is the number of a device.
        let most = check("its queues", unsafe { rte::innet_eth_max_queues(port) })?;
        let queues = queues.clamp(1, most.max(1) as usize);
        // SAFETY: the port is not started, and the pool outlives it, as `device` holds the pool.
        check("it does not start", unsafe {
            rte::innet_eth_open(port, queues as u16, DESCRIPTORS, DESCRIPTORS, pool.0.as_ptr())
        })?;
        let mut mac = rte::rte_ether_addr::default();
        // SAFETY: an address to write to.
        check("its address", unsafe { rte::rte_eth_macaddr_get(port, &mut mac) })?;
        device.mac = mac.addr_bytes;
        device.sending = (0..queues).map(|_| Mutex::new(())).collect();
        let device = Arc::new(device);
        let queue = |queue| RxQueue {
            device: device.clone(),
            queue,
            packets: [ptr::null_mut(); BURST],
            frames: [EMPTY; BURST],
            count: 0,
        };
        let queues = (0..queues as u16).map(queue).collect();
        Ok((device, queues))
    }

    /// Its Ethernet address.
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Enables promiscuous mode: the device also receives frames to other Ethernet addresses.
    ///
    /// # Errors
    /// [`Error::Config`] if the device cannot.
    pub fn enable_promiscuous(&self) -> Result<()> {
        // SAFETY: `port` belongs to this device.
        match unsafe { rte::rte_eth_promiscuous_enable(self.port) } {
            // A device without the mode, such as a memif, receives all frames anyway.
            0 => Ok(()),
            error if error == -libc::ENOTSUP => Ok(()),
            error => Err(Error::Config(format!(
                "the DPDK device {:?} cannot receive frames to other Ethernet addresses, as a switch has to: {}",
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
            let _plugging = lock(&PLUGGING);
            // SAFETY: queues hold a reference to the device, so all are gone and nothing uses the port.
            unsafe {
                rte::rte_eth_dev_stop(port);
                rte::rte_eth_dev_close(port);
            }
            let name = CString::new(name).unwrap_or_default();
            if !is_card(&self.claim.0) {
                // SAFETY: terminated strings.
                unsafe { rte::rte_eal_hotplug_remove(c"vdev".as_ptr(), name.as_ptr()) };
            }
        };
        match is_memif(name) {
            true => eal::on_interrupt_thread(close),
            false => close(),
        }
    }
}

/// Network cards are named by their PCI address.
fn is_card(name: &str) -> bool {
    name.contains(':')
}

fn is_memif(name: &str) -> bool {
    name.starts_with("net_memif")
}

/// Reservation of a device's name in this process.
struct DeviceClaim(String);

/// Names of open devices.
static CLAIMED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl DeviceClaim {
    fn new(name: &str) -> Result<Self> {
        // A panic leaves the list whole: it is changed by one call.
        let mut claimed = lock(&CLAIMED);
        if claimed.iter().any(|other| other == name) {
            return Err(Error::Config(format!(
                "the DPDK device {name:?} is in use by this process: give each of a kind another number (net_memif0, net_memif1)"
            )));
        }
        claimed.push(name.to_owned());
        Ok(DeviceClaim(name.to_owned()))
    }
}

impl Drop for DeviceClaim {
    fn drop(&mut self) {
        let mut claimed = lock(&CLAIMED);
        claimed.retain(|other| *other != self.0);
    }
}

/// A receive queue, and the burst fetched last. There is one value for each queue, so only one thread at a time receives from it.
pub struct RxQueue {
    device: Arc<Device>,
    queue: u16,
    /// Packets of the burst; null for one that was taken.
    packets: [*mut rte::rte_mbuf; BURST],
    frames: [rte::innet_frame; BURST],
    count: usize,
}

// SAFETY: this value owns its packets, and mbufs may be used on every thread.
unsafe impl Send for RxQueue {}

impl RxQueue {
    /// Replaces the burst by the next one. Returns the number of packets.
    pub fn fetch(&mut self) -> usize {
        self.clear();
        // SAFETY: both arrays have space for `BURST` entries; no other value receives from this queue.
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

    /// Number of packets in the burst.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The frame of packet `at`; `None` if the packet was taken, or if its frame spans several segments, which frames of this protocol never do.
    #[inline]
    pub fn frame(&self, at: usize) -> Option<&[u8]> {
        let (packet, frame) = (self.packets[..self.count].get(at)?, self.frames.get(at)?);
        if packet.is_null() || frame.segments != 1 || frame.data.is_null() {
            return None;
        }
        // SAFETY: `data` has `bytes` initialised bytes, in a packet that this value owns.
        Some(unsafe { std::slice::from_raw_parts(frame.data.cast(), frame.bytes.into()) })
    }

    /// Takes packet `at` out of the burst.
    pub fn take(&mut self, at: usize) -> Option<Packet> {
        let frame = self.frames.get(at)?;
        let packet = self.packets[..self.count].get_mut(at)?;
        let (packet, data) =
            (NonNull::new(std::mem::replace(packet, ptr::null_mut()))?, NonNull::new(frame.data.cast())?);
        Some(Packet { packet, data, bytes: frame.bytes, whole: frame.segments == 1, fresh: false })
    }

    fn clear(&mut self) {
        let count = std::mem::take(&mut self.count) as u32;
        // SAFETY: this value owns the packets of the burst; DPDK skips null pointers.
        unsafe { rte::innet_pktmbuf_free_bulk(self.packets.as_mut_ptr(), count) };
    }
}

impl Drop for RxQueue {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Restarts a memif without a peer: with `role=client` it connects only when it starts. Does nothing unless `queues` are all receive queues
/// of the device.
pub fn reconnect_memif(queues: &mut [RxQueue]) {
    let Some(RxQueue { device, .. }) = queues.first() else {
        return;
    };
    let all = queues.len() == device.sending.len() && queues.iter().all(|other| Arc::ptr_eq(&other.device, device));
    // SAFETY: `port` belongs to this device.
    let up = || unsafe { rte::innet_eth_link_is_up(device.port) } != 0;
    if !all || !is_memif(&device.claim.0) || up() {
        return;
    }
    let _locked: Vec<_> = device.sending.iter().map(|queue| queue.lock()).collect();
    // SAFETY: no thread uses the port: all transmit queues are locked, and all receive queues are borrowed here.
    eal::on_interrupt_thread(|| unsafe {
        rte::rte_eth_dev_stop(device.port);
        rte::rte_eth_dev_start(device.port);
    });
}

/// One core's access to a transmit queue, with the next burst.
pub struct TxQueue {
    device: Arc<Device>,
    queue: u16,
    packets: [*mut rte::rte_mbuf; BURST],
    /// Length to write to each packet's mbuf; 0 if the mbuf has its length.
    bytes: [u16; BURST],
    count: usize,
    /// Packets that the device accepted.
    pub sent: u64,
    /// Packets that the device refused, which are lost.
    pub refused: u64,
}

// SAFETY: this value owns its packets, and mbufs may be used on every thread.
unsafe impl Send for TxQueue {}

impl TxQueue {
    /// Transmit queue `queue` of `device`, modulo the number of queues; cores with the same one take turns.
    pub fn new(device: Arc<Device>, queue: usize) -> Self {
        TxQueue {
            queue: (queue % device.sending.len()) as u16,
            device,
            packets: [ptr::null_mut(); BURST],
            bytes: [0; BURST],
            count: 0,
            sent: 0,
            refused: 0,
        }
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Adds a packet to the burst.
    #[inline]
    pub fn send(&mut self, packet: Packet) {
        if self.count == BURST {
            self.flush();
        }
        self.bytes[self.count] = if packet.fresh { packet.bytes } else { 0 };
        self.packets[self.count] = packet.into_raw();
        self.count += 1;
    }

    /// Sends the burst.
    pub fn flush(&mut self) {
        if self.count == 0 {
            return;
        }
        let mut left = &mut self.packets[..self.count];
        // SAFETY: this value owns the packets. One with a length has one segment, in whose buffer so many bytes are written.
        unsafe {
            rte::innet_pktmbuf_set_lengths(left.as_ptr(), self.bytes.as_ptr(), left.len() as u32);
        }
        self.count = 0;
        let turn = &self.device.sending[usize::from(self.queue)];
        let _turn = lock(turn);
        // Retries a full queue while its peer may be emptying it, but not for ever: the peer may be gone.
        for _ in 0..SEND_ATTEMPTS {
            // SAFETY: this value owns the packets, and has the lock of the queue.
            let taken =
                unsafe { rte::innet_eth_tx_burst(self.device.port, self.queue, left.as_mut_ptr(), left.len() as u16) };
            self.sent += u64::from(taken);
            left = &mut left[usize::from(taken)..];
            if left.is_empty() {
                return;
            }
            std::hint::spin_loop();
        }
        self.refused += left.len() as u64;
        // SAFETY: the device did not accept these packets, so this value still owns them.
        unsafe { rte::innet_pktmbuf_free_bulk(left.as_mut_ptr(), left.len() as u32) };
    }
}

impl Drop for TxQueue {
    fn drop(&mut self) {
        self.flush();
    }
}
