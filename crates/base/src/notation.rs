//! Values in messages, in the notation of Python and TOML instead of Rust's.

use std::borrow::Cow;
use std::fmt;

/// A number as `nan`, `inf`, `-1`, `0.99` or `1e300`: very large and very small ones in scientific notation.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Number(pub f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Number(value) = *self;
        match value.abs() {
            _ if value.is_nan() => f.write_str("nan"),
            f64::INFINITY | 0.0 | 1e-4..1e16 => write!(f, "{value}"),
            _ => write!(f, "{value:e}"),
        }
    }
}

/// `True` or `False`.
pub fn truth(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// Values as a tuple: `()`, `(84,)`, `(84, 84)`.
pub fn tuple(values: impl IntoIterator<Item = impl fmt::Display>) -> String {
    let values: Vec<_> = values.into_iter().map(|value| value.to_string()).collect();
    match &values[..] {
        [one] => format!("({one},)"),
        values => format!("({})", values.join(", ")),
    }
}

/// Truncates text from a peer, for errors and logs: at most `most` bytes, then an ellipsis if anything was cut.
pub fn shortened<'a>(text: impl Into<Cow<'a, str>>, most: usize) -> Cow<'a, str> {
    let text = text.into();
    if text.len() <= most {
        return text;
    }
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end));
    format!("{}...", &text[..end.unwrap_or(0)]).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_two_characters() {
        assert_eq!(shortened("no", 2), "no");
        assert_eq!(shortened("ééé", 3), "é...");
    }

    #[test]
    fn numbers_are_short_and_read_back() {
        for (value, text) in [
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
            (0.0, "0"),
            (-1.0, "-1"),
            (0.99, "0.99"),
            (1e9, "1000000000"),
            (1e300, "1e300"),
            (-1e-300, "-1e-300"),
        ] {
            assert_eq!(Number(value).to_string(), text);
        }
    }

    #[test]
    fn tuples_are_written_as_in_python() {
        assert_eq!(tuple([0; 0]), "()");
        assert_eq!(tuple([84]), "(84,)");
        assert_eq!(tuple([84, 84]), "(84, 84)");
    }
}
