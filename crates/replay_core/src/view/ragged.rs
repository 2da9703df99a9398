//! Arrays whose items have different lengths: of ragged columns, and of views whose items have different numbers of rows. The lengths are
//! known from the counts in the rows before anything is unpacked. Such an array is its values, one after the other, and for each level the
//! offsets of its parts: of the rows of each item where it has several, and of the elements of each row where the column is ragged.

use std::ops::Range;
use std::sync::Arc;

use super::batch::{Array, ArraySpec, put};
use super::buffer::Buffer;
use super::decode::{Decoded, SampledRow, Unpacker};
use crate::chunk::RowLayout;
use crate::schema::Dtype;

/// An array of a column, with the rows whose values it has.
pub(super) struct RaggedArray<'a> {
    name: String,
    column: usize,
    /// The rows of all items, one after the other; `None` has no elements, and in a column of fixed shape zeros.
    rows: Arc<[Option<SampledRow<'a>>]>,
    /// Where the rows of each item end; `None` where each item has one.
    ends: Option<Arc<[usize]>>,
    /// Elements of each row; empty where the column is not ragged, and each row has one.
    counts: Vec<usize>,
    element_bytes: usize,
    is_ragged: bool,
    /// The discount of one step, where it has the returns from each row on instead of the rewards of its column.
    gamma: Option<f64>,
}

impl<'a> RaggedArray<'a> {
    /// The values of a ragged column in one row of each item.
    pub(super) fn of_values(
        layout: &RowLayout,
        name: &str,
        column: usize,
        rows: impl Iterator<Item = Option<SampledRow<'a>>>,
    ) -> Self {
        let (element_bytes, is_ragged) = (layout.columns[column].element_bytes, layout.columns[column].bytes == 0);
        let rows = rows.collect();
        let (name, counts) = (name.to_owned(), Vec::new());
        RaggedArray { name, column, rows, ends: None, counts, element_bytes, is_ragged, gamma: None }
    }

