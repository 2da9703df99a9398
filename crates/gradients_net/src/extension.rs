//! The plug-in: sums of gradients as an extension of a server.

use std::net::SocketAddr;
use std::sync::Arc;

use MetricType::{Counter, Gauge};
use bytes::Bytes;
use event_listener::EventListener;
use serde_json::Value;

use gradients::{AggregatorCounters, FrameCounters};
use replay_core::table::Attempt;
use replay_link::error::{Error, Result};
use replay_server::config::ServerConfig;
use replay_server::plugin::{
    self, Extension, ExtensionConnection, Finding, MachineFiles, Metric, MetricGroup, MetricType, Plugin, SettingsType,
};

use crate::aggregators::{Aggregators, ParentServer, ParentSession};
use crate::config::GradientsConfig;
use crate::doctor;
use crate::message::{self, NAME};

/// Plugs the extension in.
pub fn plug_in() {
    plugin::plug_in(&Plug);
}

/// The plug-in.
struct Plug;

impl Plugin for Plug {
    fn name(&self) -> &'static str {
        NAME
    }

    fn settings(&self) -> Option<SettingsType> {
        Some(SettingsType::of::<GradientsConfig>())
    }

    fn absent(&self) -> String {
        "this server does not sum gradients: start it with --gradients IP:PORT".to_owned()
    }

    fn log_targets(&self) -> &'static [&'static str] {
        &["gradients", env!("CARGO_CRATE_NAME")]
    }

    fn check(&self, config: &ServerConfig) -> Result<()> {
        GradientsConfig::of(config)?.validate(config)
    }

    fn check_files(&self, config: &ServerConfig) -> Result<()> {
        ParentServer::of(config, &GradientsConfig::of(config)?).map(drop)
    }

    fn start(&self, config: &ServerConfig) -> Result<Option<Arc<dyn Extension>>> {
        let aggregators = Aggregators::start(config, &GradientsConfig::of(config)?)?;
        Ok(aggregators.map(|aggregators| Arc::new(aggregators) as Arc<dyn Extension>))
    }

    fn trust(&self, config: &ServerConfig) -> Option<&'static str> {
        let own = GradientsConfig::of(config).ok()?;
        own.gradients?;
        Some("datagrams of gradients are neither encrypted nor authenticated")
    }

    fn findings(&self, config: &ServerConfig, machine: &MachineFiles) -> Result<Vec<Finding>> {
        Ok(doctor::findings(&GradientsConfig::of(config)?, machine))
    }
}

impl Extension for Aggregators {
    fn name(&self) -> &'static str {
        NAME
    }

    fn connect(self: Arc<Self>) -> Box<dyn ExtensionConnection> {
        Box::new(Membership { aggregators: self, parent: None, joined: None })
    }

    fn address(&self) -> Option<String> {
        Some(Aggregators::address(self).to_string())
    }

    fn instead_of_memory(&self) -> Option<&'static str> {
        self.only_sums.then_some(
            "this server only sums gradients: start it without --gradients-only for a replay memory and parameters",
        )
    }

    fn stats(&self) -> Value {
        Aggregators::stats(self)
    }

    fn metrics(&self) -> &'static [MetricGroup] {
        GROUPS
    }
}

/// A connection's membership in a job.
struct Membership {
    aggregators: Arc<Aggregators>,
    /// The job's session at the parent, while the connection waits for the job and while it is a member.
    parent: Option<Arc<ParentSession>>,
    /// Address of the aggregator, and session there.
    joined: Option<(SocketAddr, u32)>,
}

impl ExtensionConnection for Membership {
    fn attempt(&mut self, message: &Bytes) -> Result<Attempt<Bytes>> {
        let request = message::read(message)?;
        if self.joined.is_some() {
            let reason = "this connection has joined a gradient job already: join over one connection for each worker";
            return Err(replay_wire::Error::Protocol(reason.to_owned()).into());
        }
        let joined = self.aggregators.join(&request, &mut self.parent);
        let joined = match joined.map_err(Error::from)? {
            Attempt::Ready(joined) => joined,
            Attempt::Blocked(reason) => return Ok(Attempt::Blocked(reason)),
        };
        self.joined = Some((joined.address, joined.session));
        message::write(&joined).map(Attempt::Ready)
    }

    fn changed(&self) -> EventListener {
        self.aggregators.changed()
    }

    /// Not in `Drop`: a server that ends must not report its workers as missing.
    fn end(&mut self) {
        if let Some((at, session)) = self.joined.take() {
            self.aggregators.leave(at, session);
        }
        self.parent = None;
    }
}

/// All groups.
pub const GROUPS: &[MetricGroup] = &[
    MetricGroup { prefix: "gradients", pointer: "", label: None, metrics: GRADIENTS },
    MetricGroup { prefix: "gradients", pointer: "", label: None, metrics: &counters(AggregatorCounters::HELP) },
    MetricGroup { prefix: "gradients_job", pointer: "/jobs", label: Some("job"), metrics: JOB },
    MetricGroup {
        prefix: "gradients_frames",
        pointer: "/frames",
        label: None,
        metrics: &counters(FrameCounters::HELP),
    },
];

const fn counters<const N: usize>(help: [(&'static str, &'static str); N]) -> [Metric; N] {
    let mut metrics = [(Counter, "", ""); N];
    let mut at = 0;
    while at < N {
        metrics[at] = (Counter, help[at].0, help[at].1);
        at += 1;
    }
    metrics
}

const GRADIENTS: &[Metric] =
    &[(Gauge, "threads", "Threads that sum gradients"), (Gauge, "max_bytes", "Limit of the bytes of all jobs")];

const JOB: &[Metric] = &[
    (Gauge, "workers", "Workers at this server"),
    (Gauge, "world", "Workers of the job"),
    (Gauge, "joined", "Workers at this server that have joined"),
    (Gauge, "threshold", "Contributions that make a sum"),
    (Gauge, "round", "Newest round with a contribution"),
    (Gauge, "halted", "Whether nothing is summed"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_trusted_with_datagrams() {
        let settings = GradientsConfig { gradients: Some(([127, 0, 0, 1], 0).into()), ..GradientsConfig::default() };
        let config = ServerConfig { plugins: settings.settings().unwrap(), ..ServerConfig::default() };
        assert!(Plug.trust(&config).unwrap().contains("datagrams"));
        assert_eq!(Plug.trust(&ServerConfig::default()), None);
    }
}
