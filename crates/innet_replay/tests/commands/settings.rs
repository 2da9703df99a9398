//! Every setting of a server's file and command line, with everything plugged in: misspelt, given twice, of another type, and alone. The
//! command itself gets one case of each.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use clap::CommandFactory;
use replay_server::config::ServerConfig;
use toml::{Table, Value};

/// Every setting, none at its default.
const WHOLE: &str = r#"
listen = ["unix:///tmp/a", "innet://127.0.0.1:1"]
http = "http://127.0.0.1:2"
stack = "fstack"
stack_config = "a"
io_threads = 3
spin = true
max_bytes = "1GiB"
max_frame_bytes = "64MiB"
reply_bytes = "1GiB"
max_connections = 9
max_handshakes = 9
max_handshakes_per_address = 9
handshake_deadline_ms = 9
write_deadline_ms = 9
drain_deadline_ms = 9
token = "token of the operators"
token_file = "a"
learner_token = "token of the learners"
learner_token_file = "a"
actor_token = "token of the actors"
actor_token_file = "a"
tls_cert = "a"
tls_key = "a"
trusted_network = true
snapshot = "a"
snapshot_every = "9s"
log_level = "debug"
gradients = "127.0.0.1:3"
gradients_only = true
gradients_threads = 2
gradients_jobs = 9
gradients_window = 9
gradients_devices = ["net_null0"]
gradients_eal = "--no-huge"
gradients_prefix = 16
gradients_gateway = "10.0.0.1"
gradients_cores = [1, 2]
gradients_idle_sleep_us = 9
gradients_job_bytes = 9
parent = "innet://a:1"
parent_tls_ca = "a"
rack = 1
racks = 3
rack_workers = 4

[[tables]]
name = "t"
capacity = 100
capacity_bytes = 100000
sampler = "prioritized"
priority_exponent = 0.5
priority_unit_log2 = -10
live_max_priority = true
max_times_sampled = 9
min_size = 9
samples_per_insert = 1.5
slack = 99.5
max_version_lag = 9
parameters = "policy"
max_sample_lag = 9
view = { n_step = { observation = "o", stack = 2, n = 3, gamma = 0.5, padding = "repeat" } }
columns = [
    { name = "o", dtype = "uint8", shape = [4], codec = "zstd", finite = false },
    { name = "reward", dtype = "float32" },
]

[[tables]]
name = "u"
capacity = 100
columns = [
    { name = "o", dtype = "uint8" },
    { name = "reward", dtype = "float32" },
    { name = "hidden", dtype = "float32" },
]

[tables.view.sequences]
observation = "o"
stack = 2
length = 4
burn_in = 2
period = 2
gamma = 0.5
padding = "repeat"
state = ["hidden"]

[[tables]]
name = "v"
capacity = 100
columns = [{ name = "o", dtype = "uint8" }]
view = { window = { before = 1, after = 2 } }
"#;

/// Settings that are also understood as integers.
const SIZES: [&str; 3] = ["max_bytes", "max_frame_bytes", "reply_bytes"];

fn whole() -> Table {
    innet_replay::plug_in();
    WHOLE.parse().unwrap()
}

fn read(text: &str) -> Result<ServerConfig, String> {
    ServerConfig::from_toml(text, "server.toml", Table::new()).map_err(|error| error.to_string())
}

/// Checks that the command refuses a file and flags with exit code 2 and the setting's name, as a check and as a start.
fn assert_refused(text: &str, flags: &[&str], name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.toml");
    std::fs::write(&file, text).unwrap();
    for check in [&["--check"][..], &[]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_innet-replay"));
        command.env_remove("INNET_TOKEN").arg("serve").args(check).arg("--config").arg(&file).args(flags);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{check:?} {flags:?} {name}: {said}");
        assert!(said.contains(name), "{check:?} {flags:?} {name}: {said}");
    }
}

fn refusal(table: &Table) -> String {
    let text = table.to_string();
    read(&text).err().unwrap_or_else(|| panic!("accepted:\n{text}"))
}

