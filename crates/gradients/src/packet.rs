//! Format of the datagrams between workers and an aggregator. Numbers are little-endian.
//!
//! ```text
//! byte 0       version (upper 4 bits: 1), kind (lower 4 bits)
//! bytes 1..5   session: a random number for each job and worker
//! bytes 5..10  round (lower 20 bits), segment (upper 20 bits)
//! bytes 10..   body, up to the end of the datagram
//! ```
//!
//! A header of ten bytes and two float32 values fill the 18 bytes of UDP payload in the smallest Ethernet frame. The header has neither job
//! and worker, which follow from the session, nor the number of values, which follows from the length. Asynchronous jobs have vectors of one
//! length, so their segments do not say it.
//!
//! | kind | to the aggregator | from the aggregator |
//! | --- | --- | --- |
//! | `Float` | a contribution: float32 values; segment 0 of several ends with the length of the vector, as u32 | the sum of all workers |
//! | `Fixed` | a contribution: int32 values | the sum of all workers |
//! | `Exponents` | a contribution: one byte for each segment of the next round; segment 0 ends with the length of the vector, as u32 | the largest of all workers, byte for byte |
//! | `Partial` | | the sum of some workers: a bit for each, as u64, then float32 values |
//! | `Join` | key, cookie (8 bytes, 0 at first): path validation | cookie to return |
//! | `Leave` | key | |
//! | `Reset` | key: drop segments in flight; the round is the one that the worker gave up | |
//! | `SetH` | key, threshold as u16 | |
//! | `FBcast` | key, segment as u32: send the incomplete sum of this segment, or of all (2^20 - 1) | |
//! | `Help` | status query for this segment | request to send the contribution again |
//! | `Halt` | key, [`Ack`] with the reason: suspend the job | |
//! | `Ack` | | [`Ack`] |
//!
//! The key has 16 bytes and is given to the worker with its session. Controls, which affect all workers, are accepted only with the key;
//! contributions and `Help` by session and source address. The segment in the header of a control is its number, which the answer repeats:
//! a late answer is not mistaken for the answer to the next control, nor a late `SetH` for a new one.

use zerocopy::TryFromBytes;

/// Version of this format.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 10;
/// Longest datagram, in bytes: Ethernet's 1,500 without the headers of IPv4 and UDP.
pub const MAX_DATAGRAM: usize = 1472;
/// Most float32 values in a datagram.
pub const MAX_SEGMENT_VALUES: usize = 360;
/// Segment number that means all segments, in `FBcast`. Segments of a round have smaller numbers.
pub const ALL_SEGMENTS: u32 = FIELD_MASK as u32;

/// Number of the control after `last`, 0 before the first: 1 to [`ALL_SEGMENTS`], and again.
pub fn next_control(last: u32) -> u32 {
    last % ALL_SEGMENTS + 1
}

/// Whether a control was made after `last`, for at most half of all numbers.
pub fn is_later_control(number: u32, last: u32) -> bool {
    let ahead = number.wrapping_sub(last) & ALL_SEGMENTS;
    (1..=ALL_SEGMENTS / 2).contains(&ahead)
}

const FIELD_BITS: u32 = 20;
const FIELD_MASK: u64 = (1 << FIELD_BITS) - 1;

/// Secret of a session.
pub type SessionKey = [u8; 16];
/// Random number that proves receipt at the address that it was sent to.
pub type Cookie = [u8; 8];

/// Kind of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub enum PacketKind {
    /// float32 values.
    Float,
    /// int32 values.
    Fixed,
    /// Block exponents.
    Exponents,
    /// The float32 sum of some workers.
    Partial,
    /// Path validation.
    Join,
    /// The worker leaves.
    Leave,
    /// Drop segments in flight.
    Reset,
    /// Set the threshold.
    SetH,
    /// Send a segment before it is complete.
    FBcast,
    /// Status query, or request to send a contribution again.
    Help,
    /// Suspend the job.
    Halt,
    /// Answer.
    Ack,
}

/// Status in an answer of an aggregator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub enum Status {
    /// The control was applied. The header has the next round.
    Done,
    /// The segment waits for the workers in `missing`.
    Waiting,
    /// The round failed: `missing` did not contribute in time.
    Failed,
    /// The segment's sum is no longer kept.
    Gone,
    /// The job is suspended.
    Halted,
    /// The job was reset. The header has the next round.
    Reset,
    /// The control was not applied, or another process has replaced the member.
    Refused,
}

/// Header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketHeader {
    /// Kind of the datagram.
    pub kind: PacketKind,
    /// Session number.
    pub session: u32,
    /// Lower 20 bits of the round number.
    pub round: u32,
    /// Segment number, at most [`ALL_SEGMENTS`].
    pub segment: u32,
}

impl PacketHeader {
    /// A header with the lower bits of `round`.
    pub fn new(kind: PacketKind, session: u32, round: u64, segment: u32) -> Self {
        PacketHeader { kind, session, round: (round & FIELD_MASK) as u32, segment }
    }

