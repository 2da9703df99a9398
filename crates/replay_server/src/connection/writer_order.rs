//! The order of one writer's requests.

use std::collections::HashMap;

use tokio::sync::oneshot;

use replay_wire::{CloseWriter, RequestBody};

/// Waiting requests of a connection's writers. A writer's requests are applied in the order of their arrival, even if one
/// has to wait.
#[derive(Default)]
pub struct WriterOrder {
    /// End of each writer's last waiting request.
    last: HashMap<u64, oneshot::Receiver<()>>,
}

/// Position of a request behind its writer's earlier ones.
#[derive(Default)]
pub struct Position {
    /// Ends when the request ahead is answered.
    pub ahead: Option<oneshot::Receiver<()>>,
    /// Dropped when this request is answered.
    pub done: Option<oneshot::Sender<()>>,
}

impl WriterOrder {
    /// Whether no request waits that has to be applied before this one.
    pub fn is_free(&mut self, request: &RequestBody) -> bool {
        let last = ordered_writer(request).and_then(|writer| self.last.get_mut(&writer));
        last.is_none_or(is_over)
    }

    /// Position of a request behind its writer's waiting ones.
    pub fn enter(&mut self, request: &RequestBody) -> Position {
        let Some(writer) = ordered_writer(request) else {
            return Position::default();
        };
        // Bounds the map: idle writers are forgotten, so it has at most one entry for each waiting request.
        self.last.retain(|_, last| !is_over(last));
        let (done, last) = oneshot::channel();
        Position { ahead: self.last.insert(writer, last), done: Some(done) }
    }
}

fn is_over(last: &mut oneshot::Receiver<()>) -> bool {
    !matches!(last.try_recv(), Err(oneshot::error::TryRecvError::Empty))
}

/// The writer of a request that is applied in order; `None` for other requests.
fn ordered_writer(request: &RequestBody) -> Option<u64> {
    match request {
        RequestBody::Push(push) => Some(push.writer),
        RequestBody::CloseWriter(CloseWriter { writer, .. }) => Some(*writer),
        _ => None,
    }
}
