//! Arguments of calls.
//!
//! Definitions of columns, tables, views and mixes: their classes are Python's, in `innet_drl/definitions.py`; an object of one is checked here
//! when it is made, as one JSON value, and keeps the result for the calls that take it.
//!
//! Integers: PyO3 raises a bare `OverflowError` for one out of range; here it is a `ConfigError` that names the argument. Each argument has a
//! conversion function: `#[pyo3(from_py_with = arguments::batch_size)] batch_size: u32`.
//!
//! Texts: one of two choices, and addresses.

use std::str::FromStr;

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};

use replay_core::mix;
use replay_core::schema::{Column, TableConfig};
use replay_core::sum_tree::MAX_SAMPLES;
use replay_core::view::ViewSpec;

use crate::error;
use crate::interpreter::Call;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Definition {
    Column(Column),
    Table(TableConfig),
    View(ViewSpec),
    /// Tables with their shares of a batch.
    Mix(Vec<(String, f64)>),
}

/// A checked definition, from its JSON.
#[pyclass(name = "_Checked", module = "innet_drl._core", frozen)]
pub struct PyChecked(Definition);

#[pymethods]
impl PyChecked {
    #[new]
    fn new(py: Python<'_>, json: &str) -> PyResult<Self> {
        let definition = serde_json::from_str(json).map_err(|error| error::config(py, error.to_string()))?;
        let valid = match &definition {
            // The table checks it, which has its name.
            Definition::Column(_) => Ok(()),
            Definition::Table(table) => table.validate(),
            Definition::View(view) => view.check_numbers(),
            Definition::Mix(tables) => mix::check_shares(&tables.iter().map(|(_, share)| *share).collect::<Vec<_>>()),
        };
        valid.map_err(|error| error::to_python(py, error))?;
        Ok(PyChecked(definition))
    }

    /// The definition as JSON, with every default.
    #[getter]
    fn json(&self, py: Python<'_>) -> PyResult<String> {
        json(py, &self.0)
    }

    /// For pickles and copies.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().into_any(), (slf.get().json(slf.py())?,)))
    }
}

fn json(py: Python<'_>, definition: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(definition).map_err(|error| error::config(py, error.to_string()))
}

/// The checked definition of an object, if it is one.
fn of<'py>(value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyChecked>> {
    value.getattr(intern!(value.py(), "_checked")).ok()?.cast_into().ok()
}

/// Reads a view, or `None`.
pub fn view(value: &Bound<'_, PyAny>) -> PyResult<Option<ViewSpec>> {
    let _call = Call::begin(value.py());
    if value.is_none() {
        return Ok(None);
    }
    if let Some(checked) = of(value)
        && let Definition::View(view) = &checked.get().0
    {
        return Ok(Some(view.clone()));
    }
    let class = value.get_type();
    Err(PyTypeError::new_err(format!(
        "a view is an NStep, Sequences, a Trajectory or a Window, got {} {}",
        class.name()?,
        value.repr()?
    )))
}

/// Reads a table.
pub fn table(value: &Bound<'_, PyAny>) -> PyResult<TableConfig> {
    let _call = Call::begin(value.py());
    match of(value).as_ref().map(|checked| &checked.get().0) {
        Some(Definition::Table(table)) => Ok(table.clone()),
        _ => Err(PyTypeError::new_err(format!("table is a Table, got {}", value.get_type()))),
    }
}

/// Reads tables to make: one, or several.
pub fn tables(value: &Bound<'_, PyAny>) -> PyResult<Vec<TableConfig>> {
    let _call = Call::begin(value.py());
    if let Ok(one) = table(value) {
        return Ok(vec![one]);
    }
    let refused = || PyTypeError::new_err(format!("tables is a Table or a sequence of them, got {}", value.get_type()));
    let several = value.extract::<Vec<Bound<'_, PyAny>>>().map_err(|_| refused())?;
    several.iter().map(table).collect::<PyResult<_>>().map_err(|_| refused())
}

/// A table as its Python object.
pub fn table_to_python<'py>(py: Python<'py>, table: &TableConfig) -> PyResult<Bound<'py, PyAny>> {
    let _call = Call::begin(py);
    let class = py.import("innet_drl.definitions")?.getattr("Table")?;
    class.call_method1("_from_json", (json(py, table)?,))
}

/// Tables with their shares of a batch: one table with the share 1, or the tables of a mix.
#[derive(Clone)]
pub struct TablesArgument {
    tables: Vec<(String, f64)>,
    /// Whether they are of a mix.
    pub mixed: bool,
}

