//! A namespace: the names of one run on a shared server. At the server every name of a table, writer, parameter or member of an extension
//! (`extensions` in the statistics) begins with the namespace and a slash. Calls, results and errors of the client use the short names.
//!
//! # Invariant
//!
//! A client sends and shows only names with its prefix.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use base::wait::Wait;
use replay_core::cause::{OutdatedWriter, TableWait, WaitReason};
use replay_core::replay::{
    Listing, OpenWriter, Parameters, PushBody, PushChannel, ReadSteps, Replay, SampleChannel,
    SampleRequest, Sampled, StepsRead, UpdateChannel, UpdateReceipt, WriterId,
};
use replay_core::schema::TableConfig;
use replay_wire::ErrorCode;

/// A valid namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// The namespace and a slash.
    prefix: String,
    /// The prefix after an opening quotation mark, as names appear in messages.
    quoted: String,
}

impl Namespace {
    /// Limit in characters. Leaves space for the names: a server accepts 128 bytes, an extension may accept fewer.
    pub const MAX_LENGTH: usize = 40;

    /// Prefix of all names at the server.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Name at the server. An empty name stays empty, and the server refuses it.
    pub fn full(&self, name: &str) -> String {
        match name {
            "" => String::new(),
            name => format!("{}{name}", self.prefix),
        }
    }

    /// The short name of the server's `name`; `None` for a name outside.
    fn short<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_prefix(&self.prefix)
    }

    /// A server's message with short names.
    fn message(&self, text: &str) -> String {
        text.replace(&self.quoted, "\"")
    }

    /// A server's reason of a wait with short names.
    fn reason(&self, reason: &WaitReason) -> WaitReason {
        let short = |name: &String| self.short(name).unwrap_or(name).to_owned();
        match reason {
            WaitReason::Table(wait) => WaitReason::Table(TableWait {
                table: short(&wait.table),
                ..wait.clone()
            }),
            WaitReason::Outdated(wait) => WaitReason::Outdated(OutdatedWriter {
                table: short(&wait.table),
                writer: short(&wait.writer),
                parameters: short(&wait.parameters),
                ..wait.clone()
            }),
            WaitReason::Other(sentence) => WaitReason::Other(self.message(sentence)),
            WaitReason::AtServer(server, reason) => {
                WaitReason::AtServer(server.clone(), Box::new(self.reason(reason)))
            }
            other => other.clone(),
        }
    }

    /// A server's error with short names.
    pub fn error(&self, error: Error) -> Error {
        let text = error.to_string();
        if !text.contains(&self.quoted) {
            return error;
        }
        match error {
            Error::Deadline { waited_for } => Error::deadline(self.reason(&waited_for)),
            Error::RemoteDeadline { waited_for } => Error::RemoteDeadline {
                waited_for: Box::new(self.reason(&waited_for)),
            },
            error => Error::Remote {
                code: error.code(),
                message: self.message(&text),
            },
        }
    }

    /// A server's error, with short names if there is a namespace.
    pub fn short_names(namespace: Option<&Self>, error: Error) -> Error {
        match namespace {
            Some(namespace) => namespace.error(error),
            None => error,
        }
    }

    fn config(&self, config: &TableConfig) -> TableConfig {
        TableConfig {
            name: self.full(&config.name),
            ..config.clone()
        }
    }

    /// Members of an object within the namespace, by short name.
    fn members(&self, object: &Value) -> Value {
        let members = object.as_object().into_iter().flatten();
        let inside = members.filter_map(|(name, value)| {
            let name = self.short(name)?.to_owned();
            Some((name, self.texts(value)))
        });
        Value::Object(inside.collect())
    }

    /// A value whose texts have short names, including names of writers.
    fn texts(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.message(self.short(text).unwrap_or(text)).into(),
            Value::Array(values) => values.iter().map(|value| self.texts(value)).collect(),
            Value::Object(members) => {
                let members = members.iter();
                let short = members.map(|(name, value)| (name.clone(), self.texts(value)));
                Value::Object(short.collect::<Map<_, _>>())
            }
            other => other.clone(),
        }
    }

    /// A server's statistics, limited to tables, parameters and members of extensions in the namespace. All other values are the whole
    /// server's.
    pub fn stats(&self, mut stats: Value) -> Value {
        let mut groups = vec!["/tables".to_owned(), "/parameters".to_owned()];
        for (extension, named) in stats["extensions"].as_object().into_iter().flatten() {
            let named = named.as_array().into_iter().flatten();
            let pointers = named.filter_map(Value::as_str);
            groups.extend(pointers.map(|pointer| format!("/{extension}{pointer}")));
        }
        for group in groups {
            if let Some(group) = stats.pointer_mut(&group) {
                *group = self.members(group);
            }
        }
        let shards = stats.get_mut("shards").and_then(Value::as_object_mut);
        for (_, shard) in shards.into_iter().flatten() {
            if shard.is_object() {
                *shard = self.stats(shard.take());
            }
        }
        stats
    }
}

