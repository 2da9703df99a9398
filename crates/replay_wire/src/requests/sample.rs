//! A request for samples.

use super::*;
use replay_core::replay::{BatchPart, PartState, SampledItem};

call!(SampleRequest: Learner => Sampled, large: true, names: |_, _| {});

same_fields! {
    sample: SampleRequest { count, before, after, allow_short, min_probability, definition ? part }
    batch_part: BatchPart { take }
    part_state: PartState {
        number, total_priority, items, taken, allowance, holds_pushes, min_size, samples_per_insert, max_times_sampled
    }
}

/// Lists of a batch, one for each field of its items (struct of arrays).
macro_rules! item_lists {
    ($($list:ident: $field:ident),+) => { paste! {
        fn read_items(from: wire::sampled::Reader<'_>) -> Result<Vec<SampledItem>> {
            $(let $list = from.[<get_ $list>]().map_err(malformed)?;)+
            let lengths = [$($list.len()),+];
            let [len, ..] = lengths;
            if lengths.iter().any(|&other| other != len) {
                return Err(Error::Protocol(format!("a batch has lists of different lengths: {lengths:?}")));
            }
            Ok((0..len).map(|i| SampledItem { $($field: $list.get(i)),+ }).collect())
        }

        fn write_items(items: &[SampledItem], mut out: wire::sampled::Builder<'_>) -> Result<()> {
            list_len("the items of a batch", items.len())?;
            $(
                let values: Vec<_> = items.iter().map(|item| item.$field).collect();
                out.[<set_ $list>](&values[..]).map_err(internal)?;
            )+
            Ok(())
        }
    }};
}

item_lists! {
    ids: id, probabilities: probability, ages: age, times_sampled: times_sampled, before: before, after: after
}

impl Message for Sampled {
    type Struct = wire::sampled::Owned;

    fn read(from: Reader<'_, Self>, rest: &Rest) -> Result<Self> {
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
            items: read_items(from)?,
            live_items: from.get_items(),
            min_probability: Some(from.get_min_probability()).filter(|&p| p != 0.0),
            state: read_optional(from.has_state(), from.get_state(), rest)?,
            rows,
            blobs: vec![blobs],
            parts: Vec::new(),
            credit: None,
        })
    }

    fn words(&self) -> usize {
        64 + 4 * self.items.len()
    }

    fn into_payload(mut self) -> Payload {
        self.blobs.insert(0, self.rows);
        (self.blobs, self.credit)
    }

    fn write(&self, mut out: wire::sampled::Builder<'_>) -> Result<()> {
        out.set_row_bytes(self.rows.len() as u64);
        out.set_items(self.live_items);
        out.set_min_probability(self.min_probability.unwrap_or(0.0));
        write_items(&self.items, out.reborrow())?;
        match self.state {
            Some(state) => state.write(out.init_state()),
            None => Ok(()),
        }
    }
}
