//! The Python module `innet_drl._core`: thin classes over the Rust crates, one class in each file.
//!
//! | module | subject |
//! | --- | --- |
//! | `table`, `view` | `Column`, `Table`; `NStep`, `Sequence`, `Window` |
//! | `replay` | `Replay`, in this process or on a server |
//! | `writer` | `Writer` |
//! | `draw`, `batch`, `batches` | one draw; `Batch`, its arrays; `Batches`, which decode ahead |
//! | `gradients`, `gradient_updates` | `GradientWorker`; `GradientUpdates`, of asynchronous jobs |
//! | `station` | `Station`, a worker's DPDK device |
//! | `sum_tree` | `SumTree`, and its draws, `Drawn` |
//! | `parameter_server` | the parameter server and the lossy relay of `innet-drl bench gradients` |
//! | `parameters` | safetensors files to and from dictionaries of arrays |
//! | `server`, `connect` | `Server`; `connect`, which opens a client |
//! | `array`, `dtype` | NumPy arrays, in and out without copies |
//! | `wait`, `turns` | deadlines and Ctrl-C, also for values that threads share |
//! | `handle`, `context` | values that can be closed, and forks; `with` blocks |
//! | `error`, `log` | exceptions; log lines |
//!
//! The types, shapes and errors that a user needs are documented in `python/innet_drl/_core.pyi`.

use std::ffi::OsString;

use pyo3::prelude::*;

mod array;
mod batch;
mod batches;
mod connect;
mod context;
mod draw;
mod dtype;
mod error;
mod gradient_updates;
mod gradients;
mod handle;
mod log;
mod parameter_server;
mod parameters;
mod replay;
mod server;
mod station;
mod sum_tree;
mod table;
mod turns;
mod view;
mod wait;
mod writer;

/// The release of F-Stack that is linked.
#[cfg(feature = "fstack")]
fn fstack_release() -> Option<&'static str> {
    Some(fstack_sys::fstack::RELEASE.unwrap_or("unknown"))
}

#[cfg(not(feature = "fstack"))]
fn fstack_release() -> Option<&'static str> {
    None
}

/// Runs the command line of `innet-replay` and returns its exit status.
#[pyfunction]
fn run_server_cli(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    // The command line installs its own signal handlers.
    py.detach(|| replay_net::cli::run(arguments))
}

/// The compiled core of innet_drl.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("fstack_release", fstack_release())?;
    module.add_class::<batch::PyBatch>()?;
    module.add_class::<batches::PyBatches>()?;
    module.add_class::<table::PyColumn>()?;
    module.add_class::<sum_tree::PyDrawn>()?;
    module.add_class::<gradient_updates::PyGradientUpdates>()?;
    module.add_class::<gradients::PyGradientWorker>()?;
    module.add_class::<view::PyNStep>()?;
    module.add_class::<parameter_server::PyLossyPath>()?;
    module.add_class::<parameter_server::PyParameterServer>()?;
    module.add_class::<parameter_server::PyParameterWorker>()?;
    module.add_class::<parameters::PyParameters>()?;
    module.add_class::<replay::PyReplay>()?;
    module.add_class::<view::PySequence>()?;
    module.add_class::<server::PyServer>()?;
    module.add_class::<station::PyStation>()?;
    module.add_class::<sum_tree::PySumTree>()?;
    module.add_class::<table::PyTable>()?;
    module.add_class::<replay::PyUpdateReceipt>()?;
    module.add_class::<view::PyWindow>()?;
    module.add_class::<writer::PyWriter>()?;
    module.add_function(wrap_pyfunction!(connect::connect, module)?)?;
    module.add_function(wrap_pyfunction!(run_server_cli, module)?)?;
    Ok(())
}
