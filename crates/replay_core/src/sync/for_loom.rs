//! What loom lacks.

/// Stand-in for crossbeam's queue, whose atomics loom does not see: a lock orders the pop of a value after its push.
#[derive(Debug)]
pub(crate) struct ArrayQueue<T> {
    values: loom::sync::Mutex<std::collections::VecDeque<T>>,
    capacity: usize,
}

impl<T> ArrayQueue<T> {
    pub fn new(capacity: usize) -> Self {
        ArrayQueue { values: loom::sync::Mutex::default(), capacity }
    }

    /// Appends a value, or returns it if the queue is full.
    pub fn push(&self, value: T) -> std::result::Result<(), T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        if values.len() == self.capacity {
            return Err(value);
        }
        values.push_back(value);
        Ok(())
    }

    pub fn pop(&self) -> Option<T> {
        let mut values = self.values.lock().expect("no thread panics with the lock");
        values.pop_front()
    }

    pub fn len(&self) -> usize {
        let values = self.values.lock().expect("no thread panics with the lock");
        values.len()
    }
}
