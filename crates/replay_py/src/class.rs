//! Methods that several classes have: `with` blocks and attributes.

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

/// Adds read-only attributes (name, type and value) to a class, named `$python` in Python and in the stub.
macro_rules! attributes {
    ($class:ty as $python:literal, |$object:ident, $py:ident| $($name:ident: $type:ty = $value:expr;)+) => {
        #[pyo3::pymethods]
        impl $class {
            $(
                #[doc = stub_doc!(concat!($python, ".", stringify!($name)))]
                #[getter]
                #[allow(unused_variables, reason = "the interpreter is for those that make objects")]
                fn $name<'py>(&self, $py: pyo3::Python<'py>) -> $type {
                    let $object = self;
                    $value
                }
            )+
        }
    };
}

pub(crate) use {attributes, context_manager};
