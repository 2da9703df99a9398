//! `innet-replay size`: the servers that a job needs, from measured costs.

use std::fmt::Write as _;
use std::io::{self, Write};

use clap::Args;

use super::stats::{readable_bytes, with_separators};
use replay_core::schema::TableConfig;
use replay_core::table::Table;
use replay_link::error::{Error, Result};
use replay_server::config::{MAX_CONNECTIONS, ServerConfig, parse_bytes};

/// Costs of a server: the fit of `python -m benchmarks service_times`, rounded up (docs/explanation/scale.md).
mod cost {
    /// Microseconds of a processor for a push, a part of a batch, an update of priorities, and a read of parameters.
    pub const PUSH: f64 = 55.0;
    pub const BATCH: f64 = 50.0;
    pub const UPDATE: f64 = 45.0;
    pub const READ: f64 = 50.0;
    /// Microseconds for a pushed step, a sampled item, and a new priority.
    pub const STEP: f64 = 0.15;
    pub const ITEM: f64 = 0.2;
    pub const PRIORITY: f64 = 0.05;
    /// Microseconds for a byte that is pushed, sampled, or read as parameters.
    pub const PUSHED_BYTE: f64 = 2.3e-4;
    pub const SAMPLED_BYTE: f64 = 4e-4;
    pub const PARAMETER_BYTE: f64 = 1.4e-4;
    /// Bytes of memory for a stored step with its item, beside its data.
    pub const STORED_STEP: f64 = 100.0;
    /// Bytes of memory for a connection.
    pub const CONNECTION: f64 = 45_000.0;
}

/// Share of processors and ports that a job may take: beyond it, waits grow quickly.
const USABLE: f64 = 0.7;
/// Share of the memory that a job may take, beside the system and the server's buffers.
const USABLE_MEMORY: f64 = 0.9;

/// Compute how many servers a job needs, and what each of them does.
#[derive(Args, Clone)]
pub struct SizeFlags {
    /// Number of actors, each with one writer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    actors: u64,
    /// Steps of an actor in a second
    #[arg(long, value_name = "RATE", value_parser = positive)]
    steps_per_second: f64,
    /// Bytes of a stored step, after compression: steps and bytes of `innet-replay stats` have it
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "2KB")]
    step_bytes: u64,
    /// Steps that the memory holds
    #[arg(long, value_name = "STEPS", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    capacity: u64,
    /// Steps of one push (chunk_steps)
    #[arg(long, value_name = "STEPS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    chunk_steps: u64,
    /// Number of learners
    #[arg(long, value_name = "N", default_value_t = 1)]
    learners: u64,
    /// Batches of a learner in a second, from an iterator (`batches`), each with an update of its priorities
    #[arg(long, value_name = "RATE", value_parser = positive, default_value = "20")]
    batches_per_second: f64,
    /// Items of a batch
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Stored steps of an item, whose bytes are sent: 5 for stacks of four frames with the next one
    #[arg(long, value_name = "STEPS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    item_steps: u64,
    /// Bytes of the parameters that actors read
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "7MB")]
    parameter_bytes: u64,
    /// Seconds between an actor's reads of new parameters
    #[arg(long, value_name = "SECONDS", value_parser = positive, default_value = "10")]
    parameter_every: f64,
    /// Processors of a server, each with an I/O thread
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..))]
    processors: u64,
    /// Memory of a server
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "64GiB")]
    server_bytes: u64,
    /// Gigabits of a server's network port in a second
    #[arg(long, value_name = "RATE", value_parser = positive, default_value = "25")]
    gigabits: f64,
}

impl SizeFlags {
    /// Bytes of the batches of one learner in a second.
    fn batch_bytes(&self) -> f64 {
        let items = self.batches_per_second * self.batch as f64;
        items * self.step_bytes as f64 * self.item_steps as f64
    }
}

fn positive(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("it has to be a number above 0".to_owned()),
    }
}

/// Prints the size of a job.
///
/// # Errors
/// [`Error::Config`] if no number of servers carries the job.
pub fn run(flags: &SizeFlags) -> Result<()> {
    let size = Size::of(flags)?;
    // Ignores a broken pipe (`| head`).
    let _ = io::stdout().write_all(size.lines(flags).as_bytes());
    Ok(())
}

/// What one server of several does. Rates are for a second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Load {
    processors: f64,
    received: f64,
    sent: f64,
    /// Stored steps, and bytes of memory.
    steps: f64,
    memory: f64,
    connections: f64,
}

