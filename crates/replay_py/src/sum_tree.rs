//! `SumTree` and `SampledIndexes`: prioritized samples of indexes, for programs that store the items elsewhere.

use numpy::PyArray1;
use pyo3::prelude::*;

use replay_core::priority_index::PriorityIndex;

use crate::class::attributes;
use crate::interpreter::{self, Call};
use crate::{arguments, array, error};

/// Smallest batch for which the interpreter lock is released. A smaller one takes less than 1 ms, while another busy thread
/// would keep the lock for 5 ms.
const RELEASED_FROM: usize = 8192;

#[doc = stub_doc!("SumTree")]
#[pyclass(name = "SumTree", module = "innet_drl", frozen)]
pub struct PySumTree {
    /// Boxed, because it is aligned to cache lines and Python's objects are not.
    index: Box<PriorityIndex>,
}

// Python's objects are aligned to 16 bytes.
const _: () = assert!(align_of::<PySumTree>() <= 16);

impl PySumTree {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        entries: usize,
        work: impl FnOnce(&PriorityIndex) -> replay_core::Result<T> + Send,
    ) -> PyResult<T> {
        let result =
            if entries < RELEASED_FROM { work(&self.index) } else { interpreter::detach(py, || work(&self.index)) };
        result.map_err(|error| error::to_python(py, error))
    }
}

#[pymethods]
impl PySumTree {
    #[new]
    #[pyo3(
        signature = (capacity, *, priority_exponent = 0.6, priority_unit_log2 = -19, seed = None),
        text_signature = "(capacity, *, priority_exponent=0.6, priority_unit_log2=-19, seed=None)"
    )]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::capacity)] capacity: u64,
        priority_exponent: f64,
        #[pyo3(from_py_with = arguments::priority_unit_log2)] priority_unit_log2: i32,
        #[pyo3(from_py_with = arguments::seed)] seed: Option<u64>,
    ) -> PyResult<Self> {
        PriorityIndex::new(capacity, priority_exponent, priority_unit_log2, seed)
            .map(|index| PySumTree { index: Box::new(index) })
            .map_err(|error| error::to_python(py, error))
    }

    #[doc = stub_doc!("SumTree.update")]
    fn update(&self, py: Python<'_>, indexes: &Bound<'_, PyAny>, priorities: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = Call::begin(py);
        let indexes = array::numbers(indexes, "indexes", array::INDEXES)?;
        let priorities = array::numbers(priorities, "priorities", array::PRIORITIES)?;
        let (indexes, priorities) = (indexes.to_i64(py)?, priorities.to_f64(py)?);
        self.run(py, indexes.len(), |tree| tree.update(&indexes, priorities))
    }

    #[doc = stub_doc!("SumTree.sample")]
    #[pyo3(signature = (batch_size, *, beta = 0.4))]
    fn sample(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::batch_size)] batch_size: u32,
        beta: f64,
    ) -> PyResult<PySampledIndexes> {
        let _call = Call::begin(py);
        let sampled = self.run(py, batch_size as usize, |tree| tree.sample(batch_size, beta))?;
        Ok(PySampledIndexes {
            indexes: PyArray1::from_slice(py, &sampled.indexes).unbind(),
            probabilities: PyArray1::from_slice(py, &sampled.probabilities).unbind(),
            weights: PyArray1::from_slice(py, &sampled.weights).unbind(),
        })
    }

    fn __len__(&self) -> usize {
        self.index.tree.live_with_mass() as usize
    }

    fn __repr__(&self) -> String {
        let PriorityIndex { tree, exponent, unit_log2, .. } = &*self.index;
        let capacity = tree.capacity();
        format!("SumTree(capacity={capacity}, priority_exponent={exponent:?}, priority_unit_log2={unit_log2})")
    }
}

attributes! { PySumTree as "SumTree", |tree, py|
    total: f64 = tree.index.tree.from_units(tree.index.tree.total());
    capacity: u32 = tree.index.tree.capacity();
    priority_exponent: f64 = tree.index.exponent;
    priority_unit_log2: i32 = tree.index.unit_log2;
    saturated_priorities: u64 = tree.index.tree.saturated();
    rounded_up_priorities: u64 = tree.index.tree.rounded_up();
}

#[doc = stub_doc!("SampledIndexes")]
#[pyclass(name = "SampledIndexes", module = "innet_drl", frozen, get_all)]
pub struct PySampledIndexes {
    #[doc = stub_doc!("SampledIndexes.indexes")]
    indexes: Py<PyArray1<i64>>,
    #[doc = stub_doc!("SampledIndexes.probabilities")]
    probabilities: Py<PyArray1<f64>>,
    #[doc = stub_doc!("SampledIndexes.weights")]
    weights: Py<PyArray1<f32>>,
}

#[pymethods]
impl PySampledIndexes {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.indexes.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<SampledIndexes: {} of indexes, probabilities, weights>", self.__len__(py)?))
    }
}
