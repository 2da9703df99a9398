//! `innet-replay doctor`: whether this machine can serve over F-Stack, with advice for the missing parts.

mod checks;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use checks::Machine;

use crate::stack::fstack_config::Config;
use replay_core::error::Result;

/// Check whether this machine can serve over F-Stack.
///
/// Prints one line for each part, `ok` or `missing`, with advice below each missing one, and changes nothing. The exit
/// status is 0 if all parts for a network card are there, or for the devices of --stack-config, else 1. Serving over the
/// kernel's sockets needs none of them.
#[derive(Args)]
pub struct DoctorFlags {
    /// F-Stack's configuration file, as for serve; parts that its devices do not need are never missing
    #[arg(long, value_name = "FILE")]
    stack_config: Option<PathBuf>,
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

/// Checks this machine and returns the exit code.
///
/// # Errors
/// [`Error::Config`](replay_core::error::Error::Config) for a configuration that cannot be read.
pub fn run(flags: &DoctorFlags) -> Result<u8> {
    // Without a file: a network card on hugepages, and any core.
    let config = flags
        .stack_config
        .as_deref()
        .map(Config::read)
        .transpose()?;
    let findings = Machine::this().findings(&config.unwrap_or_default());
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
