use super::*;

/// A blob that does not decode. The answer is the name of the removed item's writer, `None` when it was removed before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportCorrupt {
    /// The table.
    pub table: String,
    /// The item.
    pub id: u64,
    /// The fault.
    pub reason: String,
}

// A learner could also remove an item by a priority of 0, and without this request it would sample a damaged one again and again.
call!(ReportCorrupt: Learner => Option<String>);

same_fields! { report_corrupt: ReportCorrupt { table, id, reason } }

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
