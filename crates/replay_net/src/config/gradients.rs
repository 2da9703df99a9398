//! Configuration of gradient all-reduce.

use std::net::SocketAddr;
use std::time::Duration;

use super::ServerConfig;
use crate::error::Result;
use crate::refuse;
use crate::stack::{Address, StackName};
use gradients::{AggregatorLimits, DpdkConfig};

const NEVER: Duration = Duration::from_secs(100 * 365 * 86_400);
/// Most threads of aggregators.
const MAX_THREADS: usize = 64;
/// Most segments in flight of a job: a gigabyte.
const MAX_WINDOW: u32 = 1 << 18;

impl ServerConfig {
    /// Limits of each aggregator.
    pub fn gradient_limits(&self) -> AggregatorLimits {
        AggregatorLimits {
            jobs: self.gradients_jobs,
            window: self.gradients_window,
            // Jobs end with their workers' connections.
            idle: NEVER,
            job_bytes: self.gradients_job_bytes,
        }
    }

    /// The DPDK devices, if there are any.
    pub fn gradient_dpdk(&self) -> Option<DpdkConfig> {
        let Some(SocketAddr::V4(address)) = self.gradients else {
            return None;
        };
        (!self.gradients_devices.is_empty()).then(|| DpdkConfig {
            eal: words(&self.gradients_eal),
            devices: self.gradients_devices.clone(),
            address,
            prefix: self.gradients_prefix,
            gateway: self.gradients_gateway,
            threads: self.gradients_threads,
            cores: self.gradients_cores.clone(),
            idle_sleep: Duration::from_micros(self.gradients_idle_sleep_us),
        })
    }

    pub(super) fn validate_gradients(&self) -> Result<()> {
        let Some(address) = self.gradients else {
            return match (self.gradients_only, &self.parent) {
                (false, None) => Ok(()),
                (true, _) => refuse("gradients_only is set: name the UDP address in gradients"),
                (_, Some(parent)) => refuse(format!(
                    "{parent} is a parent for sums of gradients: name the UDP address of this server in gradients"
                )),
            };
        };
        if !address.ip().is_loopback() && !self.trusted_network {
            return refuse(format!(
                "gradients {address} can be reached from other machines, and its datagrams are neither encrypted nor \
                 authenticated: a token and TLS protect the connections alone, and everyone on the path can read and forge \
                 datagrams; set trusted_network if the network between this server and its workers is trusted"
            ));
        }
        if self.gradients_only && !self.tables.is_empty() {
            return refuse("gradients_only is set, and so are tables: keep one");
        }
        if !(1..=MAX_THREADS).contains(&self.gradients_threads) {
            return refuse(format!(
                "gradients_threads is 1 to {MAX_THREADS}, got {}",
                self.gradients_threads
            ));
        }
        if usize::from(address.port()) + self.gradients_threads > 1 << 16 {
            return refuse(format!(
                "{} threads need as many ports from {} up to 65535, which are not enough: choose a lower port",
                self.gradients_threads,
                address.port()
            ));
        }
        if !(1..=MAX_WINDOW).contains(&self.gradients_window) {
            return refuse(format!(
                "gradients_window is 1 to {MAX_WINDOW}, got {}",
                self.gradients_window
            ));
        }
        self.validate_devices(address)?;
        self.validate_parent()
    }

    fn validate_devices(&self, address: SocketAddr) -> Result<()> {
        let of_devices = !self.gradients_eal.is_empty()
            || self.gradients_gateway.is_some()
            || !self.gradients_cores.is_empty()
            || self.gradients_idle_sleep_us > 0;
        if self.gradients_devices.is_empty() {
            return match of_devices {
                false => Ok(()),
                true => refuse(
                    "gradients_eal, gradients_gateway, gradients_cores and gradients_idle_sleep_us are for DPDK: name a device in \
                     gradients_devices",
                ),
            };
        }
        match address {
            SocketAddr::V4(address) if !address.ip().is_unspecified() && address.port() != 0 => {
                Ok(())
            }
            _ => refuse(format!(
                "gradients is {address}, and a DPDK device has no address of its own: give an IPv4 address that is free in its network, and a port"
            )),
        }
    }

