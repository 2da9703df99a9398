//! Programs that sample each table. Learners of different runs would silently learn from each other's steps, so the log warns of the second
//! program.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use serde_json::Value;

use crate::client::program;
use base::sync::lock;

/// Programs with an open connection that has sampled a table, by the table's name.
#[derive(Default)]
pub struct Samplers(Mutex<HashMap<String, TableSamplers>>);

#[derive(Default)]
struct TableSamplers {
    /// Connections of each program, and the address of its first one.
    programs: BTreeMap<u64, (u32, String)>,
    /// The warning was logged.
    warned: bool,
}

impl Samplers {
    /// A connection of `program`, 0 for an unknown one, from the address `peer`.
    pub fn connection<'a>(&'a self, program: u64, peer: &'a str) -> ConnectionSamples<'a> {
        ConnectionSamples { samplers: self, program, peer, tables: Vec::new() }
    }

    /// Adds `sampled_by`, the programs that sample it, to the statistics of each table.
    pub fn add_stats(&self, tables: &mut Value) {
        let samplers = lock(&self.0);
        for (name, stats) in tables.as_object_mut().into_iter().flatten() {
            let of_table = samplers.get(name).into_iter();
            let programs = of_table.flat_map(|table| table.programs.keys());
            stats["sampled_by"] = programs.map(|&number| program::listed(number)).collect();
        }
    }

    fn add(&self, table: &str, program: u64, peer: &str) {
        let mut samplers = lock(&self.0);
        let of_table = samplers.entry(table.to_owned()).or_default();
        let other = of_table.programs.iter().find(|(number, _)| **number != program);
        let other = other.map(|(_, (_, peer))| peer.clone());
        let entry = of_table.programs.entry(program);
        entry.or_insert_with(|| (0, peer.to_owned())).0 += 1;
        let Some(other) = other.filter(|_| !std::mem::replace(&mut of_table.warned, true)) else {
            return;
        };
        drop(samplers);
        tracing::warn!(
            table,
            "two programs sample table {table:?}, at {other} and {peer}, and each learns from the other's steps: give each run a \
             namespace (connect(namespace=...), --namespace), or the processes of one run one INNET_PROGRAM"
        );
    }

    fn remove(&self, table: &str, program: u64) {
        let mut samplers = lock(&self.0);
        let Some(of_table) = samplers.get_mut(table) else {
            return;
        };
        if let Some((connections, _)) = of_table.programs.get_mut(&program) {
            *connections -= 1;
            if *connections == 0 {
                of_table.programs.remove(&program);
            }
        }
        if of_table.programs.is_empty() {
            samplers.remove(table);
        }
    }
}

/// Tables that one connection has sampled. Dropping removes the connection from them.
pub struct ConnectionSamples<'a> {
    samplers: &'a Samplers,
    program: u64,
    peer: &'a str,
    tables: Vec<String>,
}

impl ConnectionSamples<'_> {
    /// Whether this is the connection's first sample of the table.
    pub fn is_new(&self, table: &str) -> bool {
        self.program != 0 && !self.tables.iter().any(|known| known == table)
    }

    /// Records the first sample of an existing table.
    pub fn note(&mut self, table: &str) {
        self.samplers.add(table, self.program, self.peer);
        self.tables.push(table.to_owned());
    }
}

impl Drop for ConnectionSamples<'_> {
    fn drop(&mut self) {
        for table in &self.tables {
            self.samplers.remove(table, self.program);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sampled_by(samplers: &Samplers) -> Value {
        let mut tables = json!({"t": {}});
        samplers.add_stats(&mut tables);
        tables["t"]["sampled_by"].take()
    }

    #[test]
    fn a_program_samples_until_its_last_connection_ends() {
        let samplers = Samplers::default();
        let warned = || lock(&samplers.0).get("t").map(|table| table.warned);
        assert!(!samplers.connection(0, "a:0").is_new("t"));
        assert_eq!((sampled_by(&samplers), warned()), (json!([]), None));
        let mut first = samplers.connection(1, "a:1");
        let mut second = samplers.connection(1, "a:2");
        for connection in [&mut first, &mut second] {
            assert!(connection.is_new("t"));
            connection.note("t");
            assert!(!connection.is_new("t"));
        }
        drop(first);
        let one = json!([program::listed(1)]);
        assert_eq!((sampled_by(&samplers), warned()), (one, Some(false)));
        let mut other = samplers.connection(2, "b:1");
        other.note("t");
        let both = json!([program::listed(1), program::listed(2)]);
        assert_eq!((sampled_by(&samplers), warned()), (both, Some(true)));
        drop((second, other));
        assert_eq!((sampled_by(&samplers), warned()), (json!([]), None));
    }
}
