//! Receive memory for connections with an open writer, by table: waiting pushes to one table leave memory for other tables.
//!
//! # Invariant
//!
//! Waiting pushes use no receive memory of other requests, and no more than the share of their table.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use base::sync::lock;

use tokio::sync::oneshot;

/// Budget for writers' frames. A table holds at most half of the free bytes, divided by the number of tables with writers (a dynamic
/// threshold, as in switches: Choudhury and Hahne, 1998), so each further blocked table takes a small part of the rest. A table's first
/// frame only has to fit. Frames of one table are granted in order of arrival, independently of other tables.
pub struct PushBudget {
    limit: u64,
    /// Poisoning is harmless: nothing that may panic runs under the lock.
    state: Mutex<State>,
}

struct State {
    left: u64,
    /// Tables with writers, by name.
    tables: HashMap<Arc<str>, TableFrames>,
}

/// Frames of the writers of one table.
#[derive(Default)]
struct TableFrames {
    /// Number of connections that write to the table.
    connections: usize,
    /// Bytes of its granted frames.
    held: u64,
    line: VecDeque<WaitingFrame>,
}

struct WaitingFrame {
    bytes: u64,
    granted: oneshot::Sender<PushPermit>,
}

/// Bytes of one frame, returned when dropped.
pub struct PushPermit {
    budget: Arc<PushBudget>,
    table: Arc<str>,
    bytes: u64,
}

/// A connection that writes to a table.
pub struct TableWrites {
    budget: Arc<PushBudget>,
    table: Arc<str>,
}

impl PushBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(PushBudget { limit, state: Mutex::new(State { left: limit, tables: HashMap::new() }) })
    }

    /// Registers a connection that writes to this table, until the returned value is dropped.
    pub fn writes(self: &Arc<Self>, table: &str) -> TableWrites {
        let table = Arc::from(table);
        let mut state = lock(&self.state);
        let frames = state.tables.entry(Arc::clone(&table)).or_default();
        frames.connections += 1;
        TableWrites { budget: Arc::clone(self), table }
    }

    /// Bytes reserved now.
    pub fn reserved(&self) -> u64 {
        self.limit - lock(&self.state).left
    }

    /// Applies a change under the lock, and grants the frames that now fit.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State)) {
        let mut granted = Vec::new();
        {
            let mut state = lock(&self.state);
            change(&mut state);
            state.grant(self, &mut granted);
        }
        for (frame, permit) in granted {
            // A send fails if the connection has ended. The returned permit is dropped, and its bytes go to the next frame.
            let _ = frame.send(permit);
        }
    }
}

impl State {
    /// Takes bytes for a frame of this table; `false` if the frame has to wait.
    fn take(&mut self, table: &str, bytes: u64) -> bool {
        let tables = self.tables.len() as u64;
        let Some(frames) = self.tables.get_mut(table) else {
            return false;
        };
        let Some(rest) = self.left.checked_sub(bytes) else {
            return false;
        };
        if frames.held > 0 && frames.held + bytes > rest / (2 * tables) {
            return false;
        }
        frames.held += bytes;
        self.left = rest;
        true
    }

    /// Grants waiting frames in the order of each table's queue, as long as they fit.
    fn grant(&mut self, budget: &Arc<PushBudget>, granted: &mut Vec<(oneshot::Sender<PushPermit>, PushPermit)>) {
        let waiting = self.tables.iter().filter(|(_, of)| !of.line.is_empty());
        let mut waiting: Vec<(u64, Arc<str>)> = waiting.map(|(table, of)| (of.held, Arc::clone(table))).collect();
        // Tables with the fewest held bytes first.
        waiting.sort_unstable();
        for (_, table) in waiting {
            while let Some(first) = self.first(&table) {
                let bytes = first.bytes;
                if !self.take(&table, bytes) {
                    break;
                }
                let line = self.tables.get_mut(&table).map(|of| &mut of.line);
                if let Some(frame) = line.and_then(VecDeque::pop_front) {
                    let permit = PushPermit { budget: Arc::clone(budget), table: Arc::clone(&table), bytes };
                    granted.push((frame.granted, permit));
                }
            }
        }
    }

