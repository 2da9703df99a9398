//! Periods: texts such as `60s`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    parse_period(&String::deserialize(deserializer)?).map(Some).map_err(serde::de::Error::custom)
}

pub(super) fn serialize<S: Serializer>(period: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    period.map(|period| humantime::format_duration(period).to_string()).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, refusal};
    use super::*;

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
}
