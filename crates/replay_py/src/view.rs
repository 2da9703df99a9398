//! `NStep`, `Sequence` and `Window`: how a client makes arrays of windows, as plain values.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use replay_core::view::{NStep, Padding, Sequence, ViewSpec, Window};

use crate::error;

fn padding(py: Python<'_>, name: &str) -> PyResult<Padding> {
    match name {
        "zero" => Ok(Padding::Zero),
        "repeat" => Ok(Padding::RepeatFirst),
        other => Err(error::config(
            py,
            format!("padding is \"zero\" or \"repeat\", got {other:?}"),
        )),
    }
}

fn padding_name(padding: Padding) -> &'static str {
    match padding {
        Padding::Zero => "zero",
        Padding::RepeatFirst => "repeat",
    }
}

fn check(py: Python<'_>, view: ViewSpec) -> PyResult<()> {
    view.check_numbers()
        .map_err(|error| error::to_python(py, error))
}

/// Transitions with n-step returns.
#[pyclass(name = "NStep", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PyNStep(NStep);

#[pymethods]
impl PyNStep {
    #[new]
    #[pyo3(signature = (stack = 1, n = 1, gamma = 0.99, observation = "frame", padding = "zero"))]
    fn new(
        py: Python<'_>,
        stack: u16,
        n: u16,
        gamma: f64,
        observation: &str,
        padding: &str,
    ) -> PyResult<Self> {
        let view = NStep {
            observation: observation.to_owned(),
            stack,
            n,
            gamma,
            padding: self::padding(py, padding)?,
        };
        check(py, ViewSpec::NStep(view.clone()))?;
        Ok(PyNStep(view))
    }

    /// Observations in a stack.
    #[getter]
    fn stack(&self) -> u16 {
        self.0.stack
    }

    /// Steps of the return.
    #[getter]
    fn n(&self) -> u16 {
        self.0.n
    }

    /// Discount of one step.
    #[getter]
    fn gamma(&self) -> f64 {
        self.0.gamma
    }

    /// The observation's column.
    #[getter]
    fn observation(&self) -> &str {
        &self.0.observation
    }

    /// What stands before an episode's first observation.
    #[getter]
    fn padding(&self) -> &'static str {
        padding_name(self.0.padding)
    }

    fn __getnewargs__(&self) -> (u16, u16, f64, &str, &'static str) {
        (
            self.stack(),
            self.n(),
            self.gamma(),
            self.observation(),
            self.padding(),
        )
    }

    fn __repr__(&self) -> String {
        format!(
            "NStep(stack={}, n={}, gamma={}, observation={:?}, padding={:?})",
            self.stack(),
            self.n(),
            self.gamma(),
            self.observation(),
            self.padding()
        )
    }
}

/// Sequences for recurrent agents.
#[pyclass(name = "Sequence", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PySequence(Sequence);

#[pymethods]
impl PySequence {
    #[new]
    #[pyo3(
        signature = (
            length, burn_in = 0, period = None, stack = 1, observation = "frame", padding = "zero",
            gamma = 0.99, state = Vec::new()
        ),
        text_signature = "(length, burn_in=0, period=None, stack=1, observation='frame', \
                          padding='zero', gamma=0.99, state=())"
    )]
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python constructor"
    )]
    fn new(
        py: Python<'_>,
        length: u16,
        burn_in: u16,
        period: Option<u16>,
        stack: u16,
        observation: &str,
        padding: &str,
        gamma: f64,
        state: Vec<String>,
    ) -> PyResult<Self> {
        let view = Sequence {
            observation: observation.to_owned(),
            stack,
            length,
            burn_in,
            period: period.unwrap_or(length),
            gamma,
            padding: self::padding(py, padding)?,
            state,
        };
        check(py, ViewSpec::Sequence(view.clone()))?;
        Ok(PySequence(view))
    }

    /// Steps to learn from.
    #[getter]
    fn length(&self) -> u16 {
        self.0.length
    }

    /// Steps before them.
    #[getter]
    fn burn_in(&self) -> u16 {
        self.0.burn_in
    }

    /// Steps from one item to the next.
    #[getter]
    fn period(&self) -> u16 {
        self.0.period
    }

    /// Observations in a stack.
    #[getter]
    fn stack(&self) -> u16 {
        self.0.stack
    }

    /// The observation's column.
    #[getter]
    fn observation(&self) -> &str {
        &self.0.observation
    }

    /// What stands before an episode's first observation.
    #[getter]
    fn padding(&self) -> &'static str {
        padding_name(self.0.padding)
    }

    /// Discount of one step.
    #[getter]
    fn gamma(&self) -> f64 {
        self.0.gamma
    }

    /// Columns delivered at the first step alone.
    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.state)
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        (
            self.length(),
            self.burn_in(),
            self.period(),
            self.stack(),
            self.observation(),
            self.padding(),
            self.gamma(),
            self.state(py)?,
        )
            .into_pyobject(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "Sequence(length={}, burn_in={}, period={}, stack={}, observation={:?}, padding={:?}, \
             gamma={}, state={})",
            self.length(),
            self.burn_in(),
            self.period(),
            self.stack(),
            self.observation(),
            self.padding(),
            self.gamma(),
            self.state(py)?.repr()?,
        ))
    }
}

/// The raw rows around an anchor.
#[pyclass(name = "Window", module = "innet_drl", frozen, eq)]
#[derive(PartialEq)]
pub struct PyWindow(Window);

#[pymethods]
impl PyWindow {
    #[new]
    fn new(py: Python<'_>, before: u16, after: u16) -> PyResult<Self> {
        let view = Window { before, after };
        check(py, ViewSpec::Window(view))?;
        Ok(PyWindow(view))
    }

    /// Rows before the anchor.
    #[getter]
    fn before(&self) -> u16 {
        self.0.before
    }

    /// Rows after the anchor.
    #[getter]
    fn after(&self) -> u16 {
        self.0.after
    }

    fn __getnewargs__(&self) -> (u16, u16) {
        (self.before(), self.after())
    }

    fn __repr__(&self) -> String {
        format!("Window(before={}, after={})", self.before(), self.after())
    }
}

/// Any view, as an argument.
pub struct ViewArgument(pub ViewSpec);

impl<'py> FromPyObject<'_, 'py> for ViewArgument {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(view) = value.cast::<PyNStep>() {
            Ok(ViewArgument(ViewSpec::NStep(view.get().0.clone())))
        } else if let Ok(view) = value.cast::<PySequence>() {
            Ok(ViewArgument(ViewSpec::Sequence(view.get().0.clone())))
        } else if let Ok(view) = value.cast::<PyWindow>() {
            Ok(ViewArgument(ViewSpec::Window(view.get().0)))
        } else {
            Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "a view is an NStep, a Sequence or a Window, got {}",
                value.get_type().name()?
            )))
        }
    }
}
