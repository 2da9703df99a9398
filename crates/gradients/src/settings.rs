//! Settings that all workers of a job share, and the check of a request to join.

use std::time::Duration;

use super::arithmetic::Arithmetic;
use super::packet::{ALL_SEGMENTS, MAX_SEGMENT_VALUES};
use super::{Asynchronous, Error, JoinJob, Result};

/// Most workers of an aggregator: a bitmap of 64 bits has the contributors of a segment.
const MAX_WORKERS: u16 = 64;
/// Longest name of a job or a worker, in bytes.
const MAX_NAME: usize = 64;

/// Settings of a job, which all its workers pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobSettings {
    /// Members of this aggregator: workers or racks.
    pub workers: u16,
    /// Whether the members are racks: aggregators with workers of their own.
    pub racks: bool,
    /// Workers of the job.
    pub world: u32,
    /// Number format of the sums.
    pub arithmetic: Arithmetic,
    /// Values of a full segment.
    pub segment_values: u16,
    /// Longest time that a segment waits for a member.
    pub deadline: Duration,
    /// Settings of an asynchronous job.
    pub asynchronous: Option<Asynchronous>,
}

impl JobSettings {
    /// Settings in the request of a worker, or of a rack.
    pub fn of(request: &JoinJob, racks: bool) -> Self {
        JobSettings {
            workers: request.workers,
            racks,
            world: request.world,
            arithmetic: request.arithmetic,
            segment_values: request.segment_values,
            deadline: request.deadline,
            asynchronous: request.asynchronous,
        }
    }

    /// Settings that differ in `other`, with both values.
    fn differences(&self, other: &JobSettings) -> String {
        let own = self.named();
        let pairs = own.iter().zip(other.named());
        let differ = pairs.filter(|(mine, theirs)| *mine != theirs);
        let texts = differ.map(|((name, mine), (_, theirs))| format!("{name}: {mine}, not {theirs}"));
        texts.collect::<Vec<_>>().join("; ")
    }

    fn named(&self) -> [(&'static str, String); 6] {
        let asynchronous = self.asynchronous.map_or("no".to_owned(), |a| {
            let (values, threshold, staleness) = (a.values, a.threshold, a.staleness);
            format!("of {values} values, threshold {threshold}, staleness {staleness}")
        });
        [
            ("members of its server", format!("{} ({}s)", self.workers, role(self.racks))),
            ("world", self.world.to_string()),
            ("arithmetic", self.arithmetic.name().to_owned()),
            ("segment_values", self.segment_values.to_string()),
            ("deadline in seconds", self.deadline.as_secs_f64().to_string()),
            ("asynchronous", asynchronous),
        ]
    }

    /// Refuses `request` if its settings, `requested`, differ.
    ///
    /// # Errors
    /// [`Error::Config`], which names the differences.
    pub fn check_same(&self, request: &JoinJob, requested: &JobSettings) -> Result<()> {
        if self == requested {
            return Ok(());
        }
        let role = role(requested.racks);
        Err(Error::Config(format!(
            "{role} {} joins the gradient job {:?} with other settings than the first one ({}): pass identical settings in all workers",
            request.worker,
            request.job,
            requested.differences(self)
        )))
    }

    /// Entries of the segment table, and segments that each holds: `window` entries, unless the job is asynchronous.
    pub fn table_size(&self, window: u32) -> (u32, usize) {
        match &self.asynchronous {
            None => (window, 2),
            Some(settings) => (settings.segments(self.segment_values), settings.depth()),
        }
    }

    /// Bytes of a full segment.
    pub fn segment_bytes(&self) -> usize {
        4 * usize::from(self.segment_values)
    }
}

/// Name of a member's role.
pub fn role(is_rack: bool) -> &'static str {
    match is_rack {
        true => "rack",
        false => "worker",
    }
}

/// Refuses a request with invalid settings.
///
/// # Errors
/// [`Error::Config`], with the reason.
pub fn check(request: &JoinJob) -> Result<()> {
    let refuse = |reason: String| Err(Error::Config(format!("a gradient job: {reason}")));
    let (worker, workers, world) = (request.worker, request.workers, request.world);
    if request.job.is_empty() || request.job.len() > MAX_NAME || request.name.len() > MAX_NAME {
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
    if request.segment_values == 0 || usize::from(request.segment_values) > MAX_SEGMENT_VALUES {
        return refuse(format!("segment_values is 1 to {MAX_SEGMENT_VALUES}, got {}", request.segment_values));
    }
    if request.deadline.is_zero() {
        return refuse("the deadline has to be longer than 0".to_owned());
    }
    let Some(settings) = request.asynchronous else {
        return Ok(());
    };
    if request.arithmetic != Arithmetic::Float || world != u32::from(workers) {
        return refuse("an asynchronous job adds up float32, at an aggregator without a parent".to_owned());
    }
    if settings.threshold == 0 || settings.threshold > workers {
        return refuse(format!(
            "the threshold is from 1 to the number of workers ({workers}), not {}",
            settings.threshold
        ));
    }
    let segments = settings.segments(request.segment_values);
    if settings.values == 0 || segments >= ALL_SEGMENTS {
        return refuse(format!(
            "values is 1 or more, in fewer than {ALL_SEGMENTS} segments of segment_values; got {} in {segments} segments",
            settings.values
        ));
    }
    Ok(())
}
