//! `innet-replay doctor`: checks whether this machine can serve over the kernel's sockets and over other stacks, with advice for missing
//! components.

mod kernel;

use std::io::{self, Write};

use clap::{ArgMatches, Args};

use super::serve::ConfigFlags;
use kernel::kernel_findings;
use replay_link::error::Result;
use replay_link::stack::StackName;
use replay_link::tls;
use replay_server::config::ServerConfig;
use replay_server::findings::{CheckResult, Finding, MachineFiles, missing};
use replay_server::plugin;
use replay_server::server::Server;

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

/// Checks this machine and returns the exit code. `matches` are the arguments that `flags` were parsed from.
///
/// # Errors
/// [`Error::Config`](replay_link::error::Error::Config) for a configuration that cannot be read.
pub fn run(flags: &DoctorFlags, matches: &ArgMatches) -> Result<u8> {
    let config = flags.configured.config(matches, std::env::var("INNET_TOKEN").ok())?;
    let file = config.stack_config.as_deref();
    let mut findings = Vec::new();
    if config.stack != StackName::Kernel || file.is_none() {
        findings.push(Finding::new("configuration", configuration(&config)));
        findings.extend(certificate(&config).map(|checked| Finding::new("certificate", checked)));
    }
    let machine = MachineFiles::this();
    let plugins: Vec<_> = match (config.stack, file) {
        (StackName::Kernel, None) => {
            findings.extend(kernel_findings(&config, &machine));
            plugin::of_server(config.stack).collect()
        }
        // Devices, without a server for them.
        (StackName::Kernel, Some(_)) => {
            plugin::plugged_in().into_iter().filter(|plugin| plugin.stack().is_some()).collect()
        }
        (StackName::Plugged(stack), _) => vec![plugin::of_stack(stack)?],
    };
    for plugin in plugins {
        findings.extend(plugin.findings(&config, &machine)?);
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
