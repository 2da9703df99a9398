use std::net::SocketAddr;
use std::time::Duration;

use super::*;
use gradients::{Arithmetic, Asynchronous, JoinJob, Ticket};

/// Joins a gradient job until the connection ends.
#[derive(Debug, Clone, PartialEq)]
pub struct JoinGradients {
    /// The job and the worker's part in it.
    pub job: JoinJob,
    /// For a server that joins its parent: the number of its workers.
    pub below: Option<u32>,
}

/// Membership in a gradient job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientsJoined {
    /// UDP address of the aggregator; all zeros for the IP address mean the server's own address.
    pub address: SocketAddr,
    /// The worker's session and key at the aggregator.
    pub ticket: Ticket,
}

call!(JoinGradients: Learner => GradientsJoined);

same_variants!(Arithmetic: Float Fixed);

same_fields! {
    join_gradients: Asynchronous { values, threshold, staleness }
    gradients_joined: Ticket { session, key, round, window }
}

impl Message for JoinGradients {
    type Struct = wire::join_gradients::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        let job = JoinJob {
            job: Field::read(from.get_job())?,
            worker: from.get_worker(),
            workers: from.get_workers(),
            world: from.get_world(),
            name: Field::read(from.get_name())?,
            arithmetic: Field::read(from.get_arithmetic())?,
            segment_values: from.get_segment_values(),
            deadline: Duration::from_millis(from.get_deadline_ms().into()),
            asynchronous: match from.get_values() {
                0 => None,
                _ => Some(Asynchronous::read(from, rest)?),
            },
        };
        Ok(JoinGradients {
            job,
            below: Some(from.get_below()).filter(|&workers| workers > 0),
        })
    }

    fn write(&self, mut out: wire::join_gradients::Builder<'_>) -> Result<()> {
        let job = &self.job;
        out.set_below(self.below.unwrap_or(0));
        out.set_job(&job.job);
        out.set_worker(job.worker);
        out.set_workers(job.workers);
        out.set_world(job.world);
        out.set_name(&job.name);
        out.set_arithmetic(job.arithmetic.into());
        out.set_segment_values(job.segment_values);
        let deadline_ms = job.deadline.as_nanos().div_ceil(1_000_000);
        out.set_deadline_ms(u32::try_from(deadline_ms).unwrap_or(u32::MAX));
        job.asynchronous.map_or(Ok(()), |terms| terms.write(out))
    }
}

impl Message for GradientsJoined {
    type Struct = wire::gradients_joined::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        let address = String::read(from.get_address())?;
        let address = address.parse().map_err(|error| {
            Error::Protocol(format!(
                "{address:?} is no address of an aggregator: {error}"
            ))
        })?;
        if from.get_window() == 0 {
            return Err(Error::Protocol("a window of no segments".to_owned()));
        }
        Ok(GradientsJoined {
            address,
            ticket: Ticket::read(from, rest)?,
        })
    }

    fn write(&self, mut out: wire::gradients_joined::Builder<'_>) -> Result<()> {
        out.set_address(self.address.to_string());
        self.ticket.write(out)
    }
}