impl FromStr for Namespace {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.is_empty() || text.len() > Self::MAX_LENGTH || !text.chars().all(allowed) {
            return Err(Error::Config(format!(
                "namespace {text:?}: it has 1 to {} characters, which are ASCII letters, digits, '.', '_' and '-'",
                Self::MAX_LENGTH
            )));
        }
        Ok(Namespace {
            prefix: format!("{text}/"),
            quoted: format!("\"{text}/"),
        })
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix[..self.prefix.len() - 1])
    }
}

/// A replay memory limited to a namespace.
pub struct Namespaced {
    replay: Arc<dyn Replay<Error>>,
    namespace: Namespace,
}

impl Namespaced {
    /// `replay`, limited to `namespace` if there is one.
    pub fn within(
        replay: Arc<dyn Replay<Error>>,
        namespace: Option<&Namespace>,
    ) -> Arc<dyn Replay<Error>> {
        match namespace {
            None => replay,
            Some(namespace) => Arc::new(Namespaced {
                replay,
                namespace: namespace.clone(),
            }),
        }
    }

    fn full(&self, name: &str) -> String {
        self.namespace.full(name)
    }

    /// Shortens names in the error of a result. Lists the namespace's tables if the table is unknown, unless it was dropped.
    fn own<T>(&self, result: Result<T>, table: &str, wait: &Wait<'_>) -> Result<T> {
        let error = match result {
            Err(error)
                if error.code() == ErrorCode::UnknownTable
                    && !error.to_string().ends_with("; it was dropped") =>
            {
                error
            }
            result => return result.map_err(|error| self.namespace.error(error)),
        };
        let Ok(listing) = self.list(wait) else {
            return Err(self.namespace.error(error));
        };
        let names = listing
            .tables
            .iter()
            .map(|table| format!("{:?}", table.name));
        let names = names.collect::<Vec<_>>().join(", ");
        let namespace = &self.namespace;
        Err(replay_core::Error::UnknownTable {
            table: table.to_owned(),
            known: match names.is_empty() {
                true => format!(
                    "the namespace {namespace} has no tables: make it with `create_table`, or connect with another namespace"
                ),
                false => format!("in the namespace {namespace} there are {names}"),
            },
        }.into())
    }

    fn channel<C: ?Sized>(&self, channel: Box<C>) -> InNamespace<C> {
        InNamespace {
            channel,
            namespace: self.namespace.clone(),
        }
    }
}

impl Replay<Error> for Namespaced {
    fn create_table(&self, config: &TableConfig, wait: &Wait<'_>) -> Result<()> {
        let made = self
            .replay
            .create_table(&self.namespace.config(config), wait);
        self.own(made, &config.name, wait)
    }

    fn table_config(&self, table: &str, wait: &Wait<'_>) -> Result<Arc<TableConfig>> {
        let found = self.replay.table_config(&self.full(table), wait);
        let mut config = TableConfig::clone(&*self.own(found, table, wait)?);
        table.clone_into(&mut config.name);
        Ok(Arc::new(config))
    }