/// Calls `visit` with each key of the configuration, and a function that makes the configuration with another key and value there.
fn each_key(visit: impl FnMut(&str, &Value, &dyn Fn(&str, Value) -> Table)) {
    fn walk(
        table: &Table,
        place: &dyn Fn(Table) -> Table,
        visit: &mut impl FnMut(&str, &Value, &dyn Fn(&str, Value) -> Table),
    ) {
        for (key, value) in table {
            let replaced = |name: &str, value: Value| {
                let mut table = table.clone();
                table.remove(key);
                table.insert(name.to_owned(), value);
                place(table)
            };
            visit(key, value, &replaced);
            match value {
                Value::Table(inner) => walk(inner, &|inner| replaced(key, inner.into()), visit),
                Value::Array(parts) => {
                    for (at, part) in parts.iter().enumerate() {
                        let Value::Table(inner) = part else { continue };
                        let place = |inner: Table| {
                            let mut parts = parts.clone();
                            parts[at] = inner.into();
                            replaced(key, parts.into())
                        };
                        walk(inner, &place, visit);
                    }
                }
                _ => {}
            }
        }
    }
    let mut visit = visit;
    walk(&whole(), &|table| table, &mut visit);
}

/// The names that differ by a letter that is left out, doubled, exchanged with the next or replaced.
fn misspelt(name: &str) -> BTreeSet<String> {
    let letters: Vec<char> = name.chars().collect();
    let mut names = BTreeSet::new();
    for at in 0..letters.len() {
        let mut change = |edit: &dyn Fn(&mut Vec<char>)| {
            let mut letters = letters.clone();
            edit(&mut letters);
            names.insert(letters.into_iter().collect::<String>());
        };
        change(&|letters| {
            letters.remove(at);
        });
        change(&|letters| letters.insert(at, letters[at]));
        let next = (at + 1).min(letters.len() - 1);
        change(&|letters| letters.swap(at, next));
        change(&|letters| letters[at] = 'x');
    }
    names.retain(|other| other != name && !other.is_empty());
    names
}

/// Keys of a table and of the tables within it, as far as the other has them.
fn keys(table: &Table) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    fn walk(name: &str, table: &Table, found: &mut BTreeMap<String, BTreeSet<String>>) {
        found.entry(name.to_owned()).or_default().extend(table.keys().cloned());
        for (key, value) in table {
            let tables = value.as_table().into_iter();
            for inner in tables.chain(value.as_array().into_iter().flatten().filter_map(Value::as_table)) {
                walk(key, inner, found);
            }
        }
    }
    walk("", table, &mut found);
    found
}

#[test]
fn these_are_all_settings() {
    let whole = whole();
    let config = read(WHOLE).unwrap();
    let mut written = Table::try_from(&config).unwrap();
    for name in whole.keys().filter(|name| {
        name.starts_with("gradients")
            || ["parent", "parent_tls_ca", "rack", "racks", "rack_workers"].contains(&name.as_str())
    }) {
        written.insert(name.clone(), Value::Boolean(true));
    }
    assert_eq!(keys(&whole), keys(&written));
    let help = refusal(&[("unknown".to_owned(), Value::Boolean(true))].into_iter().collect());
    let named: BTreeSet<_> = help.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let known: BTreeSet<_> = whole.into_iter().map(|(name, _)| name).chain(["unknown".to_owned()]).collect();
    assert_eq!(named, known);
}

#[test]
fn a_misspelt_setting_is_refused_with_the_nearest_name() {
    let siblings =
        |table: &BTreeMap<String, BTreeSet<String>>, name: &str| table.values().any(|keys| keys.contains(name));
    let known = keys(&whole());
    let mut tried = 0;
    each_key(|key, value, replaced| {
        for (at, name) in misspelt(key).into_iter().filter(|name| !siblings(&known, name)).enumerate() {
            tried += 1;
            let table = replaced(&name, value.clone());
            if at == 0 {
                assert_refused(&table.to_string(), &[], &name);
            }
            let error = refusal(&table);
            assert!(error.contains(&format!("`{name}`")), "{name}: {error}");
            assert!(key.len() < 4 || error.contains("did you mean `"), "{name}: {error}");
        }
    });
    assert!(tried > 2000, "{tried}");
    for (wrong, right) in [("shap = [4]", "shape"), ("codc = \"lz4\"", "codec"), ("finte = false", "finite")] {
        let table = "[[tables]]\nname = \"t\"\ncapacity = 1\n[[tables.columns]]\nname = \"c\"\ndtype = \"uint8\"\n";
        let error = read(&format!("{table}{wrong}")).unwrap_err();
        assert!(error.ends_with(&format!("did you mean `{right}`?\n")), "{error}");
        assert!(!error.contains("gradients"), "{error}");
    }
}

