//! Not written yet.
/// A range of a pinned chunk.
pub struct PinnedSlice;
impl AsRef<[u8]> for PinnedSlice {
    fn as_ref(&self) -> &[u8] {
        &[]
    }
}