    /// First waiting frame of a table whose connection is still open.
    fn first(&mut self, table: &str) -> Option<&WaitingFrame> {
        let line = &mut self.tables.get_mut(table)?.line;
        while line.front()?.granted.is_closed() {
            line.pop_front();
        }
        line.front()
    }

    fn forget_unused(&mut self, table: &str) {
        let unused = |of: &TableFrames| of.connections == 0 && of.held == 0;
        if self.tables.get(table).is_some_and(unused) {
            self.tables.remove(table);
        }
    }
}

impl TableWrites {
    /// Name of the table.
    pub fn table(&self) -> &str {
        &self.table
    }

    /// Waits for `bytes`, capped at the limit: with its decoded request, a frame of maximum length takes up to 16 MiB more than the
    /// limit.
    pub async fn reserve(&self, bytes: u64) -> PushPermit {
        let bytes = bytes.min(self.budget.limit);
        let granted = {
            let mut state = lock(&self.budget.state);
            let waits = state.first(&self.table).is_some();
            if !waits && state.take(&self.table, bytes) {
                return self.permit(bytes);
            }
            let (granted, receiver) = oneshot::channel();
            let frames = state.tables.get_mut(&self.table);
            let frames = frames.expect("it has this connection");
            frames.line.push_back(WaitingFrame { bytes, granted });
            receiver
        };
        granted.await.expect("a frame that waits stays in its line")
    }

    /// Reserves `bytes` without waiting; `None` when they are not free.
    pub fn try_reserve(&self, bytes: u64) -> Option<PushPermit> {
        let mut state = lock(&self.budget.state);
        let free = state.first(&self.table).is_none() && state.take(&self.table, bytes);
        drop(state);
        free.then(|| self.permit(bytes))
    }

    fn permit(&self, bytes: u64) -> PushPermit {
        PushPermit { budget: Arc::clone(&self.budget), table: Arc::clone(&self.table), bytes }
    }
}

impl Drop for TableWrites {
    fn drop(&mut self) {
        self.budget.change(|state| {
            if let Some(frames) = state.tables.get_mut(&self.table) {
                frames.connections -= 1;
            }
            state.forget_unused(&self.table);
        });
    }
}

impl Drop for PushPermit {
    fn drop(&mut self) {
        self.budget.change(|state| {
            state.left += self.bytes;
            if let Some(frames) = state.tables.get_mut(&self.table) {
                frames.held -= self.bytes;
            }
            state.forget_unused(&self.table);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    /// Reserves frames of `bytes` until one has to wait.
    fn fill(writes: &TableWrites, bytes: u64) -> Vec<PushPermit> {
        std::iter::from_fn(|| writes.try_reserve(bytes)).collect()
    }

    #[test]
    fn tables_that_are_held_back_leave_memory_for_the_next_one() {
        const TABLES: usize = 36;
        let budget = PushBudget::new(128 << 20);
        let mut held = Vec::new();
        for table in 0..TABLES {
            let writes = budget.writes(&table.to_string());
            let frames = fill(&writes, 512 << 10);
            assert!(!frames.is_empty(), "table {table}");
            held.push((writes, frames));
        }
        let free = budget.writes("free");
        assert!(free.try_reserve(1 << 20).is_some());
        // The first table, alone, was granted a third of the memory.
        assert_eq!(held[0].1.len(), 85);
        held.clear();
        drop(free);
        assert_eq!(budget.reserved(), 0);
        assert!(lock(&budget.state).tables.is_empty());
    }

    #[test]
    fn a_frame_beyond_the_budget_takes_all_of_it() {
        let budget = PushBudget::new(100);
        let (one, other) = (budget.writes("one"), budget.writes("other"));
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
        let budget = PushBudget::new(100);
        let table = budget.writes("t");
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
        let budget = PushBudget::new(100);
        let table = budget.writes("t");
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
}
