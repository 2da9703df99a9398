//! `innet-replay doctor`: checks whether this machine can serve over the kernel's sockets and over other stacks, with advice for missing
//! components.

use std::io::{self, Write};

use clap::{ArgMatches, Args};

use replay_link::error::Result;
use replay_link::stack::{StackName, kernel};
use replay_link::tls;
use replay_server::config::ServerConfig;
use replay_server::plugin::{self, CheckResult, Finding, MachineFiles, missing};
use replay_server::process_memory::{kibibytes, left_in_groups};
use replay_server::server::{Server, open_files};

use super::serve::ConfigFlags;

/// Check whether this machine can serve with the given settings (the flags of serve).
///
/// Prints one line for each check, `ok` or `missing`, with advice below each missing one. The checks are the configuration with its
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
    if config.stack != StackName::KERNEL || file.is_none() {
        findings.push(Finding::new("configuration", configuration(&config)));
        findings.extend(certificate(&config).map(|checked| Finding::new("certificate", checked)));
    }
    let machine = MachineFiles::this();
    let plugins: Vec<_> = match (config.stack.plugged(), file) {
        (None, None) => {
            findings.extend(kernel_findings(&config, &machine));
            plugin::of_server(config.stack).collect()
        }
        // Devices, without a server for them.
        (None, Some(_)) => plugin::plugged_in().into_iter().filter(|plugin| plugin.stack().is_some()).collect(),
        (Some(stack), _) => vec![plugin::of_stack(stack)?],
    };
    for plugin in plugins {
        findings.extend(plugin.findings(&config, &machine)?);
    }
    let ok = findings.iter().all(|finding| finding.ok);
    let text = if flags.json {
        serde_json::json!({ "ok": ok, "checks": findings }).to_string() + "\n"
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
        text += &format!("{state:<8} {}: {}\n", finding.check, finding.found);
        if !finding.to_do.is_empty() {
            text += &format!("         to do: {}\n", finding.to_do);
        }
    }
    text
}

/// Results of all checks for this configuration.
pub fn kernel_findings(config: &ServerConfig, machine: &MachineFiles) -> Vec<Finding> {
    vec![
        Finding::new("open files", files(config, machine)),
        Finding::new("memory", memory(config, machine)),
        Finding::new("addresses", addresses(config)),
    ]
}

/// Checks the hard limit of open files: a server raises its own soft limit.
fn files(config: &ServerConfig, machine: &MachineFiles) -> CheckResult {
    let needed = open_files(config);
    let limits = machine.text("proc/self/limits");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let hard = line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or("an unknown limit");
    let most = match hard {
        "unlimited" => u64::MAX,
        hard => hard.parse().unwrap_or(0),
    };
    let found = format!("{needed} for {} connections, of at most {hard}", config.max_connections);
    if most >= needed {
        return Ok(found);
    }
    missing(
        found,
        format!(
            "raise the hard limit (ulimit -Hn {needed}, or LimitNOFILE={needed} of the service), or lower --max-connections"
        ),
    )
}

/// Compares the limits of tables and replies with the free memory of the machine and of this process's control group.
fn memory(config: &ServerConfig, machine: &MachineFiles) -> CheckResult {
    let replies = config.effective_reply_bytes(config.effective_max_frame_bytes());
    let wanted = config.memory_limits().max_bytes.saturating_add(replies);
    let available = kibibytes(&machine.text("proc/meminfo"), "MemAvailable:").map(|bytes| (bytes, "available"));
    let groups = left_in_groups(&machine.root).into_iter().map(|bytes| (bytes, "left in the control group"));
    let Some((left, of)) = available.into_iter().chain(groups).min() else {
        return Ok(format!("{} for tables and replies; the available memory is unknown", mib(wanted)));
    };
    let found = format!("{} for tables and replies, of {} {of}", mib(wanted), mib(left));
    if wanted <= left {
        return Ok(found);
    }
    missing(
        found,
        "lower --max-bytes (or --reply-bytes), or free memory: a server that has promised more is killed when its tables fill",
    )
}

