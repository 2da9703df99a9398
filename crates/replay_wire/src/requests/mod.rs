//! Requests and replies. Each request has a file: its content, the lowest role that may make it, its reply, and the encoding of both. The
//! list at the end names all requests, and generates the code that distinguishes them.

mod authenticate;
mod call_extension;
mod close_writer;
mod create_table;
mod describe_table;
mod drop_parameters;
mod drop_table;
mod empty_table;
mod get_parameters;
mod hello;
mod list;
mod open_writer;
mod push;
mod put_parameters;
mod read_steps;
mod report_corrupt;
mod sample;
mod snapshot;
mod stats;
mod update_priorities;

use bytes::Bytes;
use pastey::paste;

use crate::error::{Error, ErrorCode, Result};
use crate::fields::{
    FEW_WORDS, Field, Message, Payload, Reader, Rest, internal, list_len, malformed, read, read_list, read_optional,
    unknown, write_list,
};
use crate::innet_capnp as wire;
use crate::role::Role;
use replay_core::cause::WaitReason;
use replay_core::memory::Memory;
use replay_core::replay::{
    Listing, Parameters, Push, ReadSteps, SampleRequest, Sampled, StepsRead, UpdateReceipt, WriterOpened,
};
use replay_core::schema::TableConfig;

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Number of the request on its connection, from 1; the reply repeats it.
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

/// Content of a request.
pub trait Call: Into<RequestBody> {
    /// The lowest role that may make it.
    const ROLE: Role;

    /// Whether its reply may be large. A large reply counts as used memory of the server until the client has read it.
    const LARGE_REPLY: bool = false;

    /// Content of its reply, unless that is an error.
    type Reply: TryFrom<ReplyBody, Error = ReplyBody>;

    /// Visits the names of tables, writers and parameters.
    fn names(&mut self, visit: &mut dyn FnMut(&mut String));

    /// Carries out a command in a memory. Commands have no result, and a memory in this process, a server and several servers carry them out
    /// alike; `None` for other requests.
    fn carry_out(&self, _memory: &Memory) -> Option<replay_core::error::Result<()>> {
        None
    }

    /// The frame's payload.
    fn payload(&self) -> Bytes {
        Bytes::new()
    }
}

/// Implements [`Call`]: the lowest role, the reply, whether that may be large, the names, the payload; what a command does.
macro_rules! call {
    (
        $request:ident: $role:ident => $reply:ty
            $(, large: $large:literal)?, names: |$named:tt, $visit:tt| $names:expr $(, payload: |$self:ident| $payload:expr)?
            $(, command: |$command:ident, $memory:ident| $done:expr)?
    ) => {
        impl Call for $request {
            const ROLE: Role = Role::$role;
            $(const LARGE_REPLY: bool = $large;)?
            type Reply = $reply;
            fn names(&mut self, $visit: &mut dyn FnMut(&mut String)) {
                let $named = self;
                $names
            }
            $(fn carry_out(&self, $memory: &Memory) -> Option<replay_core::error::Result<()>> {
                let $command = self;
                Some($done)
            })?
            $(fn payload(&self) -> Bytes {
                let $self = self;
                $payload
            })?
        }
    };
}
pub(crate) use call;

/// Code for a variant of the schema's union: a `struct`, a `text` with a struct around it, `void`, or another `value`.
macro_rules! content {
    (read struct $content:ty, $from:ident, $rest:ident) => { read($from, $rest)? };
    (read text $content:ident, $from:ident, $rest:ident) => { $content(Field::read($from)?) };
    (read void $content:ident, $from:ident, $rest:ident) => {{ let () = $from; $content }};
    (read value $content:ty, $from:ident, $rest:ident) => { Field::read($from)? };
    (write struct $name:ident, $root:ident, $value:ident) => { $value.write(paste!($root.[<init_ $name:snake>]()))? };
    (write text $name:ident, $root:ident, $value:ident) => { paste!($root.[<set_ $name:snake>](&$value.0)) };
    (write void $name:ident, $root:ident, $value:ident) => { paste!($root.[<set_ $name:snake>](())) };
    (write value $name:ident, $root:ident, $value:ident) => { paste!($root.[<set_ $name:snake>]($value.write()?)) };
    (words struct $value:ident) => { $value.words() };
    (words value $value:ident) => { FEW_WORDS + $value.write()?.len() / 8 };
    (words $other:ident $value:ident) => { FEW_WORDS };
    (payload struct $value:ident) => { $value.into_payload() };
    (payload $other:ident $value:ident) => { Payload::default() };
}

