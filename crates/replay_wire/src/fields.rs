//! Mapping between structs and enums of this workspace and the schema, in both directions: by name, where names are equal. A variant that
//! is missing on one side is a compile error.

use std::cell::Cell;

use bytes::Bytes;
use capnp::traits::OwnedStruct;
use capnp::{NotInSchema, data, struct_list, text};

use crate::error::{Error, Result};
use base::error::check_size;
use replay_core::replay::SampleCredit;
/// Longest list in a message: Cap'n Proto counts elements in 29 bits.
const MAX_LIST: usize = (1 << 29) - 1;

/// Words of a request or reply without long lists.
pub const FEW_WORDS: usize = 128;

/// A reply's payload, and the credit that counts a sample once the frame is delivered.
pub type Payload = (Vec<Bytes>, Option<Box<dyn SampleCredit>>);

/// A field, as generated readers return it and generated builders accept it.
pub trait Field: Sized {
    type Read<'a>;
    type Written<'a>
    where
        Self: 'a;

    fn read(value: Self::Read<'_>) -> Result<Self>;

    fn write(&self) -> Result<Self::Written<'_>>;
}

/// Rest of a frame during decoding: the payload, and the memory budget left for lists of structs. Elements may take no bytes in the
/// message, so the length of the message does not bound the lists.
pub struct Rest {
    payload: Cell<Bytes>,
    room: Cell<usize>,
}

impl Rest {
    /// The payload, and a budget of `room` bytes for lists.
    pub fn new(payload: Bytes, room: usize) -> Self {
        Rest { payload: Cell::new(payload), room: Cell::new(room) }
    }

    /// Takes the payload.
    pub fn payload(&self) -> Bytes {
        self.payload.take()
    }

    fn take_room(&self, bytes: usize) -> Result<()> {
        let left = self
            .room
            .get()
            .checked_sub(bytes)
            .ok_or_else(|| Error::Protocol("a message whose lists are much longer decoded than encoded".into()))?;
        self.room.set(left);
        Ok(())
    }
}

/// A struct of the schema.
pub trait Message: Sized {
    type Struct: OwnedStruct;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self>;

    fn write(&self, out: <Self::Struct as OwnedStruct>::Builder<'_>) -> Result<()>;

    /// Estimated words of a request or reply with this content.
    fn words(&self) -> usize {
        FEW_WORDS
    }

    /// The payload of a reply with this content.
    fn into_payload(self) -> Payload {
        (Vec::new(), None)
    }
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
            type Read<'a> = std::result::Result<wire::$name, capnp::NotInSchema>;
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

/// Implements [`Message`] by field names. `?` precedes an optional struct, `|` a field that is not in the message, `;` lists of structs,
/// with their names in errors.
macro_rules! same_fields {
    ($($message:ident: $type:ident {
        $($field:ident),*
        $(? $optional:ident)?
        $(| $own:ident = $value:expr)?
        $(; $($list:ident: $what:literal),+)?
    })+) => { paste! {$(
        impl Message for $type {
            type Struct = wire::$message::Owned;

            #[allow(unused_variables, reason = "only some messages have lists or payloads")]
            fn read(from: wire::$message::Reader<'_>, rest: &Rest) -> Result<Self> {
                Ok($type {
                    $($field: Field::read(from.[<get_ $field>]())?,)*
                    $($own: ($value)(rest),)?
                    $($optional: read_optional(from.[<has_ $optional>](), from.[<get_ $optional>](), rest)?,)?
                    $($($list: read_list(from.[<get_ $list>](), rest)?,)+)?
                })
            }

            fn write(&self, mut out: wire::$message::Builder<'_>) -> Result<()> {
                $(out.[<set_ $field>](self.$field.write()?);)*
                $(if let Some(value) = &self.$optional {
                    value.write(out.reborrow().[<init_ $optional>]())?;
                })?
                $($(
                    let len = list_len($what, self.$list.len())?;
                    write_list(out.reborrow().[<init_ $list>](len), &self.$list)?;
                )+)?
                Ok(())
            }
        }
    )+}};
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

impl Field for String {
    type Read<'a> = capnp::Result<text::Reader<'a>>;
    type Written<'a> = &'a str;

    fn read(text: Self::Read<'_>) -> Result<Self> {
        let text = text.map_err(malformed)?;
        text.to_string().map_err(|error| {
            let start = String::from_utf8_lossy(&text.as_bytes()[..text.len().min(64)]);
            Error::Protocol(format!("a text is not UTF-8 but {start:?}: {error}"))
        })
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

/// A struct behind a pointer.
pub fn read<T: Message>(reader: capnp::Result<Reader<'_, T>>, rest: &Rest) -> Result<T> {
    T::read(reader.map_err(malformed)?, rest)
}

/// A struct that may be missing.
pub fn read_optional<T: Message>(there: bool, reader: capnp::Result<Reader<'_, T>>, rest: &Rest) -> Result<Option<T>> {
    there.then(|| read(reader, rest)).transpose()
}

pub fn read_list<T: Message>(list: capnp::Result<struct_list::Reader<'_, T::Struct>>, rest: &Rest) -> Result<Vec<T>> {
    let list = list.map_err(malformed)?;
    rest.take_room(list.len() as usize * size_of::<T>())?;
    // Not `collect`: an iterator of results has no lower size hint, so it would reallocate.
    let mut values = Vec::with_capacity(list.len() as usize);
    for item in list {
        values.push(T::read(item, rest)?);
    }
    Ok(values)
}

pub fn write_list<T: Message>(mut list: struct_list::Builder<'_, T::Struct>, values: &[T]) -> Result<()> {
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
    Error::Protocol(format!("a message with a variant that this release does not know: {error}"))
}
