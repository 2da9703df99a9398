//! `Batch`: the arrays of one sample, as NumPy views on the core's buffers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use replay_core::view::{self, Array, Buffer};

use crate::class::attributes;
use crate::interpreter::Call;
use crate::{array, dtype};

#[doc = stub_doc!("Batch")]
#[pyclass(name = "Batch", module = "innet_drl", frozen)]
pub struct PyBatch {
    len: usize,
    arrays: Py<PyDict>,
    layout: Vec<Array>,
}

impl PyBatch {
    /// The arrays of a batch, without copies.
    pub fn new(py: Python<'_>, batch: view::Batch) -> PyResult<Self> {
        let arrays = PyDict::new(py);
        let mut owners: HashMap<*const Buffer, Bound<'_, PyAny>> = HashMap::new();
        for array in &batch.arrays {
            let owner = match owners.get(&Arc::as_ptr(&array.buffer)) {
                Some(owner) => owner.clone(),
                None => {
                    let owner = Bound::new(py, array::Owner::new(array.buffer.clone()))?.into_any();
                    owners.insert(Arc::as_ptr(&array.buffer), owner.clone());
                    owner
                }
            };
            // SAFETY: the core aligns the elements of an array and keeps them inside its buffer. The buffer does not move, and
            // Rust does not access it while a reference to it exists; `owner` holds one.
            let value = unsafe {
                array::over(
                    &owner,
                    array.buffer.as_mut_ptr().add(array.offset),
                    array.dtype,
                    &array.shape,
                    Some(&array.strides),
                    // Arrays share rows: writing one would change another.
                    false,
                )
            }?;
            arrays.set_item(&array.name, value)?;
        }
        Ok(PyBatch {
            len: batch.len,
            arrays: arrays.unbind(),
            layout: batch.arrays,
        })
    }
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
        self.arrays.bind(py).get_item(name)?.ok_or_else(|| {
            PyAttributeError::new_err(format!(
                "this batch has no array {name:?}; it has {}",
                self.names()
            ))
        })
    }

    fn __getitem__(&self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        let name = key.extract().unwrap_or("observation");
        Err(PyTypeError::new_err(format!(
            "a batch has its arrays as attributes: batch.{name}; batch.as_dict() is a dictionary of them"
        )))
    }

    fn __len__(&self) -> usize {
        self.len
    }

    #[doc = stub_doc!("Batch.as_dict")]
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.arrays.bind(py).copy()
    }

    fn __dir__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let py = slf.py();
        let names = py
            .import("builtins")?
            .getattr("object")?
            .call_method1("__dir__", (slf,))?
            .cast_into::<PyList>()?;
        for name in slf.get().arrays.bind(py).keys().iter() {
            names.append(name)?;
        }
        Ok(names)
    }

    fn __repr__(&self) -> String {
        format!("<Batch of {} items: {}>", self.len, self.names())
    }

    /// The layout, for copies to a device: each buffer as one flat uint8 array, and the arrays on it as
    /// (name, dtype, shape, strides in elements, offset in bytes).
    fn _buffers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::begin(py);
        let buffers = PyList::empty(py);
        let mut seen: HashMap<*const Buffer, Bound<'py, PyList>> = HashMap::new();
        for array in &self.layout {
            let key = Arc::as_ptr(&array.buffer);
            let arrays = match seen.entry(key) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => {
                    let owner = Bound::new(py, array::Owner::new(array.buffer.clone()))?;
                    // SAFETY: as in `new`; these are the buffer's bytes.
                    let flat = unsafe {
                        array::over(
                            owner.as_any(),
                            array.buffer.as_mut_ptr(),
                            replay_core::schema::Dtype::Uint8,
                            &[array.buffer.len()],
                            None,
                            true,
                        )
                    }?;
                    let arrays = PyList::empty(py);
                    buffers.append((flat, &arrays))?;
                    entry.insert(arrays)
                }
            };
            let size = array.dtype.bytes();
            let strides = array.strides.iter().map(|stride| stride / size);
            arrays.append((
                &array.name,
                dtype::to_numpy(py, array.dtype),
                PyTuple::new(py, &array.shape)?,
                PyTuple::new(py, strides)?,
                array.offset,
            ))?;
        }
        Ok(buffers)
    }
}

impl PyBatch {
    fn names(&self) -> String {
        let names: Vec<_> = self
            .layout
            .iter()
            .map(|array| array.name.as_str())
            .collect();
        names.join(", ")
    }
}