/// Generates [`RequestBody`] and [`ReplyBody`] from a list of requests: name and file, kind of [`content!`], variant and content; then
/// kind, variant and content of its reply, unless that is `Done` or another request's.
macro_rules! requests {
    ($(
        $name:ident: $kind:ident $request:ident($content:ident)
            $(=> $reply_kind:ident $reply:ident($reply_content:ty))?,
    )+) => {
        $(
            #[allow(unused_imports, reason = "the content of some requests is the memory's")]
            pub use $name::*;

            impl From<$content> for RequestBody {
                fn from(content: $content) -> Self { RequestBody::$request(content) }
            }
        )+

        /// Kinds of requests. Each may be answered by [`ReplyBody::Error`] instead of its [`Call::Reply`].
        #[derive(Debug, Clone, PartialEq)]
        #[expect(missing_docs, reason = "their contents have the documentation")]
        pub enum RequestBody {
            $($request($content),)+
        }

        impl RequestBody {
            /// Names of all kinds of requests.
            pub const NAMES: [&str; [$(stringify!($name)),+].len()] = [$(stringify!($name)),+];

            /// Index of the request's kind in [`RequestBody::NAMES`].
            pub fn kind(&self) -> usize {
                enum Kind { $($request),+ }
                match self { $(RequestBody::$request(_) => Kind::$request as usize,)+ }
            }

            /// Name of the request, for errors.
            pub fn name(&self) -> &'static str { Self::NAMES[self.kind()] }

            /// The lowest role that may make the request.
            pub fn role(&self) -> Role {
                match self { $(RequestBody::$request(_) => <$content as Call>::ROLE,)+ }
            }

            /// Visits the names of tables, writers and parameters.
            pub fn names(&mut self, visit: &mut dyn FnMut(&mut String)) {
                match self { $(RequestBody::$request(request) => request.names(visit),)+ }
            }

            /// Carries out a command in a memory; `None` for other requests.
            pub fn carry_out(&self, memory: &Memory) -> Option<replay_core::error::Result<()>> {
                match self { $(RequestBody::$request(request) => request.carry_out(memory),)+ }
            }

            /// Whether its reply may be large.
            pub fn has_large_reply(&self) -> bool {
                match self { $(RequestBody::$request(_) => <$content as Call>::LARGE_REPLY,)+ }
            }

            pub(crate) fn words(&self) -> usize {
                match self { $(RequestBody::$request(_request) => content!(words $kind _request),)+ }
            }

            pub(crate) fn read(from: wire::request::Reader<'_>, rest: &Rest) -> Result<Self> {
                use wire::request::Which;
                Ok(match from.which().map_err(unknown)? {
                    $(Which::$request(from) => RequestBody::$request(content!(read $kind $content, from, rest)),)+
                })
            }

            /// Writes the message; the result is the payload.
            pub(crate) fn write(&self, mut root: wire::request::Builder<'_>) -> Result<Bytes> {
                match self {
                    $(RequestBody::$request(request) => {
                        content!(write $kind $request, root, request);
                        Ok(request.payload())
                    })+
                }
            }
        }

        /// Kinds of replies.
        #[expect(missing_docs, reason = "their contents have the documentation")]
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
            $($($reply($reply_content),)?)+
        }

        impl ReplyBody {
            /// Name of the variant, for errors about unexpected replies.
            pub fn name(&self) -> &'static str {
                match self {
                    ReplyBody::Error { .. } => "error",
                    ReplyBody::Waiting(_) => "waiting",
                    ReplyBody::Done => "done",
                    $($(ReplyBody::$reply(_) => paste!(stringify!([<$reply:snake>])),)?)+
                }
            }

            pub(crate) fn words(&self) -> Result<usize> {
                Ok(match self {
                    ReplyBody::Error { message, .. } => FEW_WORDS + message.len() / 8,
                    ReplyBody::Waiting(_) | ReplyBody::Done => FEW_WORDS,
                    $($(ReplyBody::$reply(reply) => content!(words $reply_kind reply),)?)+
                })
            }

            pub(crate) fn read(from: wire::reply::Reader<'_>, rest: &Rest) -> Result<Self> {
                use wire::reply::Which;
                Ok(match from.which().map_err(unknown)? {
                    Which::Error(error) => {
                        let error = error.map_err(malformed)?;
                        ReplyBody::Error {
                            // A newer server may have codes that this client does not know.
                            code: error.get_code().unwrap_or(ErrorCode::Internal),
                            message: Field::read(error.get_message())?,
                            waited_for: read_optional(error.has_waited_for(), error.get_waited_for(), rest)?.map(Box::new),
                        }
                    }
                    Which::Waiting(reason) => ReplyBody::Waiting(read(reason, rest)?),
                    Which::Done(()) => ReplyBody::Done,
                    $($(Which::$reply(from) => ReplyBody::$reply(content!(read $reply_kind $reply_content, from, rest)),)?)+
                })
            }

            /// Writes the message; the result is the payload.
            pub(crate) fn write(self, mut root: wire::reply::Builder<'_>) -> Result<Payload> {
                match self {
                    ReplyBody::Error { code, message, waited_for } => {
                        let mut out = root.init_error();
                        out.set_code(code);
                        out.set_message(&message);
                        if let Some(reason) = waited_for {
                            reason.write(out.init_waited_for())?;
                        }
                    }
                    ReplyBody::Waiting(reason) => reason.write(root.init_waiting())?,
                    ReplyBody::Done => root.set_done(()),
                    $($(ReplyBody::$reply(reply) => {
                        content!(write $reply_kind $reply, root, reply);
                        return Ok(content!(payload $reply_kind reply));
                    })?)+
                }
                Ok(Payload::default())
            }
        }

        $($(impl TryFrom<ReplyBody> for $reply_content {
            type Error = ReplyBody;

            fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
                if let ReplyBody::$reply(reply) = body { Ok(reply) } else { Err(body) }
            }
        })?)+
    };
}

