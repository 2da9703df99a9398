//! Requests and replies. The lists at the end have a line for each kind; `read` and `write` have the two lines that take it from and to its
//! member of the schema's union. Contents of several fields are in files, with a function for each direction.

mod hello;
mod push;
mod sample;
mod table;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use replay_core::error::WaitReason;
use replay_core::replay::{
    ChangeLease, Listing, Parameters, Push, ReadSteps, SampleRequest, Sampled, StepsRead, UpdateReceipt, WriterOpened,
};
use replay_core::schema::TableConfig;

use crate::error::{Error, ErrorCode, Result};
use crate::frame::{Payload, Rest, json, key, text, to_json};
use crate::innet_capnp as wire;

pub use hello::{Challenge, Extension, Hello};
pub use push::{CloseWriter, OpenOrResume};
pub use sample::{ReportCorrupt, UpdatePriorities};
pub use table::{GetParameters, PutParameters};

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Id of the request on its connection, from 1; the reply repeats it.
    pub id: u64,
    /// Longest wait at the server in milliseconds; 0 is one try without waiting.
    pub deadline_ms: u32,
    /// The table that the request is about, in the numbers of its connection, from 1; 0 for none.
    pub table: u16,
    /// Its name, in the connection's first request about it alone.
    pub table_name: Option<String>,
    /// Content of the request.
    pub body: RequestBody,
}

impl Request {
    /// A request that is about no table, or has its name.
    pub fn new(id: u64, deadline_ms: u32, body: RequestBody) -> Self {
        Request { id, deadline_ms, table: 0, table_name: None, body }
    }
}

/// Most tables that a connection numbers.
pub const MAX_NUMBERED_TABLES: usize = 4096;

/// A reply of the server.
pub struct Reply {
    /// Id of the request; [`NO_REQUEST`](crate::NO_REQUEST) for an error of the connection.
    pub id: u64,
    /// Content of the reply.
    pub body: ReplyBody,
}

/// Proof of a token; `None` without one.
pub type Proof = Option<[u8; 32]>;

/// Size of the reply to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplySize {
    /// A few bytes.
    Few,
    /// A few kilobytes, that grow with the memory: statistics, a list.
    Report,
    /// Any number. It counts as used memory of the server until the client has read it.
    Large,
}

