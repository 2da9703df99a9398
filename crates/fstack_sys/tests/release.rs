//! What the build script finds out about the release of an F-Stack, with folders that are made up. Wants no F-Stack.

#[path = "../build/release.rs"]
mod release;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use release::{OLDEST, of_folder, refusal};

fn in_folder(fill: impl FnOnce(&Path)) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path());
    of_folder(folder.path())
}

#[test]
fn an_installation_tells_it_by_the_name_of_its_library() {
    let found = in_folder(|folder| {
        fs::write(folder.join("libfstack.a.1.25"), "").unwrap();
        symlink("/usr/local/lib/libfstack.a.1.25", folder.join("libfstack.a")).unwrap();
    });
    assert_eq!(found.as_deref(), Some("1.25"));
}

#[test]
fn a_source_tree_tells_it_by_its_makefile() {
    let found = in_folder(|folder| {
        fs::write(folder.join("libfstack.a"), "").unwrap();
        let text = "# comment\nF-STACK_VERSION=1.24\nTGT_OS=$(shell uname)\n";
        fs::write(folder.join("Makefile"), text).unwrap();
    });
    assert_eq!(found.as_deref(), Some("1.24"));
}

#[test]
fn a_pkg_config_file_beside_the_library_tells_it() {
    let found = in_folder(|folder| {
        fs::write(folder.join("libfstack.so"), "").unwrap();
        fs::create_dir(folder.join("pkgconfig")).unwrap();
        let file = folder.join("pkgconfig/libfstack.pc");
        fs::write(file, "Name: libfstack\nVersion: 1.26\n").unwrap();
    });
    assert_eq!(found.as_deref(), Some("1.26"));
}

#[test]
fn a_library_alone_does_not_tell_it() {
    let found = in_folder(|folder| fs::write(folder.join("libfstack.a"), "").unwrap());
    assert_eq!(found, None);
}

#[test]
fn releases_before_the_bindings_are_refused() {
    for release in ["1.24", "1.25", "v1.25.1", "1.25-rc1", "1.100", "2.0"] {
        assert_eq!(refusal(release), None);
    }
    for release in ["1.23", "1.22.1", "v1.9", "1.23-rc1", "0.99", "dev"] {
        let reason = refusal(release).unwrap();
        assert!(reason.contains(release) && reason.contains(OLDEST), "{reason}");
    }
}
