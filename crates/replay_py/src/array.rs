//! NumPy arrays, also of texts, and torch tensors: arguments are read without a copy if their layout allows it, and results are views on the
//! core's memory. torch's are made by `innet_drl.torch_batches`: the core itself needs NumPy alone.

use std::ffi::c_int;
use std::ptr::NonNull;

use numpy::npyffi::{self, PY_ARRAY_API, npy_intp};
use numpy::{
    PyArrayDescr, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArrayDyn,
    PyUntypedArray, PyUntypedArrayMethods,
};
use pyo3::call::PyCallArgs;
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use base::allocation;
use replay_core::schema::{Column, Dtype};
use replay_core::view::{Buffer, Lender, Storage};

use crate::{error, interpreter};

/// A C-contiguous array from Python, borrowed for reading: calls of this package that write to arrays are refused meanwhile.
///
/// As with any NumPy function that releases the interpreter lock, other Python code must not write to it meanwhile.
pub struct Input<'py> {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    start: NonNull<u8>,
    len: usize,
    /// Reference to the array, with its read borrow. The element type is a placeholder.
    _borrow: PyReadonlyArrayDyn<'py, u8>,
}

impl Input<'_> {
    /// The bytes, in C order.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `read` took both from a C-contiguous array. The reference keeps it alive, NumPy does not resize an array
        // that is referenced elsewhere, and the borrow excludes writes by this package.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Each number as a float64.
    ///
    /// # Errors
    /// `OutOfMemoryError`, as the other conversions.
    pub fn to_f64(&self, py: Python<'_>) -> PyResult<Vec<f64>> {
        let bytes = self.bytes();
        match self.dtype {
            Dtype::Float32 => map(py, bytes, |b| f64::from(f32::from_ne_bytes(b))),
            Dtype::Float64 => map(py, bytes, f64::from_ne_bytes),
            other => collect(py, bytes.chunks_exact(other.bytes()).map(|element| other.read(element))),
        }
    }

    /// Each integer as an int64; a larger uint64 wraps to a negative number.
    pub fn to_i64(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        match self.dtype {
            Dtype::Int64 | Dtype::Uint64 => map(py, self.bytes(), i64::from_ne_bytes),
            // A float64 holds every narrower integer, in as many bytes.
            _ => Ok(self.to_f64(py)?.into_iter().map(|integer| integer as i64).collect()),
        }
    }

    /// The 64 bits of each number.
    pub fn to_bits(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        map(py, self.bytes(), u64::from_ne_bytes)
    }
}

/// Expected dtype and shape. Scalars, of Python or NumPy, and lists are converted unless a number would change its kind or
/// overflow. A scalar is repeated for all elements.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    pub dtype: Dtype,
    pub shape: &'a [usize],
}

/// Reads a NumPy array, or a value with `__array__` such as a torch tensor. Arrays are never converted. `refuse` makes the
/// exception for a value that is not a usable array, from the reason.
pub fn read<'py>(
    value: &Bound<'py, PyAny>,
    expected: Option<Expected<'_>>,
    refuse: impl Fn(String) -> PyErr,
) -> PyResult<Input<'py>> {
    let array = as_array(value, &refuse)?;
    let array = match expected {
        Some(expected) if array.ndim() == 0 || is_literal(value)? => convert_literal(array, expected, &refuse)?,
        _ => array,
    };
    let Some(dtype) = from_numpy(&array.dtype()) else {
        let reason = format!("an array of {}, which cannot be stored", array.dtype());
        return Err(refuse(reason));
    };
    let shape = array.shape().to_vec();
    let array = if array.is_c_contiguous() {
        array
    } else {
        array.py().import("numpy")?.call_method1("ascontiguousarray", (&array,))?.cast_into::<PyUntypedArray>()?
    };
    let len = array.len() * dtype.bytes();
    // SAFETY: the pointer belongs to the array object that `array` holds.
    let data = unsafe { (*array.as_array_ptr()).fields.data };
    // SAFETY: it is an array; nothing reads its elements as u8, and borrows do not depend on their type.
    let bytes = unsafe { array.cast_into_unchecked::<PyArrayDyn<u8>>() };
    let borrow = bytes.try_readonly().map_err(|_| refuse("another call is writing to this array".into()))?;
    Ok(Input {
        dtype,
        shape,
        // Without elements any address is valid.
        start: NonNull::new(data.cast()).unwrap_or(NonNull::dangling()),
        len,
        _borrow: borrow,
    })
}

