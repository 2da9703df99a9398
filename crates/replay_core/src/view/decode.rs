//! Rows and blobs of a draw, unpacked with every bound checked: what comes from a server is not trusted.

use std::ops::Range;

use half::f16;

use super::Padding;
use super::batch::Plane;
use crate::difference;
use crate::error::{Error, Result};
use crate::replay::Sampled;
use crate::schema::{Codec, Dtype, TableConfig, flags};

/// Where the columns of a table are in a row (see `schema/innet.capnp`).
pub(super) struct RowLayout {
    columns: Vec<ColumnLayout>,
    /// Position in a row of the blob lengths, four bytes each.
    lengths: usize,
    /// Number of blobs of a row.
    blobs: usize,
    row_bytes: usize,
}

struct ColumnLayout {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: usize,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    /// Raw, at this position of the row.
    Row(usize),
    /// The blob of this number.
    Blob(usize),
}

impl RowLayout {
    pub(super) fn new(config: &TableConfig) -> Self {
        let (mut position, mut blobs) = (1, 0);
        let columns = config
            .columns
            .iter()
            .map(|column| {
                let bytes = column.bytes();
                let place = match column.codec {
                    Codec::None => {
                        position += bytes;
                        Place::Row(position - bytes)
                    }
                    Codec::Lz4 => {
                        blobs += 1;
                        Place::Blob(blobs - 1)
                    }
                };
                ColumnLayout {
                    name: column.name.clone(),
                    dtype: column.dtype,
                    shape: column.shape.iter().map(|&n| n as usize).collect(),
                    bytes,
                    place,
                }
            })
            .collect();
        RowLayout {
            columns,
            lengths: position,
            blobs,
            row_bytes: config.row_bytes(),
        }
    }

    pub(super) fn columns(&self) -> Range<usize> {
        0..self.columns.len()
    }

    pub(super) fn dtype(&self, column: usize) -> Dtype {
        self.columns[column].dtype
    }

    /// Bytes of one value.
    pub(super) fn bytes(&self, column: usize) -> usize {
        self.columns[column].bytes
    }

    /// A plane of `steps` values of a column for each item; without the dimension where `steps` is `None`.
    pub(super) fn plane(&self, column: usize, steps: Option<usize>) -> Plane {
        let ColumnLayout {
            name, dtype, shape, ..
        } = &self.columns[column];
        let shape = steps.into_iter().chain(shape.iter().copied()).collect();
        Plane::new(name, *dtype, shape)
    }

    fn blob<'a>(&self, row: PackedRow<'a>, number: usize) -> Blob<'a> {
        let mut lengths = blob_lengths(&row.fields[self.lengths..]);
        let start = lengths.by_ref().take(number).map(blob_bytes).sum();
        let length = lengths.next().unwrap_or_default();
        let blob = &row.blobs[start..][..blob_bytes(length)];
        match length & difference::MARK {
            0 => Blob::Alone(blob),
            _ => Blob::Difference(blob),
        }
    }

    fn blobs_length(&self, fields: &[u8]) -> usize {
        blob_lengths(&fields[self.lengths..])
            .map(blob_bytes)
            .fold(0, usize::saturating_add)
    }
}

