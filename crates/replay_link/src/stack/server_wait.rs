//! A client's wait for its server: what it says of it.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::error::Error;
use base::sync::lock;
use base::wait::Wait;
use replay_core::error::WaitReason;
use replay_wire::{NO_REQUEST, Reply, ReplyBody};

/// State of a wait for the server: the last reason that the server sent.
pub struct ServerWait {
    /// Name of the server.
    peer: String,
    /// Reason of the last [`ReplyBody::Waiting`]; `None` after an answer.
    reason: Mutex<Option<WaitReason>>,
}

impl ServerWait {
    /// Time after which a server that has not sent a reason is logged as not answering.
    const ARRIVES_WITHIN: Duration = Duration::from_secs(3);

    /// A server called `peer`, without a reason.
    pub fn new(peer: String) -> Self {
        ServerWait { peer, reason: Mutex::default() }
    }

    /// The server, for errors.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Logs a long wait for the server: see [`Wait::report`].
    pub fn report(&self, wait: &Wait<'_>, now: Instant) {
        if wait.notice.is_none() {
            return;
        }
        let reason = lock(&self.reason).clone();
        match reason {
            Some(reason) => reason.report(wait, now, Wait::REPORT_AFTER),
            None => {
                wait.awaits(None);
                wait.report(now, Wait::REPORT_AFTER + Self::ARRIVES_WITHIN, || {
                    format!("{} has not answered", self.peer)
                });
            }
        }
    }

    /// The error of a call without an answer: a deadline's error gets the server's reason, if there is one.
    pub fn explain(&self, late: Error) -> Error {
        match (late, lock(&self.reason).clone()) {
            (Error::Deadline { .. }, Some(reason)) => Error::deadline(reason),
            (late, _) => late,
        }
    }

    /// Records a reply: a reason, or an answer, which clears the reason.
    pub fn note(&self, reply: &Reply) {
        let mut reason = lock(&self.reason);
        match &reply.body {
            // A request's own reason is more specific.
            ReplyBody::Waiting(_) if reply.id == NO_REQUEST && reason.is_some() => {}
            ReplyBody::Waiting(because) => *reason = Some(because.clone()),
            _ => *reason = None,
        }
    }
}
