//! The bindings against the headers of the installed F-Stack. Empty where there is none.
#![cfg(all(feature = "fstack", fstack_found))]
#![allow(clippy::print_stdout, reason = "what could not be checked")]

use std::mem::{align_of, offset_of, size_of};

use fstack_sys::fstack::*;

// SAFETY: defined with these types in c/fstack_layout.c.
unsafe extern "C" {
    static innet_kevent_layout: [usize; 9];
    static innet_sockaddr_layout: [usize; 4];
    static innet_fstack_constants: [i32; 10];
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
fn constants_are_those_of_the_headers() {
    // SAFETY: a constant array of this length in c/fstack_layout.c.
    let theirs = unsafe { innet_fstack_constants };
    let ours = [
        EVFILT_READ.into(),
        EVFILT_WRITE.into(),
        EV_ADD.into(),
        EV_DELETE.into(),
        EV_ONESHOT.into(),
        EV_CLEAR.into(),
        EV_EOF.into(),
        EV_ERROR.into(),
        AF_INET6_LINUX,
        DPDK_CONFIG_NUM as i32,
    ];
    assert_eq!(ours, theirs);
}

#[test]
fn the_library_is_of_a_release_that_is_known_to_work() {
    // Upstream's own installation has no pkg-config file, and nothing in its headers tells the release.
    let Some(version) = RELEASE else {
        println!("the release is unknown: found by FF_PATH");
        return;
    };
    let numbers: Vec<u32> = version.split('.').filter_map(|n| n.parse().ok()).collect();
    assert!(
        numbers >= vec![1, 24],
        "F-Stack {version} is older than 1.24"
    );
}

#[test]
fn the_library_exports_every_function() {
    // Taking an address makes the linker resolve it; none is called.
    let exported: [*const (); 22] = [
        ff_load_config as *const (),
        ff_dpdk_init as *const (),
        ff_freebsd_init as *const (),
        ff_dpdk_if_up as *const (),
        ff_init as *const (),
        ff_run as *const (),
        ff_stop_run as *const (),
        ff_socket as *const (),
        ff_ioctl as *const (),
        ff_setsockopt as *const (),
        ff_getsockopt as *const (),
        ff_bind as *const (),
        ff_listen as *const (),
        ff_accept as *const (),
        ff_connect as *const (),
        ff_shutdown as *const (),
        ff_close as *const (),
        ff_getsockname as *const (),
        ff_getpeername as *const (),
        ff_kqueue as *const (),
        ff_kevent as *const (),
        ff_writev as *const (),
    ];
    assert!(exported.iter().all(|function| !function.is_null()));
}