/// The float32 values of a NumPy array that is changed in place.
///
/// # Errors
/// `ConfigError` for anything but a writable C-contiguous array of float32 that no other call uses.
pub fn floats_to_change<'py>(value: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArrayDyn<'py, f32>> {
    let refuse = |got: String| {
        let expected = "values is a C-contiguous NumPy array of float32 that can be written to";
        error::config(value.py(), format!("{expected}, got {got}"))
    };
    let Ok(array) = value.cast::<PyArrayDyn<f32>>() else {
        return Err(refuse(match value.cast::<PyUntypedArray>() {
            Ok(array) => format!("one of {}", array.dtype()),
            Err(_) => format!("a {}", value.get_type()),
        }));
    };
    if !array.is_c_contiguous() {
        return Err(refuse("one with gaps or in another order".into()));
    }
    if !array.data().is_aligned() {
        return Err(refuse("one that is not aligned".into()));
    }
    array.try_readwrite().map_err(|error| refuse(error.to_string()))
}

fn map<const N: usize, T>(py: Python<'_>, bytes: &[u8], read: impl Fn([u8; N]) -> T) -> PyResult<Vec<T>> {
    let (values, _) = bytes.as_chunks();
    collect(py, values.iter().map(|&value| read(value)))
}

fn collect<T>(py: Python<'_>, values: impl ExactSizeIterator<Item = T>) -> PyResult<Vec<T>> {
    let room = allocation::with_capacity("a copy of an array", values.len());
    let mut copy = room.map_err(|error| error::to_python(py, error))?;
    copy.extend(values);
    Ok(copy)
}

/// Dtypes of priorities: all but bool.
pub const PRIORITIES: &[Dtype] = Dtype::ALL.split_at(1).1;
/// Dtypes of indexes: all integers.
pub const INDEXES: &[Dtype] = PRIORITIES.split_at(8).0;

/// Reads one dimension of numbers of one of the dtypes in `allowed`; an empty list has no dtype.
///
/// # Errors
/// `ConfigError` that names `what`.
pub fn numbers<'py>(value: &Bound<'py, PyAny>, what: &str, allowed: &[Dtype]) -> PyResult<Input<'py>> {
    let refuse = |got: String| {
        let names = match allowed {
            _ if allowed == PRIORITIES => "numbers".to_owned(),
            _ if allowed == INDEXES => "integers".to_owned(),
            _ => {
                let names: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
                names.join(" or ")
            }
        };
        error::config(value.py(), format!("{what} has one dimension of {names}, got {got}"))
    };
    let input = read(value, None, refuse)?;
    let empty = input.shape == [0];
    if !(empty || allowed.contains(&input.dtype)) || input.shape.len() != 1 {
        let got = format!("{}{:?}", input.dtype.name(), input.shape);
        // A column of numbers, such as a network's output.
        let numbers = input.shape.iter().product::<usize>();
        let advice = match input.shape.len() {
            0 => ": give an array or a list of them".to_owned(),
            1 if INDEXES.contains(&input.dtype) => {
                format!(": {what} have 64 bits, which JAX cuts to 32; give the array of the batch itself")
            }
            2.. if input.shape.contains(&numbers) => format!(": flatten it, {what}.flatten()"),
            _ => String::new(),
        };
        return Err(refuse(got + &advice));
    }
    Ok(input)
}

fn as_array<'py>(value: &Bound<'py, PyAny>, refuse: &impl Fn(String) -> PyErr) -> PyResult<Bound<'py, PyUntypedArray>> {
    if let Ok(array) = value.cast::<PyUntypedArray>() {
        return Ok(array.clone());
    }
    let py = value.py();
    let value = match value.getattr_opt("detach")? {
        // A torch tensor, possibly on a GPU.
        Some(detach) if value.hasattr("__array__")? => detach.call0()?.call_method0("cpu")?,
        _ => value.clone(),
    };
    match py.import("numpy")?.call_method1("asarray", (&value,)) {
        Ok(array) => Ok(array.cast_into::<PyUntypedArray>()?),
        // Ctrl-C while the value is computed.
        Err(error) if !error.is_instance_of::<PyException>(py) => Err(error),
        // NumPy's and torch's own messages (a ragged list, a tensor on a GPU) are the most specific.
        Err(error) => Err(refuse(format!("not an array: {}", error.value(py)))),
    }
}

