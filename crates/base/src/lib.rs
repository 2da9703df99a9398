//! What the memory and the crates beside it need: the crate below all others, without I/O.
//!
//! | module | subject |
//! | --- | --- |
//! | [`error`] | errors that every crate above has a variant for |
//! | [`wait`] | deadlines, interrupts and log lines of blocking calls |
//! | [`random`] | random bytes, which no forked process repeats |
//! | [`sync`] | locks whose data stay whole if a holder panics |
//! | [`words`] | values in messages, as Python and TOML write them |
//! | [`histogram`] | histograms for statistics |

pub mod error;
pub mod histogram;
pub mod random;
pub mod sync;
pub mod wait;
pub mod words;