/// A packed value.
enum Blob<'a> {
    Alone(&'a [u8]),
    Difference(&'a [u8]),
}

fn blob_lengths(fields: &[u8]) -> impl Iterator<Item = u32> {
    let (lengths, _) = fields.as_chunks();
    lengths.iter().map(|&length| u32::from_le_bytes(length))
}

/// Bytes of a blob of this length, which may be marked.
fn blob_bytes(length: u32) -> usize {
    (length & !difference::MARK) as usize
}

/// One number of a column, little endian, as the nearest float64.
pub(crate) fn read_scalar(dtype: Dtype, bytes: &[u8]) -> f64 {
    macro_rules! read {
        ($type:ty) => {
            <$type>::from_le_bytes(bytes.try_into().expect("the size of the type"))
        };
    }
    match dtype {
        Dtype::Bool => f64::from(u8::from(bytes[0] != 0)),
        Dtype::Uint8 => f64::from(read!(u8)),
        Dtype::Int8 => f64::from(read!(i8)),
        Dtype::Uint16 => f64::from(read!(u16)),
        Dtype::Int16 => f64::from(read!(i16)),
        Dtype::Uint32 => f64::from(read!(u32)),
        Dtype::Int32 => f64::from(read!(i32)),
        Dtype::Uint64 => read!(u64) as f64,
        Dtype::Int64 => read!(i64) as f64,
        Dtype::Float16 => read!(f16).to_f64(),
        Dtype::Float32 => f64::from(read!(f32)),
        Dtype::Float64 => read!(f64),
    }
}

/// Unpacks a blob that is no difference.
fn unpack_alone(blob: &[u8], out: &mut [u8]) -> std::result::Result<(), String> {
    if blob.len() == out.len() {
        out.copy_from_slice(blob);
        return Ok(());
    }
    if blob.len() > out.len() {
        return Err(format!(
            "a blob of {} bytes for a value of {}",
            blob.len(),
            out.len()
        ));
    }
    // A column has at most 2^28 bytes.
    match lz4::block::decompress_to_buffer(blob, Some(out.len() as i32), out) {
        Ok(written) if written == out.len() => Ok(()),
        Ok(written) => Err(format!(
            "its LZ4 block unpacks to {written} bytes instead of {}",
            out.len()
        )),
        Err(error) => Err(format!("its LZ4 block does not unpack: {error}")),
    }
}

/// Unpacks values, and remembers those of the newest key row: the rows of a window mostly have the same.
pub(super) struct Unpacker<'a> {
    layout: &'a RowLayout,
    /// By the number of the blob.
    keys: Vec<KeyValue<'a>>,
}

#[derive(Clone, Default)]
struct KeyValue<'a> {
    /// What it was unpacked from.
    blob: Option<&'a [u8]>,
    value: Vec<u8>,
}

impl<'a> Unpacker<'a> {
    pub(super) fn new(layout: &'a RowLayout) -> Self {
        Unpacker {
            layout,
            keys: vec![KeyValue::default(); layout.blobs],
        }
    }

    /// Bytes of one value.
    pub(super) fn bytes(&self, column: usize) -> usize {
        self.layout.bytes(column)
    }

    /// Unpacks one value into `out`, which has exactly its size.
    pub(super) fn unpack(
        &mut self,
        row: Row<'a>,
        column: usize,
        out: &mut [u8],
    ) -> std::result::Result<(), String> {
        let layout = &self.layout.columns[column];
        let number = match layout.place {
            Place::Row(position) => {
                out.copy_from_slice(&row.packed.fields[position..position + layout.bytes]);
                return Ok(());
            }
            Place::Blob(number) => number,
        };
        let unpacked = match (self.layout.blob(row.packed, number), row.kind) {
            (Blob::Alone(_), Kind::Key) => self.unpack_key(row.packed, number, out),
            (Blob::Alone(blob), _) => unpack_alone(blob, out),
            (Blob::Difference(difference), Kind::After(key)) => self
                .unpack_key(key, number, out)
                .and_then(|()| Ok(difference::apply(difference, out)?)),
            (Blob::Difference(_), _) => Err("a difference in a key row".into()),
        };
        unpacked.map_err(|what| format!("column {:?}: {what}", layout.name))
    }

    /// Unpacks the observation `offset` steps after the anchor, or what pads a stack where the episode had not
    /// begun.
    pub(super) fn unpack_stacked(
        &mut self,
        window: &DrawnWindow<'a>,
        column: usize,
        padding: Padding,
        offset: isize,
        out: &mut [u8],
    ) -> std::result::Result<(), String> {
        let begun = -(window.before as isize);
        if offset < begun && padding == Padding::Zero {
            out.fill(0);
            return Ok(());
        }
        let row = window
            .row(offset.max(begun))
            .ok_or("an observation of the window is missing")?;
        self.unpack(row, column, out)
    }

    /// Unpacks a column that holds one number.
    pub(super) fn number(
        &mut self,
        row: Row<'a>,
        column: usize,
    ) -> std::result::Result<f64, String> {
        let mut bytes = [0; 8];
        let value = &mut bytes[..self.bytes(column)];
        self.unpack(row, column, value)?;
        Ok(read_scalar(self.layout.dtype(column), value))
    }

    fn unpack_key(
        &mut self,
        row: PackedRow<'a>,
        number: usize,
        out: &mut [u8],
    ) -> std::result::Result<(), String> {
        let Blob::Alone(blob) = self.layout.blob(row, number) else {
            return Err("a difference in a key row".into());
        };
        let key = &mut self.keys[number];
        // The same place has the same bytes: they are borrowed for as long as they are remembered.
        if key.blob.is_some_and(|known| std::ptr::eq(known, blob)) {
            out.copy_from_slice(&key.value);
            return Ok(());
        }
        unpack_alone(blob, out)?;
        key.blob = Some(blob);
        key.value.clear();
        key.value.extend_from_slice(out);
        Ok(())
    }
}

