//! `Batch`: the arrays of one sample, as NumPy views on the core's buffers.

use std::ops::Range;
use std::sync::Arc;

use numpy::{PyArrayDescr, PyReadonlyArray1};
use pyo3::exceptions::{PyAttributeError, PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PySlice, PyTuple};

use replay_core::schema::Dtype;
use replay_core::view::{Array, Buffer};

use crate::class::attributes;
use crate::interpreter::Call;
use crate::lease::PyLease;
use crate::structure::Structure;
use crate::{array, error};

#[doc = stub_doc!("Batch")]
#[pyclass(name = "Batch", module = "innet_drl", frozen)]
pub struct PyBatch {
    len: usize,
    layout: Vec<Array>,
    /// NumPy arrays by name, made when first asked for; those with slashes in their names are in dictionaries and tuples.
    arrays: PyOnceLock<Py<PyDict>>,
    /// Its lease, of a whole batch of an iterator with `acknowledge`.
    lease: Option<Py<PyLease>>,
    /// Its copy on a device, begun ahead of the reader.
    pub copied: Option<Py<PyAny>>,
}

impl PyBatch {
    /// Arrays of `len` items or steps each, in one buffer.
    pub fn new(len: usize, layout: Vec<Array>) -> Self {
        PyBatch { len, layout, arrays: PyOnceLock::new(), lease: None, copied: None }
    }

    /// The batch with its lease.
    pub fn leased(self, py: Python<'_>, lease: PyLease) -> PyResult<Self> {
        Ok(PyBatch { lease: Some(Py::new(py, lease)?), ..self })
    }

    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyDict>> {
        let arrays = self.arrays.get_or_try_init(py, || {
            let arrays = numpy_arrays(py, &self.layout, false, |_, array| Ok(array))?;
            nested(&self.layout, &arrays).map(Bound::unbind)
        });
        Ok(arrays?.bind(py))
    }

    fn unknown(&self, name: impl std::fmt::Display) -> String {
        let names: Vec<_> = self.layout.iter().map(|array| array.name.as_str()).collect();
        format!("this batch has no array {name}; it has {}", names.join(", "))
    }
}

/// NumPy arrays by name, without copies; with `writable` also those that share memory.
fn numpy_arrays<'py>(
    py: Python<'py>,
    layout: &[Array],
    writable: bool,
    wrap: impl Fn(&Array, Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let arrays = PyDict::new(py);
    let owner = owner(py, layout)?;
    for array in layout {
        // A write into memory that arrays share would change more than was written.
        let writable = writable || !array.shared;
        // SAFETY: the core aligns the elements of an array and keeps them inside its buffer, which is that of all arrays of a batch. It does
        // not move. While `owner` holds a reference, Rust reads it only to copy a slice (`_memory`), with the interpreter lock, as NumPy does.
        let over = |array: &Array| unsafe {
            let data = array.buffer.as_mut_ptr().add(array.offset);
            array::over(&owner, data, array.dtype, &array.shape, Some(&array.strides), writable)
        };
        let mut made = wrap(array, over(array)?)?;
        if !array.offsets.is_empty() {
            let levels = array.offsets.iter().map(|offsets| wrap(array, over(offsets)?));
            let levels = levels.collect::<PyResult<Vec<_>>>()?;
            made = py.import("innet_drl.ragged")?.call_method1("_of_memory", (made, levels, array.step))?;
        }
        arrays.set_item(&array.name, made)?;
    }
    Ok(arrays)
}

/// The owner of the buffer of a batch.
fn owner<'py>(py: Python<'py>, layout: &[Array]) -> PyResult<Bound<'py, PyAny>> {
    let buffer = &layout[0].buffer;
    debug_assert!(layout.iter().all(|array| Arc::ptr_eq(&array.buffer, buffer)), "a batch has one buffer");
    Ok(Bound::new(py, array::Owner::new(buffer.clone()))?.into_any())
}

/// Values by name of their array, in the structure of a batch.
fn nested<'py>(layout: &[Array], values: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
    if layout.iter().all(|array| !array.name.contains('/')) {
        return Ok(values.clone());
    }
    let structure = Structure::of(layout.iter().map(|array| array.name.as_str()));
    structure.to_dict(values.py(), "", &|name| {
        let value = values.get_item(name)?;
        value.ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    })
}

// The arrays of `NStep`, listed for `help`; `__getattr__` finds all others.
attributes! { PyBatch as "Batch", |batch, py|
    observation: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "observation");
    action: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "action");
    reward: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "reward");
    discount: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "discount");
    next_observation: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "next_observation");
    weights: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "weights");
    probabilities: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "probabilities");
    ids: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "ids");
    ages: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "ages");
    versions: PyResult<Bound<'py, PyAny>> = batch.__getattr__(py, "versions");
}

