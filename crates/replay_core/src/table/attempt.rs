//! One attempt at a call that may have to wait.

use crate::cause::WaitReason;

/// Result of one attempt at a call that may have to wait.
#[derive(Debug)]
pub enum Attempt<T> {
    /// Done.
    Ready(T),
    /// Nothing was done. [`PendingCall`](super::PendingCall) says when to try again.
    Blocked(WaitReason),
}

impl<T> Attempt<T> {
    /// Maps the result of a finished attempt.
    pub fn map<U>(self, result: impl FnOnce(T) -> U) -> Attempt<U> {
        match self {
            Attempt::Ready(done) => Attempt::Ready(result(done)),
            Attempt::Blocked(reason) => Attempt::Blocked(reason),
        }
    }
}