    /// The values of any column in several rows of each item.
    pub(super) fn of_rows<I: Iterator<Item = Option<SampledRow<'a>>>>(
        layout: &RowLayout,
        name: &str,
        column: usize,
        items: impl Iterator<Item = I>,
    ) -> Self {
        let (mut rows, mut ends) = (Vec::new(), Vec::new());
        for item in items {
            rows.extend(item);
            ends.push(rows.len());
        }
        RaggedArray { ends: Some(ends.into()), ..Self::of_values(layout, name, column, rows.into_iter()) }
    }

    /// The values of another column in the same rows.
    pub(super) fn of_column(&self, layout: &RowLayout, name: &str, column: usize) -> Self {
        let (rows, ends) = (self.rows.clone(), self.ends.clone());
        RaggedArray { rows, ends, ..Self::of_values(layout, name, column, std::iter::empty()) }
    }

    /// The discounted sums of the rewards from each row to the last one of its item, float32, of a column of single numbers.
    pub(super) fn into_returns(self, gamma: f64) -> Self {
        RaggedArray { gamma: Some(gamma), element_bytes: Dtype::Float32.bytes(), ..self }
    }

    fn items(&self) -> usize {
        self.ends.as_ref().map_or(self.rows.len(), |ends| ends.len())
    }

    fn rows_of(&self, items: Range<usize>) -> Range<usize> {
        let end = |items: usize| match &self.ends {
            Some(ends) => items.checked_sub(1).map_or(0, |last| ends[last]),
            None => items,
        };
        end(items.start)..end(items.end)
    }

    /// Reads the counts of the rows. An item with one that its blob cannot have is added to the failed ones, and has no elements.
    pub(super) fn read_counts(&mut self, layout: &RowLayout, failed: &mut Vec<(usize, String)>) {
        if !self.is_ragged {
            return;
        }
        self.counts = vec![0; self.rows.len()];
        for item in 0..self.items() {
            let rows = self.rows_of(item..item + 1);
            for row in rows.clone() {
                let Some(fields) = self.rows[row].map(SampledRow::fields) else { continue };
                if let Err(reason) = layout.check_counts(fields) {
                    self.counts[rows].fill(0);
                    failed.push((item, format!("a row {reason}")));
                    break;
                }
                let count = layout.counts(fields).find(|(column, _)| *column == self.column);
                self.counts[row] = count.map_or(0, |(_, count)| count);
            }
        }
    }

    /// Elements of some items; saturates.
    fn elements(&self, items: Range<usize>) -> usize {
        let rows = self.rows_of(items);
        match self.is_ragged {
            true => self.counts[rows].iter().fold(0, |sum: usize, count| sum.saturating_add(*count)),
            false => rows.len(),
        }
    }

    /// Bytes of the values of some items; saturates.
    pub(super) fn bytes(&self, items: Range<usize>) -> usize {
        self.elements(items).saturating_mul(self.element_bytes)
    }

    /// Levels of offsets.
    pub(super) fn depth(&self) -> usize {
        usize::from(self.ends.is_some()) + usize::from(self.is_ragged)
    }

    /// Lengths of the parts of each level, the outermost first.
    fn levels(&self) -> impl Iterator<Item = Vec<usize>> {
        let rows =
            self.ends.is_some().then(|| (0..self.items()).map(|item| self.rows_of(item..item + 1).len()).collect());
        rows.into_iter().chain(self.is_ragged.then(|| self.counts.clone()))
    }

    /// The parts of a buffer for the offsets of each level and, last, for the values.
    pub(super) fn specs(&self, layout: &RowLayout) -> Vec<ArraySpec> {
        let offsets = |count: usize| ArraySpec::of_rows("", Dtype::Int64, vec![], count + 1);
        let column = &layout.columns[self.column].column;
        let (dtype, shape) = match self.gamma {
            Some(_) => (Dtype::Float32, &[][..]),
            None => (column.dtype, column.inner_shape()),
        };
        let shape = shape.iter().map(|&n| n as usize).collect();
        let values = ArraySpec::of_rows(&self.name, dtype, shape, self.elements(0..self.items()));
        self.levels().map(|lengths| offsets(lengths.len())).chain([values]).collect()
    }

    /// Unpacks the values of some items, unless an item failed before.
    pub(super) fn fill(
        &self,
        unpacker: &mut Unpacker<'a>,
        items: Range<usize>,
        mut values: &mut [u8],
        failed: &mut [Option<String>],
    ) {
        for (item, failed) in items.zip(failed) {
            let of_item = values.split_off_mut(..self.bytes(item..item + 1)).unwrap_or_default();
            if failed.is_none() {
                *failed = self.fill_item(unpacker, self.rows_of(item..item + 1), of_item).err();
            }
        }
    }

    fn fill_item(&self, unpacker: &mut Unpacker<'a>, rows: Range<usize>, mut values: &mut [u8]) -> Decoded<()> {
        if let Some(gamma) = self.gamma {
            let mut following = 0.0;
            for (row, value) in self.rows[rows].iter().zip(values.as_chunks_mut().0).rev() {
                let reward = row.map_or(Ok(0.0), |row| unpacker.number(row, self.column))?;
                following = reward + gamma * following;
                *value = (following as f32).to_ne_bytes();
            }
            return Ok(());
        }
        if !self.is_ragged {
            let mut values = self.rows[rows].iter().zip(values.chunks_exact_mut(self.element_bytes));
            return values.try_for_each(|(row, value)| unpacker.unpack_or_zeros(*row, self.column, value));
        }
        for row in rows {
            let value = values.split_off_mut(..self.counts[row] * self.element_bytes).unwrap_or_default();
            if let Some(row) = self.rows[row] {
                // No difference is to a ragged value, so that none is remembered.
                unpacker.unpack(row.alone(), self.column, value)?;
            }
        }
        Ok(())
    }

    /// Removes the failed items, and closes the gaps that they left in the values.
    pub(super) fn remove_items(&mut self, values: &mut [u8], failed: &[(usize, String)]) {
        let (mut begin, mut kept_bytes) = (0, 0);
        let (mut rows, mut counts, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for item in 0..self.items() {
            let bytes = self.bytes(item..item + 1);
            if failed.binary_search_by_key(&item, |(item, _)| *item).is_err() {
                values.copy_within(begin..begin + bytes, kept_bytes);
                kept_bytes += bytes;
                let kept = self.rows_of(item..item + 1);
                rows.extend_from_slice(&self.rows[kept.clone()]);
                counts.extend_from_slice(self.counts.get(kept).unwrap_or_default());
                ends.push(rows.len());
            }
            begin += bytes;
        }
        (self.rows, self.counts) = (rows.into(), counts);
        self.ends = self.ends.take().map(|_| ends.into());
    }

    /// Writes the offsets of each level.
    pub(super) fn put_offsets(&self, parts: &mut [&mut [u8]]) {
        for (lengths, part) in self.levels().zip(parts) {
            let offsets = lengths.iter().scan(0, |end, length| {
                *end += *length as i64;
                Some(*end)
            });
            put(part, std::iter::once(0).chain(offsets).map(i64::to_ne_bytes));
        }
    }

    /// The array in the filled buffer of a batch, at the places of its specs.
    pub(super) fn array(&self, specs: &[ArraySpec], buffer: &Arc<Buffer>) -> Array {
        let mut arrays: Vec<_> = specs.iter().map(|spec| spec.array(0, buffer.clone())).collect();
        let values = arrays.pop().expect("a ragged array has values");
        Array { offsets: arrays, ..values }
    }
}
