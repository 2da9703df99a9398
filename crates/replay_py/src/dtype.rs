//! Conversions between dtypes of NumPy and of the core.

use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::prelude::*;

use replay_core::schema::Dtype;

/// The core's type for a NumPy dtype; `None` for structured, object, text and complex types and foreign byte orders.
pub fn from_numpy(descr: &Bound<'_, PyArrayDescr>) -> Option<Dtype> {
    if descr.byteorder() == b'>' {
        return None;
    }
    let kind = descr.kind();
    Dtype::ALL.iter().copied().find(|dtype| dtype.kind() == kind && dtype.bytes() == descr.itemsize())
}

/// NumPy's dtype of an element type.
pub fn to_numpy<'py>(py: Python<'py>, dtype: Dtype) -> Bound<'py, PyArrayDescr> {
    match dtype {
        Dtype::Bool => numpy::dtype::<bool>(py),
        Dtype::Uint8 => numpy::dtype::<u8>(py),
        Dtype::Int8 => numpy::dtype::<i8>(py),
        Dtype::Uint16 => numpy::dtype::<u16>(py),
        Dtype::Int16 => numpy::dtype::<i16>(py),
        Dtype::Uint32 => numpy::dtype::<u32>(py),
        Dtype::Int32 => numpy::dtype::<i32>(py),
        Dtype::Uint64 => numpy::dtype::<u64>(py),
        Dtype::Int64 => numpy::dtype::<i64>(py),
        Dtype::Float16 => numpy::dtype::<half::f16>(py),
        Dtype::Float32 => numpy::dtype::<f32>(py),
        Dtype::Float64 => numpy::dtype::<f64>(py),
    }
}
