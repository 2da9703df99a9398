//! Context managers (`with` blocks) of the bindings.

/// Adds `__enter__`, which returns the object itself, and `__exit__`, which runs `$exit`. `$failed` is whether the block raised
/// an exception.
macro_rules! context_manager {
    ($class:ty, |$object:ident, $py:ident, $failed:ident| $exit:expr) => {
        #[pyo3::pymethods]
        impl $class {
            fn __enter__(slf: pyo3::PyRef<'_, Self>) -> pyo3::PyRef<'_, Self> {
                slf
            }

            fn __exit__(
                &self,
                $py: pyo3::Python<'_>,
                exception_type: &pyo3::Bound<'_, pyo3::PyAny>,
                _exception: &pyo3::Bound<'_, pyo3::PyAny>,
                _traceback: &pyo3::Bound<'_, pyo3::PyAny>,
            ) -> pyo3::PyResult<()> {
                let $object = self;
                let $failed = !pyo3::types::PyAnyMethods::is_none(exception_type);
                $exit
            }
        }
    };
}

pub(crate) use context_manager;
