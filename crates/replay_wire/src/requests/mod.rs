//! Requests and replies. Each request has a file of its own: its content, the lowest role that may make it, its reply, what the reply takes,
//! and how both are read and written. The list at the end names all of them; what concerns each of them is derived from it.

mod authenticate;
mod close_writer;
mod create_table;
mod describe_table;
mod drop_table;
mod empty_table;
mod get_parameters;
mod hello;
mod join_gradients;
mod list;
mod open_writer;
mod push;
mod put_parameters;
mod report_corrupt;
mod sample;
mod snapshot;
mod stats;
mod update_priorities;

use bytes::Bytes;
use pastey::paste;

use crate::error::{Error, ErrorCode, Result};
use crate::fields::{
    Field, Message, Reader, Rest, internal, list_len, malformed, read, read_list, read_optional,
    unknown, write_list,
};
use crate::innet_capnp as wire;
use crate::role::Role;
use replay_core::cause::WaitReason;
use replay_core::replay::{
    Listing, Parameters, Push, SampleCredit, SampleRequest, Sampled, UpdateReceipt, WriterOpened,
};
use replay_core::schema::TableConfig;

pub use authenticate::{Authenticate, Welcome};
pub use close_writer::CloseWriter;
pub use describe_table::DescribeTable;
pub use drop_table::DropTable;
pub use empty_table::EmptyTable;
pub use get_parameters::GetParameters;
pub use hello::{Challenge, Hello};
pub use join_gradients::{GradientsJoined, JoinGradients};
pub use list::List;
pub use open_writer::OpenOrResume;
pub use push::Pushed;
pub use put_parameters::PutParameters;
pub use report_corrupt::ReportCorrupt;
pub use snapshot::Snapshot;
pub use stats::Stats;
pub use update_priorities::UpdatePriorities;

/// Words of the first segment of a message of a few fields.
const FEW_WORDS: usize = 128;

/// A request of a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Number of the request on its connection, from 1; the reply has the same.
    pub id: u64,
    /// Longest wait at the server in milliseconds; 0 is one try without waiting.
    pub deadline_ms: u32,
    /// Content of the request.
    pub body: RequestBody,
}

/// A reply of the server.
pub struct Reply {
    /// Id of the request; [`NO_REQUEST`](crate::NO_REQUEST) for an error of the connection.
    pub id: u64,
    /// Content of the reply.
    pub body: ReplyBody,
}

/// What an unread reply takes in a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplySize {
    /// A few bytes.
    Small,
    /// A few kilobytes: statistics, a list.
    Report,
    /// Rows, copied for it.
    Batch,
    /// A version of parameters, which replies share with the memory.
    Parameters,
}

/// Content of a request.
pub trait Call: Into<RequestBody> {
    /// The lowest role that may make it.
    const ROLE: Role;

    /// What its reply takes until the client has read it.
    const REPLY: ReplySize = ReplySize::Small;

    /// Content of its reply, unless that is an error.
    type Reply: Answer;

    /// About the words of its message.
    fn words(&self) -> usize {
        FEW_WORDS
    }

    /// The frame's payload.
    fn payload(&self) -> Bytes {
        Bytes::new()
    }
}

/// Content of a reply.
pub trait Answer: TryFrom<ReplyBody, Error = ReplyBody> {
    /// About the words of its message.
    fn words(&self) -> usize {
        FEW_WORDS
    }

    /// The frame's payload, and what is to be told that the reply was read.
    fn payload(self) -> (Vec<Bytes>, Option<Box<dyn SampleCredit>>) {
        (Vec::new(), None)
    }
}

/// Reads a field of the union of requests or of replies.
macro_rules! get {
    (struct, $from:ident, $rest:ident) => {
        read($from, $rest)?
    };
    ($field:ident, $from:ident, $rest:ident) => {
        Field::read($from)?
    };
}

/// Writes a field of the union.
macro_rules! set {
    (struct $name:ident, $root:ident, $value:ident) => {
        paste! {
            $value.write($root.[<init_ $name:snake>]())?
        }
    };
    ($field:ident $name:ident, $root:ident, $value:ident) => {
        paste! {
            $root.[<set_ $name:snake>]($value.write()?)
        }
    };
}

