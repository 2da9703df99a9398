//! The lease of a batch: its items stay in the memory until the batch is acknowledged.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use pyo3::prelude::*;

use base::wait::Wait;
use replay_core::replay::{ChangeLease, Replay};
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use crate::interpreter::Call;
use crate::wait::{self, Closing};

/// The lease of a batch; batches of arrays and of tensors have the same one.
#[pyclass(name = "_Lease", module = "innet_drl._core", frozen)]
pub struct PyLease {
    /// Memory of the batch. Weak: a batch outlives its replay.
    pub memory: Weak<dyn Replay<Error>>,
    pub closing: Option<Closing>,
    pub table: String,
    pub number: u64,
    /// Set by an acknowledgement that came after its lease: leases of batches ahead may be over, too. Relaxed: a hint.
    pub lost: Arc<AtomicBool>,
}

impl PyLease {
    /// Starts the lease, or acknowledges its batch.
    ///
    /// # Errors
    /// [`replay_core::Error::Lease`] when it is over.
    pub fn change(memory: &dyn Replay<Error>, table: &str, number: u64, begin: bool, wait: &Wait<'_>) -> Result<()> {
        memory.change_lease(table, ChangeLease { lease: number, begin }, wait)
    }
}

#[pymethods]
impl PyLease {
    #[pyo3(name = "_acknowledge", signature = (timeout = 60.0))]
    pub fn acknowledge(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::begin(py);
        let deadline = wait::deadline(py, timeout)?;
        let memory = self.memory.clone();
        wait::blocking(py, deadline, self.closing.as_ref(), move |wait| {
            // Dropped here, without the interpreter lock: it may be the last reference to the memory.
            let memory = memory.upgrade().ok_or(Error::Closed("the replay of this batch"))?;
            let changed = Self::change(&*memory, &self.table, self.number, false, wait);
            changed.inspect_err(|error| _ = self.lost.fetch_or(error.code() == ErrorCode::Lease, Ordering::Relaxed))
        })
    }
}
