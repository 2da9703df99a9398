//! Arrays of the `Window` view: the rows as they are.

use super::Window;
use super::batch::Plane;
use super::decode::{DrawnWindow, RowLayout, Unpacker};
use crate::schema::{Dtype, flags};

/// Bool arrays of flags, after `mask`.
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

    /// The buffers of a batch: mask, flags, then the columns.
    pub(super) fn planes(&self, rows: &RowLayout) -> Vec<Plane> {
        let mut planes = vec![Plane::new("mask", Dtype::Bool, vec![self.rows()])];
        planes.extend(FLAGS.map(|(name, _)| Plane::new(name, Dtype::Bool, vec![self.rows()])));
        planes.extend(
            rows.columns()
                .map(|column| rows.plane(column, Some(self.rows()))),
        );
        planes
    }

    /// Fills one item's part of the planes.
    pub(super) fn fill<'a>(
        &self,
        rows: &mut Unpacker<'a>,
        window: &DrawnWindow<'a>,
        out: &mut [&mut [u8]],
    ) -> std::result::Result<(), String> {
        let (bits, columns) = out.split_at_mut(1 + FLAGS.len());
        for slot in 0..self.rows() {
            let row = window.row(slot as isize - self.before as isize);
            bits[0][slot] = u8::from(row.is_some());
            for (plane, (_, flag)) in bits[1..].iter_mut().zip(FLAGS) {
                plane[slot] = u8::from(row.is_some_and(|row| row.has(flag)));
            }
            for (column, values) in columns.iter_mut().enumerate() {
                let bytes = rows.bytes(column);
                let value = &mut values[slot * bytes..(slot + 1) * bytes];
                match row {
                    Some(row) => rows.unpack(row, column, value)?,
                    None => value.fill(0),
                }
            }
        }
        Ok(())
    }
}
