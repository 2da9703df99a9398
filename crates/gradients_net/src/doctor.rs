//! Checks of `innet-replay doctor` for gradients over the kernel's UDP.

use std::net::{SocketAddr, UdpSocket};

use crate::config::GradientsConfig;
use gradients::{SOCKET_BUFFER, udp_addresses};
use replay_server::plugin::{CheckResult, Finding, MachineFiles, missing};

/// Results of all checks for these settings.
pub fn findings(config: &GradientsConfig, machine: &MachineFiles) -> Vec<Finding> {
    match config.gradients {
        Some(address) if config.gradients_devices.is_empty() => vec![
            Finding::new("gradients", addresses(address, config.gradients_threads)),
            Finding::new("UDP buffers", udp_buffers(machine)),
        ],
        _ => Vec::new(),
    }
}

/// Briefly binds each address. Fails while a server runs there.
fn addresses(address: SocketAddr, threads: usize) -> CheckResult {
    let threads = match address.port() {
        0 => 1,
        _ => threads,
    };
    let mut found = Vec::new();
    for address in udp_addresses(address, threads) {
        if let Err(error) = UdpSocket::bind(address) {
            return missing(
                format!("cannot bind gradients {address}: {error}"),
                "choose an address of this machine for --gradients at which as many ports are free as --gradients-threads says",
            );
        }
        found.push(address.to_string());
    }
    Ok(format!("{} can be bound", found.join(", ")))
}

fn udp_buffers(machine: &MachineFiles) -> CheckResult {
    let mut small = Vec::new();
    for name in ["rmem_max", "wmem_max"] {
        let most = machine.text(format!("proc/sys/net/core/{name}"));
        let most: usize = most.parse().unwrap_or(0);
        if most < SOCKET_BUFFER {
            small.push(format!("net.core.{name} is {most}"));
        }
    }
    if small.is_empty() {
        return Ok(format!("{SOCKET_BUFFER} bytes each way"));
    }
    missing(
        format!("{}, and {SOCKET_BUFFER} are asked for", small.join(", ")),
        format!(
            "sysctl -w net.core.rmem_max={SOCKET_BUFFER} net.core.wmem_max={SOCKET_BUFFER}: datagrams that find no free space are lost and \
             sent again"
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn found(rmem: &str, config: &GradientsConfig) -> Vec<Finding> {
        let root = tempfile::tempdir().unwrap();
        let machine = MachineFiles { root: root.path().to_owned() };
        let folder = machine.at("proc/sys/net/core");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("rmem_max"), rmem).unwrap();
        fs::write(folder.join("wmem_max"), "212992000\n").unwrap();
        findings(config, &machine)
    }

    #[test]
    fn what_is_short_is_named_with_the_setting() {
        let config = GradientsConfig { gradients: Some(([127, 0, 0, 1], 0).into()), ..GradientsConfig::default() };
        let ready = found("212992000\n", &config);
        assert!(ready.len() == 2 && ready.iter().all(|finding| finding.ok));
        assert_eq!(ready[0].found, "127.0.0.1:0 can be bound");
        assert_eq!(found("", &GradientsConfig::default()), []);
        // The second thread's port.
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let second = socket.local_addr().unwrap();
        let taken = GradientsConfig {
            gradients: Some((second.ip(), second.port() - 1).into()),
            gradients_threads: 2,
            ..GradientsConfig::default()
        };
        let second = second.to_string();
        for (rmem, config, check, says) in [
            ("212992000\n", &taken, "gradients", [&*second, "--gradients"]),
            ("212992\n", &config, "UDP buffers", ["212992", "sysctl"]),
        ] {
            let findings = found(rmem, config);
            let missing: Vec<_> = findings.iter().filter(|finding| !finding.ok).collect();
            let [finding] = missing[..] else { panic!("{findings:?}") };
            let text = format!("{} {}", finding.found, finding.to_do);
            assert_eq!(finding.check, check);
            assert!(says.iter().all(|says| text.contains(says)), "{text}");
        }
    }
}
