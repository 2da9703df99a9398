//! Finds F-Stack and DPDK, each only for its feature.
//!
//! A missing library is a warning here and an error of the linker: `cargo check`, clippy and rustdoc need no library. The warning, which names
//! the places searched, appears right above the linker's error. The search is repeated when one of the places changes.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

#[path = "build/release.rs"]
mod release;

/// F-Stack's variable for its folder: `FF_PATH/lib/libfstack.so` or `.a`, headers in `FF_PATH/include` or, in a source tree, beside the library.
const FF_PATH: &str = "FF_PATH";

/// Libraries that `libfstack.a` needs; a shared libfstack names its own. EAL loads drivers.
const UNDER_FSTACK: [&str; 9] = [
    "rte_timer",
    "rte_ethdev",
    "rte_mbuf",
    "rte_mempool",
    "rte_ring",
    "rte_kvargs",
    "rte_net_bond",
    "rte_eal",
    "crypto",
];

/// Changes whenever a system's packages install libraries, even into new folders.
const LIBRARIES: &str = "/etc/ld.so.cache";

/// Release of the interface that the bindings were checked against.
const DPDK_VERSION: &str = "22.11";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(fstack_found, dpdk_found)");
    println!("cargo::rerun-if-env-changed={FF_PATH}");
    ["build.rs", "build", "c"].into_iter().for_each(watch);
    if env::var_os("CARGO_FEATURE_FSTACK").is_some() {
        fstack();
    }
    if env::var_os("CARGO_FEATURE_DPDK").is_some() {
        dpdk();
    }
}

/// Repeats the search when a file changes, or a file in a folder. A missing path counts as changed, always.
fn watch(path: impl AsRef<Path>) {
    println!("cargo::rerun-if-changed={}", path.as_ref().display());
}

/// Repeats the search when pkg-config may know more. A folder named by the user is watched even if it is missing.
fn watch_packages() {
    let named = env::var_os("PKG_CONFIG_PATH").unwrap_or_default();
    let empty = |folder: &PathBuf| folder.as_os_str().is_empty();
    env::split_paths(&named).filter(|f| !empty(f)).for_each(watch);
    let others = pkg_config::get_variable("pkg-config", "pc_path").unwrap_or_default();
    let others = env::split_paths(&others).chain([LIBRARIES.into()]);
    others.filter(|path| path.exists()).for_each(watch);
}

/// Repeats the search when this package of pkg-config changes.
fn watch_package(name: &str) {
    if let Ok(folder) = pkg_config::get_variable(name, "pcfiledir") {
        watch(Path::new(&folder).join(format!("{name}.pc")));
    }
}

struct Found {
    library: PathBuf,
    include: PathBuf,
    version: Option<String>,
}

