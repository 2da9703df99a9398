//! Generates `src/innet_capnp.rs` from `schema/innet.capnp`, and beside it the checksums by which
//! `tests/wire_schema.rs` knows that the two belong together. Run it after every change of the schema:
//!
//! ```text
//! cargo run -p replay_wire --example generate_wire
//! ```
//!
//! It needs the `capnp` binary (Debian: `capnproto`). Those who only build the crate need neither.

use std::fmt::Write as _;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The contract.
pub const SCHEMA: &str = "schema/innet.capnp";
/// Its Rust.
pub const GENERATED: &str = "src/innet_capnp.rs";
/// What ties the two together.
pub const CHECKSUMS: &str = "src/innet_capnp.sha256";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    generate(root, &root.join("src"))?;
    std::fs::write(root.join(CHECKSUMS), checksums(root)?)?;
    Ok(())
}

/// Writes the Rust of the schema under `root` into `folder`.
pub fn generate(root: &Path, folder: &Path) -> capnp::Result<()> {
    capnpc::CompilerCommand::new()
        .src_prefix(root.join("schema"))
        .file(root.join(SCHEMA))
        .output_path(folder)
        .run()
}

/// The checksums of the schema and of the generated file, as `sha256sum --check` reads them.
pub fn checksums(root: &Path) -> std::io::Result<String> {
    let mut out = String::new();
    for path in [SCHEMA, GENERATED] {
        for byte in Sha256::digest(std::fs::read(root.join(path))?) {
            write!(out, "{byte:02x}").expect("a String takes everything");
        }
        out.push_str(&format!("  {path}\n"));
    }
    Ok(out)
}
