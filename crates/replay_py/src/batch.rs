//! `Batch`: the arrays of one sample, as NumPy views on the core's buffers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use numpy::{PyArrayDescr, PyReadonlyArray1};
use pyo3::exceptions::{PyAttributeError, PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PySlice, PyTuple};

use replay_core::schema::Dtype;
use replay_core::view::{self, Array, Buffer};

use crate::class::attributes;
use crate::interpreter::Call;
use crate::structure::Structure;
use crate::{array, error};

#[doc = stub_doc!("Batch")]
#[pyclass(name = "Batch", module = "innet_drl", frozen)]
pub struct PyBatch {
    len: usize,
    layout: Vec<Array>,
    /// NumPy arrays by name, made when first asked for; those with slashes in their names are in dictionaries and tuples.
    arrays: PyOnceLock<Py<PyDict>>,
}

impl PyBatch {
    /// The arrays of a batch, without copies.
    pub fn new(batch: view::Batch) -> Self {
        Self::over(batch.len, batch.arrays)
    }

    /// Arrays with an element for each of the same steps, at least one.
    pub fn of_steps(arrays: Vec<Array>) -> Self {
        Self::over(arrays[0].shape[0], arrays)
    }

    fn over(len: usize, layout: Vec<Array>) -> Self {
        PyBatch { len, layout, arrays: PyOnceLock::new() }
    }

    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyDict>> {
        let arrays = self.arrays.get_or_try_init(py, || {
            let arrays = numpy_arrays(py, &self.layout)?;
            nested(&self.layout, &arrays).map(Bound::unbind)
        });
        Ok(arrays?.bind(py))
    }

    fn unknown(&self, name: impl std::fmt::Display) -> String {
        let names: Vec<_> = self.layout.iter().map(|array| array.name.as_str()).collect();
        format!("this batch has no array {name}; it has {}", names.join(", "))
    }
}

/// Python owners of buffers.
#[derive(Default)]
struct Owners<'py>(HashMap<*const Buffer, Bound<'py, PyAny>>);

impl<'py> Owners<'py> {
    fn of(&mut self, py: Python<'py>, buffer: &Arc<Buffer>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self.0.entry(Arc::as_ptr(buffer)) {
            Entry::Occupied(entry) => entry.get().clone(),
            Entry::Vacant(entry) => {
                let owner = Bound::new(py, array::Owner::new(buffer.clone()))?.into_any();
                entry.insert(owner).clone()
            }
        })
    }

    fn array(&mut self, py: Python<'py>, array: &Array, writable: bool) -> PyResult<Bound<'py, PyAny>> {
        let owner = self.of(py, &array.buffer)?;
        // SAFETY: the core aligns the elements of an array and keeps them inside its buffer. The buffer does not move, and
        // while a reference to it exists, which `owner` holds, Rust does not read it.
        unsafe {
            array::over(
                &owner,
                array.buffer.as_mut_ptr().add(array.offset),
                array.dtype,
                &array.shape,
                Some(&array.strides),
                writable,
            )
        }
    }
}

