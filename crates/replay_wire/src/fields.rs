//! Mapping between structs and enums of this workspace and the schema, for reading and writing. One list below has each pair whose field or
//! variant names are equal on both sides. A variant that is missing on one side does not compile.

use std::cell::Cell;

use capnp::traits::OwnedStruct;
use capnp::{NotInSchema, data, struct_list, text};
use pastey::paste;

use super::innet_capnp as wire;
use super::{Challenge, Hello};
use crate::error::{Error, Result};
use base::error::check_size;
use base::words::shortened;
use gradients::{Arithmetic, Asynchronous, Ticket};
use replay_core::cause::{Cause, OutdatedWriter, TableWait, WaitReason};
use replay_core::replay::{
    ChunkHead, ListedParameters, Listing, NewItem, OpenWriter, UpdateReceipt, WriterId,
    WriterOpened,
};
use replay_core::schema::{Codec, Column, Dtype, Sampler, TableConfig};
use replay_core::view::ViewSpec;

/// Longest list in a message: Cap'n Proto counts elements in 29 bits.
const MAX_LIST: usize = (1 << 29) - 1;

/// Longest view of a table, in bytes of JSON.
const MAX_VIEW_BYTES: usize = 64 << 10;

/// Bytes of a name or of a view that an error quotes, which may come before the handshake and is logged.
const QUOTED: usize = 64;

/// Bytes of a parser's reason, which quotes the text, too.
const REASON: usize = 256;

/// A field, as generated readers return it and generated builders accept it.
pub trait Field: Sized {
    type Read<'a>;
    type Written<'a>
    where
        Self: 'a;

    fn read(value: Self::Read<'_>) -> Result<Self>;

    fn write(&self) -> Result<Self::Written<'_>>;
}

/// Memory that the lists of structs in a message may still take. Elements may have no bytes in the message, so that its length
/// alone bounds them badly.
pub struct Room(Cell<usize>);

impl Room {
    /// Memory for a message's lists of `bytes`.
    pub fn new(bytes: usize) -> Self {
        Room(Cell::new(bytes))
    }

    fn take(&self, bytes: usize) -> Result<()> {
        let left = self.0.get().checked_sub(bytes).ok_or_else(|| {
            Error::Protocol("a message whose lists are much longer decoded than encoded".into())
        })?;
        self.0.set(left);
        Ok(())
    }
}

/// A struct of the schema.
pub trait Message: Sized {
    type Struct: OwnedStruct;

    fn read(from: Reader<'_, Self>, room: &Room) -> Result<Self>;

    fn write(&self, out: <Self::Struct as OwnedStruct>::Builder<'_>) -> Result<()>;
}

/// Reader of a message.
pub type Reader<'a, T> = <<T as Message>::Struct as OwnedStruct>::Reader<'a>;

macro_rules! same_variants {
    ($name:ident: $($variant:ident)+) => {
        impl From<$name> for wire::$name {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => wire::$name::$variant,)+
                }
            }
        }

        impl From<wire::$name> for $name {
            fn from(value: wire::$name) -> Self {
                match value {
                    $(wire::$name::$variant => $name::$variant,)+
                }
            }
        }

        impl Field for $name {
            type Read<'a> = std::result::Result<wire::$name, NotInSchema>;
            type Written<'a> = wire::$name;

            fn read(value: Self::Read<'_>) -> Result<Self> {
                value.map(Into::into).map_err(unknown)
            }

            fn write(&self) -> Result<Self::Written<'_>> {
                Ok((*self).into())
            }
        }
    };
}

same_variants!(Dtype: Bool Uint8 Int8 Uint16 Int16 Uint32 Int32 Uint64 Int64 Float16 Float32 Float64);
same_variants!(Codec: None Lz4 Zstd);
same_variants!(Sampler: Prioritized Uniform Fifo Lifo MaxHeap MinHeap RankBased);
same_variants!(Arithmetic: Float Fixed);

