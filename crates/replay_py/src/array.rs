//! NumPy arrays: those that come in are read where they lie when their layout allows it, those that go out lie
//! on memory of the core.

use std::ffi::c_int;

use numpy::npyffi::{self, PY_ARRAY_API, npy_intp};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt};

use replay_core::schema::Dtype;

use crate::{dtype, error};

/// The bytes of a C-contiguous array, kept alive by a reference to it.
///
/// As with any NumPy function that works without the interpreter lock, another Python thread must not
/// write to the array during the call that reads it.
pub struct ArrayBytes {
    _owner: Py<PyAny>,
    start: *const u8,
    len: usize,
}

// SAFETY: the bytes belong to an array that `_owner` keeps alive, and NumPy refuses to resize an array that
// is referenced elsewhere; nothing here is bound to a thread.
unsafe impl Send for ArrayBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for ArrayBytes {}

impl ArrayBytes {
    /// The bytes, in C order.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` and `len` were taken from a live C-contiguous array with at least one element.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// Why a value is not the array that was asked for: a sentence for the caller's error.
pub type Refusal = String;

/// Reads `value` as an array of `dtype` and `shape`.
///
/// An array (NumPy's, or anything with `__array__`, such as a torch tensor on the CPU) must have exactly
/// this dtype and shape. Python scalars and lists are converted where no value changes in kind or overflows;
/// a scalar stands for every element.
pub fn read<'py>(
    value: &Bound<'py, PyAny>,
    dtype: Dtype,
    shape: &[usize],
) -> PyResult<Result<ArrayBytes, Refusal>> {
    let py = value.py();
    let literal = !value.hasattr("__array__")?;
    let array = as_array(value)?;
    let array = match array {
        Ok(array) => array,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let array = if literal {
        match convert_literal(value, &array, dtype, shape)? {
            Some(array) => array,
            None => return Ok(Err(difference(&array, dtype, shape)?)),
        }
    } else {
        array
    };
    if dtype::from_numpy(&array.dtype()) != Some(dtype) || array.shape() != shape {
        return Ok(Err(difference(&array, dtype, shape)?));
    }
    let array = if array.is_c_contiguous() {
        array
    } else {
        py.import("numpy")?
            .call_method1("ascontiguousarray", (&array,))?
            .cast_into::<PyUntypedArray>()?
    };
    let len = array.len() * dtype.bytes();
    // SAFETY: the pointer belongs to the array object that `array` holds.
    let start = unsafe { (*array.as_array_ptr()).data }.cast::<u8>();
    Ok(Ok(ArrayBytes {
        _owner: array.into_any().unbind(),
        start: if len == 0 {
            std::ptr::NonNull::<u8>::dangling().as_ptr()
        } else {
            start
        },
        len,
    }))
}

/// A list of numbers of any length, as they lie in an array.
pub struct Numbers {
    dtype: Dtype,
    bytes: ArrayBytes,
}

impl Numbers {
    /// Each number as a float64.
    pub fn to_f64(&self) -> Vec<f64> {
        let bytes = self.bytes.as_slice();
        match self.dtype {
            Dtype::Float32 => map(bytes, |b| f64::from(f32::from_ne_bytes(b))),
            Dtype::Float16 => map(bytes, |b| half::f16::from_ne_bytes(b).to_f64()),
            Dtype::Int64 => map(bytes, |b| i64::from_ne_bytes(b) as f64),
            _ => map(bytes, f64::from_ne_bytes),
        }
    }

    /// The 64 bits of each number.
    pub fn to_bits(&self) -> Vec<u64> {
        map(self.bytes.as_slice(), u64::from_ne_bytes)
    }
}

fn map<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&value| read(value)).collect()
}

/// Reads one dimension of numbers of one of the dtypes in `allowed`.
///
/// # Errors
/// `ConfigError` that names `what`.
pub fn numbers(value: &Bound<'_, PyAny>, what: &str, allowed: &[Dtype]) -> PyResult<Numbers> {
    let py = value.py();
    let refuse = |got: String| {
        let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
        error::config(
            py,
            format!("{what} has one dimension of {}, got {got}", names.join(" or ")),
        )
    };
    let array = as_array(value)?.map_err(refuse)?;
    let dtype = dtype::from_numpy(&array.dtype()).filter(|dtype| allowed.contains(dtype));
    let (Some(dtype), 1) = (dtype, array.ndim()) else {
        return Err(refuse(format!("{}{:?}", array.dtype(), array.shape())));
    };
    let shape = array.shape().to_vec();
    let bytes = read(array.as_any(), dtype, &shape)?.map_err(refuse)?;
    Ok(Numbers { dtype, bytes })
}