    fn empty_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let emptied = self.replay.empty_table(&self.full(table), wait);
        self.own(emptied, table, wait)
    }

    fn drop_table(&self, table: &str, wait: &Wait<'_>) -> Result<()> {
        let dropped = self.replay.drop_table(&self.full(table), wait);
        self.own(dropped, table, wait)
    }

    fn open_writer(
        &self,
        open: OpenWriter,
        wait: &Wait<'_>,
    ) -> Result<Box<dyn PushChannel<Error>>> {
        let table = open.table.clone();
        let open = OpenWriter {
            table: self.full(&open.table),
            name: self.full(&open.name),
            ..open
        };
        let opened = self.replay.open_writer(open, wait);
        let channel = self.own(opened, &table, wait)?;
        Ok(Box::new(self.channel(channel)))
    }

    fn sample(&self, request: &SampleRequest, wait: &Wait<'_>) -> Result<Sampled> {
        let full = SampleRequest {
            table: self.full(&request.table),
            ..request.clone()
        };
        self.own(self.replay.sample(&full, wait), &request.table, wait)
    }

    fn sampler(
        &self,
        request: SampleRequest,
        in_flight: usize,
    ) -> Result<Box<dyn SampleChannel<Error>>> {
        let request = SampleRequest {
            table: self.full(&request.table),
            ..request
        };
        let sampler = self.replay.sampler(request, in_flight);
        let channel = sampler.map_err(|error| self.namespace.error(error))?;
        Ok(Box::new(self.channel(channel)))
    }

    fn update_priorities(
        &self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        let updated = self
            .replay
            .update_priorities(&self.full(table), ids, priorities, wait);
        self.own(updated, table, wait)
    }

    fn updates(&self) -> Result<Option<Box<dyn UpdateChannel<Error>>>> {
        let channel = self.replay.updates()?;
        Ok(channel.map(|channel| Box::new(self.channel(channel)) as Box<dyn UpdateChannel<Error>>))
    }

    fn read_steps(&self, request: &ReadSteps, wait: &Wait<'_>) -> Result<StepsRead> {
        let full = ReadSteps {
            table: self.full(&request.table),
            ..request.clone()
        };
        self.own(self.replay.read_steps(&full, wait), &request.table, wait)
    }

    fn report_corrupt(
        &self,
        table: &str,
        id: u64,
        reason: &str,
        wait: &Wait<'_>,
    ) -> Result<Option<String>> {
        let reported = self
            .replay
            .report_corrupt(&self.full(table), id, reason, wait);
        let writer = self.own(reported, table, wait)?;
        Ok(writer.map(|writer| self.namespace.short(&writer).unwrap_or(&writer).to_owned()))
    }

    fn put_parameters(&self, name: &str, bytes: Bytes, wait: &Wait<'_>) -> Result<u64> {
        let put = self.replay.put_parameters(&self.full(name), bytes, wait);
        put.map_err(|error| self.namespace.error(error))
    }

    fn drop_parameters(&self, name: &str, wait: &Wait<'_>) -> Result<()> {
        let dropped = self.replay.drop_parameters(&self.full(name), wait);
        dropped.map_err(|error| self.namespace.error(error))
    }

    fn get_parameters(
        &self,
        name: &str,
        newer_than: u64,
        writer: Option<&WriterId>,
        wait: &Wait<'_>,
    ) -> Result<Option<Parameters>> {
        let writer = writer.map(|writer| WriterId {
            table: self.full(&writer.table),
            writer: writer.writer,
        });
        let found = self
            .replay
            .get_parameters(&self.full(name), newer_than, writer.as_ref(), wait);
        found.map_err(|error| self.namespace.error(error))
    }

    fn list(&self, wait: &Wait<'_>) -> Result<Listing> {
        let mut listing = self
            .replay
            .list(wait)
            .map_err(|error| self.namespace.error(error))?;
        let inside = |name: &mut String| {
            let short = self.namespace.short(name).map(str::to_owned);
            short.map(|short| *name = short).is_some()
        };
        listing.tables.retain_mut(|table| inside(&mut table.name));
        listing
            .parameters
            .retain_mut(|listed| inside(&mut listed.name));
        Ok(listing)
    }

    fn stats(&self, wait: &Wait<'_>) -> Result<Value> {
        let stats = self.replay.stats(wait);
        let stats = stats.map_err(|error| self.namespace.error(error))?;
        Ok(self.namespace.stats(stats))
    }
}

/// A channel whose errors have short names.
struct InNamespace<C: ?Sized> {
    channel: Box<C>,
    namespace: Namespace,
}

impl<C: ?Sized> InNamespace<C> {
    fn own<T>(&mut self, call: impl FnOnce(&mut C) -> Result<T>) -> Result<T> {
        call(&mut self.channel).map_err(|error| self.namespace.error(error))
    }
}