/// Fields by name; after the bar, one that does not cross; after the semicolon, lists of structs with their names in errors.
macro_rules! same_fields {
    ($($message:ident: $type:ident {
        $($field:ident),*
        $(| $own:ident)?
        $(; $($list:ident: $what:literal),+)?
    })+) => { paste! {$(
        impl Message for $type {
            type Struct = wire::$message::Owned;

            #[allow(unused_variables, reason = "only messages with lists need room")]
            fn read(from: wire::$message::Reader<'_>, room: &Room) -> Result<Self> {
                Ok($type {
                    $($field: Field::read(from.[<get_ $field>]())?,)*
                    $($own: None,)?
                    $($($list: read_list(from.[<get_ $list>](), room)?,)+)?
                })
            }

            fn write(&self, mut out: wire::$message::Builder<'_>) -> Result<()> {
                $(out.[<set_ $field>](self.$field.write()?);)*
                $($(
                    let len = list_len($what, self.$list.len())?;
                    write_list(out.reborrow().[<init_ $list>](len), &self.$list)?;
                )+)?
                Ok(())
            }
        }
    )+}};
}

same_fields! {
    hello: Hello { protocol, release, nonce, program }
    challenge: Challenge { protocol, release, incarnation, nonce, token_needed, max_frame_bytes }
    table_config: TableConfig {
        name, capacity, capacity_bytes, sampler, priority_exponent, priority_unit_log2, live_max_priority,
        max_times_sampled, min_size, samples_per_insert, slack, max_version_lag, view; columns: "the columns of a table"
    }
    listing: Listing { ; tables: "the tables", parameters: "the parameters" }
    listed_parameters: ListedParameters { name, version, bytes }
    open_writer: OpenWriter { table, writer, name, streams, window_before, window_after | server }
    writer_id: WriterId { table, writer }
    writer_opened: WriterOpened { epoch, last_sequence, steps }
    chunk: ChunkHead { stream, rows, first_step, bytes }
    item: NewItem { anchor, stream, before, after, priority }
    updated: UpdateReceipt { applied, stale }
    outdated_writer: OutdatedWriter { table, writer, parameters, version, newest, max_version_lag }
    join_gradients: Asynchronous { values, threshold, staleness }
    gradients_joined: Ticket { session, key, round, window }
}

/// Causes by name, with their numbers.
macro_rules! same_causes {
    ($($cause:ident { $($number:ident),+ })+; $($plain:ident)+) => { paste! {
        fn read_cause(from: wire::table_wait::cause::Reader<'_>) -> Result<Cause> {
            use wire::table_wait::cause::Which;
            Ok(match from.which().map_err(unknown)? {
                $(Which::$cause(from) => Cause::$cause {
                    $($number: from.[<get_ $number>]()),+
                },)+
                $(Which::$plain(()) => Cause::$plain,)+
            })
        }

        fn write_cause(cause: Cause, mut out: wire::table_wait::cause::Builder<'_>) {
            match cause {
                $(Cause::$cause { $($number),+ } => {
                    let mut out = out.[<init_ $cause:snake>]();
                    $(out.[<set_ $number>]($number);)+
                })+
                $(Cause::$plain => out.[<set_ $plain:snake>](()),)+
            }
        }
    }};
}

same_causes! {
    MinSize { live, min_size }
    Inserts { sampled, inserted, wanted, missing, samples_per_insert, slack }
    SamplesLeft { left, wanted, max_times_sampled }
    Items { found, wanted }
    Samples { sampled, inserted, missing, samples_per_insert, slack }
    PinnedBytes { pinned, missing, capacity_bytes };
    Emptied PinnedChunks LastItems
}

impl Message for TableWait {
    type Struct = wire::table_wait::Owned;

    fn read(from: wire::table_wait::Reader<'_>, _room: &Room) -> Result<Self> {
        Ok(TableWait {
            table: Field::read(from.get_table())?,
            cause: read_cause(from.get_cause())?,
            ahead: from.get_ahead(),
            steps_without_items: from.get_steps_without_items(),
        })
    }

    fn write(&self, mut out: wire::table_wait::Builder<'_>) -> Result<()> {
        out.set_table(&self.table);
        out.set_ahead(self.ahead);
        out.set_steps_without_items(self.steps_without_items);
        write_cause(self.cause, out.init_cause());
        Ok(())
    }
}

