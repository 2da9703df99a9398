//! The commands, as processes of the binary that users have.

mod connecting;
#[allow(dead_code, reason = "most are for the suite of the server")]
#[path = "../../../replay_server/tests/server/suite/messages.rs"]
mod messages;
mod plugged;
mod serve;
mod settings;
#[path = "../../../replay_server/tests/support/mod.rs"]
mod support;