impl Load {
    /// Load of each of `servers`. Every learner asks every server for its part of each batch; an actor reads parameters from its writer's
    /// server.
    fn of(flags: &SizeFlags, servers: u64) -> Load {
        let share = 1.0 / servers as f64;
        let (actors, learners) = (flags.actors as f64, flags.learners as f64);
        let step_bytes = flags.step_bytes as f64;
        let steps = actors * flags.steps_per_second * share;
        let pushes = steps / flags.chunk_steps as f64;
        let batches = learners * flags.batches_per_second;
        let items = batches * flags.batch as f64 * share;
        let sampled = learners * flags.batch_bytes() * share;
        let reads = actors / flags.parameter_every * share;
        let parameters = reads * flags.parameter_bytes as f64;
        let stored = flags.capacity as f64 * share;
        // Each client has a connection to every server; writers, and channels of learners, have their own.
        let connections = actors + actors * share + 4.0 * learners;
        let microseconds = pushes * cost::PUSH
            + steps * (cost::STEP + step_bytes * cost::PUSHED_BYTE)
            + batches * (cost::BATCH + cost::UPDATE)
            + items * (cost::ITEM + cost::PRIORITY)
            + sampled * cost::SAMPLED_BYTE
            + reads * cost::READ
            + parameters * cost::PARAMETER_BYTE;
        Load {
            processors: 1e-6 * microseconds,
            received: steps * step_bytes,
            sent: sampled + parameters,
            steps: stored,
            memory: stored * (step_bytes + cost::STORED_STEP) + connections * cost::CONNECTION,
            connections,
        }
    }

    /// The parts of a server that the load uses, each as a share of what may be used.
    fn shares(&self, flags: &SizeFlags) -> [(&'static str, f64); 6] {
        let port = USABLE * flags.gigabits * 1e9 / 8.0;
        [
            ("processors", self.processors / (USABLE * flags.processors as f64)),
            ("receiving", self.received / port),
            ("sending", self.sent / port),
            ("memory", self.memory / (USABLE_MEMORY * flags.server_bytes as f64)),
            ("the table", self.steps / TableConfig::MAX_CAPACITY as f64),
            ("connections", self.connections / MAX_CONNECTIONS as f64),
        ]
    }

    /// The part that saturates first.
    fn fullest(&self, flags: &SizeFlags) -> (&'static str, f64) {
        let shares = self.shares(flags);
        let most = |a: (&'static str, f64), b: (&'static str, f64)| if b.1 > a.1 { b } else { a };
        shares.into_iter().fold(shares[0], most)
    }
}

/// The smallest number of servers that carries a job.
#[derive(Debug)]
struct Size {
    servers: u64,
    load: Load,
}

/// Most servers that were simulated.
const MOST_SERVERS: u64 = 64;

impl Size {
    fn of(flags: &SizeFlags) -> Result<Size> {
        for servers in 1..=MOST_SERVERS {
            let load = Load::of(flags, servers);
            if load.fullest(flags).1 <= 1.0 {
                return Ok(Size { servers, load });
            }
        }
        let load = Load::of(flags, MOST_SERVERS);
        let (part, share) = load.fullest(flags);
        let advice = match part {
            "memory" | "the table" => "lower --capacity or --step-bytes",
            "connections" => "use fewer actors: each has one to every server",
            "receiving" => "lower the rate of steps or --step-bytes",
            _ => "lower the rates, or --batch and --parameter-bytes",
        };
        let share = if share < 1_000.0 { format!("{share:.1}") } else { "over 1,000".to_owned() };
        Err(Error::Config(format!(
            "{MOST_SERVERS} servers do not carry this: {part} would take {share} times what each has. Divide the job into several memories, \
             or {advice}"
        )))
    }

    fn lines(&self, flags: &SizeFlags) -> String {
        let Size { servers, load } = self;
        let bytes = |number: f64| readable_bytes(number as u64);
        let mut text = String::new();
        let (part, share) = load.fullest(flags);
        let rows = [
            ("servers", format!("{servers}")),
            ("processors", format!("{:.2} of {}", load.processors, flags.processors)),
            ("receives", format!("{} a second", bytes(load.received))),
            ("sends", format!("{} a second", bytes(load.sent))),
            ("memory", bytes(load.memory)),
            ("connections", with_separators(load.connections as u64)),
            ("a learner", format!("receives {} a second", bytes(flags.batch_bytes()))),
            ("fullest", format!("{part}, {:.0} % of what may be used", 100.0 * share)),
        ];
        for (name, value) in rows {
            let _ = writeln!(text, "{name:<12} {value}");
        }
        let default = ServerConfig::default();
        let mut settings = Vec::new();
        // By default a server has an I/O thread for every two processors.
        if load.processors > 0.5 * USABLE * flags.processors as f64 {
            settings.push(format!("--io-threads {}", flags.processors));
        }
        // Tables and parameters have what is left beside frames on their way in.
        let table = Size::table(load.steps.ceil() as u64, flags);
        let kept = table.capacity_bytes + Table::index_bytes(&table) + 2 * flags.parameter_bytes;
        let received = default.memory_limits().receive_bytes;
        // At least three frames, of which `received` is two.
        settings.push(format!("--max-bytes {}", (kept + received).max(received / 2 * 3)));
        if load.connections > f64::from(default.max_connections) {
            let connections = 2f64.powf(load.connections.log2().ceil());
            settings.push(format!("--max-connections {connections}"));
        }
        let TableConfig { capacity, capacity_bytes, .. } = table;
        let _ = writeln!(
            text,
            "Make the table with capacity={capacity} and capacity_bytes={capacity_bytes} at each server: without the second it reserves \
             space for steps that do not pack.\nStart each server with {}.",
            settings.join(" ")
        );
        text
    }

