//! Checks of the machine, for `innet-replay doctor`: what was found, and what to do about it.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Result of the check of one component.
#[derive(Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the component.
    pub part: &'static str,
    /// Whether the check passed.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// Advice if the check failed, else empty.
    pub to_do: String,
}

impl Finding {
    /// The result of a check.
    pub fn new(part: &'static str, checked: CheckResult) -> Self {
        let ok = checked.is_ok();
        let (found, to_do) = checked.map_or_else(|missing| missing, |found| (found, String::new()));
        Finding { part, ok, found, to_do }
    }
}

/// Description of a component; of a missing one, with advice.
pub type CheckResult = std::result::Result<String, (String, String)>;

/// # Errors
/// What was found, and what to do, always.
pub fn missing(found: impl Into<String>, to_do: impl Into<String>) -> CheckResult {
    Err((found.into(), to_do.into()))
}

/// Files of the machine to check; tests provide their own.
pub struct MachineFiles {
    /// Root folder, `/` outside of tests.
    pub root: PathBuf,
}

impl MachineFiles {
    /// The files of this machine.
    pub fn this() -> Self {
        MachineFiles { root: PathBuf::from("/") }
    }

    /// Path of a file below the root.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// A small file's text without surrounding white space; empty if it cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> String {
        let text = fs::read_to_string(self.at(path)).unwrap_or_default();
        text.trim().to_owned()
    }
}
