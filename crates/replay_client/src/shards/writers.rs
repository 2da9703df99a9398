//! The server of each open writer.

use std::sync::Arc;

use super::group::Group;
use base::sync::lock;
use replay_core::replay::WriterId;

impl Group {
    /// Server of an open writer of this client.
    pub fn server_of(&self, writer: &WriterId) -> Option<usize> {
        lock(&self.writers).get(&writer.writer).copied()
    }
}

/// An open writer. The group knows its server until this is dropped.
pub struct RegisteredWriter {
    group: Arc<Group>,
    writer: u64,
}

impl RegisteredWriter {
    /// Registers a writer that was opened at a server.
    pub fn new(group: Arc<Group>, shard: usize, writer: u64) -> Self {
        lock(&group.writers).insert(writer, shard);
        RegisteredWriter { group, writer }
    }
}

impl Drop for RegisteredWriter {
    fn drop(&mut self) {
        lock(&self.group.writers).remove(&self.writer);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::{Client, ConnectOptions};
    use super::*;
    use crate::dialer::Dialer;

    #[test]
    fn a_writer_is_known_while_it_is_open() {
        let client = |name: &str| {
            let address = format!("unix:///{name}").parse().unwrap();
            Client::unconnected(Dialer::new(address, ConnectOptions::default()).unwrap())
        };
        let clients = vec![client("a"), client("b")];
        let group = Arc::new(Group::new(clients, 0, Duration::ZERO));
        let id = |writer| WriterId { table: "t".into(), writer };
        let open = |shard, writer| RegisteredWriter::new(group.clone(), shard, writer);
        let (first, second) = (open(0, 7), open(1, 8));
        assert_eq!(group.server_of(&id(7)), Some(0));
        assert_eq!(group.server_of(&id(8)), Some(1));
        drop(first);
        assert_eq!(group.server_of(&id(7)), None);
        drop(second);
        assert!(lock(&group.writers).is_empty());
    }
}
