//! For benchmarks and tests only: a parameter server like the papers' baseline, and a relay that emulates a link.

pub mod link;
pub mod parameter_server;
pub mod relay;
