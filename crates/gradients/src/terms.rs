//! What the workers of a job agree on, and what a request to join has to be.

use std::time::Duration;

use super::arithmetic::Arithmetic;
use super::packet::{ALL_SEGMENTS, MAX_SEGMENT_VALUES};
use super::{Asynchronous, JoinJob};
use replay_core::error::{Error, Result};

/// Workers have a bit each.
const MAX_WORKERS: u16 = 64;
/// Bytes of a job's or a worker's name.
const MAX_NAME: usize = 64;

/// What the workers of a job agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Workers here, or racks.
    pub workers: u16,
    /// Whether those here are racks: servers that have workers of their own.
    pub racks: bool,
    /// Workers in all.
    pub world: u32,
    /// How it adds up.
    pub arithmetic: Arithmetic,
    /// Values of a full segment.
    pub segment_values: u16,
    /// How long a segment may wait.
    pub deadline: Duration,
    /// Where workers do not wait for each other.
    pub asynchronous: Option<Asynchronous>,
}

impl Terms {
    /// Those that a worker asks for, or a rack.
    pub fn of(request: &JoinJob, racks: bool) -> Self {
        Terms {
            workers: request.workers,
            racks,
            world: request.world,
            arithmetic: request.arithmetic,
            segment_values: request.segment_values,
            deadline: request.deadline,
            asynchronous: request.asynchronous,
        }
    }

    /// What of it is otherwise in `other`, with both values.
    fn differences(&self, other: &Terms) -> String {
        let own = self.named();
        let pairs = own.iter().zip(other.named());
        let differ = pairs.filter(|(mine, theirs)| *mine != theirs);
        let said =
            differ.map(|((name, mine), (_, theirs))| format!("{name}: {mine}, not {theirs}"));
        said.collect::<Vec<_>>().join("; ")
    }

    fn named(&self) -> [(&'static str, String); 6] {
        let asynchronous = self.asynchronous.map_or("no".to_owned(), |a| {
            let (values, threshold, staleness) = (a.values, a.threshold, a.staleness);
            format!("of {values} values, threshold {threshold}, staleness {staleness}")
        });
        [
            (
                "places at its server",
                format!("{} ({}s)", self.workers, who(self.racks)),
            ),
            ("world", self.world.to_string()),
            ("arithmetic", format!("{:?}", self.arithmetic)),
            ("segment_values", self.segment_values.to_string()),
            (
                "deadline in seconds",
                self.deadline.as_secs_f64().to_string(),
            ),
            ("asynchronous", asynchronous),
        ]
    }

    /// Refuses `request`, which asks for `asked`, where that is not the same.
    ///
    /// # Errors
    /// [`Error::Config`], which names what differs.
    pub fn admit(&self, request: &JoinJob, asked: &Terms) -> Result<()> {
        if self == asked {
            return Ok(());
        }
        let who = who(asked.racks);
        Err(Error::Config(format!(
            "{who} {} joins the gradient job {:?} with other terms than the first one ({}): give all workers the same",
            request.worker,
            request.job,
            asked.differences(self)
        )))
    }

    /// Places of its segments, and the depth of each: `window` places, where it is not asynchronous.
    pub fn places(&self, window: u32) -> (u32, usize) {
        match &self.asynchronous {
            None => (window, 2),
            Some(terms) => (terms.segments(self.segment_values), terms.depth()),
        }
    }

    /// Bytes of a full segment.
    pub fn stride(&self) -> usize {
        4 * usize::from(self.segment_values)
    }
}

/// What has a place in a job.
pub fn who(is_rack: bool) -> &'static str {
    match is_rack {
        true => "rack",
        false => "worker",
    }
}

/// Refuses what does not make sense.
///
/// # Errors
/// [`Error::Config`], which says why.
pub fn check(request: &JoinJob) -> Result<()> {
    let refuse = |reason: String| Err(Error::Config(format!("a gradient job: {reason}")));
    let JoinJob {
        job,
        worker,
        workers,
        world,
        name,
        arithmetic,
        segment_values,
        deadline,
        asynchronous,
    } = request;
    if job.is_empty() || job.len() > MAX_NAME || name.len() > MAX_NAME {
        return refuse(format!(
            "the names of job and worker have at most {MAX_NAME} bytes, and the job's at least one"
        ));
    }
    if *workers == 0 || *workers > MAX_WORKERS {
        return refuse(format!(
            "an aggregator takes 1 to {MAX_WORKERS} workers, not {workers}: put aggregators with a parent between"
        ));
    }
    if worker >= workers {
        return refuse(format!(
            "worker {worker} of {workers}: numbers begin with 0"
        ));
    }
    if *world < u32::from(*workers) {
        return refuse(format!(
            "{world} workers in all, but {workers} at this aggregator"
        ));
    }
    if *segment_values == 0 || usize::from(*segment_values) > MAX_SEGMENT_VALUES {
        return refuse(format!(
            "a segment has 1 to {MAX_SEGMENT_VALUES} values, not {segment_values}"
        ));
    }
    if deadline.is_zero() {
        return refuse("the deadline has to be longer than 0".to_owned());
    }
    let Some(terms) = asynchronous else {
        return Ok(());
    };
    if *arithmetic != Arithmetic::Float || *world != u32::from(*workers) {
        return refuse(
            "an asynchronous one adds up float32, at an aggregator without a parent".to_owned(),
        );
    }
    if terms.threshold == 0 || terms.threshold > *workers {
        return refuse(format!(
            "the threshold is from 1 to the number of workers ({workers}), not {}",
            terms.threshold
        ));
    }
    let segments = terms.segments(*segment_values);
    if terms.values == 0 || segments >= ALL_SEGMENTS {
        return refuse(format!(
            "an asynchronous one sums vectors of at least one value and fewer than {ALL_SEGMENTS} segments, not {segments}"
        ));
    }
    Ok(())
}
