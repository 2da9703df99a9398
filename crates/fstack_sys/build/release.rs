//! The release of an F-Stack without a pkg-config file. No header has it, but F-Stack's makefile in a source tree and, after `make install`, the
//! name of the file that `libfstack.a` links to.

use std::fs;
use std::path::Path;

/// The first release with all functions of the bindings: `ff_stop_run` is newer than 1.23.
pub const OLDEST: &str = "1.24";

/// The release of the library in the folder `library`; `None` if no file there has it.
pub fn of_folder(library: &Path) -> Option<String> {
    from_link(library)
        .or_else(|| from_line(&library.join("Makefile"), "F-STACK_VERSION="))
        .or_else(|| from_line(&library.join("pkgconfig/libfstack.pc"), "Version:"))
}

/// Release in the name of the linked file, such as `libfstack.a.1.25`.
fn from_link(library: &Path) -> Option<String> {
    let target = fs::read_link(library.join("libfstack.a")).ok()?;
    let name = target.file_name()?.to_str()?;
    name.strip_prefix("libfstack.a.").map(str::to_owned)
}

/// Release in the line of a file that begins with `key`.
fn from_line(file: &Path, key: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let release = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(release.trim().to_owned())
}

/// Reason why this release cannot be used.
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
