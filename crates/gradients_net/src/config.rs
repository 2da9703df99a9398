//! Settings of the extension for gradients, in a server's flags and configuration file.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};
use serde::{Deserialize, Serialize};

use crate::message::NAME;
use gradients::{AggregatorLimits, DpdkConfig};
use replay_link::error::{Error, Result, refuse};
use replay_link::stack::{Address, StackName};
use replay_server::config::{ServerConfig, within};
use replay_server::plugin::PluginSettings;

/// Limit of aggregator threads.
const MAX_THREADS: u64 = 64;
/// Limit of a job's segments in flight: about a gigabyte.
const MAX_WINDOW: u64 = 1 << 18;

/// Settings without effect unless `gradients_devices` are set.
const OF_DEVICES: &[&str] =
    &["gradients_eal", "gradients_prefix", "gradients_gateway", "gradients_cores", "gradients_idle_sleep_us"];
/// Settings without effect unless `parent` is set.
const OF_PARENT: &[&str] = &["parent_tls_ca", "rack", "racks", "rack_workers"];

/// The settings. Each field is a flag of `innet-replay serve` and a key of its file; its documentation is the flag's help text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
#[serde(default, deny_unknown_fields)]
pub struct GradientsConfig {
    /// UDP address for gradient all-reduce; port 0 lets the system choose, and an IP address of all zeros is every address
    /// of this machine. Workers join over the addresses of --listen. An address that other machines can reach needs
    /// --trusted-network.
    #[arg(long, value_name = "IP:PORT")]
    pub gradients: Option<SocketAddr>,
    /// Only sum gradients: no replay memory, no parameters.
    #[arg(long)]
    pub gradients_only: bool,
    /// Threads that sum gradients, each with its own socket, at consecutive ports from the port of --gradients. A job is summed
    /// by one thread, so more than one is for several jobs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub gradients_threads: usize,
    /// Limit of gradient jobs; one takes up to --gradients-window times 3 KB, an asynchronous one up to --gradients-job-bytes.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub gradients_jobs: usize,
    /// Limit of a job's segments in flight (datagrams of up to 360 values).
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub gradients_window: u32,
    /// DPDK device for gradients, which bypasses the kernel's UDP, may be repeated (a program built with the feature dpdk):
    /// name and arguments as DPDK takes them, net_af_packet0,iface=eth0, or a PCI address. --gradients is then an IPv4
    /// address that the kernel does not have. Two devices make a switch, which forwards all other frames.
    #[arg(long, value_name = "DEVICE")]
    pub gradients_devices: Vec<String>,
    /// Arguments for DPDK's environment, separated by spaces: "--no-huge -m 512 --no-pci"; empty by default.
    #[arg(long, value_name = "ARGUMENTS", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    pub gradients_eal: String,
    /// Prefix length of the network of a DPDK device, in bits.
    #[arg(long, value_name = "BITS", default_value_t = 24)]
    pub gradients_prefix: u8,
    /// Gateway of a DPDK device to other networks.
    #[arg(long, value_name = "IP")]
    pub gradients_gateway: Option<Ipv4Addr>,
    /// Core of each of --gradients-threads on DPDK devices, separated by commas; without it the system chooses.
    #[arg(long, value_name = "CORES", value_delimiter = ',')]
    pub gradients_cores: Vec<usize>,
    /// Sleep of an idle thread on DPDK devices, in microseconds; with 0 it polls and takes a whole core.
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub gradients_idle_sleep_us: u64,
    /// Limit of the sums that an asynchronous gradient job keeps, in bytes: its vector for each of S + 2 updates.
    #[arg(long, value_name = "N", default_value_t = 128 << 20)]
    pub gradients_job_bytes: usize,
    /// Parent server, innet://host:port, which adds up the sums of several servers: a job with more workers than join here
    /// (its world) continues there as one stream. This server connects with its token, or else its learner token.
    #[arg(long, value_name = "ADDRESS")]
    pub parent: Option<Address>,
    /// PEM file with the certificate of a parent at innets://, or with that of its authority.
    #[arg(long, value_name = "FILE")]
    pub parent_tls_ca: Option<PathBuf>,
    /// Index of this server among the servers below its parent, from 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub rack: u16,
    /// Number of servers below the parent, 2 to 64 with one.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub racks: u16,
    /// Workers of the servers below this one, on all levels, if it has a parent and workers join those servers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub rack_workers: u32,
}

impl Default for GradientsConfig {
    fn default() -> Self {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            settings: GradientsConfig,
        }
        Line::parse_from([""]).settings
    }
}

impl GradientsConfig {
    /// The settings of a server.
    ///
    /// # Errors
    /// [`Error::Config`] names the invalid setting.
    pub fn of(config: &ServerConfig) -> Result<Self> {
        config.plugins.get(NAME)
    }

