//! Addresses of servers: `innet://host:port`, `innets://host:port` (TLS) or `unix:///path`. With `+NAME` after the scheme a
//! client uses the plugged-in stack of this name.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::StackName;
use super::plugged::alternatives;
use crate::error::{Error, Result};

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Address {
    /// `innet://host:port`, or `innets://host:port` with TLS.
    Tcp {
        /// Host name or IP address, an IPv6 address without brackets.
        host: String,
        /// TCP port; for a server's 0 the system chooses one.
        port: u16,
        /// Whether TLS runs over it.
        tls: bool,
        /// Network stack of a client.
        stack: StackName,
    },
    /// `unix:///path`.
    Unix {
        /// The socket file.
        path: PathBuf,
    },
}

impl Address {
    /// Port of an address without one.
    pub const DEFAULT_PORT: u16 = 7710;

    /// Network stack of a client.
    pub fn stack(&self) -> StackName {
        match self {
            Address::Tcp { stack, .. } => *stack,
            Address::Unix { .. } => StackName::KERNEL,
        }
    }
}

/// Beginnings of an address with a scheme.
const SCHEMES: [&str; 4] = ["innet:", "innets:", "innet+", "unix:"];

impl FromStr for Address {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] with the valid forms of an address.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = |reason: &str| {
            let plugged = alternatives(|stack| {
                let (name, title) = (stack.name(), stack.title());
                format!("innet+{name}://address:port for a client over {title}")
            });
            let (or, plugged) = match plugged {
                None => (" or ", String::new()),
                Some(plugged) => (", ", format!(", or {plugged}")),
            };
            Err(Error::Config(format!(
                "address {text:?} {reason}; an address is innet://host:port, innets://host:port (TLS){or}unix:///path{plugged}"
            )))
        };
        let (scheme, rest) = match text.split_once("://") {
            Some(parts) => parts,
            None if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) => {
                return refuse("has no \"://\" after its scheme");
            }
            None => ("innet", text),
        };
        let (scheme, stack) = match scheme.split_once('+') {
            None => (scheme, StackName::KERNEL),
            Some((scheme, name)) => match name.parse::<StackName>() {
                Ok(stack) if stack != StackName::KERNEL && scheme.starts_with("innet") => (scheme, stack),
                _ => return refuse("has an unknown scheme"),
            },
        };
        let tls = match scheme {
            "unix" if rest.starts_with('/') => return Ok(Address::Unix { path: rest.into() }),
            "unix" => return refuse("has no absolute path"),
            "innet" => false,
            "innets" => true,
            _ => return refuse("has an unknown scheme"),
        };
        if rest.contains(',') {
            return refuse("is of several servers, where one is wanted");
        }
        let (host, port) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some(parts) => parts,
            None => rest.split_at(rest.find(':').unwrap_or(rest.len())),
        };
        if host.is_empty() || host.contains(['/', '[', ']']) {
            return refuse("has no host, or an IPv6 address without brackets");
        }
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => Some(Self::DEFAULT_PORT),
            port => port.and_then(|port| port.parse().ok()),
        };
        let Some(port) = port else {
            return refuse("has no port from 0 to 65535");
        };
        Ok(Address::Tcp { host: host.to_owned(), port, tls, stack })
    }
}

impl TryFrom<String> for Address {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> String {
        address.to_string()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port, tls, stack } => {
                f.write_str(if *tls { "innets" } else { "innet" })?;
                if *stack != StackName::KERNEL {
                    write!(f, "+{}", stack.name())?;
                }
                if host.contains(':') { write!(f, "://[{host}]:{port}") } else { write!(f, "://{host}:{port}") }
            }
            Address::Unix { path } => write!(f, "unix://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_as_they_are_written() {
        for text in ["innet://127.0.0.1:7710", "innets://replay.example:1", "innet://[::1]:0", "unix:///tmp/a.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("localhost".parse::<Address>().unwrap().to_string(), "innet://localhost:7710");
    }

    #[test]
    fn bad_addresses_say_what_an_address_is() {
        for text in [
            "",
            ":1",
            "http://a:1",
            "innet+other://a:1",
            "innet+kernel://a:1",
            "a:b",
            "a:70000",
            "::1:5",
            "[::1:5",
            "[::1]5",
            "unix://x",
            "a/b:1",
            "a:1,b:1",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("innet://host:port"), "{text}: {error}");
        }
    }
}
