//! The server of each open writer.

use std::sync::Arc;

use super::group::Group;
use base::sync::lock;
use base::wait::Wait;
use replay_core::replay::{PushBody, PushChannel, WriterId};
use replay_link::error::{Error, Result};

impl Group {
    /// Server of an open writer of this client.
    pub fn server_of(&self, writer: &WriterId) -> Option<usize> {
        lock(&self.writers).get(&writer.writer).copied()
    }
}

/// Pushes of one writer. The group knows the writer's server until this is dropped.
pub struct ShardedPushes {
    group: Arc<Group>,
    writer: u64,
    channel: Box<dyn PushChannel<Error>>,
}

impl ShardedPushes {
    /// Registers a writer that was opened at a server.
    pub fn new(group: Arc<Group>, shard: usize, writer: u64, channel: Box<dyn PushChannel<Error>>) -> Self {
        lock(&group.writers).insert(writer, shard);
        ShardedPushes { group, writer, channel }
    }
}

impl Drop for ShardedPushes {
    fn drop(&mut self) {
        lock(&self.group.writers).remove(&self.writer);
    }
}

impl PushChannel<Error> for ShardedPushes {
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<()> {
        self.channel.push(body, wait)
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.channel.flush(wait)
    }

    fn end_steps(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.channel.end_steps(wait)
    }

    fn close(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.channel.close(wait)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::{Client, ConnectOptions};
    use super::*;
    use crate::dialer::Dialer;
    use replay_link::error::Error;

    struct Pushes;

    impl PushChannel<Error> for Pushes {
        fn push(&mut self, _: PushBody, _: &Wait<'_>) -> Result<()> {
            Err(Error::Interrupted)
        }
        fn flush(&mut self, _: &Wait<'_>) -> Result<()> {
            Err(Error::Interrupted)
        }
        fn end_steps(&mut self, _: &Wait<'_>) -> Result<()> {
            Err(Error::Interrupted)
        }
        fn close(&mut self, _: &Wait<'_>) -> Result<()> {
            Err(Error::Interrupted)
        }
    }

    #[test]
    fn a_writer_is_known_while_it_is_open() {
        let client = |name: &str| {
            let address = format!("unix:///{name}").parse().unwrap();
            Client::unconnected(Dialer::new(address, ConnectOptions::default()).unwrap())
        };
        let clients = vec![client("a"), client("b")];
        let group = Arc::new(Group::new(clients, 0, Duration::ZERO));
        let id = |writer| WriterId { table: "t".into(), writer };
        let open = |shard, writer| ShardedPushes::new(group.clone(), shard, writer, Box::new(Pushes));
        let (first, second) = (open(0, 7), open(1, 8));
        assert_eq!(group.server_of(&id(7)), Some(0));
        assert_eq!(group.server_of(&id(8)), Some(1));
        drop(first);
        assert_eq!(group.server_of(&id(7)), None);
        drop(second);
        assert!(lock(&group.writers).is_empty());
    }
}
