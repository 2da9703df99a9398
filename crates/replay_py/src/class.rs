//! Methods that several classes have: `with` blocks, attributes, `repr` and pickling.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::interpreter::Call;

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

/// [`attributes`], `repr` and pickling of a class whose constructor accepts these attributes by name.
macro_rules! value_class {
    ($class:ty as $python:literal, |$object:ident, $py:ident| $($name:ident: $type:ty = $value:expr;)+) => {
        crate::class::attributes! { $class as $python, |$object, $py| $($name: $type = $value;)+ }

        #[pyo3::pymethods]
        impl $class {
            fn __getnewargs_ex__<'py>(
                slf: &pyo3::Bound<'py, Self>,
            ) -> pyo3::PyResult<((), pyo3::Bound<'py, pyo3::types::PyDict>)> {
                Ok(((), crate::class::arguments(slf, &[$(stringify!($name)),+])?))
            }

            fn __repr__(slf: &pyo3::Bound<'_, Self>) -> pyo3::PyResult<String> {
                crate::class::call(slf, &[$(stringify!($name)),+])
            }
        }
    };
}

pub(crate) use {attributes, context_manager, value_class};

/// Attributes of an object by name.
pub fn arguments<'py>(object: &Bound<'py, PyAny>, names: &[&str]) -> PyResult<Bound<'py, PyDict>> {
    let _call = Call::begin(object.py());
    let arguments = PyDict::new(object.py());
    for name in names {
        arguments.set_item(name, object.getattr(name)?)?;
    }
    Ok(arguments)
}

/// Constructor call that would make an equal object, for `repr`.
pub fn call(object: &Bound<'_, PyAny>, names: &[&str]) -> PyResult<String> {
    let _call = Call::begin(object.py());
    let mut arguments = Vec::new();
    for name in names {
        arguments.push(format!("{name}={}", object.getattr(name)?.repr()?));
    }
    Ok(format!("{}({})", object.get_type().name()?, arguments.join(", ")))
}
