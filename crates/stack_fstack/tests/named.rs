//! F-Stack by its name: settings, addresses and messages, with the feature `fstack` and without.

use replay_client::{Address, ConnectOptions, connect};
use replay_link::error::Result;
use replay_server::config::ServerConfig;

fn read(text: &str) -> Result<ServerConfig> {
    stack_fstack::plug_in();
    let config = ServerConfig::from_toml(text, "server.toml", toml::Table::new())?;
    config.validate().map(|()| config)
}

const SERVER: &str = "stack = \"fstack\"\ntrusted_network = true\n";

#[test]
fn settings_that_fstack_cannot_serve_are_refused() {
    let good = "stack_config = \"a.ini\"\nlisten = [\"10.0.0.2:7710\"]\n";
    assert_eq!(read(&[SERVER, good].concat()).unwrap().stack.name(), "fstack");
    for (text, part) in [
        ("listen = [\"10.0.0.2:7710\"]", "name F-Stack's configuration file"),
        (&[good, "spin = true"].concat(), "F-Stack polls"),
        (&[good, "io_threads = 2"].concat(), "one thread in a process"),
        ("stack_config = \"a\"\nlisten = [\"unix:///a\"]", "a socket file"),
        ("stack_config = \"a\"", "a loopback address"),
        ("stack_config = \"a\"\nlisten = [\"localhost:1\"]", "write its IP address"),
    ] {
        let error = read(&[SERVER, text].concat()).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let error = read("stack_config = \"a\"").unwrap_err().to_string();
    assert!(error.contains("set stack to fstack, or leave"), "{error}");
}

const ADDRESS: &str = "innet+fstack://10.0.0.2:7710";

#[test]
fn clients_have_addresses_of_fstack() {
    stack_fstack::plug_in();
    for text in [ADDRESS, "innets+fstack://10.0.0.2:1"] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    let error = "innet+dpdk://a".parse::<Address>().unwrap_err().to_string();
    assert!(error.ends_with("or innet+fstack://address:port for a client over F-Stack"), "{error}");
}

#[test]
fn options_that_do_not_fit_are_refused_before_anything_starts() {
    stack_fstack::plug_in();
    let refused = |options| {
        let refused = connect(&ADDRESS.parse().unwrap(), options).err();
        refused.unwrap().to_string()
    };
    let spinning = refused(ConnectOptions { spin: true, ..ConnectOptions::default() });
    assert!(spinning.contains("leave spin out"), "{spinning}");
    let bare = refused(ConnectOptions::default());
    let expected = match stack_fstack::release() {
        None => "this program was built without F-Stack",
        Some(_) => "needs F-Stack's configuration file",
    };
    assert!(bare.contains(expected), "{bare}");
}
