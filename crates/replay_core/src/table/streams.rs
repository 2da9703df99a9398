//! The steps of a stream: their chunks, and whether all steps of a window are there.

use std::collections::VecDeque;

#[cfg(test)]
thread_local! {
    /// Chunks that were looked at for windows, by this thread.
    pub static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Steps of a stream that lie in one chunk, which was alive when it was last looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSpan {
    /// The chunk's number in the table's order of arrival.
    pub arrival: u64,
    pub first_step: u64,
    pub rows: u32,
    /// Gaps of the stream before it, modulo 2^32: a window has all its steps if its first and its last chunk agree, so
    /// those between are not looked at.
    pub gaps: u32,
}

impl ChunkSpan {
    fn end(&self) -> u64 {
        self.first_step + u64::from(self.rows)
    }
}

/// One environment's steps, by number.
#[derive(Debug, Default)]
pub struct Stream {
    /// The number of the next step unless there is a gap.
    pub next_step: u64,
    spans: VecDeque<ChunkSpan>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstChunk {
    /// One that the table has stored, by its number in the order of arrival.
    Stored(u64),
    /// One of the chunks that are being pushed, by its index.
    Pushed(usize),
}

impl Stream {
    /// The stream of a writer of a snapshot, whose chunks are pushed next.
    pub fn restored(next_step: u64) -> Self {
        Stream { next_step, spans: VecDeque::new() }
    }

    /// Adds a chunk of a snapshot, in the order of arrival; `next_step` stays.
    pub fn push_restored(&mut self, arrival: u64, first_step: u64, rows: u32) {
        let span = self.arriving(first_step, rows);
        self.spans.push_back(ChunkSpan { arrival, ..span });
    }

    /// Forgets chunks that were evicted: those before `first_arrival`.
    pub fn forget_before(&mut self, first_arrival: u64) {
        while let Some(span) = self.spans.front()
            && span.arrival < first_arrival
        {
            self.spans.pop_front();
        }
    }

    /// Calls `passed` with the oldest chunks in which no later item begins: those before the chunk `newest`, in which an item of this stream
    /// begins, and those that windows of later items, which reach back over `window` steps, no longer reach. The stream keeps its last
    /// chunk, which the next one continues.
    pub fn pass(&mut self, newest: u64, window: u64, mut passed: impl FnMut(u64)) {
        while let Some(&span) = self.spans.front()
            && (span.arrival < newest || span.end() + window <= self.next_step)
        {
            passed(span.arrival);
            if self.spans.len() == 1 {
                return;
            }
            self.spans.pop_front();
        }
    }

    /// The last chunk that a chunk starting at `first_step` continues without a gap.
    pub fn continues(&self, first_step: u64) -> Option<u64> {
        self.spans.back().filter(|span| span.end() == first_step).map(|span| span.arrival)
    }

    /// The steps of a chunk that is being pushed.
    pub fn arriving(&self, first_step: u64, rows: u32) -> ChunkSpan {
        let gaps = match self.spans.back() {
            None => 0,
            Some(last) => last.gaps.wrapping_add(u32::from(last.end() != first_step)),
        };
        ChunkSpan { arrival: u64::MAX, first_step, rows, gaps }
    }

    pub fn reserve(&mut self) {
        self.spans.reserve(1);
    }

    pub fn push(&mut self, span: ChunkSpan) {
        self.next_step = span.end();
        self.spans.push_back(span);
    }

    /// Finds the first row of the window of steps `first..=last`, given the chunk that is being pushed to this stream, if any; `None` when it
    /// has been evicted. The error says which steps are missing: those not written yet, or in a gap.
    pub fn locate(
        &self,
        first: u64,
        last: u64,
        pushed: Option<(FirstChunk, ChunkSpan)>,
    ) -> Result<Option<(FirstChunk, u32)>, String> {
        let end = pushed.map_or(self.next_step, |(_, span)| span.end());
        if last >= end {
            return Err(format!("steps up to {last}, and the stream has been written up to step {end}, exclusive"));
        }
        let begin = self.position(first);
        let known = self.spans.get(begin).map(|&span| {
            let chunk = FirstChunk::Stored(span.arrival);
            (chunk, span)
        });
        let Some((chunk, holder)) = known.or(pushed) else {
            return Ok(None);
        };
        if first < holder.first_step {
            // Before the first known chunk: the step was evicted or is in a forgotten gap. Else it is in a known gap.
            return if begin == 0 {
                Ok(None)
            } else {
                Err(format!("step {first}, which the stream's gap before step {} leaves out", holder.first_step))
            };
        }
        let pushed = pushed.map(|(_, span)| span);
        let until = self.spans.get(self.position(last)).copied().or(pushed);
        if until.is_some_and(|span| span.gaps != holder.gaps) {
            let mut rest = self.spans.range(begin..).copied().chain(pushed);
            let after = rest.find(|span| span.gaps != holder.gaps);
            return Err(format!(
                "steps {first} to {last}, across the stream's gap before step {}",
                after.map_or(last, |span| span.first_step)
            ));
        }
        Ok(Some((chunk, (first - holder.first_step) as u32)))
    }

    /// Index of the first known chunk that ends after `step`.
    fn position(&self, step: u64) -> usize {
        let before = |span: &ChunkSpan| {
            #[cfg(test)]
            LOOKS.set(LOOKS.get() + 1);
            span.end() <= step
        };
        self.spans.partition_point(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream() -> Stream {
        let mut stream = Stream::default();
        for (arrival, first_step, rows) in [(3, 0, 4), (5, 4, 4), (9, 10, 4)] {
            let span = stream.arriving(first_step, rows);
            stream.push(ChunkSpan { arrival, ..span });
        }
        stream
    }

    fn pushed(stream: &Stream, index: usize, first_step: u64, rows: u32) -> Option<(FirstChunk, ChunkSpan)> {
        let span = stream.arriving(first_step, rows);
        Some((FirstChunk::Pushed(index), span))
    }

    #[test]
    fn finds_windows_within_and_across_chunks() {
        let s = stream();
        let stored = |arrival, row| Ok(Some((FirstChunk::Stored(arrival), row)));
        assert_eq!(s.locate(1, 3, None), stored(3, 1));
        assert_eq!(s.locate(3, 7, None), stored(3, 3));
        assert_eq!(s.locate(12, 15, pushed(&s, 6, 14, 2)), stored(9, 2));
        assert_eq!(s.locate(14, 15, pushed(&s, 6, 14, 2)), Ok(Some((FirstChunk::Pushed(6), 0))));
        assert_eq!(s.continues(14), Some(9));
        assert_eq!(s.continues(15), None);
    }

    #[test]
    fn refuses_steps_that_are_not_there() {
        let s = stream();
        assert!(s.locate(13, 14, None).unwrap_err().contains("up to step 14"));
        assert!(s.locate(6, 10, None).unwrap_err().contains("gap before step 10"));
        assert!(s.locate(8, 10, None).unwrap_err().contains("gap before step 10"));
        assert!(s.locate(13, 17, pushed(&s, 0, 16, 4)).unwrap_err().contains("gap before step 16"));
    }

    #[test]
    fn a_gap_is_found_from_the_last_chunk_of_a_window() {
        let mut s = Stream::default();
        for step in (0..1000).filter(|&step| step != 500) {
            let span = s.arriving(step, 1);
            s.push(ChunkSpan { arrival: step, ..span });
        }
        assert_eq!(s.locate(0, 499, None), Ok(Some((FirstChunk::Stored(0), 0))));
        assert_eq!(s.locate(501, 999, None), Ok(Some((FirstChunk::Stored(501), 0))));
        for (first, last) in [(0, 999), (499, 501), (499, 500)] {
            let refused = s.locate(first, last, pushed(&s, 0, 1000, 1)).unwrap_err();
            assert!(refused.contains("gap before step 501"), "{refused}");
        }
        assert_eq!(s.arriving(1000, 1).gaps, 1);
        assert_eq!(s.arriving(1001, 1).gaps, 2);
    }

    #[test]
    fn tells_evicted_from_missing() {
        let mut s = stream();
        s.forget_before(5);
        assert_eq!(s.locate(3, 5, None), Ok(None));
        s.forget_before(10);
        assert_eq!(s.locate(10, 12, None), Ok(None));
        assert_eq!(s.next_step, 14);
        assert_eq!(s.locate(13, 14, pushed(&s, 0, 14, 1)), Ok(None));
    }
}
