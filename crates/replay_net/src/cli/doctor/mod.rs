//! `innet-replay doctor`: whether this machine can serve through F-Stack, and what to do where it cannot.

mod checks;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use checks::{Machine, Needs};

use crate::stack::fstack_config::Config;
use replay_core::error::Result;

/// Say what a server on F-Stack needs that is here, and what is missing.
///
/// One line for each part, `ok` or `missing`, and below what is missing what to do. Nothing is changed. The exit status
/// is 0 when nothing is missing for a network card, or for the devices of --stack-config, else 1. Serving on the
/// kernel's sockets needs none of it.
#[derive(Args)]
pub struct Flags {
    /// F-Stack's configuration file, as for serve: what its devices do not need is not missing
    #[arg(long, value_name = "FILE")]
    stack_config: Option<PathBuf>,
    /// One JSON object in place of the lines
    #[arg(long)]
    json: bool,
}

/// What was found of one part.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    part: &'static str,
    /// Whether it is there.
    ok: bool,
    found: String,
    /// What to do, empty where there is nothing.
    to_do: String,
}

impl Finding {
    fn ok(part: &'static str, found: impl Into<String>) -> Self {
        Finding {
            part,
            ok: true,
            found: found.into(),
            to_do: String::new(),
        }
    }

    fn missing(part: &'static str, found: impl Into<String>, to_do: impl Into<String>) -> Self {
        Finding {
            part,
            ok: false,
            found: found.into(),
            to_do: to_do.into(),
        }
    }
}

/// Looks at this machine and returns the exit code.
///
/// # Errors
/// [`Error::Config`](replay_core::error::Error::Config) for a configuration that cannot be read.
pub fn run(flags: &Flags) -> Result<u8> {
    let needs = match &flags.stack_config {
        Some(path) => Needs::of(&Config::read(path)?),
        None => Needs::A_CARD,
    };
    let findings = Machine::this().findings(&needs);
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
    fn a_line_says_what_is_there_and_what_to_do() {
        let findings = [
            Finding::ok("cores", "8"),
            Finding::missing("hugepages", "none", "reserve some"),
        ];
        assert_eq!(
            lines(&findings),
            "ok       cores: 8\nmissing  hugepages: none\n         to do: reserve some\n"
        );
        assert_eq!((code(&findings), code(&findings[..1])), (1, 0));
    }
}