/// Generates [`RequestBody`] from kinds of requests, each with its name, content, lowest role and size of its reply, and [`ReplyBody`] from kinds of replies,
/// each with its name and content.
macro_rules! kinds {
    (
        requests: $($(#[$about:meta])* $name:literal $request:ident $(($content:ty))? from $role:ident replies $size:ident,)+
        replies: $($(#[$about_reply:meta])* $reply_name:literal $reply:ident($reply_content:ty),)+
    ) => {
        /// Kinds of requests. Each may be answered by [`ReplyBody::Error`].
        #[derive(Debug, Clone, PartialEq)]
        pub enum RequestBody {
            $($(#[$about])* $request $(($content))?,)+
        }

        impl RequestBody {
            /// Names of all kinds of requests.
            pub const NAMES: [&str; [$($name),+].len()] = [$($name),+];

            /// Index of the request's kind in [`RequestBody::NAMES`].
            pub fn kind(&self) -> usize {
                enum Kind { $($request),+ }
                match self { $(RequestBody::$request { .. } => Kind::$request as usize,)+ }
            }

            /// The lowest role that may make the request.
            pub fn role(&self) -> Role {
                match self { $(RequestBody::$request { .. } => Role::$role,)+ }
            }

            /// Size of its reply.
            pub fn reply_size(&self) -> ReplySize {
                match self { $(RequestBody::$request { .. } => ReplySize::$size,)+ }
            }
        }

        /// Kinds of replies.
        pub enum ReplyBody {
            /// The request failed.
            Error {
                /// Kind of the error.
                code: ErrorCode,
                /// Message for the user; empty with a reason.
                message: String,
                /// Reason of the wait, with [`ErrorCode::Deadline`].
                waited_for: Option<Box<WaitReason>>,
            },
            /// No answer yet: reason why the request waits or, with id [`NO_REQUEST`](crate::NO_REQUEST), why the server has paused reading
            /// the connection (backpressure).
            Waiting(WaitReason),
            /// Success without a result.
            Done,
            $($(#[$about_reply])* $reply($reply_content),)+
        }

        impl ReplyBody {
            /// Name of the variant, for errors about unexpected replies.
            pub fn name(&self) -> &'static str {
                match self {
                    ReplyBody::Error { .. } => "error",
                    ReplyBody::Waiting(_) => "waiting",
                    ReplyBody::Done => "done",
                    $(ReplyBody::$reply(_) => $reply_name,)+
                }
            }
        }

        $(impl TryFrom<ReplyBody> for $reply_content {
            type Error = ReplyBody;

            fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
                if let ReplyBody::$reply(reply) = body { Ok(reply) } else { Err(body) }
            }
        })+
    };
}

impl TryFrom<ReplyBody> for () {
    type Error = ReplyBody;

    fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
        matches!(body, ReplyBody::Done).then_some(()).ok_or(body)
    }
}

impl RequestBody {
    /// Name of the request, for errors and statistics.
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.kind()]
    }

    /// The names of a table, a writer or parameters in the request.
    pub fn named(&mut self) -> impl Iterator<Item = &mut String> {
        use RequestBody::*;
        let mut parameters = None;
        let name = match self {
            CreateTable(table) => {
                parameters = table.parameters.as_mut();
                Some(&mut table.name)
            }
            OpenWriter(writer) => Some(&mut writer.open.name),
            PutParameters(put) => Some(&mut put.name),
            GetParameters(get) => Some(&mut get.name),
            DescribeTable(name) | EmptyTable(name) | DropTable(name) | DropParameters(name) => Some(name),
            Hello(_) | Authenticate(_) | Push(_) | Sample(_) | UpdatePriorities(_) | ReadSteps(_)
            | ReportCorrupt(_) | Stats | List | Snapshot | CloseWriter(_) | CallExtension(_) | ChangeLease(_) => None,
        };
        name.into_iter().chain(parameters)
    }

    /// Reads the message.
    pub(crate) fn read(from: wire::request::Reader<'_>, rest: &Rest) -> Result<Self> {
        use wire::request::Which;
        Ok(match from.which()? {
            Which::Hello(hello) => RequestBody::Hello(hello::read(hello?)?),
            Which::Authenticate(proof) => RequestBody::Authenticate(read_proof(proof)?),
            Which::CreateTable(config) => RequestBody::CreateTable(table::read(config)?),
            Which::DescribeTable(name) => RequestBody::DescribeTable(text(name)?),
            Which::EmptyTable(name) => RequestBody::EmptyTable(text(name)?),
            Which::DropTable(name) => RequestBody::DropTable(text(name)?),
            Which::OpenWriter(open) => RequestBody::OpenWriter(push::read_open(open?)?),
            Which::Push(push) => RequestBody::Push(push::read(push?, rest)?),
            Which::Sample(sample) => RequestBody::Sample(sample::read(sample?)?),
            Which::UpdatePriorities(update) => RequestBody::UpdatePriorities(sample::read_update(update?)?),
            Which::ReadSteps(read) => RequestBody::ReadSteps(sample::read_steps(read?)?),
            Which::ReportCorrupt(report) => RequestBody::ReportCorrupt(sample::read_report(report?)?),
            Which::PutParameters(put) => RequestBody::PutParameters(table::read_put(put?, rest)?),
            Which::DropParameters(name) => RequestBody::DropParameters(text(name)?),
            Which::GetParameters(get) => RequestBody::GetParameters(table::read_get(get?)?),
            Which::Stats(()) => RequestBody::Stats,
            Which::List(()) => RequestBody::List,
            Which::Snapshot(()) => RequestBody::Snapshot,
            Which::CloseWriter(close) => RequestBody::CloseWriter(push::read_close(close?)),
            Which::ChangeLease(change) => RequestBody::ChangeLease(sample::read_lease(change?)),
            Which::CallExtension(call) => RequestBody::CallExtension(hello::read_extension(call?, rest)?),
        })
    }

    /// Writes the message; the result is the payload.
    pub(crate) fn write(&self, mut root: wire::request::Builder<'_>) -> Result<Bytes> {
        match self {
            RequestBody::Hello(hello) => hello::write(hello, root.init_hello()),
            RequestBody::Authenticate(proof) => root.set_authenticate(proof.as_ref().map_or(&[], |proof| proof)),
            RequestBody::CreateTable(config) => root.set_create_table(&*to_json(config)),
            RequestBody::DescribeTable(name) => root.set_describe_table(name),
            RequestBody::EmptyTable(name) => root.set_empty_table(name),
            RequestBody::DropTable(name) => root.set_drop_table(name),
            RequestBody::OpenWriter(open) => push::write_open(open, root.init_open_writer()),
            RequestBody::Push(push) => {
                push::write(push, root.init_push())?;
                return Ok(push.body.payload.clone());
            }
            RequestBody::Sample(request) => sample::write(request, root.init_sample()),
            RequestBody::UpdatePriorities(update) => sample::write_update(update, root.init_update_priorities()),
            RequestBody::ReadSteps(read) => sample::write_steps(read, root.init_read_steps()),
            RequestBody::ReportCorrupt(report) => sample::write_report(report, root.init_report_corrupt()),
            RequestBody::PutParameters(put) => {
                table::write_put(put, root.init_put_parameters());
                return Ok(put.bytes.clone());
            }
            RequestBody::DropParameters(name) => root.set_drop_parameters(name),
            RequestBody::GetParameters(get) => table::write_get(get, root.init_get_parameters()),
            RequestBody::Stats => root.set_stats(()),
            RequestBody::List => root.set_list(()),
            RequestBody::Snapshot => root.set_snapshot(()),
            RequestBody::CloseWriter(close) => push::write_close(close, root.init_close_writer()),
            RequestBody::ChangeLease(change) => sample::write_lease(*change, root.init_change_lease()),
            RequestBody::CallExtension(call) => {
                hello::write_extension(call, root.init_call_extension());
                return Ok(call.message.clone());
            }
        }
        Ok(Bytes::new())
    }
}

impl ReplyBody {
    /// Reads the message.
    pub(crate) fn read(from: wire::reply::Reader<'_>, rest: &Rest) -> Result<Self> {
        use wire::reply::Which;
        Ok(match from.which()? {
            Which::Error(error) => {
                let error = error?;
                let waited_for = || json("the reason of a wait", error.get_waited_for());
                ReplyBody::Error {
                    // A newer server may have codes that this client does not know.
                    code: error.get_code().unwrap_or(ErrorCode::Internal),
                    message: text(error.get_message())?,
                    waited_for: error.has_waited_for().then(waited_for).transpose()?,
                }
            }
            Which::Waiting(reason) => ReplyBody::Waiting(json("the reason of a wait", reason)?),
            Which::Done(()) => ReplyBody::Done,
            Which::Challenge(challenge) => ReplyBody::Challenge(hello::read_challenge(challenge?)?),
            Which::Welcome(proof) => ReplyBody::Welcome(read_proof(proof)?),
            Which::Table(config) => ReplyBody::Table(table::read(config)?),
            Which::Writer(opened) => ReplyBody::Writer(push::read_opened(opened?)),
            Which::Pushed(pushed) => ReplyBody::Pushed(pushed?.get_steps()),
            Which::Sampled(sampled) => ReplyBody::Sampled(sample::read_sampled(sampled?, rest)?),
            Which::Updated(receipt) => ReplyBody::Updated(sample::read_receipt(receipt?)),
            Which::StepsRead(read) => ReplyBody::StepsRead(sample::read_steps_read(read?, rest)?),
            Which::Corrupt(writer) => ReplyBody::Corrupt(Some(text(writer)?).filter(|name| !name.is_empty())),
            Which::Parameters(stored) => ReplyBody::Parameters(table::read_parameters(stored?, rest)),
            Which::Stats(json) => ReplyBody::Stats(text(json)?),
            Which::Listing(listing) => ReplyBody::Listing(table::read_listing(listing?, rest)?),
            Which::Extension(answer) => ReplyBody::Extension(hello::read_extension(answer?, rest)?),
        })
    }

    /// Writes the message; the result is the payload.
    pub(crate) fn write(self, mut root: wire::reply::Builder<'_>) -> Payload {
        match self {
            ReplyBody::Error { code, message, waited_for } => {
                let mut out = root.init_error();
                out.set_code(code);
                out.set_message(&message);
                if let Some(reason) = waited_for {
                    out.set_waited_for(&*to_json(&reason));
                }
            }
            ReplyBody::Waiting(reason) => root.set_waiting(&*to_json(&reason)),
            ReplyBody::Done => root.set_done(()),
            ReplyBody::Challenge(challenge) => hello::write_challenge(&challenge, root.init_challenge()),
            ReplyBody::Welcome(proof) => root.set_welcome(proof.as_ref().map_or(&[], |proof| proof)),
            ReplyBody::Table(config) => root.set_table(&*to_json(&config)),
            ReplyBody::Writer(opened) => push::write_opened(&opened, root.init_writer()),
            ReplyBody::Pushed(steps) => root.init_pushed().set_steps(steps),
            ReplyBody::Sampled(mut sampled) => {
                sample::write_sampled(&sampled, root.init_sampled());
                sampled.blobs.insert(0, sampled.rows);
                return (sampled.blobs, sampled.credit);
            }
            ReplyBody::Updated(receipt) => sample::write_receipt(&receipt, root.init_updated()),
            ReplyBody::StepsRead(read) => {
                sample::write_steps_read(&read, root.init_steps_read());
                return (read.chunks.into_iter().map(|chunk| chunk.packed).collect(), None);
            }
            ReplyBody::Corrupt(writer) => root.set_corrupt(&*writer.unwrap_or_default()),
            ReplyBody::Parameters(stored) => {
                root.init_parameters().set_version(stored.as_ref().map_or(0, |stored| stored.version));
                return (stored.into_iter().map(|stored| stored.bytes).collect(), None);
            }
            ReplyBody::Stats(json) => root.set_stats(&json),
            ReplyBody::Listing(listing) => table::write_listing(&listing, root.init_listing()),
            ReplyBody::Extension(answer) => {
                hello::write_extension(&answer, root.init_extension());
                return (vec![answer.message], None);
            }
        }
        Payload::default()
    }
}

/// A proof; empty for none.
fn read_proof(proof: capnp::Result<&[u8]>) -> Result<Proof> {
    match proof {
        Ok([]) => Ok(None),
        proof => key(proof).map(Some),
    }
}

kinds! {
    requests:
    /// Starts a connection.
    "hello" Hello(Hello) from Actor replies Few,
    /// Ends the handshake, with the client's proof.
    "authenticate" Authenticate(Proof) from Actor replies Few,
    /// Makes a table.
    "create_table" CreateTable(TableConfig) from Learner replies Few,
    /// Definition of a table, by name.
    "describe_table" DescribeTable(String) from Actor replies Few,
    /// Removes the steps and items of a table, by name.
    "empty_table" EmptyTable(String) from Operator replies Few,
    /// Removes a table, by name.
    "drop_table" DropTable(String) from Operator replies Few,
    /// Opens or takes over a writer.
    "open_writer" OpenWriter(OpenOrResume) from Actor replies Few,
    /// Steps and items of a writer.
    "push" Push(Push) from Actor replies Few,
    /// Samples items.
    "sample" Sample(SampleRequest) from Learner replies Large,
    /// Begins leases of batches, or acknowledges them.
    "change_lease" ChangeLease(ChangeLease) from Learner replies Few,
    /// Sets priorities of items.
    "update_priorities" UpdatePriorities(UpdatePriorities) from Learner replies Few,
    /// Reads stored steps, in the order of their arrival.
    "read_steps" ReadSteps(ReadSteps) from Learner replies Large,
    /// Removes an item whose blob does not decode: learners could also disable it with priority 0, and would otherwise sample it repeatedly.
    "report_corrupt" ReportCorrupt(ReportCorrupt) from Learner replies Few,
    /// Stores parameters.
    "put_parameters" PutParameters(PutParameters) from Learner replies Few,
    /// Removes parameters, by name. The next put continues their version numbers.
    "drop_parameters" DropParameters(String) from Operator replies Few,
    /// Reads the newest parameters.
    "get_parameters" GetParameters(GetParameters) from Actor replies Large,
    /// Counters and gauges.
    "stats" Stats from Actor replies Report,
    /// All tables and parameters. Actors may ask, as `DescribeTable` and `Stats` show them the same definitions and versions.
    "list" List from Actor replies Report,
    /// Saves the server's memory.
    "snapshot" Snapshot from Operator replies Few,
    /// Closes a writer.
    "close_writer" CloseWriter(CloseWriter) from Actor replies Few,
    /// A message to an extension of the server.
    "call_extension" CallExtension(Extension) from Learner replies Few,

    replies:
    /// The answer to `Hello`.
    "challenge" Challenge(Challenge),
    /// The server's proof.
    "welcome" Welcome(Proof),
    /// Definition of a table.
    "table" Table(TableConfig),
    /// State of the writer that was opened.
    "writer" Writer(WriterOpened),
    /// Steps of the writer that the table has applied so far.
    "pushed" Pushed(u64),
    /// A batch.
    "sampled" Sampled(Sampled),
    /// Counts of an update.
    "updated" Updated(UpdateReceipt),
    /// Stored steps.
    "steps_read" StepsRead(StepsRead),
    /// Name of the removed item's writer; `None` when it was removed before.
    "corrupt" Corrupt(Option<String>),
    /// The newest parameters, or the version of those put; `None` when there are none newer.
    "parameters" Parameters(Option<Parameters>),
    /// One JSON object.
    "stats" Stats(String),
    /// All tables and parameters.
    "listing" Listing(Listing),
    /// Answer of an extension.
    "extension" Extension(Extension),
}

/// Role of a client. Each one may make the requests of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Writes with writers of its own; reads definitions, parameters and statistics.
    Actor,
    /// Samples, updates priorities, publishes parameters, makes tables, removes damaged items, and uses the server's extensions.
    Learner,
    /// Empties and drops tables, drops parameters, saves snapshots.
    Operator,
}

impl Role {
    /// Name for errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            Role::Actor => "actor",
            Role::Learner => "learner",
            Role::Operator => "operator",
        }
    }

    /// Checks that a client of this role may make a request.
    pub fn check(self, request: &RequestBody) -> Result<()> {
        let required = request.role();
        if self >= required {
            return Ok(());
        }
        Err(Error::Forbidden {
            role: self.name(),
            request: request.name(),
            allowed_by: match required {
                Role::Operator => "the server's operator token (--token-file)",
                _ => "the server's learner token (--learner-token-file) or operator token (--token-file)",
            },
        })
    }
}
