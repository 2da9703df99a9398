//! Fields of messages, and what a frame has beside its control message.

use std::cell::Cell;

use bytes::Bytes;
use capnp::traits::OwnedStruct;
use capnp::{data, struct_list, text};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use base::notation::shortened;
use replay_core::replay::SampleCredit;

/// Most bytes of a text in an error: the peer may be unauthenticated, and errors are logged.
const QUOTED: usize = 64;

/// Most bytes of a parser's reason, which also quotes the text.
const REASON: usize = 256;

/// Why `expect` of the setter of a list of numbers holds: capnp's setters of slices always return `Ok`.
pub const COPIED: &str = "a slice of numbers is copied";

/// A reply's payload, and the credit that counts a sample once the frame is delivered.
pub type Payload = (Vec<Bytes>, Option<Box<dyn SampleCredit>>);

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

    /// Reserves memory for a list of so many elements.
    pub fn reserve<T>(&self, elements: u32) -> Result<()> {
        let left = self.room.get().checked_sub(elements as usize * size_of::<T>());
        let longer = || Error::Protocol("a message whose lists are much longer decoded than encoded".into());
        self.room.set(left.ok_or_else(longer)?);
        Ok(())
    }

    /// A list of structs, each by `read`.
    pub fn list<'a, S: OwnedStruct, T>(
        &self,
        list: capnp::Result<struct_list::Reader<'a, S>>,
        read: impl Fn(S::Reader<'a>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let list = list?;
        self.reserve::<T>(list.len())?;
        // Not `collect`: an iterator of results has no lower size hint, so it would reallocate.
        let mut values = Vec::with_capacity(list.len() as usize);
        for item in list {
            values.push(read(item)?);
        }
        Ok(values)
    }
}

/// Writes a list of structs, each by `write`.
pub fn write_list<S: OwnedStruct, T>(
    mut list: struct_list::Builder<'_, S>,
    values: &[T],
    write: impl Fn(&T, S::Builder<'_>),
) {
    for (i, value) in values.iter().enumerate() {
        write(value, list.reborrow().get(i as u32));
    }
}

/// A text.
pub fn text(text: capnp::Result<text::Reader<'_>>) -> Result<String> {
    let text = text?;
    text.to_string().map_err(|error| {
        let start = String::from_utf8_lossy(&text.as_bytes()[..text.len().min(QUOTED)]);
        Error::Protocol(format!("a text is not UTF-8 but {start:?}: {error}"))
    })
}

/// A nonce or a proof.
pub fn key(data: capnp::Result<data::Reader<'_>>) -> Result<[u8; 32]> {
    let data = data?;
    data.try_into().map_err(|_| Error::Protocol(format!("a field of 32 bytes has {}", data.len())))
}

/// A value in JSON, which clients of other languages read, too.
pub fn json<T: DeserializeOwned>(what: &str, json: capnp::Result<text::Reader<'_>>) -> Result<T> {
    let json = json?.as_bytes();
    serde_json::from_slice(json).map_err(|error| {
        let start = String::from_utf8_lossy(&json[..json.len().min(QUOTED)]);
        let reason = shortened(error.to_string(), REASON);
        Error::Protocol(format!("{what} {start:?} cannot be read: {reason}"))
    })
}

/// JSON of a value.
pub fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("a value with derived serialisation and texts as keys has JSON")
}
