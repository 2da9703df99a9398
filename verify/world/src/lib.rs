//! Servers, clients, disks and their faults in one simulated world. Everything follows from one number: the network's delays and cuts, what
//! the disks lose, who is killed when, and what the programs do. The server, the clients and the snapshots are the product's own, over the
//! time, the network, the disk and the random numbers of the world.
//!
//! | module | subject |
//! | --- | --- |
//! | [`process`] | threads of programs, which take turns |
//! | [`client_stack`] | the network of clients |
//! | [`disk`] | disks that tear and reorder |
//! | [`machine`] | a server with its disk: starts, snapshots, kills |
//! | [`programs`] | actors, learners, operators, a hostile client |
//! | [`ledger`] | the oracle |
//! | [`frequencies`] | how often items are sampled, by chi-square |
//! | [`story`] | a world's settings and faults, and its end |
//! | [`trials`] | programs that reach for one kind of mistake |
//! | [`scale`] | thousands of actors, machines that take time, and no other faults than a lost server |

pub mod client_stack;
pub mod disk;
pub mod frequencies;
pub mod ledger;
pub mod machine;
pub mod process;
pub mod programs;
pub mod scale;
pub mod story;
pub mod trials;

pub use story::{Outcome, run};
