//! The datagrams between workers and an aggregator. Everything is little endian, as on the project's other wire.
//!
//! ```text
//! byte 0       version (upper 4 bits: 1), kind (lower 4 bits)
//! bytes 1..5   session: names job and worker; drawn at random when the worker joins
//! bytes 5..10  round (lower 20 bits), segment (upper 20 bits)
//! bytes 10..   the body, whose length the datagram's own length gives
//! ```
//!
//! Ten bytes of header and two float32 values are the 18 bytes of UDP payload that an Ethernet frame of 64 bytes has room for. The
//! number of values is that of the body, and job and worker are the session's, so neither stands in the header.
//!
//! | kind | to the aggregator | from the aggregator |
//! | --- | --- | --- |
//! | `Float` | a contribution: float32 values | the sum of all workers |
//! | `Fixed` | a contribution: int32 values | the sum of all workers |
//! | `Exponents` | a contribution: one byte for each segment of the round to come | the largest of all workers, byte for byte |
//! | `Partial` | | the sum of some: who they are as u64, one bit each, then float32 values |
//! | `Join` | key, cookie (8 bytes, 0 at first): proves the return path | cookie: send it back |
//! | `Leave` | key | |
//! | `Reset` | key: drop what is open; the round is the one the worker gave up | |
//! | `SetH` | key, threshold as u16 | |
//! | `FBcast` | key: send what there is of this segment, or of all (segment 2^20 - 1) | |
//! | `Help` | what became of this segment? | the contribution is missing: send it again |
//! | `Halt` | key, [`Ack`] with the reason: suspend the job | |
//! | `Ack` | | [`Ack`] |
//!
//! The key has 16 bytes, is given to the worker with its session, and stands in what could harm others. Data and `Help` are told by
//! session and source alone.

/// Version of this format.
pub const VERSION: u8 = 1;
/// Bytes before the body.
pub const HEADER_BYTES: usize = 10;
/// Longest datagram, in bytes: Ethernet's 1,500 without the headers of IPv4 and UDP.
pub const MAX_DATAGRAM: usize = 1472;
/// Most float32 values in a datagram.
pub const MAX_SEGMENT_VALUES: usize = 360;
/// Segments of a round are numbered below this; it names all of them in `FBcast`.
pub const ALL_SEGMENTS: u32 = FIELD_MASK as u32;

const FIELD_BITS: u32 = 20;
const FIELD_MASK: u64 = (1 << FIELD_BITS) - 1;

/// What a session's owner knows and nobody else.
pub type Key = [u8; 16];
/// What comes back only over the path it was sent to.
pub type Cookie = [u8; 8];

/// What a datagram is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// float32 values.
    Float,
    /// int32 values.
    Fixed,
    /// Exponents of blocks.
    Exponents,
    /// The float32 sum of some workers.
    Partial,
    /// Proof of the return path.
    Join,
    /// The worker goes.
    Leave,
    /// Drop what is open.
    Reset,
    /// Set the threshold.
    SetH,
    /// Send a segment before it is complete.
    FBcast,
    /// A segment is missing.
    Help,
    /// Suspend the job.
    Halt,
    /// An answer.
    Ack,
}

impl Kind {
    const ALL: [Kind; 12] = [
        Kind::Float,
        Kind::Fixed,
        Kind::Exponents,
        Kind::Partial,
        Kind::Join,
        Kind::Leave,
        Kind::Reset,
        Kind::SetH,
        Kind::FBcast,
        Kind::Help,
        Kind::Halt,
        Kind::Ack,
    ];

    fn from_bits(bits: u8) -> Option<Self> {
        Kind::ALL.get(usize::from(bits)).copied()
    }
}

/// The first bytes of every datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// Whose it is.
    pub session: u32,
    /// The lower 20 bits of the round's number.
    pub round: u32,
    /// The segment, at most [`ALL_SEGMENTS`].
    pub segment: u32,
}

impl Header {
    /// A header of `round`, of which the lower bits travel.
    pub fn new(kind: Kind, session: u32, round: u64, segment: u32) -> Self {
        Header {
            kind,
            session,
            round: (round & FIELD_MASK) as u32,
            segment,
        }
    }

    /// The bytes on the wire.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let place = u64::from(self.round) | u64::from(self.segment) << FIELD_BITS;
        let first = VERSION << 4 | self.kind as u8;
        // Two whole words: what copies them next would wait for smaller ones.
        let low = u64::from(first) | u64::from(self.session) << 8 | place << 40;
        let high = (place >> 24) as u16;
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..].copy_from_slice(&high.to_le_bytes());
        bytes
    }

    /// Header and body of a datagram; `None` for what is none of this version.
    #[inline]
    pub fn decode(datagram: &[u8]) -> Option<(Header, &[u8])> {
        let (head, body) = datagram.split_first_chunk::<HEADER_BYTES>()?;
        if head[0] >> 4 != VERSION || datagram.len() > MAX_DATAGRAM {
            return None;
        }
        let [a, b, c, d, e, f, g, h, high @ ..] = *head;
        let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let place = low >> 40 | u64::from(u16::from_le_bytes(high)) << 24;
        let header = Header {
            kind: Kind::from_bits(head[0] & 15)?,
            session: (low >> 8) as u32,
            round: (place & FIELD_MASK) as u32,
            segment: (place >> FIELD_BITS) as u32,
        };
        Some((header, body))
    }

    /// The round's whole number: the one next to `near` whose lower bits these are. `None` before round 0.
    pub fn round_near(&self, near: u64) -> Option<u64> {
        let ahead = u64::from(self.round).wrapping_sub(near) & FIELD_MASK;
        match ahead > FIELD_MASK / 2 {
            true => near.checked_sub(FIELD_MASK + 1 - ahead),
            false => near.checked_add(ahead),
        }
    }
}