impl PushChannel<Error> for InNamespace<dyn PushChannel<Error>> {
    fn push(&mut self, body: PushBody, wait: &Wait<'_>) -> Result<()> {
        self.own(|channel| channel.push(body, wait))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.own(|channel| channel.flush(wait))
    }

    fn end_steps(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.own(|channel| channel.end_steps(wait))
    }

    fn close(&mut self, wait: &Wait<'_>) -> Result<()> {
        self.own(|channel| channel.close(wait))
    }
}

impl SampleChannel<Error> for InNamespace<dyn SampleChannel<Error>> {
    fn next(&mut self, wait: &Wait<'_>) -> Result<Sampled> {
        self.own(|channel| channel.next(wait))
    }
}

impl UpdateChannel<Error> for InNamespace<dyn UpdateChannel<Error>> {
    fn send(
        &mut self,
        table: &str,
        ids: &[u64],
        priorities: &[f64],
        wait: &Wait<'_>,
    ) -> Result<UpdateReceipt> {
        let table = self.namespace.full(table);
        self.own(|channel| channel.send(&table, ids, priorities, wait))
    }

    fn flush(&mut self, wait: &Wait<'_>) -> Result<UpdateReceipt> {
        self.own(|channel| channel.flush(wait))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use replay_core::cause::Cause;

    fn namespace() -> Namespace {
        "run-7".parse().unwrap()
    }

    #[test]
    fn names_of_other_characters_are_refused() {
        let longest = "a".repeat(Namespace::MAX_LENGTH);
        for good in ["run-7", "A.b_c-9", &longest] {
            assert_eq!(good.parse::<Namespace>().unwrap().to_string(), good);
        }
        let long = format!("{longest}a");
        for bad in ["", "a/b", "a b", "\"", "\u{e9}", &long] {
            let refused = bad.parse::<Namespace>().unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("namespace {bad:?}: it has 1 to 40")),
                "{refused}"
            );
        }
    }

    #[test]
    fn errors_keep_their_kind_and_lose_the_namespace() {
        let short = |error| namespace().error(error);
        for (table, of) in [("run-7/t", "t"), ("run-70/t", "run-70/t")] {
            let deadline = short(Error::deadline(WaitReason::at(table, Cause::Emptied)));
            let emptied = WaitReason::at(of, Cause::Emptied);
            assert_eq!(deadline.waited_for(), Some(&emptied));
        }
        let deadline = short(Error::deadline("items of table \"run-7/t\""));
        assert_eq!(deadline.waited_for(), Some(&"items of table \"t\"".into()));
        let short = |error: replay_core::Error| short(error.into());
        let differs = short(replay_core::Error::TableDiffers {
            table: "run-7/t".into(),
            difference: "capacity".into(),
        });
        assert_eq!(differs.code(), ErrorCode::TableDiffers);
        assert!(differs.to_string().starts_with("table \"t\" exists"));
        let other = short(replay_core::Error::NoMass {
            table: "run-70/t".into(),
            items: 1,
        });
        assert!(
            matches!(other, Error::Memory(replay_core::Error::NoMass { table, .. }) if table == "run-70/t")
        );
    }

    #[test]
    fn statistics_have_what_is_inside() {
        let of_server = json!({
            "bytes": 3,
            "tables": {
                "run-7/t": {"items": 1, "by_writer": [{"name": "run-7/actor 1"}], "pushes_wait_for": "room in \"run-7/t\""},
                "run-70/t": {"items": 2}, "t": {"items": 3},
            },
            "parameters": {"run-7/policy": {"version": 1}, "policy": {"version": 2}},
            "extensions": {"adder": ["/jobs"]},
            "adder": {"jobs": {"run-7/job": {}, "job": {}}, "rounds": 4},
        });
        let mut inside = json!({
            "bytes": 3,
            "tables": {"t": {"items": 1, "by_writer": [{"name": "actor 1"}], "pushes_wait_for": "room in \"t\""}},
            "parameters": {"policy": {"version": 1}},
            "extensions": {"adder": ["/jobs"]},
            "adder": {"jobs": {"job": {}}, "rounds": 4},
        });
        assert_eq!(namespace().stats(of_server.clone()), inside);
        let mut of_servers = of_server.clone();
        of_servers["shards"] = json!({"a": of_server, "b": null});
        inside["shards"] = json!({"a": inside, "b": null});
        assert_eq!(namespace().stats(of_servers), inside);
    }
}
