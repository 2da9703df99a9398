//! `innet-replay doctor`: checks whether this machine can serve over the kernel's sockets and over other stacks, with advice for missing
//! components.

mod kernel;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args};
use serde::Serialize;

use super::serve::ConfigFlags;
use crate::config::ServerConfig;
use crate::error::Result;
use crate::extension;
use crate::server::Server;
use crate::stack::StackName;
use crate::stack::plugged::plugged_in;
use crate::tls;

/// Check whether this machine can serve with the given settings (the flags of serve).
///
/// Prints one line for each part, `ok` or `missing`, with advice below each missing one. The parts are the configuration with its
/// files (as of serve --check) and what the machine has to have for it: for the kernel's sockets, with --stack NAME for that network
/// stack, with --stack-config alone for the devices of that file. The exit status is 0 if all are there, else 1.
#[derive(Args)]
pub struct DoctorFlags {
    #[command(flatten)]
    configured: ConfigFlags,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

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

/// Checks this machine and returns the exit code. `matches` are the arguments that `flags` were parsed from.
///
/// # Errors
/// [`Error::Config`](crate::error::Error::Config) for a configuration that cannot be read.
pub fn run(flags: &DoctorFlags, matches: &ArgMatches) -> Result<u8> {
    let config = flags.configured.config(matches, std::env::var("INNET_TOKEN").ok())?;
    let file = config.stack_config.as_deref();
    let plugged = match (config.stack, file) {
        (StackName::Plugged(stack), _) => vec![stack],
        (StackName::Kernel, None) => vec![],
        // Devices, without a server for them.
        (StackName::Kernel, Some(_)) => plugged_in(),
    };
    let mut findings = Vec::new();
    if config.stack != StackName::Kernel || file.is_none() {
        findings.push(Finding::new("configuration", configuration(&config)));
        findings.extend(certificate(&config).map(|checked| Finding::new("certificate", checked)));
    }
    if config.stack == StackName::Kernel && file.is_none() {
        let machine = MachineFiles::this();
        findings.extend(machine.kernel_findings(&config));
        for extension in extension::plugged_in() {
            findings.extend(extension.findings(&config, &machine)?);
        }
    }
    for stack in plugged {
        findings.extend(stack.findings(file)?);
    }
    let ok = findings.iter().all(|finding| finding.ok);
    let text = if flags.json {
        serde_json::json!({ "ok": ok, "parts": findings }).to_string() + "\n"
    } else {
        lines(&findings)
    };
    // Ignores a closed standard output: the exit status still counts.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    Ok(u8::from(!ok))
}

/// The checks of a start.
fn configuration(config: &ServerConfig) -> CheckResult {
    match Server::check(config) {
        Ok(()) => Ok("a server starts with these settings and files".to_owned()),
        Err(error) => missing(error.to_string(), "change what it names: no server starts with it"),
    }
}

/// The dates of the certificate, if there is one that can be used.
fn certificate(config: &ServerConfig) -> Option<CheckResult> {
    let (_, dates) = tls::acceptor(config.tls_cert.as_ref()?, config.tls_key.as_ref()?).ok()?;
    Some(match dates.problem() {
        None => Ok(format!("valid until {}", tls::date(dates.end))),
        Some(problem) => missing(problem, tls::RENEW),
    })
}

fn lines(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let state = if finding.ok { "ok" } else { "missing" };
        text += &format!("{state:<8} {}: {}\n", finding.part, finding.found);
        if !finding.to_do.is_empty() {
            text += &format!("         to do: {}\n", finding.to_do);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_part_has_advice_below_it() {
        let finding = |part, found: &str, to_do: &str| Finding {
            part,
            ok: to_do.is_empty(),
            found: found.to_owned(),
            to_do: to_do.to_owned(),
        };
        let findings = [finding("cores", "8", ""), finding("hugepages", "none", "reserve some")];
        assert_eq!(lines(&findings), "ok       cores: 8\nmissing  hugepages: none\n         to do: reserve some\n");
    }
}
