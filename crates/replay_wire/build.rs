//! With the feature `generate`, writes the Rust of the schema before the crate is compiled, so that it also works when the
//! crate does not compile with the previous one:
//!
//! ```text
//! cargo check -p replay_wire --features generate      (make wire)
//! ```

#[cfg(feature = "generate")]
#[path = "schema/generate.rs"]
mod generate;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=schema");
    #[cfg(feature = "generate")]
    {
        println!("cargo::rerun-if-changed={}", generate::GENERATED);
        generate::generate_all(env!("CARGO_MANIFEST_DIR").as_ref())?;
    }
    Ok(())
}