/// Makes [`RequestBody`] and [`ReplyBody`] of a list of requests: name, field in the schema's union (`struct`, `text` or `void`), variant,
/// content; then the same of its reply, unless that is `Done` or another request's.
macro_rules! requests {
    ($(
        $name:ident: $kind:ident $request:ident($content:ty) $(=> $reply_kind:ident $reply:ident($reply_content:ty))?,
    )+) => {
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
                enum Kind {
                    $($request),+
                }
                match self {
                    $(RequestBody::$request(_) => Kind::$request as usize,)+
                }
            }

            /// Name of the request, for errors.
            pub fn name(&self) -> &'static str {
                Self::NAMES[self.kind()]
            }

            /// The lowest role that may make the request.
            pub fn role(&self) -> Role {
                match self {
                    $(RequestBody::$request(_) => <$content as Call>::ROLE,)+
                }
            }

            /// What its reply takes until the client has read it.
            pub fn reply_size(&self) -> ReplySize {
                match self {
                    $(RequestBody::$request(_) => <$content as Call>::REPLY,)+
                }
            }

            pub(crate) fn words(&self) -> usize {
                match self {
                    $(RequestBody::$request(request) => Call::words(request),)+
                }
            }

            pub(crate) fn payload(&self) -> Bytes {
                match self {
                    $(RequestBody::$request(request) => Call::payload(request),)+
                }
            }

            pub(crate) fn read(from: wire::request::Reader<'_>, rest: &Rest) -> Result<Self> {
                use wire::request::Which;
                Ok(match from.which().map_err(unknown)? {
                    $(Which::$request(from) => RequestBody::$request(get!($kind, from, rest)),)+
                })
            }

            pub(crate) fn write(&self, mut root: wire::request::Builder<'_>) -> Result<()> {
                match self {
                    $(RequestBody::$request(request) => set!($kind $request, root, request),)+
                }
                Ok(())
            }
        }

        $(impl From<$content> for RequestBody {
            fn from(content: $content) -> Self {
                RequestBody::$request(content)
            }
        })+

        /// Kinds of replies.
        #[expect(missing_docs, reason = "their contents have the documentation")]
        pub enum ReplyBody {
            /// The request failed.
            Error {
                /// Kind of the error.
                code: ErrorCode,
                /// Message for the user; empty with a reason.
                message: String,
                /// With [`ErrorCode::Deadline`] and [`ErrorCode::Renew`]: what the request waited for.
                waited_for: Option<Box<WaitReason>>,
            },
            /// No answer yet, and the reason: the request waits or, with id [`NO_REQUEST`](crate::NO_REQUEST), the server does not read
            /// the connection for now.
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

            pub(crate) fn words(&self) -> usize {
                match self {
                    ReplyBody::Error { message, .. } => 64 + message.len() / 8,
                    ReplyBody::Waiting(_) | ReplyBody::Done => FEW_WORDS,
                    $($(ReplyBody::$reply(reply) => Answer::words(reply),)?)+
                }
            }

            pub(crate) fn payload(self) -> (Vec<Bytes>, Option<Box<dyn SampleCredit>>) {
                match self {
                    ReplyBody::Error { .. } | ReplyBody::Waiting(_) | ReplyBody::Done => (Vec::new(), None),
                    $($(ReplyBody::$reply(reply) => Answer::payload(reply),)?)+
                }
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
                    $($(Which::$reply(from) => ReplyBody::$reply(get!($reply_kind, from, rest)),)?)+
                })
            }

            pub(crate) fn write(&self, mut root: wire::reply::Builder<'_>) -> Result<()> {
                match self {
                    ReplyBody::Error { code, message, waited_for } => {
                        let mut out = root.init_error();
                        out.set_code(*code);
                        out.set_message(message);
                        if let Some(reason) = waited_for {
                            reason.write(out.init_waited_for())?;
                        }
                    }
                    ReplyBody::Waiting(reason) => reason.write(root.init_waiting())?,
                    ReplyBody::Done => root.set_done(()),
                    $($(ReplyBody::$reply(reply) => set!($reply_kind $reply, root, reply),)?)+
                }
                Ok(())
            }
        }

        $($(impl TryFrom<ReplyBody> for $reply_content {
            type Error = ReplyBody;

            fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
                match body {
                    ReplyBody::$reply(reply) => Ok(reply),
                    other => Err(other),
                }
            }
        })?)+
    };
}

impl TryFrom<ReplyBody> for () {
    type Error = ReplyBody;

    fn try_from(body: ReplyBody) -> Result<Self, ReplyBody> {
        match body {
            ReplyBody::Done => Ok(()),
            other => Err(other),
        }
    }
}

impl Answer for () {}

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
    report_corrupt: struct ReportCorrupt(ReportCorrupt) => text Corrupt(Option<String>),
    put_parameters: struct PutParameters(PutParameters),
    get_parameters: struct GetParameters(GetParameters) => struct Parameters(Option<Parameters>),
    stats: void Stats(Stats) => text Stats(String),
    list: void List(List) => struct Listing(Listing),
    snapshot: void Snapshot(Snapshot),
    close_writer: struct CloseWriter(CloseWriter),
    join_gradients: struct JoinGradients(JoinGradients) => struct Gradients(GradientsJoined),
}