impl Message for WaitReason {
    type Struct = wire::wait_reason::Owned;

    fn read(from: wire::wait_reason::Reader<'_>, room: &Room) -> Result<Self> {
        use wire::wait_reason::Which;
        Ok(match from.which().map_err(unknown)? {
            Which::Table(wait) => WaitReason::Table(read(wait, room)?),
            Which::Outdated(wait) => WaitReason::Outdated(read(wait, room)?),
            Which::Ahead(calls) => WaitReason::Ahead(calls),
            Which::OwnReplies(bytes) => WaitReason::OwnReplies(bytes),
            Which::RoleReplies(bytes) => WaitReason::RoleReplies(bytes),
            Which::Answers(requests) => WaitReason::Answers(requests),
            Which::ReceiveMemory(()) => WaitReason::ReceiveMemory,
            Which::Other(sentence) => WaitReason::Other(Field::read(sentence)?),
        })
    }

    fn write(&self, mut out: wire::wait_reason::Builder<'_>) -> Result<()> {
        match self {
            WaitReason::Table(wait) => wait.write(out.init_table())?,
            WaitReason::Outdated(wait) => wait.write(out.init_outdated())?,
            WaitReason::Ahead(calls) => out.set_ahead(*calls),
            WaitReason::OwnReplies(bytes) => out.set_own_replies(*bytes),
            WaitReason::RoleReplies(bytes) => out.set_role_replies(*bytes),
            WaitReason::Answers(requests) => out.set_answers(*requests),
            WaitReason::ReceiveMemory => out.set_receive_memory(()),
            WaitReason::Other(sentence) => out.set_other(sentence),
            // A client's, which no server sends.
            WaitReason::AtServer(..) => out.set_other(self.to_string()),
        }
        Ok(())
    }
}

/// Written out, because the error about an unknown codec names the column.
impl Message for Column {
    type Struct = wire::column::Owned;

    fn read(from: wire::column::Reader<'_>, _room: &Room) -> Result<Self> {
        let name = String::read(from.get_name())?;
        let codec = from.get_codec().map_err(|codec| {
            Error::Protocol(format!(
                "column {:?} has codec {}, which this release does not know: update it, or choose another codec",
                shortened(&*name, QUOTED),
                codec.0
            ))
        })?;
        Ok(Column {
            name,
            dtype: Field::read(from.get_dtype())?,
            shape: from.get_shape().map_err(malformed)?.iter().collect(),
            codec: codec.into(),
            finite: from.get_finite(),
        })
    }

    fn write(&self, mut out: wire::column::Builder<'_>) -> Result<()> {
        out.set_name(&self.name);
        out.set_dtype(self.dtype.into());
        out.set_codec(self.codec.into());
        out.set_finite(self.finite);
        list_len("the dimensions of a column", self.shape.len())?;
        out.set_shape(&self.shape[..]).map_err(internal)
    }
}

macro_rules! numbers {
    ($($type:ty)+) => {$(
        impl Field for $type {
            type Read<'a> = Self;
            type Written<'a> = Self;

            fn read(value: Self) -> Result<Self> {
                Ok(value)
            }

            fn write(&self) -> Result<Self> {
                Ok(*self)
            }
        }
    )+};
}

numbers!(bool u16 u32 i32 u64 f64);

/// As JSON, which clients of other languages read, too.
impl Field for Option<ViewSpec> {
    type Read<'a> = capnp::Result<text::Reader<'a>>;
    type Written<'a> = String;

    fn read(text: Self::Read<'_>) -> Result<Self> {
        let text = text.map_err(malformed)?;
        if text.is_empty() {
            return Ok(None);
        }
        // Before it is copied: parsed, it takes a small multiple of its bytes.
        if text.len() > MAX_VIEW_BYTES {
            return Err(Error::Protocol(format!(
                "the view of a table has {} bytes, and {MAX_VIEW_BYTES} are the most",
                text.len()
            )));
        }
        let text = String::read(Ok(text))?;
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Error::Protocol(format!(
                "the view {:?} of a table cannot be read: {}",
                shortened(&*text, QUOTED),
                shortened(error.to_string(), REASON)
            ))
        })
    }

    fn write(&self) -> Result<String> {
        let Some(view) = self else {
            return Ok(String::new());
        };
        serde_json::to_string(view).map_err(|error| {
            replay_core::Error::Config(format!("the view of a table cannot be sent: {error}"))
                .into()
        })
    }
}

