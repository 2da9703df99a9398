//! The command of users: what is plugged into it.

use std::process::{Command, Output};

fn output(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_innet-replay"));
    let command = command.args(arguments).env_remove("INNET_TOKEN");
    command.output().unwrap()
}

#[test]
fn the_version_is_the_release() {
    let text = String::from_utf8(output(&["--version"]).stdout).unwrap();
    assert_eq!(text.trim(), format!("innet-replay {}", replay_wire::RELEASE));
}

#[test]
fn help_describes_the_commands() {
    let help = String::from_utf8(output(&["--help"]).stdout).unwrap();
    for (command, text) in [
        ("serve", "Serve a replay memory until SIGTERM or SIGINT"),
        ("doctor", "Check whether this machine can serve with the given settings (the flags of serve)"),
    ] {
        let line = help.lines().find_map(|line| line.trim().strip_prefix(command));
        assert_eq!(line.map(str::trim), Some(text), "{help}");
        let own = String::from_utf8(output(&[command, "--help"]).stdout).unwrap();
        assert!(own.starts_with(text), "{own}");
    }
}

#[test]
fn fstack_is_plugged_in() {
    let help = String::from_utf8(output(&["serve", "--help"]).stdout).unwrap();
    assert!(help.contains("fstack"), "{help}");
    let checked = output(&["doctor", "--json", "--stack", "fstack", "--stack-config=/nowhere/a.ini"]);
    assert_eq!(checked.status.code(), Some(2));
    let checks = |flags: &[&str]| {
        let checked = output(&[&["doctor", "--json"], flags].concat());
        let checked: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
        let checks = checked["checks"].as_array().unwrap().iter();
        checks.map(|check| check["check"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(checks(&["--listen=127.0.0.1:0"]), ["configuration", "open files", "memory", "addresses"]);
    let fstack = checks(&["--stack=fstack"]);
    assert!(fstack.starts_with(&["configuration".into(), "F-Stack support".into()]), "{fstack:?}");
    let config = tempfile::NamedTempFile::new().unwrap();
    let config = config.path().to_str().unwrap();
    let serve = output(&["serve", "--stack=fstack", "--stack-config", config]);
    assert_eq!(serve.status.code(), Some(2));
    let serve = String::from_utf8(serve.stderr).unwrap();
    let without = serve.contains("built without F-Stack");
    assert!(without || innet_replay::fstack_release().is_some(), "{serve}");
}

#[test]
fn sums_of_gradients_are_plugged_in() {
    let help = String::from_utf8(output(&["serve", "--help"]).stdout).unwrap();
    assert!(help.contains("--gradients-threads"), "{help}");
    // The message of one plug-in about the address of another.
    let parent = ["serve", "--gradients=127.0.0.1:0", "--parent=innet+fstack://10.0.0.2:7710"];
    let refused = output(&parent);
    assert_eq!(refused.status.code(), Some(2));
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("kernel's UDP"), "{error}");
    // A file of its own is read by a check, too.
    let parent = "--gradients=127.0.0.1:0 --parent=innets://127.0.0.1:1 --racks=2 --parent-tls-ca=/nowhere/ca";
    let flags: Vec<&str> = parent.split(' ').collect();
    for command in [&["serve", "--listen=127.0.0.1:0"][..], &["serve", "--listen=127.0.0.1:0", "--check"]] {
        let refused = output(&[command, &flags].concat());
        let error = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{error}");
        assert!(error.contains("/nowhere/ca"), "{error}");
    }
}
