//! What server and client stand on.
//!
//! | module | subject |
//! | --- | --- |
//! | [`stack`] | the `Stack` trait: `kernel`, and stacks that are plugged in |
//! | [`framing`] | frames of `replay_wire`, read from and written to a stream |
//! | [`tls`] | certificates and keys for rustls |
//! | [`error`] | the error enum of link, client and server |

pub mod error;
pub mod framing;
pub mod stack;
pub mod tls;

use base::wait::Wait;
use error::{Error, Result};
use replay_core::memory::Memory;
use replay_core::replay::Replay;
use replay_wire::RequestBody;

/// A replay memory that carries out commands: requests without a result, which a memory in this process, a server and several servers carry out
/// alike. A new one needs no method of [`Replay`]; code of the server only if it takes long (`Tables`), of clients only if it ends batches in
/// progress (`shards`). Requests that have a method of [`Replay`], such as `drop_table`, are no commands: their methods do more than send
/// them.
pub trait Commands: Replay<Error> {
    /// Carries out a command; of several servers, on each.
    ///
    /// # Errors
    /// Errors of [`carry_out`], and of the connection; [`Error::Disconnected`] when one of several servers is absent.
    fn command(&self, command: RequestBody, wait: &Wait<'_>) -> Result<()>;
}

impl Commands for Memory {
    fn command(&self, command: RequestBody, _wait: &Wait<'_>) -> Result<()> {
        carry_out(self, &command)
    }
}

/// Carries out a command in the memory.
///
/// # Errors
/// Errors of the memory; [`Error::Internal`] for another request.
pub fn carry_out(memory: &Memory, command: &RequestBody) -> Result<()> {
    use RequestBody::*;
    match command {
        EmptyTable(name) => memory.empty_table(name)?,
        DropParameters(name) => memory.parameters().remove(name),
        Hello(_) | Authenticate(_) | CreateTable(_) | DescribeTable(_) | DropTable(_) | OpenWriter(_) | Push(_)
        | Sample(_) | UpdatePriorities(_) | ReadSteps(_) | ReportCorrupt(_) | PutParameters(_) | GetParameters(_)
        | ChangeLease(_) | Stats | List | Snapshot | CloseWriter(_) | CallExtension(_) => {
            return Err(Error::Internal(format!("{} is not a command", command.name())));
        }
    }
    Ok(())
}