/// Whether a value is a list or another value without a dtype.
fn is_literal(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    // The type is checked first: an attribute lookup takes longer than reading the array.
    Ok(!value.is_instance_of::<PyUntypedArray>() && !value.hasattr(intern!(value.py(), "__array__"))?)
}

/// A scalar or list converted to the expected array, or unchanged if it is of another kind.
fn convert_literal<'py>(
    array: Bound<'py, PyUntypedArray>,
    expected: Expected<'_>,
    refuse: &impl Fn(String) -> PyErr,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = array.py();
    let numpy = py.import("numpy")?;
    let convert = || array.call_method1("astype", (to_numpy(py, expected.dtype),));
    let not_held = || -> PyResult<PyErr> {
        let numbers = array.as_any().str()?;
        Ok(refuse(format!("{numbers} has a number that {} does not hold", expected.dtype.name())))
    };
    let converted = match (array.dtype().kind(), expected.dtype.kind()) {
        (b'b', b'b') => convert()?,
        (b'f', b'f') => {
            let doubles = match array.cast::<PyArrayDyn<f64>>() {
                // Of Python's numbers.
                Ok(doubles) => doubles.clone(),
                Err(_) => array.call_method1("astype", (numpy::dtype::<f64>(py),))?.cast_into()?,
            };
            if doubles.readonly().as_array().iter().any(|&number| overflows(number, expected.dtype)) {
                return Err(not_held()?);
            }
            convert()?
        }
        (b'i' | b'u', b'i' | b'u' | b'f') => {
            let converted = convert()?;
            let exact = numpy.call_method1("array_equal", (&converted, &array))?;
            if !exact.is_truthy()? {
                return Err(not_held()?);
            }
            converted
        }
        _ => return Ok(array),
    };
    let converted =
        if array.ndim() == 0 { numpy.call_method1("full", (expected.shape, &converted))? } else { converted };
    Ok(converted.cast_into::<PyUntypedArray>()?)
}

/// Whether a finite number is infinite in another dtype.
fn overflows(number: f64, dtype: Dtype) -> bool {
    let infinite = match dtype {
        Dtype::Float16 => half::f16::from_f64(number).is_infinite(),
        Dtype::Float32 => (number as f32).is_infinite(),
        _ => false,
    };
    infinite && number.is_finite()
}

/// Owner of the memory under arrays, alive until the last array is dropped.
#[pyclass(frozen)]
pub struct Owner(#[expect(dead_code, reason = "held, never read")] Box<dyn Send + Sync>);

impl Owner {
    pub fn new(memory: impl Send + Sync + 'static) -> Self {
        Owner(Box::new(memory))
    }
}

/// A NumPy array over memory that `owner` keeps alive.
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
    writable: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = owner.py();
    let mut shape: Vec<npy_intp> = shape.iter().map(|&n| n as npy_intp).collect();
    let mut strides: Option<Vec<npy_intp>> = strides.map(|strides| strides.iter().map(|&n| n as npy_intp).collect());
    // SAFETY: the descriptor's reference is handed over, shape and strides have `shape.len()` entries that
    // NumPy copies, and the caller vouches for `data`.
    let array = unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            npyffi::get_type_object(py, npyffi::NpyTypes::PyArray_Type),
            to_numpy(py, dtype).into_dtype_ptr(),
            shape.len() as c_int,
            shape.as_mut_ptr(),
            strides.as_mut().map_or(std::ptr::null_mut(), |strides| strides.as_mut_ptr()),
            data.cast(),
            if writable { npyffi::NPY_ARRAY_WRITEABLE } else { 0 },
            std::ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, array)?
    };
    // SAFETY: `array` is a new array without a base; the call takes over one reference to `owner`.
    let status = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast(), owner.clone().into_ptr()) };
    if status < 0 {
        return Err(PyErr::fetch(py));
    }
    Ok(array)
}

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

