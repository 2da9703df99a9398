//! Arrays of the `Window` view: the rows, unchanged.

use super::Window;
use super::batch::ArraySpec;
use super::decode::{Decoded, SampledWindow, Unpacker};
use crate::row_layout::RowLayout;
use crate::schema::{Dtype, flags};

/// The bool arrays of flags, and the flag in each.
const FLAGS: [(&str, u8); 4] = [
    ("terminated", flags::TERMINATED),
    ("truncated", flags::TRUNCATED),
    ("first", flags::FIRST),
    ("final", flags::FINAL),
];

impl Window {
    fn rows(&self) -> usize {
        usize::from(self.before) + 1 + usize::from(self.after)
    }

    /// The arrays of a batch: mask, flags, then the columns.
    pub(super) fn array_specs(&self, layout: &RowLayout) -> Vec<ArraySpec> {
        let bits = ["mask"].into_iter().chain(FLAGS.map(|(name, _)| name));
        let mut specs: Vec<_> = bits.map(|name| ArraySpec::new(name, Dtype::Bool, vec![self.rows()])).collect();
        specs.extend((0..layout.columns.len()).map(|column| ArraySpec::of_column(layout, column, Some(self.rows()))));
        specs
    }

    pub(super) fn fill<'a>(
        &self,
        unpacker: &mut Unpacker<'a>,
        window: &SampledWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> Decoded<()> {
        let (bits, columns) = out.split_at_mut(1 + FLAGS.len());
        for slot in 0..self.rows() {
            let row = window.row(slot as isize - self.before as isize);
            bits[0][slot] = u8::from(row.is_some());
            for (values, (_, flag)) in bits[1..].iter_mut().zip(FLAGS) {
                values[slot] = u8::from(row.is_some_and(|row| row.has(flag)));
            }
            for (column, values) in columns.iter_mut().enumerate() {
                let bytes = unpacker.bytes(column);
                let value = &mut values[slot * bytes..(slot + 1) * bytes];
                match row {
                    Some(row) => unpacker.unpack(row, column, value)?,
                    None => value.fill(0),
                }
            }
        }
        Ok(())
    }
}
