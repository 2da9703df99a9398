//! The memory and the wire need neither a runtime nor each other's libraries: what `cargo tree` says of the crates.

use std::collections::BTreeSet;
use std::process::Command;

/// Names of the crates that `package` is built with, without features and without development dependencies.
fn dependencies(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "tree",
            "--locked",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{lib}",
            "--package",
            package,
        ])
        .output()
        .expect("cargo runs");
    let names = String::from_utf8_lossy(&output.stdout);
    let names: BTreeSet<_> = names.split_whitespace().map(str::to_owned).collect();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(names.contains("replay_core"), "cargo tree: {error}");
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

#[test]
fn the_memory_has_neither_sockets_nor_a_wire() {
    assert_without(
        "replay_core",
        &[
            "tokio",
            "capnp",
            "rustls",
            "replay_wire",
            "replay_net",
            "fstack_sys",
            "mio",
            "clap",
        ],
    );
}

#[test]
fn the_wire_has_no_runtime() {
    assert_without("replay_wire", &["tokio", "rustls", "replay_net", "mio"]);
}

#[test]
fn gradients_have_no_runtime() {
    assert_without(
        "gradients",
        &[
            "tokio",
            "capnp",
            "rustls",
            "replay_wire",
            "replay_net",
            "fstack_sys",
        ],
    );
}