#[pymethods]
impl PyBatch {
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let found = self.arrays(py)?.get_item(name)?;
        found.ok_or_else(|| PyAttributeError::new_err(self.unknown(format!("{name:?}"))))
    }

    /// An array by name, or a batch of some of the items by a slice.
    fn __getitem__<'py>(&self, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = key.py();
        let _call = Call::begin(py);
        if let Ok(slice) = key.cast::<PySlice>() {
            let indices = slice.indices(self.len as isize)?;
            let Ok(step) = usize::try_from(indices.step) else {
                return Err(PyTypeError::new_err("the step of a slice of a batch is 1 or more"));
            };
            let (first, len) = (indices.start as usize, indices.slicelength);
            let items = self.layout.iter().map(|array| array.items(first, len, step));
            let part = PyBatch::new(len, items.collect());
            return Ok(Bound::new(py, part)?.into_any());
        }
        let Ok(name) = key.extract::<String>() else {
            return Err(PyTypeError::new_err(format!(
                "a batch takes the name of an array, as batch[\"observation\"], or a slice of its items, as batch[:32], got {}",
                key.get_type().name()?
            )));
        };
        let found = self.arrays(py)?.get_item(&name)?;
        found.ok_or_else(|| PyKeyError::new_err(self.unknown(format!("{name:?}"))))
    }

    fn __contains__(&self, py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.arrays(py)?.contains(name)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.arrays(py)?.keys().try_iter()?.into_any())
    }

    fn __len__(&self) -> usize {
        self.len
    }

    #[doc = stub_doc!("Batch.acknowledge")]
    #[pyo3(signature = (timeout = 60.0))]
    fn acknowledge(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::begin(py);
        match &self.lease {
            Some(lease) => lease.get().acknowledge(py, timeout),
            None => Err(error::config(
                py,
                "this batch has no lease: acknowledge whole batches of an iterator with acknowledge=True, no parts and no copies",
            )),
        }
    }

    /// The lease, which batches of tensors take over.
    #[getter]
    fn _lease(&self, py: Python<'_>) -> Option<Py<PyLease>> {
        self.lease.as_ref().map(|lease| lease.clone_ref(py))
    }

    #[getter]
    fn _copied(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.copied.as_ref().map(|copied| copied.clone_ref(py))
    }

    #[doc = stub_doc!("Batch.keys")]
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        Ok(self.arrays(py)?.keys())
    }

    #[doc = stub_doc!("Batch.values")]
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        Ok(self.arrays(py)?.values())
    }

    #[doc = stub_doc!("Batch.items")]
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        Ok(self.arrays(py)?.items())
    }

    #[doc = stub_doc!("Batch.get")]
    #[pyo3(signature = (name, default = None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        Ok(self.arrays(py)?.get_item(name)?.or(default))
    }

    #[doc = stub_doc!("Batch.as_dict")]
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.arrays(py)?.copy()
    }

    fn __dir__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let py = slf.py();
        let names = py.import("builtins")?.getattr("object")?.call_method1("__dir__", (slf,))?.cast_into::<PyList>()?;
        for name in slf.get().arrays(py)?.keys().iter() {
            names.append(name)?;
        }
        Ok(names)
    }

    fn __repr__(&self) -> String {
        let names: Vec<_> = self.layout.iter().map(|array| array.name.as_str()).collect();
        format!("<Batch of {} items: {}>", self.len, names.join(", "))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (py, batch) = (slf.py(), slf.get());
        let restore = py.import("innet_drl._core")?.getattr("_restored_batch")?;
        Ok((restore, (batch.len, batch._memory(py)?).into_pyobject(py)?.into_any()))
    }

    /// All arrays in the structure of this batch, each but the ids as the tensor that `wrap` makes of its memory.
    fn _wrapped<'py>(&self, wrap: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let tensors = numpy_arrays(wrap.py(), &self.layout, true, |array, value| match &*array.name {
            "ids" => Ok(value),
            _ => wrap.call1((value,)),
        })?;
        nested(&self.layout, &tensors)
    }

    /// Values by name of their array, in the structure of this batch.
    fn _nested<'py>(&self, values: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
        nested(&self.layout, values)
    }

    /// The memory, for pickles and copies to a device: its used bytes as one flat uint8 array, and the arrays in it as (name, dtype,
    /// shape, strides in elements, offset in bytes, whether other arrays share its bytes, the shape, strides and offset of each level of
    /// offsets, the step of a slice of these).
    fn _memory<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyList>)> {
        let _call = Call::begin(py);
        let (buffer, used) = (&self.layout[0].buffer, self.used());
        let bytes = used.last().map_or(0, |(last, at)| at + last.len());
        let (owner, data) = match &used[..] {
            [(whole, _)] => (owner(py, &self.layout)?, buffer.as_mut_ptr().wrapping_add(whole.start)),
            parts => {
                let mut copy = Buffer::zeros(bytes).map_err(|error| error::to_python(py, error))?;
                for (part, at) in parts {
                    copy.as_mut_slice()[*at..][..part.len()].copy_from_slice(&buffer.as_slice()[part.clone()]);
                }
                let data = copy.as_mut_ptr();
                (Bound::new(py, array::Owner::new(copy))?.into_any(), data)
            }
        };
        // SAFETY: the bytes are within the buffer or the copy, which `owner` keeps, and nobody else writes there.
        let flat = unsafe { array::over(&owner, data, Dtype::Uint8, &[bytes], None, true) }?;
        let laid_out = PyList::empty(py);
        let place = |array: &Array| -> PyResult<_> {
            let size = array.dtype.bytes();
            let strides = array.strides.iter().map(|stride| stride / size);
            let offset = used.iter().rev().find_map(|(used, at)| Some(at + array.offset.checked_sub(used.start)?));
            Ok((PyTuple::new(py, &array.shape)?, PyTuple::new(py, strides)?, offset))
        };
        for array in &self.layout {
            let (shape, strides, offset) = place(array)?;
            let levels = array.offsets.iter().map(place).collect::<PyResult<Vec<_>>>()?;
            let dtype = array::to_numpy(py, array.dtype);
            laid_out.append((&array.name, dtype, shape, strides, offset, array.shared, levels, array.step))?;
        }
        Ok((flat, laid_out))
    }
}

