//! The walls between the lower crates: what `cargo tree` says of them, and what their sources name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Names of the crates that `package` is built with, without features and without development dependencies.
fn dependencies(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{lib}", "--package", package])
        .output()
        .expect("cargo runs");
    let names = String::from_utf8_lossy(&output.stdout);
    let names: BTreeSet<_> = names.split_whitespace().map(str::to_owned).collect();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(names.contains("base"), "cargo tree: {error}");
    names
}

fn assert_without(package: &str, unwanted: &[&str]) {
    let found = dependencies(package);
    for name in unwanted {
        assert!(
            !found.contains(*name),
            "{package} depends on {name}: see `cargo tree --package {package} --invert {name}`"
        );
    }
}

/// Crates that only servers and clients need.
const OF_THE_NETWORK: [&str; 8] =
    ["tokio", "capnp", "rustls", "replay_wire", "replay_link", "fstack_sys", "mio", "clap"];

#[test]
fn the_ground_floor_stands_on_no_other_crate() {
    assert_without("base", &OF_THE_NETWORK);
    assert_without("base", &["replay_core", "gradients"]);
}

#[test]
fn the_memory_has_neither_sockets_nor_a_wire() {
    assert_without("replay_core", &OF_THE_NETWORK);
    assert_without("replay_core", &["gradients"]);
}

#[test]
fn gradients_have_neither_a_memory_nor_a_runtime() {
    assert_without("gradients", &OF_THE_NETWORK);
    assert_without("gradients", &["replay_core"]);
}

#[test]
fn the_wire_has_no_runtime() {
    assert_without("replay_wire", &["tokio", "rustls", "replay_link", "mio"]);
}

#[test]
fn server_and_client_know_neither_each_other_nor_what_is_plugged_in() {
    let plugins = ["fstack_sys", "stack_fstack", "gradients", "gradients_net", "innet_replay"];
    assert_without("replay_server", &plugins);
    assert_without("replay_client", &plugins);
    assert_without("replay_server", &["replay_client"]);
    assert_without("replay_client", &["replay_server", "clap"]);
    let mut known = Vec::new();
    for name in ["base", "replay_core", "replay_wire", "replay_link", "replay_client", "replay_server"] {
        each_source(name, &mut |path, source| {
            let lines = source.lines().filter(|line| {
                let line = line.to_lowercase();
                let plugins = ["fstack", "f-stack", "dpdk", "gradient"];
                plugins.iter().any(|plugin| line.contains(plugin))
            });
            known.extend(lines.map(|line| format!("{}: {line}", path.display())));
        });
    }
    assert!(known.is_empty(), "{known:#?}");
}

#[test]
fn sources_below_the_wire_open_no_files() {
    for name in ["base", "replay_core", "gradients"] {
        each_source(name, &mut |path, source| {
            for word in ["std::fs", "fs::", "File::", "tokio"] {
                assert!(!source.contains(word), "{} names {word}", path.display());
            }
        });
    }
}

/// Visits all sources of a crate.
fn each_source(name: &str, visit: &mut dyn FnMut(&Path, &str)) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders = vec![crates.join(name).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                visit(&path, &fs::read_to_string(&path).expect("a source"));
            }
        }
    }
}