impl Field for String {
    type Read<'a> = capnp::Result<text::Reader<'a>>;
    type Written<'a> = &'a str;

    fn read(text: Self::Read<'_>) -> Result<Self> {
        let text = text.map_err(malformed)?;
        match text.to_str() {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(Error::Protocol(format!(
                "a text is not UTF-8 but {:?}: {error}",
                String::from_utf8_lossy(&text.as_bytes()[..text.len().min(64)])
            ))),
        }
    }

    fn write(&self) -> Result<&str> {
        Ok(self)
    }
}

/// A nonce or a key.
impl<const N: usize> Field for [u8; N] {
    type Read<'a> = capnp::Result<data::Reader<'a>>;
    type Written<'a> = data::Reader<'a>;

    fn read(data: Self::Read<'_>) -> Result<Self> {
        let data = data.map_err(malformed)?;
        let wrong_length = || format!("a field of {N} bytes has {}", data.len());
        <[u8; N]>::try_from(data).map_err(|_| Error::Protocol(wrong_length()))
    }

    fn write(&self) -> Result<&[u8]> {
        Ok(self)
    }
}

/// A proof; empty for none.
impl Field for Option<[u8; 32]> {
    type Read<'a> = capnp::Result<data::Reader<'a>>;
    type Written<'a> = data::Reader<'a>;

    fn read(data: Self::Read<'_>) -> Result<Self> {
        match data {
            Ok([]) => Ok(None),
            data => Field::read(data).map(Some),
        }
    }

    fn write(&self) -> Result<&[u8]> {
        Ok(self.as_ref().map_or(&[], |proof| proof))
    }
}

/// A checked priority; -1 for none.
impl Field for Option<f32> {
    type Read<'a> = f32;
    type Written<'a> = f32;

    fn read(priority: f32) -> Result<Self> {
        Ok(Some(priority).filter(|&p| p != -1.0))
    }

    fn write(&self) -> Result<f32> {
        Ok(self.unwrap_or(-1.0))
    }
}

/// A struct behind a pointer.
pub fn read<T: Message>(reader: capnp::Result<Reader<'_, T>>, room: &Room) -> Result<T> {
    T::read(reader.map_err(malformed)?, room)
}

pub fn read_list<T: Message>(
    list: capnp::Result<struct_list::Reader<'_, T::Struct>>,
    room: &Room,
) -> Result<Vec<T>> {
    let list = list.map_err(malformed)?;
    room.take(list.len() as usize * size_of::<T>())?;
    // Collecting results would not allocate once.
    let mut values = Vec::with_capacity(list.len() as usize);
    for item in list {
        values.push(T::read(item, room)?);
    }
    Ok(values)
}

pub fn write_list<T: Message>(
    mut list: struct_list::Builder<'_, T::Struct>,
    values: &[T],
) -> Result<()> {
    for (i, value) in values.iter().enumerate() {
        value.write(list.reborrow().get(i as u32))?;
    }
    Ok(())
}

/// The length of a list, as Cap'n Proto counts it.
pub fn list_len(what: &'static str, len: usize) -> Result<u32> {
    check_size(what, len as u64, MAX_LIST as u64, "send less at a time")?;
    Ok(len as u32)
}

pub(super) fn internal(error: capnp::Error) -> Error {
    replay_core::Error::Internal(format!("a message could not be built: {error}")).into()
}

pub fn malformed(error: capnp::Error) -> Error {
    Error::Protocol(format!("a malformed message: {error}"))
}

pub fn unknown(error: NotInSchema) -> Error {
    Error::Protocol(format!(
        "a message with a variant that this release does not know: {error}"
    ))
}
