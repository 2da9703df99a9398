//! Sizes in bytes: texts such as `8GiB`.

use serde::{Deserialize, Deserializer};

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

#[cfg(test)]
mod tests {
    use super::super::tests::read;
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
}