/// Texts of one step or of a block as a uint8 array with the bytes in the last dimension; `None` for any other value or column.
/// `refuse` makes the exception for a text that is too long.
pub fn text_to_bytes<'py>(
    column: &Column,
    value: &Bound<'py, PyAny>,
    refuse: impl FnOnce(String) -> PyErr,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let (Dtype::Uint8, &[width]) = (column.dtype, &column.shape[..]) else {
        return Ok(None);
    };
    let may_be_text = match value.cast::<PyUntypedArray>() {
        Ok(array) => holds_text(array),
        Err(_) => {
            value.is_instance_of::<PyString>() || value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>()
        }
    };
    if !may_be_text {
        return Ok(None);
    }
    let py = value.py();
    let numpy = py.import("numpy")?;
    // A ragged list is no array; the caller's own conversion raises the error.
    let Ok(array) = numpy.call_method1("atleast_1d", (value,)) else {
        return Ok(None);
    };
    let array = array.cast_into::<PyUntypedArray>()?;
    if !holds_text(&array) {
        return Ok(None);
    }
    let texts = array.call_method0("ravel")?.call_method0("tolist")?;
    let Ok(texts) = texts.extract::<Vec<String>>() else {
        return Ok(None);
    };
    let width = width as usize;
    let bytes = allocation::zeros("an array of texts", texts.len().saturating_mul(width));
    let mut bytes = bytes.map_err(|error| error::to_python(py, error))?;
    for (text, slot) in texts.iter().zip(bytes.chunks_exact_mut(width)) {
        let Some(slot) = slot.get_mut(..text.len()) else {
            return Err(refuse(format!(
                "a text has {} bytes and the column {width}: give the table a wider one, columns={{{:?}: (\"uint8\", {})}}",
                text.len(),
                column.name,
                text.len().next_power_of_two()
            )));
        };
        slot.copy_from_slice(text.as_bytes());
    }
    let mut shape = array.shape().to_vec();
    shape.push(width);
    let flat = numpy.call_method1("frombuffer", (PyBytes::new(py, &bytes), "uint8"))?;
    flat.call_method1("reshape", (shape,)).map(Some)
}

/// Whether an array has text or objects, which may be text.
fn holds_text(array: &Bound<'_, PyUntypedArray>) -> bool {
    matches!(array.dtype().kind(), b'U' | b'O')
}

/// The `torch.device` of an argument `device`.
///
/// # Errors
/// `MissingExtraError` without torch, `ConfigError` for a device that this machine does not have.
pub fn torch_device<'py>(py: Python<'py>, name: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    torch_call(intern!(py, "torch_device"), (name,))
}

/// Storage that Python lends: `lend(bytes)` returns a uint8 array of at least as many bytes without another user, or `None`. A call that
/// raises lends nothing; the exception of a signal handler is raised again by the call that waits for the batch.
pub fn lender(lend: Py<PyAny>) -> Box<Lender> {
    let lent = move |py: Python<'_>, bytes: usize| -> PyResult<Option<Storage>> {
        let Some(array) = lend.call1(py, (bytes,))?.extract::<Option<Py<PyArrayDyn<u8>>>>(py)? else {
            return Ok(None);
        };
        let (start, len) = (array.bind(py).data(), array.bind(py).len());
        let usable = array.bind(py).is_c_contiguous() && start.align_offset(Buffer::ALIGNMENT) == 0;
        // SAFETY: the array keeps its bytes, which lie one after the other from an aligned address on, and the function gives it away.
        Ok(NonNull::new(start).filter(|_| usable).map(|start| unsafe { Storage::lent(start, len, array) }))
    };
    Box::new(move |bytes| {
        let lent = interpreter::try_attach(|py| {
            lent(py, bytes).map_err(|error| match error.is_instance_of::<PyException>(py) {
                true => error.write_unraisable(py, None),
                false => error::keep_raised(error),
            })
        });
        lent?.ok()?
    })
}

/// Calls a function or class of `innet_drl.torch_batches`. An interned name is found without a new string for each batch.
///
/// # Errors
/// Its exceptions.
pub fn torch_call<'py>(name: &Bound<'py, PyString>, arguments: impl PyCallArgs<'py>) -> PyResult<Bound<'py, PyAny>> {
    let py = name.py();
    // An import takes as long as a tensor.
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("innet_drl.torch_batches").map(Bound::unbind))?;
    module.bind(py).getattr(name)?.call1(arguments)
}
