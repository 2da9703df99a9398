//! Rows and blobs of a sampled batch, unpacked with every bound checked, since a server's reply is not trusted.

use super::Padding;
use super::batch::Copies;
use crate::chunk::{BlobLength, FLAGS_OFFSET, RowLayout, ValueLocation};
use crate::codec::Codec;
use crate::difference::Patched;
use crate::error::{Error, Result};
use crate::replay::{Sampled, SampledItem};
use crate::schema::flags;

/// The error is the reason why an item does not decode.
pub(super) type Decoded<T> = std::result::Result<T, String>;

enum Blob<'a> {
    /// Packed by the column's codec.
    Value(&'a [u8]),
    /// A difference from the key row.
    Difference(&'a [u8]),
}

/// Unpacks values, and remembers the newest key row's: most rows of a window have the same key row.
pub(super) struct Unpacker<'a> {
    layout: &'a RowLayout,
    /// By number of the blob.
    keys: Vec<KeyValue<'a>>,
    /// A value on its way into a streamed batch, which is written once.
    value: Vec<u8>,
    copies: Copies,
}

/// An unpacked value of a key row.
#[derive(Clone, Default)]
struct KeyValue<'a> {
    blob: Option<&'a [u8]>,
    value: Patched,
}

impl<'a> Unpacker<'a> {
    pub(super) fn new(layout: &'a RowLayout, copies: Copies) -> Self {
        Unpacker { layout, keys: vec![KeyValue::default(); layout.blob_columns.len()], value: Vec::new(), copies }
    }

    pub(super) fn bytes(&self, column: usize) -> usize {
        self.layout.columns[column].bytes
    }

    pub(super) fn fixed_columns(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.layout.fixed_columns()
    }

    pub(super) fn is_raw(&self, column: usize) -> bool {
        matches!(self.layout.columns[column].location, ValueLocation::Row(_))
    }

    /// Unpacks a column's value of a row, or zeros without a row, into `out`, which has exactly its size.
    #[inline(always)]
    pub(super) fn unpack_or_zeros(
        &mut self,
        row: Option<SampledRow<'a>>,
        column: usize,
        out: &mut [u8],
    ) -> Decoded<()> {
        let Some(row) = row else {
            out.fill(0);
            return Ok(());
        };
        self.unpack(row, column, out)
    }

    /// Unpacks one value into `out`, which has exactly its size.
    #[inline(always)]
    pub(super) fn unpack(&mut self, row: SampledRow<'a>, column: usize, out: &mut [u8]) -> Decoded<()> {
        let layout = &self.layout.columns[column];
        match layout.location {
            ValueLocation::Row(offset) => {
                self.copies.copy(&row.parts.fields[offset..offset + layout.bytes], out);
                Ok(())
            }
            ValueLocation::Blob(number) => self
                .unpack_blob(row, number, layout.column.codec, out)
                .map_err(|what| format!("column {:?}: {what}", layout.column.name)),
        }
    }

    /// Unpacks observations into the slots of a buffer: `offset` gives the steps from the anchor to a slot, or `None` for
    /// zeros. Slots before the episode's first observation are padded.
    pub(super) fn unpack_slots(
        &mut self,
        window: &SampledWindow<'a>,
        column: usize,
        padding: Padding,
        slots: &mut [u8],
        offset: impl Fn(usize) -> Option<isize>,
    ) -> Decoded<()> {
        let first = -(window.before as isize);
        let slots = slots.chunks_exact_mut(self.bytes(column));
        for (slot, value) in slots.enumerate() {
            let offset = offset(slot).filter(|&at| at >= first || padding != Padding::Zero);
            let Some(offset) = offset else {
                value.fill(0);
                continue;
            };
            let row = window.row(offset.max(first)).ok_or("an observation of the window is missing")?;
            self.unpack(row, column, value)?;
        }
        Ok(())
    }

    #[inline(always)]
    pub(super) fn number(&mut self, row: SampledRow<'a>, column: usize) -> Decoded<f64> {
        let layout = &self.layout.columns[column];
        if let ValueLocation::Row(offset) = layout.location {
            return Ok(layout.column.dtype.read(&row.parts.fields[offset..offset + layout.bytes]));
        }
        let mut bytes = [0; 8];
        let value = &mut bytes[..layout.bytes];
        self.unpack(row, column, value)?;
        Ok(layout.column.dtype.read(value))
    }

