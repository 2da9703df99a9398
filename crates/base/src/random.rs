//! Random bytes from the operating system. A forked process never repeats its parent's, unlike a
//! generator in the process.

use crate::error::OsError;
use crate::host::fill_random;

/// Random bytes.
///
/// # Errors
/// [`OsError`] when the operating system fails.
pub fn random<const N: usize>() -> Result<[u8; N], OsError> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}

/// Random number, from [`random`].
///
/// # Errors
/// Errors of [`random`].
pub fn random_number() -> Result<u64, OsError> {
    random().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random::<32>().unwrap(), random().unwrap());
        assert_ne!(random_number().unwrap(), random_number().unwrap());
    }
}