    /// A server's table of so many steps.
    fn table(capacity: u64, flags: &SizeFlags) -> TableConfig {
        let capacity_bytes = capacity * flags.step_bytes;
        TableConfig { capacity_bytes, ..TableConfig::new("", Vec::new(), capacity) }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use replay_core::schema::{Codec, Column, Dtype};

    use super::*;
    use replay_server::server::Server;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: SizeFlags,
    }

    fn flags(line: &str) -> SizeFlags {
        let words = std::iter::once("size").chain(line.split(' '));
        let line = Line::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
        line.flags
    }

    #[test]
    fn a_small_job_needs_one_server_of_the_default_size() {
        let flags = flags("--actors 8 --steps-per-second 100");
        let size = Size::of(&flags).unwrap();
        assert_eq!(size.servers, 1);
        let text = size.lines(&flags);
        assert!(text.starts_with("servers      1\n"), "{text}");
        assert!(!text.contains("--max-connections"), "{text}");
    }

    /// A server's table and limit are those that this command names.
    #[test]
    fn a_server_takes_the_settings() {
        let flags = flags("--actors 8 --steps-per-second 100 --step-bytes 200B --capacity 500000");
        let text = Size::of(&flags).unwrap().lines(&flags);
        let number = |before: &str| {
            let rest = text.split_once(before).unwrap_or_else(|| panic!("{text}")).1;
            let digits = rest.split_once(|next: char| !next.is_ascii_digit()).unwrap().0;
            digits.parse::<u64>().unwrap()
        };
        let column =
            Column { name: "frame".into(), dtype: Dtype::Uint8, shape: vec![84, 84], codec: Codec::Lz4, finite: true };
        let of = |capacity_bytes| {
            let table = TableConfig::new("t", vec![column.clone()], number("capacity="));
            let tables = vec![TableConfig { capacity_bytes, ..table }];
            Server::check(&ServerConfig { tables, max_bytes: number("--max-bytes "), ..ServerConfig::default() })
        };
        of(number("capacity_bytes=")).unwrap();
        assert!(of(0).unwrap_err().to_string().contains("set capacity_bytes"));
    }

    #[test]
    fn the_fullest_part_decides_the_number_of_servers() {
        let line = "--actors 1000 --steps-per-second 60 --parameter-every 60";
        for (more, part) in [
            ("--processors 1 --chunk-steps 1", "processors"),
            ("--capacity 60000000 --server-bytes 8GiB", "memory"),
            ("--capacity 100000000 --step-bytes 100", "the table"),
            ("--step-bytes 30KB --gigabits 5", "receiving"),
            ("--learners 8 --gigabits 10", "sending"),
        ] {
            let flags = flags(&format!("{line} {more}"));
            let size = Size::of(&flags).unwrap();
            assert!(size.servers > 1, "{more}: {size:?}");
            let fewer = Load::of(&flags, size.servers - 1).fullest(&flags);
            assert_eq!(fewer.0, part, "{more}: {size:?}");
            assert!(fewer.1 > 1.0, "{more}: {size:?}");
        }
    }

    #[test]
    fn a_job_that_no_number_of_servers_carries_is_an_error() {
        let flags = flags("--actors 1000000 --steps-per-second 1000");
        let error = Size::of(&flags).unwrap_err().to_string();
        assert!(error.contains("64 servers do not carry this: "), "{error}");
        assert!(error.contains("Divide the job"), "{error}");
    }

    #[test]
    fn more_connections_than_the_default_are_a_setting_of_the_servers() {
        let flags = flags("--actors 10000 --steps-per-second 60 --parameter-every 60");
        let text = Size::of(&flags).unwrap().lines(&flags);
        assert!(text.contains(" --max-connections 32768."), "{text}");
    }
}
