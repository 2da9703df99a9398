//! F-Stack's C interface: `ff_api.h`, `ff_event.h`, and the four stages of `ff_init`, which its library exports although no header declares
//! them.
//!
//! Every function except [`ff_stop_run`] may be called only on the thread that ran the initialisation, once in a process. A failed
//! initialisation ends the process by `exit`. `errno` is set, in Linux's values.

#![allow(non_camel_case_types)]

use libc::{c_char, c_int, c_short, c_uint, c_ulong, c_ushort, c_void, iovec, size_t, socklen_t, ssize_t, timespec};

/// Callback of [`ff_run`], called in every iteration; its result is ignored.
pub type loop_func_t = unsafe extern "C" fn(arg: *mut c_void) -> c_int;

/// A socket address in Linux's layout: a `sockaddr_in` or `sockaddr_in6` is passed by its pointer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct linux_sockaddr {
    /// `AF_INET` or [`AF_INET6_LINUX`].
    pub sa_family: c_short,
    /// The rest.
    pub sa_data: [c_char; 14],
}

/// A change to a kqueue, or an event from it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct kevent {
    /// The descriptor.
    pub ident: usize,
    /// `EVFILT_*`.
    pub filter: c_short,
    /// `EV_*`.
    pub flags: c_ushort,
    /// Flags of the filter.
    pub fflags: c_uint,
    /// Bytes ready to read, or free to write.
    pub data: i64,
    /// The caller's value, returned in events. F-Stack ignores 0.
    pub udata: *mut c_void,
    /// Extensions.
    pub ext: [u64; 4],
}

/// The state of a port's link.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, Default)]
pub struct rte_eth_link {
    /// In megabits a second.
    pub link_speed: u32,
    /// Bits of duplex, negotiation and status, from the lowest.
    pub bits: u16,
}

impl rte_eth_link {
    /// Whether the link is up.
    pub fn is_up(&self) -> bool {
        self.bits & 0b100 != 0
    }
}

/// Release of the linked library; `None` if neither pkg-config nor a file beside the library names it.
pub const RELEASE: Option<&str> = option_env!("FSTACK_VERSION");

/// CRC-32 of the linked shared library's file; `None` for a static library.
pub fn shared_library() -> Option<u32> {
    u32::from_str_radix(option_env!("FSTACK_SHARED_CRC32")?, 16).ok()
}

/// Data to read, or connections to accept.
pub const EVFILT_READ: c_short = -1;
/// Free space to write.
pub const EVFILT_WRITE: c_short = -2;
/// Adds an event to the queue.
pub const EV_ADD: c_ushort = 0x0001;
/// Reports once, then leaves the queue.
pub const EV_ONESHOT: c_ushort = 0x0010;
/// Reports changes of a state (edge-triggered).
pub const EV_CLEAR: c_ushort = 0x0020;
/// The peer has closed its sending side.
pub const EV_EOF: c_ushort = 0x8000;
/// IPv6 in a [`linux_sockaddr`].
pub const AF_INET6_LINUX: c_int = 10;
/// Most arguments in [`dpdk_argv`].
pub const DPDK_CONFIG_NUM: usize = 16;

// SAFETY: the signatures equal F-Stack 1.25's `ff_init` and the headers, which the C compiler compares in c/; tests/fstack_layout.rs compares
// structures and constants.
unsafe extern "C" {
    /// The arguments for EAL that [`ff_load_config`] made.
    pub static mut dpdk_argc: c_int;
    /// The arguments for EAL that [`ff_load_config`] made.
    pub static mut dpdk_argv: [*mut c_char; DPDK_CONFIG_NUM + 1];

    /// Reads the file that `--conf` names, prints it to standard output, and derives EAL's arguments.
    pub fn ff_load_config(argc: c_int, argv: *const *mut c_char) -> c_int;
    /// Starts EAL and the ports.
    pub fn ff_dpdk_init(argc: c_int, argv: *mut *mut c_char) -> c_int;
    /// Enables checksum offload and TSO on the ports, whatever capabilities their drivers report, so that segments of up to 64 KiB leave
    /// unsplit. Call it after [`ff_dpdk_init`]. 0, or a negative errno: `ENOENT` if a device is not a port of F-Stack or its port table has
    /// an unknown layout; DPDK's own, such as `ENOMEM`.
    pub fn innet_ff_whole_segments() -> c_int;
    /// Starts the FreeBSD stack.
    pub fn ff_freebsd_init() -> c_int;
    /// Gives the ports their addresses.
    pub fn ff_dpdk_if_up() -> c_int;
    /// Polls the ports and calls `loop_` until [`ff_stop_run`].
    pub fn ff_run(loop_: loop_func_t, arg: *mut c_void);
    /// Ends [`ff_run`]; callable from any thread.
    pub fn ff_stop_run();

    /// Replaces DPDK's delay function, with which F-Stack waits for the links of its ports.
    pub fn rte_delay_us_callback_register(wait: unsafe extern "C" fn(microseconds: c_uint));
    /// DPDK's default delay function: a busy wait.
    pub fn rte_delay_us_block(microseconds: c_uint);

    /// Number of ports.
    pub fn rte_eth_dev_count_avail() -> u16;
    /// Finds the port with this name; 0, or a negative error.
    pub fn rte_eth_dev_get_port_by_name(name: *const c_char, port: *mut u16) -> c_int;
    /// Reads a port's link without waiting; 0, or a negative error.
    pub fn rte_eth_link_get_nowait(port: u16, link: *mut rte_eth_link) -> c_int;
    /// Starts a stopped port.
    pub fn rte_eth_dev_start(port: u16) -> c_int;
    /// Stops a port.
    pub fn rte_eth_dev_stop(port: u16) -> c_int;

    /// `socket(2)`.
    pub fn ff_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    /// `ioctl(2)`, with Linux's requests.
    pub fn ff_ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    /// `setsockopt(2)`, with Linux's options.
    pub fn ff_setsockopt(s: c_int, level: c_int, option: c_int, value: *const c_void, length: socklen_t) -> c_int;
    /// `getsockopt(2)`, with Linux's options.
    pub fn ff_getsockopt(s: c_int, level: c_int, option: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int;
    /// `bind(2)`.
    pub fn ff_bind(s: c_int, address: *const linux_sockaddr, length: socklen_t) -> c_int;
    /// `listen(2)`.
    pub fn ff_listen(s: c_int, backlog: c_int) -> c_int;
    /// `accept(2)`; writes a whole address whatever `length` is.
    pub fn ff_accept(s: c_int, address: *mut linux_sockaddr, length: *mut socklen_t) -> c_int;
    /// `connect(2)`.
    pub fn ff_connect(s: c_int, address: *const linux_sockaddr, length: socklen_t) -> c_int;
    /// `shutdown(2)`.
    pub fn ff_shutdown(s: c_int, how: c_int) -> c_int;
    /// `close(2)`.
    pub fn ff_close(fd: c_int) -> c_int;

    /// `read(2)`.
    pub fn ff_read(fd: c_int, buffer: *mut c_void, bytes: size_t) -> ssize_t;
    /// `writev(2)`.
    pub fn ff_writev(fd: c_int, slices: *const iovec, count: c_int) -> ssize_t;

    /// `kqueue(2)`.
    pub fn ff_kqueue() -> c_int;
    /// `kevent(2)`, without waiting: the timeout is ignored.
    pub fn ff_kevent(
        kq: c_int,
        changes: *const kevent,
        change_count: c_int,
        events: *mut kevent,
        event_count: c_int,
        timeout: *const timespec,
    ) -> c_int;
}