    fn validate_parent(&self) -> Result<()> {
        let Some(parent) = &self.parent else {
            return match &self.parent_tls_ca {
                None => Ok(()),
                Some(_) => refuse("parent_tls_ca is set without a parent: set both"),
            };
        };
        if parent.stack() != StackName::Kernel {
            return refuse(format!(
                "{parent}: gradients go by the kernel's UDP, write innet:// or innets://"
            ));
        }
        let tls = matches!(parent, Address::Tcp { tls: true, .. });
        if tls != self.parent_tls_ca.is_some() {
            return refuse(format!(
                "the parent is {parent}: parent_tls_ca goes with innets://, and innets:// with parent_tls_ca"
            ));
        }
        if !(2..=64).contains(&self.racks) {
            return refuse(format!(
                "the parent {parent} adds up the sums of 2 to 64 servers: say in racks how many there are, which is {}, and in rack which of \
                 them this one is",
                self.racks
            ));
        }
        if self.rack >= self.racks {
            return refuse(format!(
                "rack {} of {}: racks are numbered from 0",
                self.rack, self.racks
            ));
        }
        Ok(())
    }
}

/// Arguments separated by spaces.
fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<ServerConfig> {
        let config = ServerConfig::from_toml(text, "server.toml", toml::Table::new())?;
        config.validate()?;
        Ok(config)
    }

    #[test]
    fn sums_of_gradients_are_off_by_default_and_take_one_address() {
        assert_eq!(check("").unwrap().gradients, None);
        let config = check("gradients = \"127.0.0.1:7711\"\ngradients_window = 8").unwrap();
        assert_eq!(config.gradients.unwrap().port(), 7711);
        assert_eq!(config.gradient_limits().window, 8);
    }

    /// Token and TLS protect connections, not datagrams.
    #[test]
    fn datagrams_that_leave_the_machine_need_a_trusted_network() {
        let safe = "listen = [\"innets://127.0.0.1:1\"]\ntoken = \"x\"\ntls_cert = \"c\"\ntls_key = \"k\"\n";
        let open = format!("{safe}gradients = \"0.0.0.0:1\"\n");
        let error = check(&open).unwrap_err().to_string();
        assert!(
            error.contains("neither encrypted nor authenticated"),
            "{error}"
        );
        assert!(error.contains("set trusted_network"), "{error}");
        check(&format!("{open}trusted_network = true")).unwrap();
        for here in ["127.0.0.1:1", "[::1]:1"] {
            check(&format!("{safe}gradients = \"{here}\"")).unwrap();
        }
    }

    #[test]
    fn devices_of_dpdk_take_the_address_of_gradients() {
        let text = "gradients = \"10.0.0.2:7711\"\ntrusted_network = true\n";
        assert_eq!(check(text).unwrap().gradient_dpdk(), None);
        let dpdk = check(&format!(
            "{text}gradients_devices = [\"net_af_packet0,iface=eth0\"]\ngradients_eal = \"--no-huge  -m 512\"\n\
             gradients_threads = 2\ngradients_cores = [2, 3]\ngradients_idle_sleep_us = 20"
        ));
        let dpdk = dpdk.unwrap().gradient_dpdk().unwrap();
        assert_eq!(dpdk.devices, ["net_af_packet0,iface=eth0"]);
        assert_eq!(dpdk.eal, ["--no-huge", "-m", "512"]);
        assert_eq!((dpdk.threads, dpdk.cores), (2, vec![2, 3]));
        assert_eq!(dpdk.idle_sleep, Duration::from_micros(20));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let here = "gradients = \"127.0.0.1:7711\"\n";
        for (text, part) in [
            ("gradients = \"nowhere\"", "socket address"),
            ("gradients_only = true", "gradients_only"),
            ("parent = \"innet://a:1\"", "is a parent"),
            ("gradients = \"0.0.0.0:1\"", "neither encrypted nor"),
            (&format!("{here}gradients_cores = [1]"), "gradients_devices"),
            (
                "gradients = \"[::1]:7711\"\ngradients_devices = [\"net_null0\"]",
                "IPv4 address",
            ),
            (
                "gradients = \"127.0.0.1:65530\"\ngradients_threads = 7",
                "lower port",
            ),
            (&format!("{here}gradients_threads = 0"), "1 to 64"),
            (
                &format!("{here}gradients_jobs = 0"),
                "gradients_jobs is 1 to 1024, got 0",
            ),
            (
                &format!("{here}gradients_window = 0"),
                "gradients_window is",
            ),
            (&format!("{here}parent = \"innets://a:1\""), "parent_tls_ca"),
            (&format!("{here}parent_tls_ca = \"a\""), "without a parent"),
            (
                &format!("{here}parent = \"innet://a:1\"\nrack = 2\nracks = 2"),
                "rack 2 of 2",
            ),
            (
                &format!("{here}parent = \"innet://a:1\""),
                "how many there are",
            ),
            (
                &format!(
                    "{here}gradients_only = true\n[[tables]]\nname = \"a\"\ncolumns = []\ncapacity = 1"
                ),
                "keep one",
            ),
        ] {
            let error = check(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
