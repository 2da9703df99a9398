//! Integer arguments. PyO3 raises a bare `OverflowError` for one out of range; here it is a `ConfigError` that names the
//! argument. A function of an argument's name converts it: `#[pyo3(from_py_with = integer::batch_size)] batch_size: u32`.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::error;

/// A type of integer arguments.
pub trait Integer: Sized {
    /// The values of the argument, for the error.
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

fn convert<T: Integer>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let py = value.py();
    T::from_python(value).map_err(|error| match error.is_instance_of::<PyOverflowError>(py) {
        true => {
            let (least, most) = T::RANGE;
            let message = format!("{name} is an integer from {least} to {most}, got {value}");
            error::config(py, message)
        }
        // A `TypeError`, to which PyO3 adds the name.
        false => error,
    })
}

macro_rules! named {
    ($($name:ident)*) => {$(
        #[doc = concat!("The argument `", stringify!($name), "`.")]
        pub fn $name<T: Integer>(value: &Bound<'_, PyAny>) -> PyResult<T> {
            convert(stringify!($name), value)
        }
    )*};
}

named!(
    after batch_size before burn_in capacity capacity_bytes chunk_steps idle_sleep_us index io_threads length max_bytes
    max_times_sampled max_version_lag min_size n newer_than num_envs period prefetch prefix priority_unit_log2 seed segment_values staleness
    stack threads threshold updates values worker workers world
);
