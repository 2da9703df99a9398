//! Integer arguments. PyO3 raises a bare `OverflowError` for one out of range; here it is a `ConfigError` that names the argument. Each
//! argument has a conversion function: `#[pyo3(from_py_with = integer::batch_size)] batch_size: u32`.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use replay_core::schema::TableConfig;
use replay_core::sum_tree::MAX_SAMPLES;

use crate::error;
use crate::interpreter::Call;

/// Most batches decoded ahead.
const MAX_PREFETCH: u16 = 1024;
/// Most threads that unpack a batch.
pub const MAX_THREADS: u16 = 256;

/// Which integers an argument takes, for its error.
enum Range {
    /// All of its type, up to this one.
    Type(u64),
    /// Those of this range.
    Checked(i128, i128),
    /// Those of this range, which the memory checks with an error class of its own.
    Memory(i128, i128),
}

fn convert<'py, T>(name: &str, range: &Range, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let py = value.py();
    let _call = Call::begin(py);
    let (least, most) = match *range {
        Range::Type(most) => (0, most.into()),
        Range::Checked(least, most) | Range::Memory(least, most) => (least, most),
    };
    let refused = || error::config(py, format!("{name} is an integer from {least} to {most}, got {value}"));
    let converted = value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(py) {
            return refused();
        }
        let class = value.get_type();
        match class.name() {
            // Not the value: a torch or NumPy array has a long `repr`.
            Ok(class) => PyTypeError::new_err(format!("{name} is an integer, got a {class}")),
            Err(error) => error,
        }
    })?;
    let checked = matches!(range, Range::Checked(..)) && !value.is_none();
    if checked && !(least..=most).contains(&value.extract::<i128>()?) {
        return Err(refused());
    }
    Ok(converted)
}

/// Conversion functions, by argument.
macro_rules! named {
    ($($name:ident $range:expr),* $(,)?) => {$(
        #[doc = concat!("The argument `", stringify!($name), "`.")]
        pub fn $name<'py, T>(value: &Bound<'py, PyAny>) -> PyResult<T>
        where
            T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
        {
            convert(stringify!($name), &$range, value)
        }
    )*};
}

const U16: Range = Range::Type(u16::MAX as u64);
const U32: Range = Range::Type(u32::MAX as u64);
const U64: Range = Range::Type(u64::MAX);

named!(
    batch_size Range::Memory(1, MAX_SAMPLES as i128),
    capacity Range::Memory(1, TableConfig::MAX_CAPACITY as i128),
    chunk_steps Range::Memory(1, 65_536),
    idle_sleep_us Range::Checked(0, 1_000_000),
    index Range::Checked(0, i64::MAX as i128),
    io_threads Range::Memory(0, 256),
    max_bytes U64,
    newer_than U64,
    num_envs Range::Memory(1, TableConfig::MAX_CAPACITY as i128),
    prefetch Range::Checked(0, MAX_PREFETCH as i128),
    prefix Range::Checked(0, 32),
    priority_unit_log2 Range::Memory(-30, 0),
    seed U64,
    segment_values Range::Memory(1, 360),
    server U32,
    staleness U16,
    threads Range::Checked(1, MAX_THREADS as i128),
    threshold U16,
    updates U64,
    values U32,
    worker U16,
    workers U16,
    world U32,
);