fn as_array<'py>(value: &Bound<'py, PyAny>) -> PyResult<Result<Bound<'py, PyUntypedArray>, Refusal>> {
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return Ok(Ok(array.clone()));
    }
    let py = value.py();
    let value = match value.getattr_opt("detach")? {
        // A torch tensor, maybe on a device.
        Some(detach) if value.hasattr("__array__")? => detach.call0()?.call_method0("cpu")?,
        _ => value.clone(),
    };
    match py.import("numpy")?.call_method1("asarray", (&value,)) {
        Ok(array) => Ok(Ok(array.cast_into::<PyUntypedArray>()?)),
        // NumPy's and torch's reasons (a ragged list, a tensor on a GPU) are the best there are.
        Err(error) => Ok(Err(format!("not an array: {}", error.value(py)))),
    }
}

/// A scalar or list as an array of `dtype`, or `None` when a value would change.
fn convert_literal<'py>(
    value: &Bound<'py, PyAny>,
    array: &Bound<'py, PyUntypedArray>,
    dtype: Dtype,
    shape: &[usize],
) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
    let py = value.py();
    let numpy = py.import("numpy")?;
    let safe = match (array.dtype().kind(), dtype::kind(dtype)) {
        (b'b', b'b') | (b'f', b'f') => true,
        // In range, and exact where the target is a float.
        (b'i' | b'u', b'i' | b'u' | b'f') => {
            let there = array.call_method1("astype", (dtype::to_numpy(py, dtype),))?;
            numpy
                .call_method1("array_equal", (&there, array))?
                .is_truthy()?
        }
        _ => false,
    };
    if !safe {
        return Ok(None);
    }
    let array = array.call_method1("astype", (dtype::to_numpy(py, dtype),))?;
    let scalar = value.is_instance_of::<PyBool>()
        || value.is_instance_of::<PyInt>()
        || value.is_instance_of::<PyFloat>();
    let array = if scalar {
        numpy.call_method1("full", (shape, &array))?
    } else {
        array
    };
    Ok(Some(array.cast_into::<PyUntypedArray>()?))
}

fn difference(
    array: &Bound<'_, PyUntypedArray>,
    dtype: Dtype,
    shape: &[usize],
) -> PyResult<Refusal> {
    Ok(format!(
        "expected {}{shape:?}, got {}{:?}",
        dtype.name(),
        array.dtype().str()?,
        array.shape()
    ))
}

/// A writable NumPy array over memory that `owner` keeps alive.
///
/// # Safety
/// `data` is aligned for `dtype`; every element that `shape` and `strides` (in bytes; `None` is C order) reach
/// from it lies in memory that stays valid, and that nothing but arrays on `owner` touches, for as long as
/// `owner` lives.
pub unsafe fn over<'py>(
    owner: &Bound<'py, PyAny>,
    data: *mut u8,
    dtype: Dtype,
    shape: &[usize],
    strides: Option<&[usize]>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let mut shape: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
    let mut strides: Option<Vec<npy_intp>> =
        strides.map(|strides| strides.iter().map(|&n| n as npy_intp).collect());
    // SAFETY: the descriptor's reference is handed over, shape and strides have `shape.len()` entries that
    // NumPy copies, and the caller vouches for `data`.
    let array = unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, npyffi::NpyTypes::PyArray_Type),
            dtype::to_numpy(py, dtype).into_dtype_ptr(),
            shape.len() as c_int,
            shape.as_mut_ptr(),
            strides
                .as_mut()
                .map_or(std::ptr::null_mut(), |strides| strides.as_mut_ptr()),
            data.cast(),
            npyffi::NPY_ARRAY_WRITEABLE,
            std::ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, array)?
    };
    // SAFETY: `array` is a new array without a base; the call takes over one reference to `owner`.
    let status = unsafe {
        PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), owner.clone().into_ptr())
    };
    if status < 0 {
        return Err(PyErr::fetch(py));
    }
    Ok(array)
}
