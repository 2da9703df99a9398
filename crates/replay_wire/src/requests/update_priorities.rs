use super::*;

/// New priorities.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdatePriorities {
    /// Ids of items.
    pub ids: Vec<u64>,
    /// New priority of each id, before the exponent.
    pub priorities: Vec<f64>,
}

call!(UpdatePriorities: Learner => UpdateReceipt, names: |_, _| {});

same_fields! { updated: UpdateReceipt { applied, stale } }

impl Message for UpdatePriorities {
    type Struct = wire::update_priorities::Owned;

    fn read(from: Reader<'_, Self>, _rest: &Rest) -> Result<Self> {
        let ids: Vec<u64> = from.get_ids().map_err(malformed)?.iter().collect();
        let priorities: Vec<f64> = from.get_priorities().map_err(malformed)?.iter().collect();
        if ids.len() != priorities.len() {
            return Err(Error::Protocol(format!(
                "an update has {} ids and {} priorities",
                ids.len(),
                priorities.len()
            )));
        }
        Ok(UpdatePriorities { ids, priorities })
    }

    fn words(&self) -> usize {
        64 + 2 * self.ids.len()
    }

    fn write(&self, mut out: wire::update_priorities::Builder<'_>) -> Result<()> {
        list_len("the ids of an update", self.ids.len().max(self.priorities.len()))?;
        out.set_ids(&self.ids[..]).map_err(internal)?;
        out.set_priorities(&self.priorities[..]).map_err(internal)
    }
}
