//! `SumTree` and `SampledIndexes`: prioritized samples of indexes, for programs that store the items elsewhere.

use numpy::PyArray1;
use pyo3::prelude::*;

use replay_core::priority_index::{PriorityIndex, SampledIndexes};
use replay_core::schema::Dtype;

use crate::class::{self, attributes};
use crate::{array, error};

/// Dtypes of indexes: NumPy and torch use signed and unsigned integers.
const INDEXES: [Dtype; 2] = [Dtype::Int64, Dtype::Uint64];

/// Smallest batch for which the interpreter lock is released. A smaller one takes less than 1 ms, while another busy thread
/// would keep the lock for 5 ms.
const RELEASED_FROM: usize = 8192;

/// Samples indexes by priority, for programs that keep the items elsewhere.
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
        let result = if entries < RELEASED_FROM {
            work(&self.index)
        } else {
            py.detach(|| work(&self.index))
        };
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
        capacity: u64,
        priority_exponent: f64,
        priority_unit_log2: i32,
        seed: Option<u64>,
    ) -> PyResult<Self> {
        PriorityIndex::new(capacity, priority_exponent, priority_unit_log2, seed)
            .map(|index| PySumTree {
                index: Box::new(index),
            })
            .map_err(|error| error::to_python(py, error))
    }

    /// Sets the priorities of indexes.
    fn update(
        &self,
        py: Python<'_>,
        index: &Bound<'_, PyAny>,
        priority: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let index = array::numbers(index, "index", &INDEXES)?;
        let priority = array::numbers(priority, "priority", &array::PRIORITIES)?;
        let (index, priority) = (index.to_i64(), priority.to_f64());
        self.run(py, index.len(), |tree| tree.update(&index, priority))
    }

    /// Samples `count` indexes, with replacement.
    #[pyo3(signature = (count, *, beta = 0.4))]
    fn sample(&self, py: Python<'_>, count: u32, beta: f64) -> PyResult<PySampledIndexes> {
        let sampled = self.run(py, count as usize, |tree| tree.sample(count, beta))?;
        Ok(PySampledIndexes::new(py, &sampled))
    }

    fn __len__(&self) -> usize {
        self.index.len() as usize
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let arguments = ["capacity", "priority_exponent", "priority_unit_log2"];
        class::call(slf, &arguments)
    }
}

attributes! { PySumTree, |tree, py|
    /// The sum of all priorities, after the exponent.
    total: f64 = tree.index.total();
    /// Number of indexes.
    capacity: u32 = tree.index.capacity();
    /// Alpha.
    priority_exponent: f64 = tree.index.exponent();
    /// Base-2 logarithm of the smallest difference of two stored priorities.
    priority_unit_log2: i32 = tree.index.unit_log2();
}

/// The result of `SumTree.sample`: three arrays, in ascending order of the indexes.
#[pyclass(name = "SampledIndexes", module = "innet_drl", frozen, get_all)]
pub struct PySampledIndexes {
    /// The sampled indexes.
    index: Py<PyArray1<i64>>,
    /// Its probability at the instant of sampling.
    probability: Py<PyArray1<f64>>,
    /// Importance weight.
    weight: Py<PyArray1<f32>>,
}

impl PySampledIndexes {
    fn new(py: Python<'_>, sampled: &SampledIndexes) -> Self {
        PySampledIndexes {
            index: PyArray1::from_slice(py, &sampled.index).unbind(),
            probability: PyArray1::from_slice(py, &sampled.probability).unbind(),
            weight: PyArray1::from_slice(py, &sampled.weight).unbind(),
        }
    }
}

#[pymethods]
impl PySampledIndexes {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.index.bind(py).len()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "<SampledIndexes: {} of index, probability, weight>",
            self.__len__(py)?
        ))
    }
}
