//! Program numbers: a server warns if clients with different numbers sample one table. The learners of one run share a number.

use std::sync::OnceLock;

use base::random::random_number;

/// Program number, never 0: a hash of `name`, or else a random number that later forks inherit.
pub fn number(name: Option<&str>) -> u64 {
    static RANDOM: OnceLock<u64> = OnceLock::new();
    let number = match name {
        // FNV-1a: the same on all hosts.
        Some(name) => name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
        // Without random numbers the program has no number.
        None => *RANDOM.get_or_init(|| random_number().unwrap_or(0)),
    };
    number.max(1)
}

/// The number as statistics list it.
pub fn listed(number: u64) -> String {
    format!("{number:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_program_and_a_process_another() {
        assert_eq!(number(Some("run")), number(Some("run")));
        assert_ne!(number(Some("run")), number(Some("runs")));
        assert_eq!(number(None), number(None));
        assert_ne!(number(None), number(Some("run")));
    }
}
