//! What the benchmarks of gradients measure against: a parameter server in the manner of the papers' baseline, and a
//! relay that loses datagrams. Not part of the library's interface.

pub mod lossy;
pub mod parameter_server;
