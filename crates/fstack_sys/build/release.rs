//! The release of an F-Stack that has no pkg-config file. No header tells it: F-Stack's makefile does in a source tree,
//! and after `make install` the name of the file that `libfstack.a` is a link to.

use std::fs;
use std::path::Path;

/// The first release with all that the bindings name: `ff_stop_run` is newer than 1.23.
pub const OLDEST: &str = "1.24";

/// The release of the library in the folder `library`, where something there tells it.
pub fn of_folder(library: &Path) -> Option<String> {
    linked(library)
        .or_else(|| told(&library.join("Makefile"), "F-STACK_VERSION="))
        .or_else(|| told(&library.join("pkgconfig/libfstack.pc"), "Version:"))
}

/// By the file that is linked, `libfstack.a.1.25`.
fn linked(library: &Path) -> Option<String> {
    let target = fs::read_link(library.join("libfstack.a")).ok()?;
    let name = target.file_name()?.to_str()?;
    name.strip_prefix("libfstack.a.").map(str::to_owned)
}

/// By the line of a file that begins with `key`.
fn told(file: &Path, key: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let release = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(release.trim().to_owned())
}

/// Why this release cannot be used.
pub fn refusal(release: &str) -> Option<String> {
    let number = |part: &str| -> Option<u32> {
        let digits = part.find(|c: char| !c.is_ascii_digit());
        part[..digits.unwrap_or(part.len())].parse().ok()
    };
    let numbers = |release: &str| -> Vec<u32> {
        let parts = release.trim_start_matches('v').split('.');
        parts.map_while(number).collect()
    };
    (numbers(release) < numbers(OLDEST))
        .then(|| format!("F-Stack {release}, and the bindings are for {OLDEST} or newer"))
}
