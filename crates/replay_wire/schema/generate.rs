//! Generates `src/innet_capnp.rs` from `innet.capnp`, and the checksums by which `tests/wire_schema.rs` checks that the two
//! belong together. Used by `build.rs` and by that test; needs the command `capnp` (Debian: `capnproto`).

use std::fmt::Write as _;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The schema.
pub const SCHEMA: &str = "schema/innet.capnp";
/// Generated Rust of the schema.
pub const GENERATED: &str = "src/innet_capnp.rs";
/// Checksums of both.
pub const CHECKSUMS: &str = "src/innet_capnp.sha256";

/// Writes the Rust of the schema and the checksums into `root`.
pub fn generate_all(root: &Path) -> Result<(), Box<dyn std::error::Error>> {
    generate(root, &root.join("src"))?;
    Ok(std::fs::write(root.join(CHECKSUMS), checksums(root)?)?)
}

/// Writes the Rust of the schema in `root` into `folder`.
pub fn generate(root: &Path, folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    Ok(capnpc::CompilerCommand::new()
        .src_prefix(root.join("schema"))
        .file(root.join(SCHEMA))
        .output_path(folder)
        .run()?)
}

/// The checksums of the schema and of the generated file, as `sha256sum --check` reads them.
pub fn checksums(root: &Path) -> std::io::Result<String> {
    let mut out = String::new();
    for path in [SCHEMA, GENERATED] {
        for byte in Sha256::digest(std::fs::read(root.join(path))?) {
            write!(out, "{byte:02x}").expect("writing to a String does not fail");
        }
        out.push_str(&format!("  {path}\n"));
    }
    Ok(out)
}