impl PyBatch {
    /// The bytes of the buffer that the arrays use, in ascending order, each with its place in a copy: one range for a whole batch, several
    /// for a slice. They begin at multiples of [`Buffer::ALIGNMENT`], so that elements are aligned in a copy.
    fn used(&self) -> Vec<(Range<usize>, usize)> {
        const ALIGNMENT: usize = Buffer::ALIGNMENT;
        let arrays = self.layout.iter().flat_map(Array::with_offsets);
        let mut ranges: Vec<_> = arrays.map(|a| a.offset / ALIGNMENT * ALIGNMENT..a.end()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut used: Vec<(Range<usize>, usize)> = Vec::new();
        for range in ranges {
            match used.last_mut() {
                Some((last, _)) if range.start < last.end + ALIGNMENT => last.end = last.end.max(range.end),
                last => {
                    let at = last.map_or(0, |(last, at)| *at + last.len().next_multiple_of(ALIGNMENT));
                    used.push((range, at));
                }
            }
        }
        used
    }
}

/// An array of a pickled batch, as in `_memory`.
type Pickled<'py> =
    (String, Bound<'py, PyArrayDescr>, Vec<usize>, Vec<usize>, usize, bool, Vec<PickledLevel>, Option<usize>);
/// Shape, strides and offset of the offsets of a level.
type PickledLevel = (Vec<usize>, Vec<usize>, usize);

/// The batch that was pickled, from its length, its memory and the arrays in it.
#[pyfunction(name = "_restored_batch")]
pub fn restored_batch(
    py: Python<'_>,
    len: usize,
    memory: (PyReadonlyArray1<'_, u8>, Vec<Pickled<'_>>),
) -> PyResult<PyBatch> {
    let _call = Call::begin(py);
    let damaged = || PyTypeError::new_err("the pickled batch is damaged");
    let (flat, pickled) = memory;
    let bytes = flat.as_slice()?;
    let mut buffer = Buffer::zeros(bytes.len()).map_err(|error| error::to_python(py, error))?;
    buffer.as_mut_slice().copy_from_slice(bytes);
    let buffer = Arc::new(buffer);
    let arrays = pickled.into_iter().map(|(name, dtype, shape, strides, offset, shared, levels, step)| {
        let place = |name: String, dtype: Dtype, (shape, strides, offset): PickledLevel| {
            let strides = strides.iter().map(|stride| stride.saturating_mul(dtype.bytes())).collect();
            let buffer = buffer.clone();
            let array = Array { name, dtype, shape, strides, offset, buffer, shared, offsets: Vec::new(), step };
            array.is_within_buffer().then_some(array).ok_or_else(damaged)
        };
        let dtype = array::from_numpy(&dtype).ok_or_else(damaged)?;
        let values = place(name, dtype, (shape, strides, offset))?;
        let offsets = levels.into_iter().map(|level| place(String::new(), Dtype::Int64, level));
        let array = Array { offsets: offsets.collect::<PyResult<_>>()?, ..values };
        match array.shape[0] == len || !array.offsets.is_empty() {
            true => Ok(array),
            false => Err(damaged()),
        }
    });
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    if arrays.is_empty() {
        return Err(damaged());
    }
    Ok(PyBatch::new(len, arrays))
}
