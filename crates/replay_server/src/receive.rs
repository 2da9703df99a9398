//! Memory for receive buffers, within [`MemoryLimits::receive_bytes`] of the memory's byte limit.
//!
//! A push may wait until items are sampled. Connections with an open writer therefore share one half of the receive memory, divided by
//! table. All other connections (for example the learner's parameters) share the other half, in which no request waits.
//!
//! # Invariant
//!
//! Waiting pushes use no receive memory of other requests, and no more than the share of their table.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

use base::wait::lock;
use replay_core::memory::MemoryLimits;

/// A server's two budgets for receive buffers.
pub struct ReceiveBudgets {
    /// Frames of connections with an open writer.
    pub pushes: Arc<ReceiveBudget>,
    /// Frames of all other connections, in one line.
    pub others: Arc<ReceiveBudget>,
}

impl ReceiveBudgets {
    /// The budgets within a memory's limits.
    pub fn new(limits: &MemoryLimits) -> Self {
        let half = limits.receive_bytes.min(limits.max_bytes) / 2;
        ReceiveBudgets { pushes: ReceiveBudget::new(half, true), others: ReceiveBudget::new(half, false) }
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.pushes.reserved() + self.others.reserved()
    }
}

/// Budget for frames in lines, one for each table. Frames of one line are granted in order of arrival, so that short ones do not starve a
/// long one, and independently of other lines. In a divided budget a line holds at most half of the free bytes, divided by the number of lines
/// (a dynamic threshold, as in switches: Choudhury and Hahne, 1998), so each further blocked table takes less of the rest. A line
/// without frames may take any that fits.
pub struct ReceiveBudget {
    limit: u64,
    divided: bool,
    /// Poisoning is harmless: nothing that may panic runs under the lock.
    state: Mutex<State>,
}

struct State {
    left: u64,
    /// The lines that connections are in, by name.
    lines: HashMap<Arc<str>, LineState>,
}

#[derive(Default)]
struct LineState {
    /// Number of connections in the line.
    connections: usize,
    /// Bytes of its granted frames.
    held: u64,
    waiting: VecDeque<WaitingFrame>,
}

struct WaitingFrame {
    bytes: u64,
    granted: oneshot::Sender<ReceivePermit>,
}

/// A connection's position in a line.
pub struct Line {
    budget: Arc<ReceiveBudget>,
    name: Arc<str>,
}

/// Bytes of one frame, returned when dropped.
pub struct ReceivePermit {
    budget: Arc<ReceiveBudget>,
    line: Arc<str>,
    bytes: u64,
}

impl ReceiveBudget {
    /// A budget of `limit` bytes, which may be `divided` by line.
    pub fn new(limit: u64, divided: bool) -> Arc<Self> {
        let state = State { left: limit, lines: HashMap::new() };
        Arc::new(ReceiveBudget { limit, divided, state: Mutex::new(state) })
    }

    /// Adds a connection to the line of this name, until the returned value is dropped.
    pub fn line(self: &Arc<Self>, name: &str) -> Line {
        let name = Arc::from(name);
        lock(&self.state).lines.entry(Arc::clone(&name)).or_default().connections += 1;
        Line { budget: Arc::clone(self), name }
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.limit - lock(&self.state).left
    }

    /// Takes bytes for a frame of this line; `false` if the frame has to wait.
    fn take(&self, state: &mut State, name: &str, bytes: u64) -> bool {
        let lines = state.lines.len() as u64;
        let (Some(line), Some(rest)) = (state.lines.get_mut(name), state.left.checked_sub(bytes)) else {
            return false;
        };
        if self.divided && line.held > 0 && line.held + bytes > rest / (2 * lines) {
            return false;
        }
        line.held += bytes;
        state.left = rest;
        true
    }

    /// Applies a change to a line under the lock. Forgets the line if it is not used any more, and grants the frames that now fit.
    fn change(self: &Arc<Self>, name: &str, change: impl FnOnce(&mut u64, &mut LineState)) {
        let mut granted = Vec::new();
        {
            let mut state = lock(&self.state);
            let State { left, lines } = &mut *state;
            if let Some(line) = lines.get_mut(name) {
                change(left, line);
                if line.connections == 0 && line.held == 0 {
                    lines.remove(name);
                }
            }
            self.grant(&mut state, &mut granted);
        }
        for (frame, permit) in granted {
            // A send fails if the connection has ended. The returned permit is dropped, and its bytes go to the next frame.
            let _ = frame.send(permit);
        }
    }

    /// Grants waiting frames in the order of each line, as long as they fit.
    fn grant(self: &Arc<Self>, state: &mut State, granted: &mut Vec<(oneshot::Sender<ReceivePermit>, ReceivePermit)>) {
        let waiting = state.lines.iter().filter(|(_, line)| !line.waiting.is_empty());
        let mut waiting: Vec<(u64, Arc<str>)> = waiting.map(|(name, line)| (line.held, Arc::clone(name))).collect();
        // Lines with the fewest held bytes first.
        waiting.sort_unstable();
        for (_, name) in waiting {
            while let Some(bytes) = state.first(&name)
                && self.take(state, &name, bytes)
            {
                let frame = state.lines.get_mut(&name).and_then(|line| line.waiting.pop_front());
                granted.extend(frame.map(|frame| (frame.granted, self.permit(&name, bytes))));
            }
        }
    }

    fn permit(self: &Arc<Self>, line: &Arc<str>, bytes: u64) -> ReceivePermit {
        ReceivePermit { budget: Arc::clone(self), line: Arc::clone(line), bytes }
    }
}

