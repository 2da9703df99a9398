//! Passes on the linker arguments of an installed F-Stack, whose own build script cannot, and splits the type stub into its
//! docstrings, which the macro `stub_doc` compiles in: `help()`, editors and the site show one text.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{env, fs};

const STUB: &str = "../../python/innet_drl/_core.pyi";
const QUOTES: &str = r#"""""#;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={STUB}");
    if let Ok(arguments) = env::var("DEP_FSTACK_LINK_ARGS") {
        println!("cargo::rustc-link-arg={arguments}");
    }
    let stub = fs::read_to_string(STUB).unwrap_or_else(|error| panic!("{STUB}: {error}"));
    let folder = PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("docstrings");
    fs::create_dir_all(&folder).unwrap();
    for (name, text) in docstrings(&stub) {
        fs::write(folder.join(name), text).unwrap();
    }
}

/// Docstrings by the name of their class, function or `Class.method`; of overloads the first one. The stub's layout is
/// `ruff format`'s, and tests/docs/test_stubs.py compares the result with Python's own reading of the stub.
fn docstrings(stub: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut class = "";
    // The last definition, until its docstring.
    let mut defined = None;
    let mut lines = stub.lines();
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        let margin = line.len() - text.len();
        if let Some(name) = text.strip_prefix("class ").map(identifier) {
            class = name;
            defined = Some(name.to_owned());
        } else if let Some(name) = text.strip_prefix("def ").map(identifier) {
            defined = Some(match margin {
                0 => name.to_owned(),
                _ => format!("{class}.{name}"),
            });
        } else if let Some(first) = text.strip_prefix(QUOTES) {
            let mut text = first.to_owned();
            while !text.ends_with(QUOTES) {
                let next = lines.next().expect("a docstring has an end");
                text.push('\n');
                text.push_str(next.get(margin..).unwrap_or_default());
            }
            let text = text.trim_end_matches(QUOTES).trim_end();
            assert!(!text.contains('\\'), "{defined:?}: no escapes in docstrings");
            if let Some(name) = defined.take() {
                found.entry(name).or_insert(text.to_owned());
            }
        }
    }
    found
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| c != '_' && !c.is_alphanumeric());
    &text[..end.unwrap_or(text.len())]
}
