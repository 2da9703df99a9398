//! A namespace: the names of one run on a shared server. At the server every name of a table, writer, parameter or member of an extension
//! (`extensions` in the statistics) begins with the namespace and a slash. Connections add it to requests and take it from replies:
//! everything above them has the short names.
//!
//! # Invariant
//!
//! A client sends and shows only names with its prefix.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

use replay_core::error::WaitReason;
use replay_core::schema::TableConfig;
use replay_link::error::{Error, Result};
use replay_wire::{ErrorCode, ReplyBody};

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
        reason.map(|sentence| self.message(sentence), |table| self.short(table).unwrap_or(table).to_owned())
    }

    /// A server's error with short names.
    pub fn error(&self, error: Error) -> Error {
        let text = error.to_string();
        if !text.contains(&self.quoted) {
            return error;
        }
        match error {
            Error::Deadline { waited_for } => Error::deadline(self.reason(&waited_for)),
            Error::RemoteDeadline { waited_for } => {
                Error::RemoteDeadline { waited_for: Box::new(self.reason(&waited_for)) }
            }
            error => Error::Remote { code: error.code(), message: self.message(&text) },
        }
    }

    /// A server's error, with short names if there is a namespace.
    pub fn short_names(namespace: Option<&Self>, error: Error) -> Error {
        match namespace {
            Some(namespace) => namespace.error(error),
            None => error,
        }
    }

    /// A server's error of an unknown table, which lists the tables of the namespace alone.
    fn unknown_table(&self, message: &str) -> String {
        let listed = message.split_once("; there are ");
        let Some((missing, known)) = listed.or_else(|| message.split_once("; the memory has no")) else {
            return self.message(message);
        };
        // A name of another namespace has no such piece: quotation marks in names are escaped.
        let inside = |name: &&str| name.starts_with(&self.quoted) && name.ends_with('"');
        let names: Vec<_> = known.split(", ").filter(inside).collect();
        let names = names.join(", ");
        let known = match names.is_empty() {
            // Servers shorten long errors.
            _ if known.ends_with("...") => format!("`tables()` lists the tables of the namespace {self}"),
            true => format!(
                "the namespace {self} has no tables: make it with `create_table`, or connect with another namespace"
            ),
            false => format!("in the namespace {self} there are {names}"),
        };
        self.message(&format!("{missing}; {known}"))
    }

    /// Limits a server's reply to the namespace, and shortens its names.
    pub fn limit(&self, reply: &mut ReplyBody) {
        let inside = |name: &mut String| match self.short(name) {
            Some(short) => {
                *name = short.to_owned();
                true
            }
            None => false,
        };
        let table_inside = |table: &mut TableConfig| {
            if let Some(parameters) = &mut table.parameters {
                inside(parameters);
            }
            inside(&mut table.name)
        };
        match reply {
            ReplyBody::Error { code, message, waited_for } => {
                *message = match code {
                    ErrorCode::UnknownTable => self.unknown_table(message),
                    _ => self.message(message),
                };
                if let Some(reason) = waited_for {
                    **reason = self.reason(reason);
                }
            }
            ReplyBody::Waiting(reason) => *reason = self.reason(reason),
            ReplyBody::Table(table) => {
                table_inside(table);
            }
            ReplyBody::Corrupt(Some(writer)) => {
                inside(writer);
            }
            ReplyBody::Listing(listing) => {
                listing.tables.retain_mut(table_inside);
                listing.parameters.retain_mut(|listed| inside(&mut listed.name));
            }
            // Without names, or with those that `stats` shortens.
            ReplyBody::Done
            | ReplyBody::Challenge(_)
            | ReplyBody::Welcome(_)
            | ReplyBody::Writer(_)
            | ReplyBody::Pushed(_)
            | ReplyBody::Sampled(_)
            | ReplyBody::Updated(_)
            | ReplyBody::StepsRead(_)
            | ReplyBody::Corrupt(None)
            | ReplyBody::Parameters(_)
            | ReplyBody::Stats(_)
            | ReplyBody::Extension(_) => {}
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

    /// A server's statistics, limited to tables, parameters and members of extensions in the namespace. All other values are those
    /// of the whole server.
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
        Ok(Namespace { prefix: format!("{text}/"), quoted: format!("\"{text}/") })
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix[..self.prefix.len() - 1])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use replay_core::replay::{ListedParameters, Listing};

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
            assert!(refused.starts_with(&format!("namespace {bad:?}: it has 1 to 40")), "{refused}");
        }
    }

    #[test]
    fn errors_keep_their_kind_and_lose_the_namespace() {
        let short = |error| namespace().error(error);
        for (table, of) in [("run-7/t", "t"), ("run-70/t", "run-70/t")] {
            let wait = |table| WaitReason::for_writers(table, format!("table {table:?} is empty"));
            assert_eq!(short(Error::deadline(wait(table))).waited_for(), Some(&wait(of)));
        }
        let deadline = short(Error::deadline("items of table \"run-7/t\""));
        assert_eq!(deadline.waited_for(), Some(&"items of table \"t\"".into()));
        let short = |error: replay_core::Error| short(error.into());
        let differs =
            short(replay_core::Error::TableDiffers { table: "run-7/t".into(), difference: "capacity".into() });
        assert_eq!(differs.code(), ErrorCode::TableDiffers);
        assert!(differs.to_string().starts_with("table \"t\" exists"));
        let other = short(replay_core::Error::NoMass { table: "run-70/t".into(), items: 1 });
        assert!(matches!(other, Error::Memory(replay_core::Error::NoMass { table, .. }) if table == "run-70/t"));
    }

    #[test]
    fn an_unknown_table_is_beside_those_of_the_namespace() {
        let own = |known: &str| namespace().unknown_table(&format!("no table \"run-7/u\"; {known}"));
        assert_eq!(
            own(r#"there are "run-7/t", "two/t", "two/, \"run-7/x\"", "run-7/v""#),
            r#"no table "u"; in the namespace run-7 there are "t", "v""#
        );
        let none = r#"no table "u"; the namespace run-7 has no tables: make it"#;
        for known in [r#"there are "two/t""#, "the memory has no tables: make it"] {
            assert!(own(known).starts_with(none), "{}", own(known));
        }
        let cut = r#"no table "u"; `tables()` lists the tables of the namespace run-7"#;
        assert_eq!(own(r#"there are "one/t", "run-7..."#), cut);
        assert_eq!(own(r#"there are "run-7/t", "run-7/..."#), cut);
        assert_eq!(own("it was dropped"), r#"no table "u"; it was dropped"#);
    }

    #[test]
    fn replies_have_what_is_inside() {
        let limited = |mut reply: ReplyBody| {
            namespace().limit(&mut reply);
            reply
        };
        let listed = |name: &str| ListedParameters { name: name.into(), version: 1, bytes: 2 };
        let listing = ReplyBody::Listing(Listing {
            tables: Vec::new(),
            parameters: ["run-7/policy", "run-70/policy", "policy"].map(listed).to_vec(),
        });
        assert!(matches!(limited(listing), ReplyBody::Listing(inside) if inside.parameters == [listed("policy")]));
        let corrupt = ReplyBody::Corrupt(Some("run-7/actor 1".into()));
        assert!(matches!(limited(corrupt), ReplyBody::Corrupt(Some(writer)) if writer == "actor 1"));
        let wait = |table| WaitReason::for_writers(table, format!("table {table:?} is empty"));
        let waiting = ReplyBody::Waiting(wait("run-7/t"));
        assert!(matches!(limited(waiting), ReplyBody::Waiting(reason) if reason == wait("t")));
        let unknown = ReplyBody::Error {
            code: ErrorCode::UnknownTable,
            message: r#"no table "run-7/u"; there are "two/t""#.into(),
            waited_for: None,
        };
        let alone = r#"no table "u"; the namespace run-7 has no tables"#;
        assert!(matches!(limited(unknown), ReplyBody::Error { message, .. } if message.starts_with(alone)));
    }

    #[test]
    fn statistics_have_what_is_inside() {
        let of_server = json!({
            "bytes": 3,
            "tables": {
                "run-7/t": {"items": 1, "by_writer": [{"name": "run-7/actor 1"}], "last_writer": "run-7/actor 1", "pushes_wait_for": "room in \"run-7/t\""},
                "run-70/t": {"items": 2}, "t": {"items": 3},
            },
            "parameters": {"run-7/policy": {"version": 1}, "policy": {"version": 2}},
            "extensions": {"adder": ["/jobs"]},
            "adder": {"jobs": {"run-7/job": {}, "job": {}}, "rounds": 4},
        });
        let inside = json!({
            "bytes": 3,
            "tables": {"t": {"items": 1, "by_writer": [{"name": "actor 1"}], "last_writer": "actor 1", "pushes_wait_for": "room in \"t\""}},
            "parameters": {"policy": {"version": 1}},
            "extensions": {"adder": ["/jobs"]},
            "adder": {"jobs": {"job": {}}, "rounds": 4},
        });
        assert_eq!(namespace().stats(of_server), inside);
    }
}
