//! The bindings against the headers of the installed F-Stack. Empty where there is none.
#![cfg(all(feature = "fstack", fstack_found))]
#![allow(clippy::print_stdout, reason = "what could not be checked")]

use std::collections::BTreeSet;
use std::mem::{align_of, offset_of, size_of};

use fstack_sys::fstack::*;

// SAFETY: defined with these types in c/fstack_layout.c.
unsafe extern "C" {
    static innet_kevent_layout: [usize; 9];
    static innet_sockaddr_layout: [usize; 4];
    static innet_fstack_constants: [i32; 8];
}

#[test]
fn structures_are_laid_out_as_the_headers_say() {
    // SAFETY: constant arrays of these lengths in c/fstack_layout.c.
    let (event, address) = unsafe { (innet_kevent_layout, innet_sockaddr_layout) };
    let ours = [
        size_of::<kevent>(),
        align_of::<kevent>(),
        offset_of!(kevent, ident),
        offset_of!(kevent, filter),
        offset_of!(kevent, flags),
        offset_of!(kevent, fflags),
        offset_of!(kevent, data),
        offset_of!(kevent, udata),
        offset_of!(kevent, ext),
    ];
    assert_eq!(ours, event);
    let ours = [
        size_of::<linux_sockaddr>(),
        align_of::<linux_sockaddr>(),
        offset_of!(linux_sockaddr, sa_family),
        offset_of!(linux_sockaddr, sa_data),
    ];
    assert_eq!(ours, address);
}

#[test]
fn links_of_ports_are_laid_out_as_the_headers_say() {
    // SAFETY: defined with these types in c/fstack_ports.c.
    unsafe extern "C" {
        static innet_eth_link_layout: [usize; 3];
        static innet_link_up: rte_eth_link;
        static innet_link_down: rte_eth_link;
    }
    // SAFETY: constants.
    let (theirs, up, down) = unsafe { (innet_eth_link_layout, innet_link_up, innet_link_down) };
    let ours = [size_of::<rte_eth_link>(), align_of::<rte_eth_link>(), offset_of!(rte_eth_link, link_speed)];
    assert_eq!(ours, theirs);
    assert_eq!((up.link_speed, down.link_speed), (10, 10));
    assert!(up.is_up() && !down.is_up() && down.bits != 0);
}

#[test]
fn constants_are_those_of_the_headers() {
    // SAFETY: a constant array of this length in c/fstack_layout.c.
    let theirs = unsafe { innet_fstack_constants };
    let ours = [
        EVFILT_READ.into(),
        EVFILT_WRITE.into(),
        EV_ADD.into(),
        EV_ONESHOT.into(),
        EV_CLEAR.into(),
        EV_EOF.into(),
        AF_INET6_LINUX,
        DPDK_CONFIG_NUM as i32,
    ];
    assert_eq!(ours, theirs);
}

#[test]
fn the_library_is_of_a_release_that_is_known_to_work() {
    // Nothing in the headers names the release.
    let Some(version) = RELEASE else {
        println!("the release is unknown: nothing beside the library names it");
        return;
    };
    let numbers: Vec<u32> = version.split('.').filter_map(|n| n.parse().ok()).collect();
    assert!(numbers >= vec![1, 24], "F-Stack {version} is older than 1.24");
}

/// Names and addresses of functions: taking an address makes the linker resolve it; none is called.
macro_rules! functions {
    ($($name:ident,)*) => { [$((stringify!($name), $name as *const ())),*] };
}

#[test]
fn the_library_exports_every_function() {
    let exported = functions![
        ff_load_config,
        ff_dpdk_init,
        innet_ff_whole_segments,
        ff_freebsd_init,
        ff_dpdk_if_up,
        ff_run,
        ff_stop_run,
        rte_delay_us_callback_register,
        rte_delay_us_block,
        rte_eth_dev_count_avail,
        rte_eth_dev_get_port_by_name,
        rte_eth_link_get_nowait,
        rte_eth_dev_start,
        rte_eth_dev_stop,
        ff_socket,
        ff_ioctl,
        ff_setsockopt,
        ff_getsockopt,
        ff_bind,
        ff_listen,
        ff_accept,
        ff_connect,
        ff_shutdown,
        ff_close,
        ff_read,
        ff_writev,
        ff_kqueue,
        ff_kevent,
    ];
    assert!(exported.iter().all(|(_, function)| !function.is_null()));
    let (_, bindings) = include_str!("../src/fstack.rs").split_once("extern \"C\" {").unwrap();
    let bound = bindings.lines().filter_map(|line| Some(line.trim().strip_prefix("pub fn ")?.split_once('(')?.0));
    assert_eq!(BTreeSet::from(exported.map(|(name, _)| name)), bound.collect());
}