impl State {
    /// Bytes of the first waiting frame of a line whose connection is still open.
    fn first(&mut self, name: &str) -> Option<u64> {
        let waiting = &mut self.lines.get_mut(name)?.waiting;
        while waiting.front()?.granted.is_closed() {
            waiting.pop_front();
        }
        waiting.front().map(|frame| frame.bytes)
    }
}

impl Line {
    /// Name of the line.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for `bytes`, capped at the limit: with its decoded request, a frame of maximum length takes up to 16 MiB more than the
    /// limit.
    pub async fn reserve(&self, bytes: u64) -> ReceivePermit {
        let bytes = bytes.min(self.budget.limit);
        if let Some(permit) = self.try_reserve(bytes) {
            return permit;
        }
        let (granted, receiver) = oneshot::channel();
        // Granted at once if it fits by now.
        self.budget.change(&self.name, |_, line| line.waiting.push_back(WaitingFrame { bytes, granted }));
        receiver.await.expect("a frame that waits stays in its line")
    }

    /// Reserves `bytes` without waiting; `None` when they are not free.
    pub fn try_reserve(&self, bytes: u64) -> Option<ReceivePermit> {
        let mut state = lock(&self.budget.state);
        let free = state.first(&self.name).is_none() && self.budget.take(&mut state, &self.name, bytes);
        drop(state);
        free.then(|| self.budget.permit(&self.name, bytes))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.budget.change(&self.name, |_, line| line.connections -= 1);
    }
}

impl Drop for ReceivePermit {
    fn drop(&mut self) {
        self.budget.change(&self.line, |left, line| {
            *left += self.bytes;
            line.held -= self.bytes;
        });
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    /// Reserves frames of `bytes` until one has to wait.
    fn fill(line: &Line, bytes: u64) -> Vec<ReceivePermit> {
        std::iter::from_fn(|| line.try_reserve(bytes)).collect()
    }

    #[test]
    fn tables_that_are_held_back_leave_memory_for_the_next_one() {
        const TABLES: usize = 36;
        let budget = ReceiveBudget::new(128 << 20, true);
        let mut held = Vec::new();
        for table in 0..TABLES {
            let line = budget.line(&table.to_string());
            let frames = fill(&line, 512 << 10);
            assert!(!frames.is_empty(), "table {table}");
            held.push((line, frames));
        }
        let free = budget.line("free");
        assert!(free.try_reserve(1 << 20).is_some());
        // The first table, alone, was granted a third of the memory.
        assert_eq!(held[0].1.len(), 85);
        held.clear();
        drop(free);
        assert_eq!(budget.reserved(), 0);
        assert!(lock(&budget.state).lines.is_empty());
    }

    #[test]
    fn a_frame_beyond_the_budget_takes_all_of_it() {
        let budget = ReceiveBudget::new(100, true);
        let (one, other) = (budget.line("one"), budget.line("other"));
        let first = one.try_reserve(1).unwrap();
        let mut long = pin!(other.reserve(120));
        assert!(long.as_mut().now_or_never().is_none());
        assert!(one.try_reserve(1).is_some(), "it does not wait for the other table's");
        drop(first);
        let _long = long.now_or_never().expect("memory is free now");
        assert_eq!(budget.reserved(), 100);
        assert!(one.try_reserve(1).is_none());
    }

    #[test]
    fn frames_of_a_table_are_granted_in_their_order() {
        let budget = ReceiveBudget::new(100, true);
        let table = budget.line("t");
        let first = table.try_reserve(50).unwrap();
        let mut long = pin!(table.reserve(90));
        let mut gone = Box::pin(table.reserve(1));
        let mut short = pin!(table.reserve(5));
        for waits in [long.as_mut().now_or_never(), gone.as_mut().now_or_never()] {
            assert!(waits.is_none());
        }
        assert!(short.as_mut().now_or_never().is_none());
        assert!(table.try_reserve(1).is_none(), "it is behind the long one");
        drop(gone);
        drop(first);
        let long = long.now_or_never().expect("memory is free now");
        assert!(short.as_mut().now_or_never().is_none());
        drop(long);
        let short = short.now_or_never().expect("the one ahead has ended");
        assert_eq!(budget.reserved(), 5);
        drop(short);
        assert_eq!(budget.reserved(), 0);
    }

    #[test]
    fn a_granted_frame_whose_connection_has_ended_is_returned() {
        let budget = ReceiveBudget::new(100, true);
        let table = budget.line("t");
        let first = table.try_reserve(100).unwrap();
        let mut gone = Box::pin(table.reserve(40));
        let mut next = pin!(table.reserve(100));
        assert!(gone.as_mut().now_or_never().is_none());
        assert!(next.as_mut().now_or_never().is_none());
        drop(first);
        assert_eq!(budget.reserved(), 40);
        drop(gone);
        assert!(next.now_or_never().is_some());
    }

    #[test]
    fn a_long_frame_is_not_overtaken() {
        let budget = ReceiveBudget::new(100, false);
        let line = budget.line("");
        let first = line.try_reserve(60).unwrap();
        let mut long = pin!(line.reserve(80));
        assert!(long.as_mut().now_or_never().is_none());
        assert!(line.try_reserve(10).is_none(), "it is behind the long one");
        drop(first);
        let long = long.now_or_never().expect("memory is free now");
        assert_eq!(budget.reserved(), 80);
        assert!(line.try_reserve(20).is_some());
        drop(long);
        assert_eq!(budget.reserved(), 0);
    }
}
