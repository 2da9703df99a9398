//! What server and client stand on.
//!
//! | module | subject |
//! | --- | --- |
//! | [`stack`] | the `Stack` trait: `kernel`, and stacks that are plugged in |
//! | [`framing`] | frames of `replay_wire`, read from and written to a stream |
//! | [`tls`] | certificates and keys for rustls |
//! | [`command`] | requests without a result, in process and on servers |
//! | [`error`] | the error enum of link, client and server |

pub mod command;
pub mod error;
pub mod framing;
pub mod stack;
pub mod tls;