fn fstack() {
    let found = match env::var_os(FF_PATH) {
        Some(path) => in_folder(Path::new(&path)),
        None => by_pkg_config(),
    };
    let found = match found {
        Ok(found) => found,
        Err(looked_for) => {
            println!(
                "cargo::warning=no F-Stack was found that can be linked: {looked_for}. Checks need none, but nothing can be linked with the \
                 feature `fstack`: install it by the instructions at https://github.com/F-Stack/f-stack, then set \
                 {FF_PATH} to its folder, or PKG_CONFIG_PATH to that of its libfstack.pc"
            );
            println!("cargo::rustc-link-lib=fstack");
            match env::var_os(FF_PATH) {
                Some(path) => watch(path),
                None => watch_packages(),
            }
            return;
        }
    };
    println!("cargo::rustc-cfg=fstack_found");
    watch(found.include.join("ff_api.h"));
    match found.version {
        Some(version) => println!("cargo::rustc-env=FSTACK_VERSION={version}"),
        None => println!(
            "cargo::warning=nothing in {} names the release of F-Stack: the bindings are for {} or newer, and only its \
             headers are compared with them",
            found.library.display(),
            release::OLDEST
        ),
    }
    let folder = found.library.display();
    println!("cargo::rustc-link-search=native={folder}");
    let shared = found.library.join("libfstack.so");
    // A build script cannot pass linker arguments to dependents: each dependent asks for `link_args`.
    if let Ok(bytes) = fs::read(&shared) {
        let checksum = crc32fast::hash(&bytes);
        println!("cargo::rustc-env=FSTACK_SHARED_CRC32={checksum:08x}");
        watch(shared);
        println!("cargo::rustc-link-lib=dylib=fstack");
        for library in ["rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"] {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
        println!("cargo::metadata=link_args=-Wl,-rpath,{folder}");
    } else {
        watch(found.library.join("libfstack.a"));
        // FreeBSD's linker sets are found by their sections' names alone, so lld would collect them as garbage.
        println!("cargo::rustc-link-lib=static:+whole-archive,-bundle=fstack");
        println!("cargo::rustc-link-arg=-Wl,-z,nostart-stop-gc");
        println!("cargo::metadata=link_args=-Wl,-z,nostart-stop-gc");
        for library in UNDER_FSTACK {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
    }
    match probe_dpdk() {
        Ok(dpdk) => with_dpdk(&dpdk, "c/fstack.c")
            .files(["c/fstack_layout.c", "c/fstack_ports.c"])
            .include(found.include)
            .compile("innet_fstack"),
        Err(_) => no_dpdk(),
    }
}

fn in_folder(path: &Path) -> Result<Found, String> {
    let library = path.join("lib");
    if !["libfstack.so", "libfstack.a"].iter().any(|name| library.join(name).exists()) {
        return Err(format!(
            "{FF_PATH} is {}, and neither libfstack.so nor libfstack.a is in its lib folder",
            path.display()
        ));
    }
    let version = release::of_folder(&library);
    if let Some(reason) = version.as_deref().and_then(release::refusal) {
        return Err(format!("{FF_PATH} is {}, with {reason}", path.display()));
    }
    let headers = [path.join("include"), library.clone()];
    let include = headers.into_iter().find(|folder| folder.join("ff_api.h").exists());
    match include {
        Some(include) => Ok(Found { library, include, version }),
        None => Err(format!(
            "{FF_PATH} is {}, and ff_api.h is neither in its include nor in its lib folder",
            path.display()
        )),
    }
}

fn by_pkg_config() -> Result<Found, String> {
    let found = pkg_config::Config::new()
        .cargo_metadata(false)
        .probe("libfstack")
        .map_err(|_| format!("{FF_PATH} is not set, and pkg-config knows no libfstack"))?;
    watch_package("libfstack");
    if let Some(reason) = release::refusal(&found.version) {
        return Err(format!("{FF_PATH} is not set, and pkg-config knows {reason}"));
    }
    let first = |paths: &[PathBuf], what| {
        let missing = || format!("pkg-config knows libfstack, but names no folder of its {what}");
        paths.first().cloned().ok_or_else(missing)
    };
    Ok(Found {
        library: first(&found.link_paths, "library")?,
        include: first(&found.include_paths, "headers")?,
        version: Some(found.version),
    })
}

fn dpdk() {
    let Ok(found) = probe_dpdk() else {
        println!("cargo::rustc-link-lib=rte_ethdev");
        return no_dpdk();
    };
    println!("cargo::rustc-cfg=dpdk_found");
    // The shim first, as linkers resolve it from later libraries.
    with_dpdk(&found, "c/dpdk.c").compile("innet_dpdk");
    for path in &found.link_paths {
        println!("cargo::rustc-link-search=native={}", path.display());
    }
    for library in ["rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"] {
        println!("cargo::rustc-link-lib=dylib={library}");
    }
}

fn no_dpdk() {
    println!(
        "cargo::warning=DPDK was not found: pkg-config knows no libdpdk of version {DPDK_VERSION} or newer. Checks need \
         none, but nothing can be linked with the features `dpdk` and `fstack`: install it (Debian: apt install libdpdk-dev), or \
         set PKG_CONFIG_PATH to the folder of its libdpdk.pc"
    );
    watch_packages();
}

fn probe_dpdk() -> Result<pkg_config::Library, pkg_config::Error> {
    pkg_config::Config::new()
        .cargo_metadata(false)
        .atleast_version(DPDK_VERSION)
        .probe("libdpdk")
        .inspect(|_| watch_package("libdpdk"))
}

/// A compilation with DPDK's headers.
fn with_dpdk(found: &pkg_config::Library, source: &str) -> cc::Build {
    let mut build = cc::Build::new();
    build.file(source).includes(&found.include_paths);
    // The headers' inline functions use instructions up to SSE4.2, which DPDK requires.
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        build.flag("-march=corei7");
    }
    build.flag("-include").flag("rte_config.h");
    build
}