impl TablesArgument {
    /// Names of the tables.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tables.iter().map(|(name, _)| name.as_str())
    }

    /// Shares of the tables.
    pub fn shares(&self) -> Vec<f64> {
        self.tables.iter().map(|(_, share)| *share).collect()
    }

    /// The tables in errors and descriptions.
    pub fn describe(&self) -> String {
        let names: Vec<_> = self.names().map(|name| format!("{name:?}")).collect();
        match &names[..] {
            [one] => format!("table {one}"),
            several => format!("tables {}", several.join(", ")),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for TablesArgument {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let _call = Call::begin(value.py());
        if let Ok(name) = value.extract::<String>() {
            return Ok(TablesArgument { tables: vec![(name, 1.0)], mixed: false });
        }
        match of(&value).as_ref().map(|checked| &checked.get().0) {
            Some(Definition::Mix(tables)) => Ok(TablesArgument { tables: tables.clone(), mixed: true }),
            _ => Err(PyTypeError::new_err(format!(
                "table is the name of a table or a Mix, got a {}",
                value.get_type().name()?
            ))),
        }
    }
}

/// Most batches decoded ahead.
const MAX_PREFETCH: u16 = 1024;
/// Most threads that unpack a batch.
pub const MAX_THREADS: u16 = 256;

/// Which integers an argument takes, for its error.
enum Range {
    /// All of its type, up to this one.
    Type(u64),
    /// Integers of this range.
    Checked(i128, i128),
    /// Integers of this range, which the memory checks with an error class of its own.
    Memory(i128, i128),
}

fn convert<'py, T>(name: &str, range: &Range, value: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let py = value.py();
    let _call = Call::begin(py);
    let (least, most) = match *range {
        Range::Type(most) => (0, most.into()),
        Range::Checked(least, most) | Range::Memory(least, most) => (least, most),
    };
    let refused = || error::config(py, format!("{name} is an integer from {least} to {most}, got {value}"));
    let converted = value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(py) {
            return refused();
        }
        let class = value.get_type();
        match class.name() {
            // Not the value: a torch or NumPy array has a long `repr`.
            Ok(class) => PyTypeError::new_err(format!("{name} is an integer, got a {class}")),
            Err(error) => error,
        }
    })?;
    let checked = matches!(range, Range::Checked(..)) && !value.is_none();
    if checked && !(least..=most).contains(&value.extract::<i128>()?) {
        return Err(refused());
    }
    Ok(converted)
}

/// Conversion functions, by argument.
macro_rules! named {
    ($($name:ident $range:expr),* $(,)?) => {$(
        #[doc = concat!("The argument `", stringify!($name), "`.")]
        pub fn $name<'py, T>(value: &Bound<'py, PyAny>) -> PyResult<T>
        where
            T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
        {
            convert(stringify!($name), &$range, value)
        }
    )*};
}

const U16: Range = Range::Type(u16::MAX as u64);
const U32: Range = Range::Type(u32::MAX as u64);
const U64: Range = Range::Type(u64::MAX);

named!(
    batch_size Range::Memory(1, MAX_SAMPLES as i128),
    capacity Range::Memory(1, TableConfig::MAX_CAPACITY as i128),
    chunk_steps Range::Memory(1, 65_536),
    idle_sleep_us Range::Checked(0, 1_000_000),
    index Range::Checked(0, i64::MAX as i128),
    io_threads Range::Memory(0, 256),
    max_bytes U64,
    newer_than U64,
    num_envs Range::Memory(1, TableConfig::MAX_CAPACITY as i128),
    prefetch Range::Checked(0, MAX_PREFETCH as i128),
    prefix Range::Checked(0, 32),
    priority_unit_log2 Range::Memory(-30, 0),
    seed U64,
    segment_values Range::Memory(1, 360),
    server U32,
    staleness U16,
    threads Range::Checked(1, MAX_THREADS as i128),
    threshold U16,
    updates U64,
    values U32,
    version U64,
    worker U16,
    workers U16,
    world U32,
);

/// The value that an argument names, out of two.
pub fn choice<T>(py: Python<'_>, argument: &str, name: &str, choices: [(&str, T); 2]) -> PyResult<T> {
    let names = choices.each_ref().map(|(known, _)| *known);
    let chosen = choices.into_iter().find(|(known, _)| *known == name);
    chosen.map(|(_, value)| value).ok_or_else(|| {
        let [first, second] = names;
        error::config(py, format!("{argument} is {first:?} or {second:?}, got {name:?}"))
    })
}

/// Parses the text of an argument; errors say what is `wanted`.
pub fn parse<T: FromStr>(py: Python<'_>, argument: &str, text: &str, wanted: &str) -> PyResult<T> {
    text.parse().map_err(|_| error::config(py, format!("{argument} is {wanted}, got {text:?}")))
}
