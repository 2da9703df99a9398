//! Random bytes from the operating system, or from a simulated world. A forked process never repeats its parent's, unlike a generator in
//! the process.

/// Random bytes.
///
/// # Panics
/// When the operating system has none.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[cfg(feature = "simulated")]
    if let Some(host) = crate::system::simulated::current() {
        host.fill_random(&mut bytes);
        return bytes;
    }
    let filled = rand::TryRng::try_fill_bytes(&mut rand::rngs::SysRng, &mut bytes);
    filled.expect("the operating system has random bytes");
    bytes
}

/// Random number, from [`random`].
///
/// # Panics
/// As [`random`].
pub fn random_number() -> u64 {
    u64::from_le_bytes(random())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random::<32>(), random());
        assert_ne!(random_number(), random_number());
    }
}
