//! The order of one writer's requests.

use std::collections::HashMap;

use tokio::sync::oneshot;

use replay_wire::RequestBody;

/// The writers of one connection: what a writer sends is applied in the order in which it came, also when
/// some of it has to wait.
#[derive(Default)]
pub struct Lanes {
    /// For each writer the end of its last request that waits.
    last: HashMap<u64, oneshot::Receiver<()>>,
}

/// A place in a lane.
#[derive(Default)]
pub struct Turn {
    /// Ends when the request ahead is answered.
    pub ahead: Option<oneshot::Receiver<()>>,
    /// Dropped when this one is.
    pub done: Option<oneshot::Sender<()>>,
}

impl Lanes {
    /// Nothing of this writer waits.
    pub fn is_free(&mut self, writer: u64) -> bool {
        self.last.get_mut(&writer).is_none_or(is_over)
    }

    /// The place behind what waits of this writer.
    pub fn enter(&mut self, writer: u64) -> Turn {
        // Writers that have nothing waiting are forgotten, so no more are known than requests are under way.
        self.last.retain(|_, last| !is_over(last));
        let (done, last) = oneshot::channel();
        Turn {
            ahead: self.last.insert(writer, last),
            done: Some(done),
        }
    }
}

fn is_over(last: &mut oneshot::Receiver<()>) -> bool {
    !matches!(last.try_recv(), Err(oneshot::error::TryRecvError::Empty))
}

/// The writer whose order a request has to keep.
pub fn lane(request: &RequestBody) -> Option<u64> {
    match request {
        RequestBody::Push(push) => Some(push.writer),
        RequestBody::CloseWriter { writer, .. } => Some(*writer),
        _ => None,
    }
}