/// NumPy arrays by name, without copies.
fn numpy_arrays<'py>(py: Python<'py>, layout: &[Array]) -> PyResult<Bound<'py, PyDict>> {
    let arrays = PyDict::new(py);
    let mut owners = Owners::default();
    for array in layout {
        // A write into memory that arrays share would change more than was written.
        let writable = !array.shared;
        arrays.set_item(&array.name, owners.array(py, array, writable)?)?;
    }
    Ok(arrays)
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
            let part = PyBatch::over(len, items.collect());
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
        let names: Vec<_> = batch.layout.iter().map(|array| &array.name).collect();
        let restore = py.import("innet_drl._core")?.getattr("_restored_batch")?;
        Ok((restore, (batch.len, names, batch._buffers(py)?).into_pyobject(py)?.into_any()))
    }

    /// All arrays in the structure of this batch, each but the ids as the tensor that `wrap` makes of its memory.
    fn _wrapped<'py>(&self, wrap: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let py = wrap.py();
        let mut owners = Owners::default();
        let tensors = PyDict::new(py);
        for array in &self.layout {
            let mut value = owners.array(py, array, true)?;
            if array.name != "ids" {
                value = wrap.call1((value,))?;
            }
            tensors.set_item(&array.name, value)?;
        }
        nested(&self.layout, &tensors)
    }

    /// Values by name of their array, in the structure of this batch.
    fn _nested<'py>(&self, values: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyDict>> {
        nested(&self.layout, values)
    }

    /// The layout, for pickles and copies to a device: the used bytes of each buffer as one flat uint8 array, and the arrays on it as
    /// (name, dtype, shape, strides in elements, offset in bytes, whether other arrays share its memory).
    fn _buffers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::begin(py);
        let buffers = PyList::empty(py);
        let mut owners = Owners::default();
        for (buffer, arrays) in self.by_buffer() {
            // A slice of a batch needs a part of its buffers.
            let first = arrays.iter().map(|array| array.offset).min().unwrap_or(0);
            let end = arrays.iter().map(|array| array.end()).max().unwrap_or(0).max(first);
            let owner = owners.of(py, buffer)?;
            // SAFETY: as in `Owners::array`; the core keeps arrays, and so these bytes, within their buffer.
            let flat = unsafe {
                array::over(&owner, buffer.as_mut_ptr().add(first), Dtype::Uint8, &[end - first], None, true)
            }?;
            let laid_out = PyList::empty(py);
            for array in arrays {
                let size = array.dtype.bytes();
                let strides = array.strides.iter().map(|stride| stride / size);
                laid_out.append((
                    &array.name,
                    array::to_numpy(py, array.dtype),
                    PyTuple::new(py, &array.shape)?,
                    PyTuple::new(py, strides)?,
                    array.offset - first,
                    array.shared,
                ))?;
            }
            buffers.append((flat, laid_out))?;
        }
        Ok(buffers)
    }
}

/// An array of a pickled batch, as in `_buffers`.
type Pickled<'py> = (String, Bound<'py, PyArrayDescr>, Vec<usize>, Vec<usize>, usize, bool);

/// The batch that was pickled, from its length, the names of its arrays, and each buffer with the arrays in it.
#[pyfunction(name = "_restored_batch")]
pub fn restored_batch(
    py: Python<'_>,
    len: usize,
    names: Vec<String>,
    buffers: Vec<(PyReadonlyArray1<'_, u8>, Vec<Pickled<'_>>)>,
) -> PyResult<PyBatch> {
    let _call = Call::begin(py);
    let damaged = || PyTypeError::new_err("the pickled batch is damaged");
    let mut arrays = HashMap::new();
    for (flat, pickled) in buffers {
        let bytes = flat.as_slice()?;
        let mut buffer = Buffer::zeros(bytes.len()).map_err(|error| error::to_python(py, error))?;
        buffer.as_mut_slice().copy_from_slice(bytes);
        let buffer = Arc::new(buffer);
        for (name, dtype, shape, strides, offset, shared) in pickled {
            let dtype = array::from_numpy(&dtype).ok_or_else(damaged)?;
            let strides = strides.iter().map(|stride| stride.saturating_mul(dtype.bytes()));
            let strides = strides.collect();
            let array = Array { name, dtype, shape, strides, offset, buffer: buffer.clone(), shared };
            if !array.is_within_buffer() || array.shape[0] != len {
                return Err(damaged());
            }
            arrays.insert(array.name.clone(), array);
        }
    }
    let arrays = names.iter().map(|name| arrays.remove(name));
    let arrays = arrays.collect::<Option<_>>().ok_or_else(damaged)?;
    Ok(PyBatch::over(len, arrays))
}

impl PyBatch {
    /// The buffers, and the arrays in each.
    fn by_buffer(&self) -> Vec<(&Arc<Buffer>, Vec<&Array>)> {
        let mut buffers: Vec<(&Arc<Buffer>, Vec<&Array>)> = Vec::new();
        for array in &self.layout {
            let same = |(buffer, _): &&mut (&Arc<Buffer>, _)| Arc::ptr_eq(buffer, &array.buffer);
            match buffers.iter_mut().find(same) {
                Some((_, arrays)) => arrays.push(array),
                None => buffers.push((&array.buffer, vec![array])),
            }
        }
        buffers
    }
}