#[test]
fn a_setting_given_twice_is_refused() {
    let text = whole().to_string();
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let Some((key, _)) = line.split_once(" = ") else { continue };
        let twice = [&lines[..=at], &lines[at..]].concat().join("\n");
        let error = read(&twice).unwrap_err();
        assert!(error.contains("duplicate key") && error.contains(key), "{line}: {error}");
        assert_refused(&twice, &[], key);
    }
}

#[test]
fn a_setting_of_another_type_is_refused_with_its_name() {
    let others: Table =
        "text = 'text'\nfloat = 1.5\ninteger = 7\nswitch = true\nlist = [[]]\ntable = {}\ntime = 1979-05-27T07:32:00Z"
            .parse()
            .unwrap();
    each_key(|key, value, replaced| {
        for other in others.values() {
            let number = other.is_integer() && (value.is_float() || SIZES.contains(&key));
            let parts = key == "stack" && value.is_integer() && other.is_table();
            if number || parts || (value.same_type(other) && !other.is_array()) {
                continue;
            }
            let error = refusal(&replaced(key, other.clone()));
            assert!(error.contains(key), "{key} = {other}: {error}");
        }
    });
}

/// Those that have no effect without another, and those that need one.
#[test]
fn a_setting_alone_has_an_effect_or_is_refused_with_its_name() {
    let mut refused = BTreeSet::new();
    for (name, value) in whole() {
        let alone: Table = [(name.clone(), value)].into_iter().collect();
        if let Err(error) = read(&alone.to_string()).unwrap().validate() {
            assert_refused(&alone.to_string(), &[], &name);
            let error = error.to_string();
            assert!(error.contains(&name), "{name}: {error}");
            refused.insert(name);
        }
    }
    let expected = "stack stack_config tls_cert tls_key snapshot_every gradients_only gradients_threads gradients_jobs \
        gradients_window gradients_devices gradients_eal gradients_prefix gradients_gateway gradients_cores \
        gradients_idle_sleep_us gradients_job_bytes parent parent_tls_ca rack racks rack_workers";
    assert_eq!(refused, expected.split_whitespace().map(str::to_owned).collect());
}

#[test]
fn a_flag_misspelt_or_given_twice_is_refused_with_its_name() {
    innet_replay::plug_in();
    let whole = whole();
    let command = ServerConfig::command();
    let refused = |arguments: &[&str]| command.clone().try_get_matches_from(arguments).unwrap_err().to_string();
    for name in command.get_arguments().filter_map(|flag| flag.get_long()).filter(|name| *name != "listen") {
        let value = match &whole[&name.replace('-', "_")] {
            Value::Boolean(_) => String::new(),
            Value::String(text) => format!("={text}"),
            other => format!("={other}"),
        };
        let flag = format!("--{name}{value}");
        command.clone().try_get_matches_from(["", &flag]).unwrap();
        let error = refused(&["", &flag, &flag]);
        assert!(error.contains("multiple times") && error.contains(name), "{error}");
        assert_refused("", &[&flag, &flag], name);
        let unknown = |wrong: &String| !whole.contains_key(&wrong.replace('-', "_"));
        for (at, wrong) in misspelt(name).into_iter().filter(unknown).enumerate() {
            let flag = format!("--{wrong}{value}");
            if at == 0 {
                assert_refused("", &[&flag], &wrong);
            }
            let error = refused(&["", &flag]);
            assert!(error.contains(&wrong), "{wrong}: {error}");
        }
    }
}
