//! A request for samples.

use super::*;
use replay_core::replay::{BatchPart, SampledItem, ShardState};

impl Call for SampleRequest {
    const ROLE: Role = Role::Learner;
    const REPLY: ReplySize = ReplySize::Batch;
    type Reply = Sampled;
}

impl Answer for Sampled {
    fn words(&self) -> usize {
        64 + 4 * self.items.len()
    }

    fn payload(self) -> (Vec<Bytes>, Option<Box<dyn SampleCredit>>) {
        let mut payload = self.blobs;
        payload.insert(0, self.rows);
        (payload, self.credit)
    }
}

same_fields! {
    sample: SampleRequest { table, count, before, after, allow_short, min_probability, repeated ? part }
    batch_part: BatchPart { limiter_samples }
    shard_state: ShardState { number, total_priority, items, inserted, allowance }
}

impl Message for Sampled {
    type Struct = wire::sampled::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
        let ids = from.get_ids().map_err(malformed)?;
        let probabilities = from.get_probabilities().map_err(malformed)?;
        let ages = from.get_ages().map_err(malformed)?;
        let times_sampled = from.get_times_sampled().map_err(malformed)?;
        let before = from.get_before().map_err(malformed)?;
        let after = from.get_after().map_err(malformed)?;
        let lengths = [
            probabilities.len(),
            ages.len(),
            times_sampled.len(),
            before.len(),
            after.len(),
        ];
        if lengths.iter().any(|&n| n != ids.len()) {
            return Err(Error::Protocol(format!(
                "a batch of {} ids has lists of other lengths: {lengths:?}",
                ids.len()
            )));
        }
        let items = (0..ids.len())
            .map(|i| SampledItem {
                id: ids.get(i),
                probability: probabilities.get(i),
                age: ages.get(i),
                times_sampled: times_sampled.get(i),
                before: before.get(i),
                after: after.get(i),
            })
            .collect();
        let mut rows = rest.payload();
        let row_bytes = from.get_row_bytes();
        if row_bytes > rows.len() as u64 {
            return Err(Error::Protocol(format!(
                "a batch says that it has {row_bytes} bytes of rows, in a payload of {}",
                rows.len()
            )));
        }
        let blobs = rows.split_off(row_bytes as usize);
        Ok(Sampled {
            items,
            live_items: from.get_items(),
            min_probability: Some(from.get_min_probability()).filter(|&p| p != 0.0),
            shard: read_optional(from.has_shard(), from.get_shard(), rest)?,
            rows,
            blobs: vec![blobs],
            credit: None,
        })
    }

    fn write(&self, mut out: wire::sampled::Builder<'_>) -> Result<()> {
        out.set_row_bytes(self.rows.len() as u64);
        out.set_items(self.live_items);
        out.set_min_probability(self.min_probability.unwrap_or(0.0));
        list_len("the items of a batch", self.items.len())?;
        macro_rules! set_list {
            ($set:ident, $field:ident) => {
                let values: Vec<_> = self.items.iter().map(|item| item.$field).collect();
                out.$set(&values[..]).map_err(internal)?;
            };
        }
        set_list!(set_ids, id);
        set_list!(set_probabilities, probability);
        set_list!(set_ages, age);
        set_list!(set_times_sampled, times_sampled);
        set_list!(set_before, before);
        set_list!(set_after, after);
        match self.shard {
            Some(state) => state.write(out.init_shard()),
            None => Ok(()),
        }
    }
}