    /// Wraps these settings for a [`ServerConfig`].
    ///
    /// # Errors
    /// [`Error::Config`] for a path that is not Unicode.
    pub fn settings(&self) -> Result<PluginSettings> {
        PluginSettings::of(NAME, self)
    }

    /// Limits of each aggregator.
    pub fn limits(&self) -> AggregatorLimits {
        AggregatorLimits {
            jobs: self.gradients_jobs,
            window: self.gradients_window,
            job_bytes: self.gradients_job_bytes,
        }
    }

    /// The DPDK devices, if there are any.
    pub fn dpdk(&self) -> Option<DpdkConfig> {
        let Some(SocketAddr::V4(address)) = self.gradients else {
            return None;
        };
        (!self.gradients_devices.is_empty()).then(|| DpdkConfig {
            eal: self.gradients_eal.split_whitespace().map(str::to_owned).collect(),
            devices: self.gradients_devices.clone(),
            address,
            prefix: self.gradients_prefix,
            gateway: self.gradients_gateway,
            threads: self.gradients_threads,
            cores: self.gradients_cores.clone(),
            idle_sleep: Duration::from_micros(self.gradients_idle_sleep_us),
        })
    }

    /// Checks the settings for a server with this configuration.
    ///
    /// # Errors
    /// [`Error::Config`] with advice.
    pub fn validate(&self, config: &ServerConfig) -> Result<()> {
        for (name, value, least, most) in [
            ("gradients_jobs", self.gradients_jobs as u64, 1, 1024),
            ("gradients_job_bytes", self.gradients_job_bytes as u64, 0, 1 << 40),
            ("gradients_prefix", self.gradients_prefix.into(), 0, 32),
            ("gradients_idle_sleep_us", self.gradients_idle_sleep_us, 0, 1_000_000),
            ("gradients_threads", self.gradients_threads as u64, 1, MAX_THREADS),
            ("gradients_window", self.gradients_window.into(), 1, MAX_WINDOW),
        ] {
            within(name, value, least, most)?;
        }
        let given = self.given()?;
        let among = |names: &[&str]| given.iter().find(|given| names.contains(&given.as_str()));
        let Some(address) = self.gradients else {
            return match given.first() {
                None => Ok(()),
                Some(name) => refuse(format!(
                    "{name} is set, but gradients, the UDP address of this server, is not: set both, or leave it out"
                )),
            };
        };
        if let Some(name) = among(OF_DEVICES).filter(|_| self.gradients_devices.is_empty()) {
            return refuse(format!("{name} is for DPDK: name a device in gradients_devices, or leave it out"));
        }
        if let Some(name) = among(OF_PARENT).filter(|_| self.parent.is_none()) {
            return refuse(format!("{name} is set without a parent: set both, or leave it out"));
        }
        if !address.ip().is_loopback() && !config.trusted_network {
            return refuse(format!(
                "gradients {address} can be reached from other machines, and its datagrams are neither encrypted nor \
                 authenticated: a token and TLS protect the connections alone, and everyone on the path can read and forge \
                 datagrams; set trusted_network if the network between this server and its workers is trusted"
            ));
        }
        if self.gradients_only && !config.tables.is_empty() {
            return refuse("gradients_only is set, and so are tables: keep one");
        }
        if self.gradients_only && config.snapshot.is_some() {
            return refuse(
                "snapshot is set, but with gradients_only there is no memory to save: leave one of them out",
            );
        }
        if usize::from(address.port()) + self.gradients_threads > 1 << 16 {
            return refuse(format!(
                "{} threads need as many ports from {} up to 65535, which are not enough: choose a lower port",
                self.gradients_threads,
                address.port()
            ));
        }
        self.validate_devices(address)?;
        self.validate_parent()
    }

    /// Names of the settings that differ from their defaults.
    fn given(&self) -> Result<Vec<String>> {
        let table = |of: &Self| toml::Table::try_from(of).map_err(|error| Error::Config(error.to_string()));
        let (own, defaults) = (table(self)?, table(&Self::default())?);
        let given = own.into_iter().filter(|(name, value)| defaults.get(name) != Some(value));
        Ok(given.map(|(name, _)| name).collect())
    }

    fn validate_devices(&self, address: SocketAddr) -> Result<()> {
        if self.gradients_devices.is_empty() {
            return Ok(());
        }
        match address {
            SocketAddr::V4(address) if !address.ip().is_unspecified() && address.port() != 0 => Ok(()),
            _ => refuse(format!(
                "gradients is {address}, and a DPDK device has no address of its own: give an IPv4 address that is free in its network, and a port"
            )),
        }
    }

