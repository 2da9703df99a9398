//! Mistakes that tests plant, to show that they would be found: by the simulated world, and by the models of lock-free code. Without the
//! feature `planted` they are compiled away.

/// Whether the mistake of this name is planted, or what happens then: `planted!(KeptReply => return)`.
#[macro_export]
macro_rules! planted {
    ($mistake:ident) => {
        $crate::planted::is_planted(stringify!($mistake))
    };
    ($mistake:ident => $then:expr) => {
        if $crate::planted!($mistake) {
            $then;
        }
    };
}

/// Whether the mistake of this name is planted.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn is_planted(_name: &str) -> bool {
    false
}

#[cfg(feature = "planted")]
pub use by_tests::{is_planted, plant};

#[cfg(feature = "planted")]
mod by_tests {
    use std::cell::Cell;

    // A world or a model runs on one thread, so other tests are not affected.
    thread_local!(static PLANTED: Cell<Option<&'static str>> = const { Cell::new(None) });

    /// Whether the mistake of this name is planted.
    pub fn is_planted(name: &str) -> bool {
        PLANTED.get() == Some(name)
    }

    /// Plants a mistake on this thread, or none.
    pub fn plant(name: Option<&'static str>) {
        PLANTED.set(name);
    }
}
