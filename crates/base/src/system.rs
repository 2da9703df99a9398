//! Time, pauses, threads, random bytes and errors of the machine. Threads of a simulated world (feature `simulated`) get them from the world.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An error of the operating system.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what}: {source}")]
pub struct OsError {
    /// The failed operation.
    pub what: String,
    /// The operating system's reason.
    pub source: Arc<io::Error>,
}

impl OsError {
    /// Converter of the operating system's reason, for `map_err`; `what` names the failed operation.
    pub fn of(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        |source| OsError { what, source: source.into() }
    }
}

/// The time.
#[inline]
pub fn now() -> Instant {
    #[cfg(feature = "simulated")]
    if let Some(host) = simulated::current() {
        return host.now();
    }
    Instant::now()
}

/// Time since an instant of [`now`].
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}

/// Blocks the calling thread.
pub fn sleep(time: Duration) {
    #[cfg(feature = "simulated")]
    if let Some(host) = simulated::current() {
        return host.sleep(time);
    }
    std::thread::sleep(time);
}

/// Runs `work` on a thread of its own.
///
/// # Errors
/// The operating system cannot start a thread.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(feature = "simulated")]
    if let Some(host) = simulated::current() {
        host.spawn(name, Box::new(work));
        return Ok(());
    }
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

/// Hosts of simulated worlds.
#[cfg(feature = "simulated")]
pub mod simulated {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    /// A simulated machine. A world has one thread, on which its processes take turns.
    pub trait Host {
        /// The time.
        fn now(&self) -> Instant;
        /// Suspends the running process.
        fn sleep(&self, time: Duration);
        /// Starts another process of the running program.
        fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>);
        /// Fills `bytes` with random bytes, which follow from the world's seed.
        fn fill_random(&self, bytes: &mut [u8]);
    }

    thread_local! {
        static CURRENT: RefCell<Option<Rc<dyn Host>>> = const { RefCell::new(None) };
    }

    /// The host of this thread, if it belongs to a world.
    pub fn current() -> Option<Rc<dyn Host>> {
        // None at the end of a thread, where destructors may ask for the time, too.
        let current = CURRENT.try_with(|current| current.borrow().clone());
        current.ok().flatten()
    }

    /// Makes `host` the host of this thread until the result is dropped.
    pub fn enter(host: Rc<dyn Host>) -> Entered {
        Entered { before: CURRENT.replace(Some(host)) }
    }

    /// The thread's time in a world. It stays on its thread.
    pub struct Entered {
        before: Option<Rc<dyn Host>>,
    }

    impl Drop for Entered {
        fn drop(&mut self) {
            // Dropped outside of the cell: the host may be the last one that has its world.
            drop(CURRENT.replace(self.before.take()));
        }
    }
}

/// Random bytes. A fork never repeats the bytes of its parent, as a generator in it would.
///
/// # Panics
/// When the operating system has none.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[cfg(feature = "simulated")]
    if let Some(host) = simulated::current() {
        host.fill_random(&mut bytes);
        return bytes;
    }
    let filled = rand::TryRng::try_fill_bytes(&mut rand::rngs::SysRng, &mut bytes);
    filled.expect("the operating system has random bytes");
    bytes
}

/// Random number, from [`random`].
///
/// # Panics
/// As [`random`].
pub fn random_number() -> u64 {
    u64::from_le_bytes(random())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_differ() {
        assert_ne!(random::<32>(), random());
        assert_ne!(random_number(), random_number());
    }
}