/// One row of a window.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    packed: PackedRow<'a>,
    kind: Kind<'a>,
}

#[derive(Clone, Copy)]
enum Kind<'a> {
    /// Blobs of it may be differences to this key row's.
    After(PackedRow<'a>),
    /// The next row is one after it.
    Key,
    /// No row of the draw needs it.
    Alone,
}

/// The fields of a row and its blobs.
#[derive(Clone, Copy)]
struct PackedRow<'a> {
    fields: &'a [u8],
    blobs: &'a [u8],
}

impl PackedRow<'_> {
    fn has(self, flag: u8) -> bool {
        self.fields[0] & flag != 0
    }
}

impl Row<'_> {
    pub(super) fn has(self, flag: u8) -> bool {
        self.packed.has(flag)
    }
}

/// The rows around the anchor of one drawn item.
#[derive(Clone, Copy)]
pub(super) struct DrawnWindow<'a> {
    rows: &'a [Row<'a>],
    before: usize,
}

impl<'a> DrawnWindow<'a> {
    /// The row `offset` steps after the anchor (before it where negative).
    pub(super) fn row(&self, offset: isize) -> Option<Row<'a>> {
        let index = self.before.checked_add_signed(offset)?;
        self.rows.get(index).copied()
    }
}

/// Finds the rows of a draw, their blobs and their key rows.
///
/// # Errors
/// [`Error::Corrupt`] when the reply does not have the rows, the blobs or the key rows that it announces.
pub(super) fn split_rows<'a>(sampled: &'a Sampled, layout: &RowLayout) -> Result<Vec<Row<'a>>> {
    if !sampled.rows.len().is_multiple_of(layout.row_bytes) {
        return Err(Error::Corrupt(format!(
            "a draw has {} bytes of rows, which is no multiple of {}",
            sampled.rows.len(),
            layout.row_bytes
        )));
    }
    let mut rows: Vec<Row<'a>> = Vec::with_capacity(sampled.rows.len() / layout.row_bytes);
    let mut segments = sampled.blobs.iter().map(AsRef::as_ref);
    let mut rest: &[u8] = &[];
    let mut key: Option<PackedRow<'a>> = None;
    for fields in sampled.rows.chunks_exact(layout.row_bytes) {
        let length = layout.blobs_length(fields);
        while rest.is_empty() && length > 0 {
            rest = segments
                .next()
                .ok_or_else(|| Error::Corrupt("the blobs of a draw end before its rows".into()))?;
        }
        let (blobs, left) = rest.split_at_checked(length).ok_or_else(|| {
            Error::Corrupt("the blobs of a row reach beyond their segment".into())
        })?;
        rest = left;
        let packed = PackedRow { fields, blobs };
        let kind = if packed.has(flags::DIFFERENCE) {
            let key = key.ok_or_else(|| {
                Error::Corrupt("a draw begins with a row that needs the one before".into())
            })?;
            if let Some(before) = rows.last_mut()
                && std::ptr::eq(before.packed.fields, key.fields)
            {
                before.kind = Kind::Key;
            }
            Kind::After(key)
        } else {
            key = Some(packed);
            Kind::Alone
        };
        if !packed.has(flags::REFERENCE) {
            rows.push(Row { packed, kind });
        }
    }
    Ok(rows)
}

/// Cuts the rows of a draw into the windows of its items.
///
/// # Errors
/// [`Error::Corrupt`] when the windows do not add up to the rows.
pub(super) fn split_windows<'a>(
    sampled: &Sampled,
    rows: &'a [Row<'a>],
) -> Result<Vec<DrawnWindow<'a>>> {
    let mut rest = rows;
    let windows = sampled
        .items
        .iter()
        .map(|item| {
            let before = usize::from(item.before);
            let (rows, left) = rest.split_at_checked(before + 1 + usize::from(item.after))?;
            rest = left;
            Some(DrawnWindow { rows, before })
        })
        .collect::<Option<Vec<_>>>();
    windows.filter(|_| rest.is_empty()).ok_or_else(|| {
        Error::Corrupt(format!(
            "the windows of {} drawn items do not add up to their {} rows",
            sampled.items.len(),
            rows.len()
        ))
    })
}
