//! `innet-replay doctor`: whether this machine can serve, over the kernel's sockets and over F-Stack, with advice for the missing
//! parts.

mod checks;

use std::io::{self, Write};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde::Serialize;

use checks::Machine;

use super::serve::ServeFlags;
use crate::error::Result;
use crate::stack::StackName;
use crate::stack::fstack_config::Config;

/// Check whether this machine can serve; takes the settings of serve.
///
/// Prints one line for each part, `ok` or `missing`, with advice below each missing one, and changes nothing. With --stack
/// kernel these are the parts for the kernel's sockets, with --stack fstack or --stack-config those for F-Stack (for a network
/// card, or for the devices of the file), and without them both. The exit status is 0 if all are there, else 1.
#[derive(Args)]
pub struct DoctorFlags {
    #[command(flatten)]
    serve: ServeFlags,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

/// Result of the check of one part.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    part: &'static str,
    /// Whether the part is there.
    ok: bool,
    found: String,
    /// Advice for a missing part, else empty.
    to_do: String,
}

/// Checks this machine and returns the exit code. `matches` are the arguments that `flags` were parsed from.
///
/// # Errors
/// [`Error::Config`](replay_core::error::Error::Config) for a configuration that cannot be read.
pub fn run(flags: &DoctorFlags, matches: &ArgMatches) -> Result<u8> {
    let config = flags.serve.config(matches, None)?;
    let over_fstack = config.stack == StackName::Fstack || config.stack_config.is_some();
    let chosen = matches.value_source("stack") == Some(ValueSource::CommandLine);
    let (machine, mut findings) = (Machine::this(), Vec::new());
    if !over_fstack {
        findings = machine.kernel_findings(&config);
    }
    if over_fstack || !chosen {
        // Without a file: a network card on hugepages, and any core.
        let file = config.stack_config.as_deref().map(Config::read);
        findings.extend(machine.findings(&file.transpose()?.unwrap_or_default()));
    }
    let text = if flags.json {
        let ok = findings.iter().all(|finding| finding.ok);
        serde_json::json!({ "ok": ok, "parts": findings }).to_string() + "\n"
    } else {
        lines(&findings)
    };
    // A closed standard output changes nothing about the machine.
    let _ = io::stdout().lock().write_all(text.as_bytes());
    Ok(code(&findings))
}

fn code(findings: &[Finding]) -> u8 {
    u8::from(findings.iter().any(|finding| !finding.ok))
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
        let findings = [
            finding("cores", "8", ""),
            finding("hugepages", "none", "reserve some"),
        ];
        assert_eq!(
            lines(&findings),
            "ok       cores: 8\nmissing  hugepages: none\n         to do: reserve some\n"
        );
        assert_eq!((code(&findings), code(&findings[..1])), (1, 0));
    }
}
