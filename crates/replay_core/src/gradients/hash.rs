//! Hash tables for keys that no stranger chooses: sessions are drawn at random here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table of integers, several times as fast as one that has to withstand chosen keys.
pub type IntegerMap<K, V> = HashMap<K, V, BuildHasherDefault<Folded>>;

/// A product with a large odd number (2^64 by the golden ratio), its halves folded together.
#[derive(Default)]
pub struct Folded(u64);

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, key: u64) {
        let product = u128::from(self.0 ^ key) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product ^ product >> 64) as u64;
    }

    fn write_u32(&mut self, key: u32) {
        self.write_u64(key.into());
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }
}