    fn unpack_blob(&mut self, row: SampledRow<'a>, number: usize, codec: Codec, out: &mut [u8]) -> Decoded<()> {
        let value = match (row.parts.blob(self.layout, number), row.role) {
            (key @ Blob::Value(_), KeyRole::Key) => self.keys[number].unpack(key, codec, out.len())?.base(),
            // Not packed, see `Codec::unpack`.
            (Blob::Value(blob), _) if blob.len() == out.len() => blob,
            // Not streamed: unpacked into the batch.
            (Blob::Value(blob), _) if !self.copies.streams(out.len()) => {
                return codec.unpack(blob, out);
            }
            (Blob::Value(blob), _) => {
                self.value.resize(out.len(), 0);
                codec.unpack(blob, &mut self.value)?;
                &self.value
            }
            (Blob::Difference(difference), KeyRole::DifferenceTo(key)) => {
                let key = key.blob(self.layout, number);
                let key = self.keys[number].unpack(key, codec, out.len())?;
                key.apply(difference)?
            }
            (Blob::Difference(_), _) => return Err(KEY_DIFFERS.into()),
        };
        self.copies.copy(value, out);
        Ok(())
    }
}

const KEY_DIFFERS: &str = "a difference in a key row";

impl<'a> KeyValue<'a> {
    fn unpack(&mut self, blob: Blob<'a>, codec: Codec, bytes: usize) -> Decoded<&mut Patched> {
        let Blob::Value(blob) = blob else {
            return Err(KEY_DIFFERS.into());
        };
        // A blob at the same address is the same blob: its bytes are borrowed for as long as the value is remembered.
        if !self.blob.is_some_and(|known| std::ptr::eq(known, blob)) {
            self.blob = None;
            self.value.set_base(bytes, |base| codec.unpack(blob, base))?;
            self.blob = Some(blob);
        }
        Ok(&mut self.value)
    }
}

#[derive(Clone, Copy)]
pub(super) struct SampledRow<'a> {
    parts: RowParts<'a>,
    role: KeyRole<'a>,
}

/// Relation of a row to key rows.
#[derive(Clone, Copy)]
enum KeyRole<'a> {
    /// Blobs of the row may be differences to this key row.
    DifferenceTo(RowParts<'a>),
    /// The next row is one with differences to this key row: its values are worth remembering.
    Key,
    /// No other row of the sample needs the row.
    Alone,
}

#[derive(Clone, Copy)]
struct RowParts<'a> {
    /// Flags, raw values and blob lengths, where [`RowLayout`] has them.
    fields: &'a [u8],
    blobs: &'a [u8],
}

impl<'a> RowParts<'a> {
    fn has(self, flag: u8) -> bool {
        self.fields[FLAGS_OFFSET] & flag != 0
    }

    fn blob(self, layout: &RowLayout, number: usize) -> Blob<'a> {
        let mut lengths = layout.blob_lengths(self.fields);
        let start: usize = lengths.by_ref().take(number).map(BlobLength::bytes).sum();
        // A row has a length for each of its layout's blobs.
        let length = lengths.next().unwrap_or(BlobLength::of_value(0));
        let blob = &self.blobs[start..start + length.bytes()];
        if length.is_difference() { Blob::Difference(blob) } else { Blob::Value(blob) }
    }
}

impl<'a> SampledRow<'a> {
    pub(super) fn has(self, flag: u8) -> bool {
        self.parts.has(flag)
    }

    /// Flags, raw values, blob lengths and counts.
    pub(super) fn fields(self) -> &'a [u8] {
        self.parts.fields
    }

    /// The row without its relation to others.
    pub(super) fn alone(self) -> Self {
        SampledRow { role: KeyRole::Alone, ..self }
    }
}

/// The steps of a window from its anchor on, up to the end of the episode (or life).
#[derive(Clone, Copy)]
pub(super) struct Steps<'a> {
    pub(super) window: SampledWindow<'a>,
    /// Steps that learning may use: the observation after each is known, or it terminates.
    pub(super) counted: usize,
    /// These, and a truncated step after them whose next observation never came.
    pub(super) all: usize,
    pub(super) terminated: bool,
    /// Known observations, from the anchor's to the one after the steps that count.
    pub(super) observations: usize,
}

impl<'a> Steps<'a> {
    /// The row of a step, counted from the anchor.
    pub(super) fn row(self, step: usize) -> SampledRow<'a> {
        self.window.rows.row(self.window.first + self.window.before + step)
    }

    /// The row of a known observation.
    pub(super) fn observation(self, step: usize) -> Option<SampledRow<'a>> {
        (step < self.observations).then(|| self.row(step))
    }
}

/// The rows around the anchor of one sampled item.
#[derive(Clone, Copy)]
pub(super) struct SampledWindow<'a> {
    rows: &'a Rows<'a>,
    first: usize,
    len: usize,
    before: usize,
}

