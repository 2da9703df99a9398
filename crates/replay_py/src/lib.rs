//! The Python module `innet_drl._core`: thin classes over the memory, its client and its server, one class or two a file.
//!
//! | module | subject |
//! | --- | --- |
//! | `arguments` | integers, named in errors; definitions, which are Python's: their check, and how calls read them |
//! | `replay` | `Replay`: the interface of a memory, and `connect`; `Memory`, in this process, and `Server`; `Episodes`; `UpdateReceipt` |
//! | `writer`, `open_writers` | `Writer`; the writers that a sample waits for: their open chunks, their state |
//! | `decoded_sample`, `batch`, `batches` | one sampled batch: its request, `Batch`; `Batches`, decoded ahead |
//! | `parameters` | `Parameters`: safetensors files to and from dictionaries of arrays |
//! | `sum_tree` | `SumTree` and its samples, `SampledIndexes` |
//! | `gradients` | gradient jobs: `GradientWorker`, `GradientUpdates`, `Station` |
//! | `array` | NumPy arrays, in and out without copies; dtypes; texts as bytes; torch tensors |
//! | `structure` | nested dictionaries and tuples of arrays |
//! | `wait` | waits with deadlines and Ctrl-C; values that one thread uses at a time, or that can be closed and do not survive a fork |
//! | `interpreter` | calls with and without the interpreter lock, until the interpreter ends |
//! | `class` | methods that classes share |
//! | `error`, `log` | exceptions for error codes; log lines for Python's `logging` |
//!
//! Types, shapes and errors are documented in `python/innet_drl/_core.pyi`, whose docstrings are compiled in (`stub_doc`).

#![expect(clippy::too_many_arguments, reason = "methods in Python have keyword arguments")]

use std::ffi::OsString;

use pyo3::prelude::*;

/// The docstring of a class, function or `Class.method` in the stub, for its `doc` attribute. `build.rs` writes the files.
macro_rules! stub_doc {
    ($name:expr) => {
        include_str!(concat!(env!("OUT_DIR"), "/docstrings/", $name))
    };
}

mod arguments;
mod array;
mod batch;
mod batches;
mod class;
mod decoded_sample;
mod error;
mod gradients;
mod interpreter;
mod lease;
mod log;
mod open_writers;
mod parameters;
mod replay;
mod structure;
mod sum_tree;
mod wait;
mod writer;

#[doc = stub_doc!("run_server_cli")]
#[pyfunction]
fn run_server_cli(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    // The command line installs its own signal handlers.
    interpreter::detach(py, || innet_replay::run(arguments))
}

/// The compiled core of innet_drl. A free-threaded interpreter enables the GIL to load it, with a warning: the tests do not run without the
/// GIL.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::replay::{PyEpisodes, PyMemory, PyReplay, PyServer, PyStoredTable, PyUpdateReceipt, connect};
    use super::{arguments, batch, interpreter, lease};
    #[pymodule_export]
    use super::{
        batch::PyBatch, batches::PyBatches, gradients::PyGradientUpdates, gradients::PyGradientWorker,
        gradients::PyStation, parameters::PyParameters, run_server_cli, sum_tree::PySampledIndexes,
        sum_tree::PySumTree, writer::PyWriter,
    };
    use numpy::{PyArray1, PyArrayMethods};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        interpreter::watch_end(module.py())?;
        // NumPy's interface is loaded now: its first use runs Python code, where Ctrl-C would be a panic in a later call.
        drop(PyArray1::<u8>::zeros(module.py(), 0, false).readonly());
        innet_replay::plug_in();
        replay_server::process_memory::guard_allocations();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("fstack_release", innet_replay::fstack_release())?;
        // Not in `__all__`: for definitions and pickles.
        module.setattr("_Lease", module.py().get_type::<lease::PyLease>())?;
        module.setattr("_Checked", module.py().get_type::<arguments::PyChecked>())?;
        module.setattr("_restored_batch", wrap_pyfunction!(batch::restored_batch, module)?)
    }
}