    /// The bytes on the wire.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let fields = u64::from(self.round) | u64::from(self.segment) << FIELD_BITS;
        let first = VERSION << 4 | self.kind as u8;
        // Written as two whole words: a copy that reads bytes just stored in smaller pieces stalls (store forwarding).
        let low = u64::from(first) | u64::from(self.session) << 8 | fields << 40;
        let high = (fields >> 24) as u16;
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&low.to_le_bytes());
        bytes[8..].copy_from_slice(&high.to_le_bytes());
        bytes
    }

    /// Header and body of a datagram; `None` if it is not of this version.
    #[inline]
    pub fn decode(datagram: &[u8]) -> Option<(PacketHeader, &[u8])> {
        let (head, body) = datagram.split_first_chunk::<HEADER_BYTES>()?;
        if head[0] >> 4 != VERSION || datagram.len() > MAX_DATAGRAM {
            return None;
        }
        let [a, b, c, d, e, f, g, h, high @ ..] = *head;
        let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        let fields = low >> 40 | u64::from(u16::from_le_bytes(high)) << 24;
        let header = PacketHeader {
            kind: PacketKind::try_read_from_bytes(&[head[0] & 15]).ok()?,
            session: (low >> 8) as u32,
            round: (fields & FIELD_MASK) as u32,
            segment: (fields >> FIELD_BITS) as u32,
        };
        Some((header, body))
    }

    /// Round number, extended to 64 bits: the one closest to `near` with these lower bits. `None` before round 0.
    pub fn round_near(&self, near: u64) -> Option<u64> {
        let ahead = u64::from(self.round).wrapping_sub(near) & FIELD_MASK;
        match ahead > FIELD_MASK / 2 {
            true => near.checked_sub(FIELD_MASK + 1 - ahead),
            false => near.checked_add(ahead),
        }
    }
}

/// Body of [`PacketKind::Ack`]: status (u8), kind of the answered datagram (u8), missing workers (u64, a bit each), text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// Its status.
    pub status: Status,
    /// Kind of the answered datagram.
    pub about: PacketKind,
    /// Missing workers, a bit each.
    pub missing: u64,
    /// Reason, for error messages.
    pub text: String,
}

impl Ack {
    /// Bytes before the text.
    const HEAD: usize = 10;
    /// Longest text, in bytes.
    pub const MAX_TEXT: usize = 1024;

    /// An answer without missing workers and reason.
    pub fn new(status: Status, about: PacketKind) -> Self {
        Ack { status, about, missing: 0, text: String::new() }
    }

    /// The answer, with a reason.
    pub fn with_text(self, text: impl Into<String>) -> Self {
        let text = text.into();
        Ack { text, ..self }
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
        let (head, text) = body.split_first_chunk::<{ Self::HEAD }>()?;
        Some(Ack {
            status: Status::try_read_from_bytes(&head[..1]).ok()?,
            about: PacketKind::try_read_from_bytes(&head[1..2]).ok()?,
            missing: u64::from_le_bytes(head[2..].try_into().ok()?),
            text: String::from_utf8_lossy(text).into_owned(),
        })
    }
}

/// Prefix of `text` of at most `limit` bytes, cut between characters.
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
    fn the_layout_is_as_documented() {
        let header = PacketHeader::new(PacketKind::Help, 0x0403_0201, 0x12_3456, 0xABCDE);
        let bytes = header.encode();
        assert_eq!(bytes, [0x19, 1, 2, 3, 4, 0x56, 0x34, 0xE2, 0xCD, 0xAB], "{bytes:x?}");
        let (read, body) = PacketHeader::decode(&bytes).unwrap();
        assert_eq!((read, body), (header, &[][..]));
        assert_eq!(read.round_near(0x12_3450), Some(0x12_3456));
    }

    #[test]
    fn a_frame_of_64_bytes_has_two_values_and_a_full_one_fits_ethernet() {
        let headers = 14 + 20 + 8 + HEADER_BYTES;
        let checksum = 4;
        assert_eq!(headers + 2 * 4 + checksum, 64);
        let members = 8;
        const { assert!(HEADER_BYTES + 8 + 4 * MAX_SEGMENT_VALUES <= MAX_DATAGRAM) };
        assert!(14 + 20 + 8 + HEADER_BYTES + members + 4 * MAX_SEGMENT_VALUES <= 1514);
    }

    #[test]
    fn datagrams_of_other_protocols_are_not_decoded() {
        let good = PacketHeader::new(PacketKind::Float, 7, 1, 0).encode();
        assert!(PacketHeader::decode(&good[..9]).is_none());
        for first in [0x09, 0x29, 0x1C, 0x1F, 0xFF] {
            let mut bad = good;
            bad[0] = first;
            assert!(PacketHeader::decode(&bad).is_none(), "{first:x}");
        }
        assert!(PacketHeader::decode(&[good.as_slice(), &[0; 1463]].concat()).is_none());
        assert!(Ack::decode(&[0; 9]).is_none());
        assert!(Ack::decode(&[7; 10]).is_none());
    }

    #[test]
    fn round_numbers_are_extended_from_their_lower_bits() {
        let header = |round| PacketHeader::new(PacketKind::Float, 0, round, 0);
        for near in [0, 1, 500_000, (1 << 20) - 1, 1 << 20, (1 << 40) + 17] {
            for ahead in [0, 1, 1000, (1 << 19) - 1] {
                assert_eq!(header(near + ahead).round_near(near), Some(near + ahead), "{near} {ahead}");
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
            ..Ack::new(Status::Failed, PacketKind::Float)
        };
        assert_eq!(Ack::decode(&ack.encode()), Some(ack.clone()));
        let long = Ack { text: "é".repeat(4000), ..ack };
        assert!(HEADER_BYTES + long.encode().len() <= MAX_DATAGRAM);
        assert_eq!(cut("aé", 2), "a");
    }
}
