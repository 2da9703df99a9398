//! `NStep`, `Sequences` and `Window`: views, which define the arrays that a client makes of windows, as plain values.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyTuple};

use replay_core::view::{NStep, Padding, Sequences, Stack, ViewSpec, Window};

use crate::class::value_class;
use crate::interpreter::Call;
use crate::{error, integer, keywords};

const PADDINGS: [(&str, Padding); 2] = [("zero", Padding::Zero), ("repeat", Padding::RepeatFirst)];

fn check(py: Python<'_>, view: ViewSpec) -> PyResult<()> {
    view.check_numbers().map_err(|error| error::to_python(py, error))
}

#[doc = stub_doc!("NStep")]
#[pyclass(name = "NStep", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PyNStep(NStep);

#[pymethods]
impl PyNStep {
    #[new]
    #[pyo3(
        signature = (stack = Stack::All(1), n = 1, gamma = 0.99, observation = "observation", padding = "zero", **unknown),
        text_signature = "(stack=1, n=1, gamma=0.99, observation='observation', padding='zero')"
    )]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = stack)] stack: Stack,
        #[pyo3(from_py_with = integer::n)] n: u16,
        gamma: f64,
        observation: &str,
        padding: &str,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        keywords::refuse(unknown, || Ok(py.get_type::<PyNStep>().into_any()))?;
        let view = NStep {
            observation: observation.to_owned(),
            stack,
            n,
            gamma,
            padding: error::choice(py, "padding", padding, PADDINGS)?,
        };
        check(py, ViewSpec::NStep(view.clone()))?;
        Ok(PyNStep(view))
    }
}

value_class! { PyNStep as "NStep", |view, py|
    stack: PyResult<Bound<'py, PyAny>> = stack_to_python(py, &view.0.stack);
    n: u16 = view.0.n;
    gamma: f64 = view.0.gamma;
    observation: &str = &view.0.observation;
    padding: &'static str = view.0.padding.name();
}

#[doc = stub_doc!("Sequences")]
#[pyclass(name = "Sequences", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PySequences(Sequences);

#[pymethods]
impl PySequences {
    #[new]
    #[pyo3(
        signature = (
            length, burn_in = 0, period = None, stack = Stack::All(1), observation = "observation", padding = "zero",
            gamma = 0.99, state = Vec::new(), **unknown
        ),
        text_signature = "(length, burn_in=0, period=None, stack=1, observation='observation', \
                          padding='zero', gamma=0.99, state=())"
    )]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = integer::length)] length: u16,
        #[pyo3(from_py_with = integer::burn_in)] burn_in: u16,
        #[pyo3(from_py_with = integer::period)] period: Option<u16>,
        #[pyo3(from_py_with = stack)] stack: Stack,
        observation: &str,
        padding: &str,
        gamma: f64,
        #[pyo3(from_py_with = columns)] state: Vec<String>,
        unknown: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        keywords::refuse(unknown, || Ok(py.get_type::<PySequences>().into_any()))?;
        let view = Sequences {
            observation: observation.to_owned(),
            stack,
            length,
            burn_in,
            period: period.unwrap_or(length),
            gamma,
            padding: error::choice(py, "padding", padding, PADDINGS)?,
            state,
        };
        check(py, ViewSpec::Sequences(view.clone()))?;
        Ok(PySequences(view))
    }
}

/// Reads the number of observations in a stack, or the numbers by part.
fn stack(value: &Bound<'_, PyAny>) -> PyResult<Stack> {
    let _call = Call::begin(value.py());
    let Ok(parts) = value.cast::<PyMapping>() else {
        return integer::stack(value).map(Stack::All);
    };
    let mut stacks = BTreeMap::new();
    for item in parts.items()?.iter() {
        // Parts of a tuple have numbers.
        let (part, stack): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        stacks.insert(part.str()?.to_string(), integer::stack(&stack)?);
    }
    Ok(Stack::Parts(stacks))
}

fn stack_to_python<'py>(py: Python<'py>, stack: &Stack) -> PyResult<Bound<'py, PyAny>> {
    Ok(match stack {
        Stack::All(stack) => stack.into_pyobject(py)?.into_any(),
        Stack::Parts(parts) => parts.into_pyobject(py)?.into_any(),
    })
}

/// Reads names of columns.
fn columns(value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let _call = Call::begin(value.py());
    value.extract().map_err(|_| {
        PyTypeError::new_err(format!("state is a sequence of names of columns, as [\"hidden\"], got {value}"))
    })
}

value_class! { PySequences as "Sequences", |view, py|
    length: u16 = view.0.length;
    burn_in: u16 = view.0.burn_in;
    period: u16 = view.0.period;
    stack: PyResult<Bound<'py, PyAny>> = stack_to_python(py, &view.0.stack);
    observation: &str = &view.0.observation;
    padding: &'static str = view.0.padding.name();
    gamma: f64 = view.0.gamma;
    state: PyResult<Bound<'py, PyTuple>> = PyTuple::new(py, &view.0.state);
}

#[doc = stub_doc!("Window")]
#[pyclass(name = "Window", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PyWindow(Window);

#[pymethods]
impl PyWindow {
    #[new]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = integer::before)] before: u16,
        #[pyo3(from_py_with = integer::after)] after: u16,
    ) -> PyResult<Self> {
        let view = Window { before, after };
        check(py, ViewSpec::Window(view))?;
        Ok(PyWindow(view))
    }
}

value_class! { PyWindow as "Window", |view, py|
    before: u16 = view.0.before;
    after: u16 = view.0.after;
}

/// Reads a view of any class.
pub fn read(value: &Bound<'_, PyAny>) -> PyResult<Option<ViewSpec>> {
    let _call = Call::begin(value.py());
    if value.is_none() {
        Ok(None)
    } else if let Ok(view) = value.cast::<PyNStep>() {
        Ok(Some(ViewSpec::NStep(view.get().0.clone())))
    } else if let Ok(view) = value.cast::<PySequences>() {
        Ok(Some(ViewSpec::Sequences(view.get().0.clone())))
    } else if let Ok(view) = value.cast::<PyWindow>() {
        Ok(Some(ViewSpec::Window(view.get().0)))
    } else {
        Err(PyTypeError::new_err(format!(
            "a view is an NStep, Sequences or a Window, got {} {}",
            value.get_type().name()?,
            value.repr()?
        )))
    }
}

/// A view as its Python object.
pub fn to_python<'py>(py: Python<'py>, view: &ViewSpec) -> PyResult<Bound<'py, PyAny>> {
    Ok(match view.clone() {
        ViewSpec::NStep(view) => Bound::new(py, PyNStep(view))?.into_any(),
        ViewSpec::Sequences(view) => Bound::new(py, PySequences(view))?.into_any(),
        ViewSpec::Window(view) => Bound::new(py, PyWindow(view))?.into_any(),
    })
}
