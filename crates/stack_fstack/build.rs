//! Passes on the linker arguments of an installed F-Stack: its own build script cannot.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(arguments) = std::env::var("DEP_FSTACK_LINK_ARGS") {
        println!("cargo::rustc-link-arg={arguments}");
    }
}
