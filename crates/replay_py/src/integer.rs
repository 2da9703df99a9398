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

/// A type of integer arguments.
pub trait Integer: Sized {
    /// Range of the argument, for the error.
    const RANGE: (i128, i128);

    /// The value of the argument.
    fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Self>;
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Integer for $type {
            const RANGE: (i128, i128) = (<$type>::MIN as i128, <$type>::MAX as i128);

            fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Self> {
                value.extract()
            }
        }
    )*};
}

integers!(u8 u16 u32 u64 usize i32);

impl<T: Integer> Integer for Option<T> {
    const RANGE: (i128, i128) = T::RANGE;

    fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        match value.is_none() {
            true => Ok(None),
            false => T::from_python(value).map(Some),
        }
    }
}

/// The range of an argument, for errors; `CHECKED` also refuses other values of its type.
struct Range<const CHECKED: bool>(i128, i128);

fn convert<T: Integer, const CHECKED: bool>(
    name: &str,
    range: Option<Range<CHECKED>>,
    value: &Bound<'_, PyAny>,
) -> PyResult<T> {
    let py = value.py();
    let _call = Call::begin(py);
    let Range(least, most) = range.unwrap_or(Range(T::RANGE.0, T::RANGE.1));
    let refused = || {
        let message = format!("{name} is an integer from {least} to {most}, got {value}");
        error::config(py, message)
    };
    let converted = T::from_python(value).map_err(|error| {
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
    if CHECKED && !value.is_none() && !(least..=most).contains(&value.extract::<i128>()?) {
        return Err(refused());
    }
    Ok(converted)
}

/// Conversion functions, by argument. The range is the type's; or the one after `in`, which is checked here; or the one after `of`, which
/// the memory checks, with its own error class.
macro_rules! named {
    ($($name:ident $(in $least:literal..=$most:expr)? $(; of $first:literal..=$last:expr)?),* $(,)?) => {$(
        #[doc = concat!("The argument `", stringify!($name), "`.")]
        pub fn $name<T: Integer>(value: &Bound<'_, PyAny>) -> PyResult<T> {
            named!(@convert value $name [$($least, $most)?] [$($first, $last)?])
        }
    )*};
    (@convert $value:ident $name:ident [] []) => {
        convert::<T, false>(stringify!($name), None, $value)
    };
    (@convert $value:ident $name:ident [$least:literal, $most:expr] []) => {
        convert::<T, true>(stringify!($name), Some(Range($least, $most.into())), $value)
    };
    (@convert $value:ident $name:ident [] [$least:literal, $most:expr]) => {
        convert::<T, false>(stringify!($name), Some(Range($least, $most.into())), $value)
    };
}

named!(
    after; of 0..=16_384,
    batch_size; of 1..=MAX_SAMPLES,
    before; of 0..=16_384,
    burn_in; of 0..=16_384,
    capacity; of 1..=TableConfig::MAX_CAPACITY,
    capacity_bytes,
    chunk_steps; of 1..=65_536,
    idle_sleep_us in 0..=1_000_000,
    index in 0..=i64::MAX,
    io_threads; of 0..=256,
    length; of 1..=16_384,
    max_bytes,
    max_times_sampled,
    max_version_lag,
    min_size; of 1..=TableConfig::MAX_CAPACITY,
    n; of 1..=1024,
    newer_than,
    num_envs; of 1..=TableConfig::MAX_CAPACITY,
    period; of 1..=65_535,
    prefetch in 0..=MAX_PREFETCH,
    prefix in 0..=32,
    priority_unit_log2; of -30..=0,
    seed,
    segment_values; of 1..=360,
    server,
    staleness,
    stack; of 1..=1024,
    threads in 1..=MAX_THREADS,
    threshold,
    updates,
    values,
    worker,
    workers,
    world,
);