impl TryFrom<ReplyBody> for () {
    type Error = ReplyBody;

    fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
        matches!(body, ReplyBody::Done).then_some(()).ok_or(body)
    }
}

requests! {
    hello: struct Hello(Hello) => struct Challenge(Challenge),
    authenticate: struct Authenticate(Authenticate) => struct Welcome(Welcome),
    create_table: struct CreateTable(TableConfig),
    describe_table: text DescribeTable(DescribeTable) => struct Table(TableConfig),
    empty_table: text EmptyTable(EmptyTable),
    drop_table: text DropTable(DropTable),
    open_writer: struct OpenWriter(OpenOrResume) => struct Writer(WriterOpened),
    push: struct Push(Push) => struct Pushed(Pushed),
    sample: struct Sample(SampleRequest) => struct Sampled(Sampled),
    update_priorities: struct UpdatePriorities(UpdatePriorities) => struct Updated(UpdateReceipt),
    read_steps: struct ReadSteps(ReadSteps) => struct StepsRead(StepsRead),
    report_corrupt: struct ReportCorrupt(ReportCorrupt) => value Corrupt(Option<String>),
    put_parameters: struct PutParameters(PutParameters),
    drop_parameters: text DropParameters(DropParameters),
    get_parameters: struct GetParameters(GetParameters) => struct Parameters(Option<Parameters>),
    stats: void Stats(Stats) => value Stats(String),
    list: void List(List) => struct Listing(Listing),
    snapshot: void Snapshot(Snapshot),
    close_writer: struct CloseWriter(CloseWriter),
    call_extension: struct CallExtension(Extension) => struct Extension(Extension),
}