    fn validate_parent(&self) -> Result<()> {
        let Some(parent) = &self.parent else {
            return Ok(());
        };
        if parent.stack() != StackName::KERNEL {
            return refuse(format!("{parent}: gradients go by the kernel's UDP, write innet:// or innets://"));
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
            return refuse(format!("rack {} of {}: racks are numbered from 0", self.rack, self.racks));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn check(text: &str) -> Result<GradientsConfig> {
        crate::plug_in();
        let config = ServerConfig::from_toml(text, "server.toml", toml::Table::new())?;
        config.validate()?;
        GradientsConfig::of(&config)
    }

    #[test]
    fn sums_of_gradients_are_off_by_default_and_take_one_address() {
        assert_eq!(check("").unwrap().gradients, None);
        let config = check("gradients = \"127.0.0.1:7711\"\ngradients_window = 8").unwrap();
        assert_eq!(config.gradients.unwrap().port(), 7711);
        assert_eq!(config.limits().window, 8);
    }

    /// Token and TLS protect connections, not datagrams.
    #[test]
    fn datagrams_that_leave_the_machine_need_a_trusted_network() {
        let safe = "listen = [\"innets://127.0.0.1:1\"]\ntoken = \"x\"\ntls_cert = \"c\"\ntls_key = \"k\"\n";
        let open = format!("{safe}gradients = \"0.0.0.0:1\"\n");
        let error = check(&open).unwrap_err().to_string();
        assert!(error.contains("neither encrypted nor authenticated"), "{error}");
        assert!(error.contains("set trusted_network"), "{error}");
        check(&format!("{open}trusted_network = true")).unwrap();
        for here in ["127.0.0.1:1", "[::1]:1"] {
            check(&format!("{safe}gradients = \"{here}\"")).unwrap();
        }
    }

    #[test]
    fn devices_of_dpdk_take_the_address_of_gradients() {
        let text = "gradients = \"10.0.0.2:7711\"\ntrusted_network = true\n";
        assert_eq!(check(text).unwrap().dpdk(), None);
        let dpdk = check(&format!(
            "{text}gradients_devices = [\"net_af_packet0,iface=eth0\"]\ngradients_eal = \"--no-huge  -m 512\"\n\
             gradients_threads = 2\ngradients_cores = [2, 3]\ngradients_idle_sleep_us = 20"
        ));
        let dpdk = dpdk.unwrap().dpdk().unwrap();
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
            ("parent = \"innet://a:1\"", "parent is set, but gradients"),
            ("gradients_threads = 2", "gradients_threads is set, but gradients"),
            (&format!("{here}gradients_prefix = 16"), "gradients_prefix is for DPDK"),
            (&format!("{here}racks = 2"), "racks is set without a parent"),
            (&format!("{here}rack_workers = 2"), "rack_workers is set without a parent"),
            ("gradients = \"0.0.0.0:1\"", "neither encrypted nor"),
            (&format!("{here}gradients_cores = [1]"), "gradients_devices"),
            ("gradients = \"[::1]:7711\"\ngradients_devices = [\"net_null0\"]", "IPv4 address"),
            ("gradients = \"127.0.0.1:65530\"\ngradients_threads = 7", "lower port"),
            (&format!("{here}gradients_threads = 0"), "1 to 64"),
            (&format!("{here}gradients_jobs = 0"), "gradients_jobs is 1 to 1024, got 0"),
            (&format!("{here}gradients_window = 0"), "gradients_window is"),
            (&format!("{here}parent = \"innets://a:1\""), "parent_tls_ca"),
            (&format!("{here}parent_tls_ca = \"a\""), "without a parent"),
            (&format!("{here}parent = \"innet://a:1\"\nrack = 2\nracks = 2"), "rack 2 of 2"),
            (&format!("{here}parent = \"innet://a:1\""), "how many there are"),
            (&format!("{here}gradients_only = true\n[[tables]]\nname = \"a\"\ncolumns = []\ncapacity = 1"), "keep one"),
        ] {
            let error = check(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn every_field_has_a_flag_of_its_name() {
        let filled = GradientsConfig {
            gradients: Some(([127, 0, 0, 1], 1).into()),
            gradients_gateway: Some([10, 0, 0, 1].into()),
            parent: Some("innet://a".parse().unwrap()),
            parent_tls_ca: Some("a".into()),
            ..GradientsConfig::default()
        };
        let fields = toml::Table::try_from(filled).unwrap();
        let fields: BTreeSet<_> = fields.keys().map(String::as_str).collect();
        let command = GradientsConfig::augment_args(clap::Command::new(""));
        let flags = command.get_arguments().map(|flag| flag.get_id().as_str());
        assert_eq!(flags.collect::<BTreeSet<_>>(), fields);
    }

    #[test]
    fn a_misspelt_key_is_told_the_names_of_these_too() {
        let error = check("\ngradient_threads = 2").unwrap_err().to_string();
        for part in ["line 2", "`io_threads`", "`gradients_threads`"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
