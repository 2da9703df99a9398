use super::*;

/// A blob that does not decode. The answer is the name of the removed item's writer, `None` when it was removed before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportCorrupt {
    /// The item.
    pub id: u64,
    /// The fault.
    pub reason: String,
}

// Allowed for learners, which could also disable an item with priority 0, and would otherwise sample a damaged item repeatedly.
call!(ReportCorrupt: Learner => Option<String>, names: |_, _| {});

same_fields! { report_corrupt: ReportCorrupt { id, reason } }

/// A name; empty for none.
impl Field for Option<String> {
    type Read<'a> = capnp::Result<capnp::text::Reader<'a>>;
    type Written<'a> = &'a str;

    fn read(text: Self::Read<'_>) -> Result<Self> {
        Ok(Some(String::read(text)?).filter(|name| !name.is_empty()))
    }

    fn write(&self) -> Result<&str> {
        Ok(self.as_deref().unwrap_or_default())
    }
}