/// How an aggregator answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The control was applied. The header has the round that comes next.
    Done,
    /// The segment waits for the workers in `missing`.
    Waiting,
    /// The round failed: `missing` did not contribute in time.
    Failed,
    /// The segment's sum is no longer kept.
    Gone,
    /// The job is suspended.
    Halted,
    /// The job was reset. The header has the round that comes next.
    Reset,
    /// The control was not applied.
    Refused,
}

impl Status {
    const ALL: [Status; 7] = [
        Status::Done,
        Status::Waiting,
        Status::Failed,
        Status::Gone,
        Status::Halted,
        Status::Reset,
        Status::Refused,
    ];
}

/// The body of [`Kind::Ack`]: status (u8), the kind that is answered (u8), missing workers (u64, one bit each), text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// What became of it.
    pub status: Status,
    /// What is answered.
    pub about: Kind,
    /// Workers that are waited for.
    pub missing: u64,
    /// For people.
    pub text: String,
}

impl Ack {
    const TEXT: usize = 10;
    /// Longest text, in bytes.
    pub const MAX_TEXT: usize = 1024;

    /// An answer without more to say.
    pub fn new(status: Status, about: Kind) -> Self {
        Ack {
            status,
            about,
            missing: 0,
            text: String::new(),
        }
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let text = cut(&self.text, Self::MAX_TEXT);
        let mut bytes = vec![self.status as u8, self.about as u8];
        bytes.extend(self.missing.to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes
    }

    /// The answer in a body.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let (head, text) = body.split_first_chunk::<{ Self::TEXT }>()?;
        Some(Ack {
            status: *Status::ALL.get(usize::from(head[0]))?,
            about: Kind::from_bits(head[1])?,
            missing: u64::from_le_bytes(head[2..].try_into().ok()?),
            text: String::from_utf8_lossy(text).into_owned(),
        })
    }
}

/// The first bytes of `text`, whole characters, at most `limit`.
pub fn cut(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_documentation() {
        let header = Header::new(Kind::Help, 0x0403_0201, 0x12_3456, 0xABCDE);
        let bytes = header.encode();
        assert_eq!(
            bytes,
            [0x19, 1, 2, 3, 4, 0x56, 0x34, 0xE2, 0xCD, 0xAB],
            "{bytes:x?}"
        );
        let (read, body) = Header::decode(&bytes).unwrap();
        assert_eq!((read, body), (header, &[][..]));
        assert_eq!(read.round_near(0x12_3450), Some(0x12_3456));
    }

    #[test]
    fn a_frame_of_64_bytes_has_two_values_and_a_full_one_fits_ethernet() {
        let headers = 14 + 20 + 8 + HEADER_BYTES;
        let checksum = 4;
        assert_eq!(headers + 2 * 4 + checksum, 64);
        let who = 8;
        const { assert!(HEADER_BYTES + 8 + 4 * MAX_SEGMENT_VALUES <= MAX_DATAGRAM) };
        assert!(14 + 20 + 8 + HEADER_BYTES + who + 4 * MAX_SEGMENT_VALUES <= 1514);
    }

    #[test]
    fn strange_datagrams_are_none() {
        let good = Header::new(Kind::Float, 7, 1, 0).encode();
        assert!(Header::decode(&good[..9]).is_none());
        for first in [0x09, 0x29, 0x1C, 0x1F, 0xFF] {
            let mut bad = good;
            bad[0] = first;
            assert!(Header::decode(&bad).is_none(), "{first:x}");
        }
        assert!(Header::decode(&[good.as_slice(), &[0; 1463]].concat()).is_none());
        assert!(Ack::decode(&[0; 9]).is_none());
        assert!(Ack::decode(&[7; 10]).is_none());
    }

    #[test]
    fn rounds_are_told_from_their_lower_bits() {
        let header = |round| Header::new(Kind::Float, 0, round, 0);
        for near in [0, 1, 500_000, (1 << 20) - 1, 1 << 20, (1 << 40) + 17] {
            for ahead in [0, 1, 1000, (1 << 19) - 1] {
                assert_eq!(
                    header(near + ahead).round_near(near),
                    Some(near + ahead),
                    "{near} {ahead}"
                );
                if near >= ahead {
                    assert_eq!(header(near - ahead).round_near(near), Some(near - ahead));
                }
            }
        }
        assert_eq!(header((1 << 20) - 1).round_near(3), None);
    }

    #[test]
    fn answers_survive_the_wire_and_long_texts_are_cut() {
        let ack = Ack {
            missing: 1 << 63 | 5,
            text: "worker 2 is missing".into(),
            ..Ack::new(Status::Failed, Kind::Float)
        };
        assert_eq!(Ack::decode(&ack.encode()), Some(ack.clone()));
        let long = Ack {
            text: "é".repeat(4000),
            ..ack
        };
        assert!(HEADER_BYTES + long.encode().len() <= MAX_DATAGRAM);
        assert_eq!(cut("aé", 2), "a");
    }
}
