//! For the benchmarks of gradients only: a parameter server like the papers' baseline, and a relay that loses datagrams.

pub mod lossy;
pub mod parameter_server;
