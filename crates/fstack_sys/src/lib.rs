//! Raw bindings to what is installed on the machine; nothing is fetched or built here.
//!
//! | feature | binds | found by |
//! | --- | --- | --- |
//! | `fstack` | F-Stack 1.24 or newer: module `fstack` | `FF_PATH`, then pkg-config `libfstack` |
//! | `dpdk` | packet bursts of libdpdk 22.11 or newer: module `dpdk` | pkg-config `libdpdk` |
//!
//! Without a feature there is nothing in it. The declarations are written by hand from the headers; `tests/` compares
//! their layouts and constants with the headers of the installed library.

#[cfg(feature = "dpdk")]
pub mod dpdk;
#[cfg(feature = "fstack")]
pub mod fstack;
