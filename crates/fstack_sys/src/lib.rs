//! Raw bindings to installed libraries; this crate neither fetches nor builds them.
//!
//! | module | feature | binds | found by |
//! | --- | --- | --- | --- |
//! | `fstack` | `fstack` | F-Stack 1.24 or newer | `FF_PATH`, then pkg-config `libfstack` |
//! | `dpdk` | `dpdk` | packet bursts of DPDK 22.11 or newer | pkg-config `libdpdk` |
//!
//! Without features the crate is empty. The declarations are written by hand from the headers; `tests/` compares
//! their layouts and constants with the headers of the installed library. `c/dpdk.c` and `c/fstack.c` wrap inline functions and
//! structures whose layout depends on the release; the other C files serve those tests.

#[cfg(feature = "dpdk")]
pub mod dpdk;
#[cfg(feature = "fstack")]
pub mod fstack;
