//! The address of `--http`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use replay_link::error::{Error, Result};
use replay_link::stack::{Address, StackName};

/// `host:port`, `http://host:port`, or `https://host:port` for TLS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HttpAddress {
    /// Host name or IP address, an IPv6 address without brackets.
    pub host: String,
    /// TCP port; for 0 the system chooses one.
    pub port: u16,
    /// Whether TLS runs over it.
    pub tls: bool,
}

impl HttpAddress {
    /// The same host and port, for the checks of an address to listen on.
    pub(super) fn tcp(&self) -> Address {
        Address::Tcp { host: self.host.clone(), port: self.port, tls: self.tls, stack: StackName::Kernel }
    }
}

impl FromStr for HttpAddress {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] with the valid forms of an address.
    fn from_str(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let address = match scheme {
            "http" => format!("innet://{rest}"),
            "https" => format!("innets://{rest}"),
            _ => String::new(),
        };
        match address.parse() {
            // A port is required: the default port of an address belongs to the replay protocol.
            Ok(Address::Tcp { host, port, tls, .. }) if rest.ends_with(&format!(":{port}")) => {
                Ok(HttpAddress { host, port, tls })
            }
            _ => Err(Error::Config(format!(
                "http address {text:?}: an address is host:port, http://host:port or https://host:port (TLS)"
            ))),
        }
    }
}

impl TryFrom<String> for HttpAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<HttpAddress> for String {
    fn from(address: HttpAddress) -> String {
        address.to_string()
    }
}

impl fmt::Display for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.tcp().to_string().replacen("innet", "http", 1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, refusal};
    use super::*;

    #[test]
    fn addresses_are_urls_or_host_and_port() {
        for (text, url) in [
            ("127.0.0.1:9100", "http://127.0.0.1:9100"),
            ("http://localhost:0/", "http://localhost:0"),
            ("https://[::1]:80", "https://[::1]:80"),
        ] {
            assert_eq!(text.parse::<HttpAddress>().unwrap().to_string(), url);
        }
        for text in ["", "localhost", "[::1]", "::1:80", "innet://a:1", "http://a:1/b", "a:x"] {
            let error = text.parse::<HttpAddress>().unwrap_err().to_string();
            assert!(error.contains("http://host:port"), "{text}: {error}");
        }
    }

    #[test]
    fn an_open_address_needs_a_token_and_tls_or_trust() {
        let open = "http = \"0.0.0.0:1\"\n";
        let error = refusal(open);
        assert!(error.contains("http://0.0.0.0:1") && error.contains("needs a token"), "{error}");
        assert!(refusal("http = \"https://127.0.0.1:1\"").contains("tls_cert"));
        for rest in ["token = \"x\"\ntls_cert = \"c\"\ntls_key = \"k\"", "trusted_network = true"] {
            read(&[open, rest].concat()).unwrap().validate().unwrap();
        }
        read("http = \"127.0.0.1:1\"").unwrap().validate().unwrap();
    }
}
