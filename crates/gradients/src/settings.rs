//! Settings of DPDK, and those that all members of a job share, with the check of a request to join.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use super::arithmetic::Arithmetic;
use super::packet::{ALL_SEGMENTS, MAX_SEGMENT_VALUES};
use super::{Error, JoinJob, Result};

/// Most workers of an aggregator: a bitmap of 64 bits has the contributors of a segment.
pub const MAX_WORKERS: u16 = 64;
/// Longest name of a job or a worker, in bytes.
const MAX_NAME: usize = 64;

/// DPDK devices, and the IPv4 interface that they form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DpdkConfig {
    /// Arguments for DPDK's environment (EAL), the same for all devices of a process: `--no-huge`, `-m`, `256`.
    pub eal: Vec<String>,
    /// Devices, by name and arguments as `--vdev` takes them (`net_af_packet0,iface=eth0`), or by PCI address. At least one; an aggregator
    /// with two is a switch.
    pub devices: Vec<String>,
    /// IPv4 address of the interface, not assigned in the kernel, and UDP port of the first thread.
    pub address: SocketAddrV4,
    /// Length of the network prefix in bits, at most 32.
    pub prefix: u8,
    /// Router to other networks.
    pub gateway: Option<Ipv4Addr>,
    /// Threads of an aggregator. Each has a UDP port, from the port of `address` upwards, and takes a core unless `idle_sleep` is set.
    pub threads: usize,
    /// Core of each thread; empty to let the operating system choose.
    pub cores: Vec<usize>,
    /// Sleep of an idle thread between two polls; 0 means busy polling.
    pub idle_sleep: Duration,
}

impl JoinJob {
    /// Name of the member's role.
    pub(super) fn role(&self) -> &'static str {
        match self.below {
            Some(_) => "rack",
            None => "worker",
        }
    }

    /// The settings that all members share, with their names.
    fn shared(&self) -> [(&'static str, String); 6] {
        let asynchronous = self.asynchronous.map_or("no".to_owned(), |a| {
            let (values, threshold, staleness) = (a.values, a.threshold, a.staleness);
            format!("of {values} values, threshold {threshold}, staleness {staleness}")
        });
        [
            ("members of its server", format!("{} ({}s)", self.workers, self.role())),
            ("world", self.world.to_string()),
            ("arithmetic", self.arithmetic.name().to_owned()),
            ("segment_values", self.segment_values.to_string()),
            ("deadline in seconds", self.deadline.as_secs_f64().to_string()),
            ("asynchronous", asynchronous),
        ]
    }

    /// Refuses a request whose settings differ from those of the job's `first` request.
    ///
    /// # Errors
    /// [`Error::Config`], which names the differences.
    pub fn check_same(&self, first: &JoinJob) -> Result<()> {
        let differences: Vec<String> = self
            .shared()
            .iter()
            .zip(first.shared())
            .filter(|(own, others)| *own != others)
            .map(|((name, own), (_, others))| format!("{name}: {own}, not {others}"))
            .collect();
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::Config(format!(
            "{} {} joins the gradient job {:?} with other settings than the first one ({}): pass identical settings in all workers",
            self.role(),
            self.worker,
            self.job,
            differences.join("; ")
        )))
    }

    /// Entries of the segment table, and segments that each holds: `window` entries, unless the job is asynchronous.
    pub(super) fn table_size(&self, window: u32) -> (u32, usize) {
        match &self.asynchronous {
            None => (window, 2),
            Some(settings) => (settings.segments(self.segment_values), settings.depth()),
        }
    }

    /// Bytes of a full segment.
    pub(super) fn segment_bytes(&self) -> usize {
        4 * usize::from(self.segment_values)
    }

    /// Refuses invalid settings.
    ///
    /// # Errors
    /// [`Error::Config`], with the reason.
    pub fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Config(format!("a gradient job: {reason}")));
        let (worker, workers, world) = (self.worker, self.workers, self.world);
        if self.job.is_empty() || self.job.len() > MAX_NAME || self.name.len() > MAX_NAME {
            return refuse(format!(
                "the names of job and worker have at most {MAX_NAME} bytes, and the job's at least one"
            ));
        }
        if workers == 0 || workers > MAX_WORKERS {
            return refuse(format!(
                "an aggregator takes 1 to {MAX_WORKERS} workers, not {workers}: for more, start a server for each rack, with --parent"
            ));
        }
        if worker >= workers {
            return refuse(format!("worker {worker} of {workers}: numbers begin with 0"));
        }
        if world < u32::from(workers) {
            return refuse(format!("a world of {world} workers, but {workers} at this aggregator"));
        }
        if self.segment_values == 0 || usize::from(self.segment_values) > MAX_SEGMENT_VALUES {
            return refuse(format!("segment_values is 1 to {MAX_SEGMENT_VALUES}, got {}", self.segment_values));
        }
        if self.deadline.is_zero() {
            return refuse("the deadline has to be longer than 0".to_owned());
        }
        let Some(settings) = self.asynchronous else {
            return Ok(());
        };
        if self.arithmetic != Arithmetic::Float || world != u32::from(workers) {
            return refuse("an asynchronous job adds up float32, at an aggregator without a parent".to_owned());
        }
        if settings.threshold == 0 || settings.threshold > workers {
            return refuse(format!(
                "the threshold is from 1 to the number of workers ({workers}), not {}",
                settings.threshold
            ));
        }
        let segments = settings.segments(self.segment_values);
        if settings.values == 0 || segments >= ALL_SEGMENTS {
            return refuse(format!(
                "values is 1 or more, in fewer than {ALL_SEGMENTS} segments of segment_values; got {} in {segments} segments",
                settings.values
            ));
        }
        Ok(())
    }
}
