//! Values of settings that are texts: sizes such as `8GiB`, periods such as `60s`, the address of `--http`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use replay_link::error::{Error, Result};
use replay_link::stack::{Address, StackName};

/// Parses a number of bytes: digits, optionally followed by `KB`, `MB`, `GB` (powers of 1000), `KiB`, `MiB` or `GiB` (powers of 1024).
///
/// # Errors
/// A sentence with examples.
pub fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let factor: u64 = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 0,
    };
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)) {
        // Integers of TOML have 63 bits.
        Some(bytes) if factor > 0 && bytes <= i64::MAX as u64 => Ok(bytes),
        _ => Err(format!("{text:?} is not a size in bytes: write 1000000, 500MB or 8GiB")),
    }
}

pub(super) fn deserialize_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a size in bytes: 1000000, \"500MB\" or \"8GiB\"")]
    enum Size {
        Number(u64),
        Text(String),
    }
    match Size::deserialize(deserializer)? {
        Size::Number(bytes) => Ok(bytes),
        Size::Text(text) => parse_bytes(&text).map_err(serde::de::Error::custom),
    }
}

/// Most digits of a number.
const MAX_DIGITS: usize = 12;

/// # Errors
/// A sentence with examples.
pub fn parse_period(text: &str) -> Result<Duration, String> {
    let refused = |reason: &str| format!("{text:?} is not a period such as 500ms, 60s, 5min or 1h: {reason}");
    // humantime panics on some sums near the end of a duration's range.
    if text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > MAX_DIGITS) {
        return Err(refused(&format!("a number has at most {MAX_DIGITS} digits")));
    }
    humantime::parse_duration(text).map_err(|error| refused(&error.to_string()))
}

pub(super) fn deserialize_period<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    parse_period(&String::deserialize(deserializer)?).map(Some).map_err(serde::de::Error::custom)
}

pub(super) fn serialize_period<S: Serializer>(period: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    period.map(|period| humantime::format_duration(period).to_string()).serialize(serializer)
}

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
        Address::Tcp { host: self.host.clone(), port: self.port, tls: self.tls, stack: StackName::KERNEL }
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
    fn sizes_are_numbers_or_texts() {
        let config = read("max_bytes = \"8GiB\"\nmax_frame_bytes = 1000000").unwrap();
        assert_eq!(config.max_bytes, 8 << 30);
        assert_eq!(config.max_frame_bytes, 1_000_000);
        for text in ["8G", "GiB", "1.5GiB", "-1", "99999999999999999999", "20000000000GiB", "9999999999GiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_period_has_a_unit() {
        for (text, millis) in [
            ("60s", 60_000),
            ("500ms", 500),
            ("5min", 300_000),
            ("1 h", 3_600_000),
            ("1h 30min", 5_400_000),
            ("1.5s", 1_500),
            ("1 day", 86_400_000),
            ("0s", 0),
        ] {
            let config = read(&format!("snapshot_every = {text:?}")).unwrap();
            assert_eq!(config.snapshot_every, Some(Duration::from_millis(millis)), "{text}");
            // As flags are put over a file.
            let written = toml::to_string(&config).unwrap();
            assert_eq!(read(&written).unwrap(), config, "{written}");
        }
        for text in ["60", "s", "", "-1s", "99999999999999999999s", "18446744073709551615s 1000ms"] {
            assert!(parse_period(text).is_err(), "{text}");
        }
        let error = refusal("snapshot_every = \"1 dog\"");
        assert!(error.contains("snapshot_every") && error.contains("1 dog") && error.contains("5min"), "{error}");
    }

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
