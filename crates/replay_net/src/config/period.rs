//! Periods such as `60s`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A period: a whole number followed by `ms`, `s`, `min` or `h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Period(pub Duration);

impl FromStr for Period {
    type Err = String;

    /// # Errors
    /// A sentence with examples.
    fn from_str(text: &str) -> Result<Self, String> {
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let factor: u64 = match unit.trim() {
            "ms" => 1,
            "s" => 1_000,
            "min" => 60_000,
            "h" => 3_600_000,
            _ => 0,
        };
        let number = text[..text.len() - unit.len()].parse::<u64>().ok();
        match number.and_then(|number| number.checked_mul(factor)) {
            Some(millis) if factor > 0 => Ok(Period(Duration::from_millis(millis))),
            _ => Err(format!("{text:?} is not a period: write 60s, 500ms, 5min or 1h")),
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_millis() {
            0 => write!(f, "{}s", self.0.as_secs()),
            _ => write!(f, "{}ms", self.0.as_millis()),
        }
    }
}

impl TryFrom<String> for Period {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Period> for String {
    fn from(period: Period) -> Self {
        period.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, refusal};
    use super::*;

    #[test]
    fn a_period_has_a_unit() {
        for (text, millis) in [("60s", 60_000), ("500ms", 500), ("5min", 300_000), ("1 h", 3_600_000)] {
            let config = read(&format!("snapshot_every = {text:?}")).unwrap();
            let every = config.snapshot_every.unwrap();
            assert_eq!(every.0, Duration::from_millis(millis), "{text}");
            assert_eq!(every.to_string().parse(), Ok(every), "{text}");
        }
        for text in ["60", "s", "", "-1s", "1.5s", "99999999999999999999s", "20000000000000000h"] {
            assert!(text.parse::<Period>().is_err(), "{text}");
        }
        let error = refusal("snapshot_every = \"1 day\"");
        assert!(error.contains("1 day") && error.contains("5min"), "{error}");
    }
}