impl<'a> SampledWindow<'a> {
    /// The row `offset` steps after the anchor (before it where negative).
    pub(super) fn row(&self, offset: isize) -> Option<SampledRow<'a>> {
        let index = self.before.checked_add_signed(offset)?;
        (index < self.len).then(|| self.rows.row(self.first + index))
    }

    /// The steps from the anchor on, at most `most`; `None` where the window ends before its episode does.
    #[inline(always)]
    pub(super) fn steps(&self, most: usize) -> Option<Steps<'a>> {
        let (anchor, rows) = (self.first + self.before, self.len - self.before);
        let has = |step: usize, flag: u8| self.rows.row(anchor + step).has(flag);
        let end = (0..rows.min(most)).find(|&step| has(step, flags::TERMINATED | flags::TRUNCATED | flags::FINAL));
        let all = end.map_or(most, |end| end + 1);
        let terminated = end.is_some_and(|end| has(end, flags::TERMINATED));
        let followed = all < rows;
        let counted = all - usize::from(end.is_some() && !followed && !terminated);
        if all > rows || counted == 0 || !(followed || end.is_some()) || has(all - 1, flags::FINAL) {
            return None;
        }
        Some(Steps { window: *self, counted, all, terminated, observations: rows.min(counted + 1) })
    }
}

/// The rows of a sample, without key rows that no window has.
pub(super) struct Rows<'a> {
    fields: &'a [u8],
    row_bytes: usize,
    /// The rows of a layout with blobs. Without blobs a row is found by its place in `fields`.
    packed: Option<Vec<SampledRow<'a>>>,
}

impl<'a> Rows<'a> {
    /// Finds the rows of a sample, their blobs and their key rows.
    pub(super) fn of(sampled: &'a Sampled, layout: &RowLayout) -> Result<Self> {
        let (fields, row_bytes) = (&sampled.rows[..], layout.row_bytes);
        if !fields.len().is_multiple_of(row_bytes) {
            let bytes = fields.len();
            let reason = format!("a sample has {bytes} bytes of rows, which is no multiple of {row_bytes}");
            return Err(Error::Corrupt(reason));
        }
        let packed = (!layout.blob_columns.is_empty()).then(|| packed_rows(sampled, layout)).transpose()?;
        Ok(Rows { fields, row_bytes, packed })
    }

    fn len(&self) -> usize {
        self.packed.as_ref().map_or_else(|| self.fields.len() / self.row_bytes, Vec::len)
    }

    fn row(&self, index: usize) -> SampledRow<'a> {
        match &self.packed {
            Some(packed) => packed[index],
            None => {
                let fields = &self.fields[index * self.row_bytes..][..self.row_bytes];
                SampledRow { parts: RowParts { fields, blobs: &[] }, role: KeyRole::Alone }
            }
        }
    }

    /// Cuts the rows into the windows of the sampled items.
    pub(super) fn windows(&'a self, items: &[SampledItem]) -> Result<Vec<SampledWindow<'a>>> {
        let mut end = 0;
        let windows: Vec<_> = items
            .iter()
            .map(|item| {
                let (first, before) = (end, usize::from(item.before));
                let len = before + 1 + usize::from(item.after);
                end += len;
                SampledWindow { rows: self, first, len, before }
            })
            .collect();
        if end != self.len() {
            let (items, rows) = (items.len(), self.len());
            let reason = format!("the windows of {items} sampled items do not add up to their {rows} rows");
            return Err(Error::Corrupt(reason));
        }
        Ok(windows)
    }
}

/// The rows of a layout with blobs.
fn packed_rows<'a>(sampled: &'a Sampled, layout: &RowLayout) -> Result<Vec<SampledRow<'a>>> {
    let mut rows: Vec<SampledRow<'a>> = Vec::with_capacity(sampled.rows.len() / layout.row_bytes);
    let mut segments = sampled.blobs.iter().map(AsRef::as_ref);
    let mut rest: &[u8] = &[];
    let mut key: Option<RowParts<'a>> = None;
    for fields in sampled.rows.chunks_exact(layout.row_bytes) {
        let lengths = layout.blob_lengths(fields).map(BlobLength::bytes);
        let length = lengths.fold(0, usize::saturating_add);
        while rest.is_empty() && length > 0 {
            rest = segments.next().ok_or_else(|| Error::Corrupt("the blobs of a sample end before its rows".into()))?;
        }
        let (blobs, left) = rest
            .split_at_checked(length)
            .ok_or_else(|| Error::Corrupt("the blobs of a row reach beyond their segment".into()))?;
        rest = left;
        let parts = RowParts { fields, blobs };
        let role = if parts.has(flags::DIFFERENCE) {
            let key =
                key.ok_or_else(|| Error::Corrupt("a sample begins with a row that needs the one before".into()))?;
            if let Some(before) = rows.last_mut()
                && std::ptr::eq(before.parts.fields, key.fields)
            {
                before.role = KeyRole::Key;
            }
            KeyRole::DifferenceTo(key)
        } else {
            key = Some(parts);
            KeyRole::Alone
        };
        if !parts.has(flags::REFERENCE) {
            rows.push(SampledRow { parts, role });
        }
    }
    Ok(rows)
}
