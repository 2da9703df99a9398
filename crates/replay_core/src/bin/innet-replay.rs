//! The `innet-replay` command.
fn main() {}