/// Binds each address and closes it again. Fails while a server runs there.
fn addresses(config: &ServerConfig) -> CheckResult {
    let taken = |error: String, setting: &str| {
        let to_do =
            format!("end the program that listens there, if it is not this server, or choose another {setting}");
        missing(error, to_do)
    };
    let mut names: Vec<String> = config.listen.iter().map(ToString::to_string).collect();
    if let Err(error) = config.listen.iter().try_for_each(kernel::try_bind) {
        return taken(error.to_string(), "--listen");
    }
    if let Some(http) = &config.http {
        if let Err(error) = kernel::bind_tcp(&http.host, http.port) {
            return taken(format!("cannot listen on {http}: {error}"), "--http");
        }
        names.push(http.to_string());
    }
    Ok(format!("{} can be bound", names.join(", ")))
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_missing_part_has_advice_below_it() {
        let finding = |check, found: &str, to_do: &str| Finding {
            check,
            ok: to_do.is_empty(),
            found: found.to_owned(),
            to_do: to_do.to_owned(),
        };
        let findings = [finding("cores", "8", ""), finding("hugepages", "none", "reserve some")];
        assert_eq!(lines(&findings), "ok       cores: 8\nmissing  hugepages: none\n         to do: reserve some\n");
    }

    const READY: [(&str, &str); 4] = [
        (
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units\n\
             Max open files            1024                 4096                 files\n",
        ),
        ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    8388608 kB\n"),
        ("sys/fs/cgroup/memory.max", "6442450944\n"),
        ("sys/fs/cgroup/memory.current", "1073741824\n"),
    ];

    fn config() -> ServerConfig {
        ServerConfig {
            listen: vec!["innet://127.0.0.1:0".parse().unwrap()],
            max_bytes: 3 << 30,
            ..ServerConfig::default()
        }
    }

    fn found(changes: &[(&str, &str)], config: &ServerConfig) -> Vec<Finding> {
        let mut files = READY.to_vec();
        for change in changes {
            files.retain(|(path, _)| path != &change.0);
            files.push(*change);
        }
        let root = tempfile::tempdir().unwrap();
        let machine = MachineFiles { root: root.path().to_owned() };
        for (path, text) in files {
            fs::create_dir_all(machine.at(path).parent().unwrap()).unwrap();
            fs::write(machine.at(path), text).unwrap();
        }
        kernel_findings(config, &machine)
    }

    fn check<'a>(findings: &'a [Finding], name: &str) -> &'a Finding {
        let mut named = findings.iter().filter(|finding| finding.check == name);
        named.next().unwrap()
    }

    #[test]
    fn a_machine_with_everything() {
        let findings = found(&[], &config());
        assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
        assert_eq!(findings.len(), 3);
        assert_eq!(
            check(&findings, "memory").found,
            "4096 MiB for tables and replies, of 5120 MiB left in the control group"
        );
        assert!(check(&findings, "open files").found.contains("2432 for 2048"));
        assert_eq!(check(&findings, "addresses").found, "innet://127.0.0.1:0 can be bound");
    }

    #[test]
    fn what_is_short_is_named_with_the_setting() {
        let busy = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = busy.local_addr().unwrap().to_string();
        let taken = ServerConfig { listen: vec![format!("innet://{address}").parse().unwrap()], ..config() };
        let http = ServerConfig { http: Some(busy.local_addr().unwrap().to_string().parse().unwrap()), ..config() };
        let large = ServerConfig { max_bytes: 8 << 30, ..config() };
        let many = ServerConfig { max_connections: 10_000, ..config() };
        for (changes, config, name, says) in [
            (&[][..], &taken, "addresses", [&*address, "--listen"]),
            (&[], &http, "addresses", [&*address, "--http"]),
            (&[], &large, "memory", ["9216 MiB", "--max-bytes"]),
            (&[], &many, "open files", ["10384", "--max-connections"]),
        ] {
            let findings = found(changes, config);
            let finding = check(&findings, name);
            let text = format!("{} {}", finding.found, finding.to_do);
            assert!(!finding.ok, "{text}");
            assert!(says.iter().all(|says| text.contains(says)), "{text}");
            assert_eq!(findings.iter().filter(|finding| !finding.ok).count(), 1);
        }
    }
}
