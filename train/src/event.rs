//! Reports warnings to `tracing`. A subscriber of `tracing` is the program's code; a panic in it does not end this
//! crate's work.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls a subscriber. Must be called without holding a lock, because the subscriber may call this crate.
pub(crate) fn tell(telling: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(telling)) {
        // The panic's payload may be a type of the program, whose drop is the program's code again.
        std::mem::forget(panic);
    }
}

/// Reports a warning, with the arguments of `tracing::warn!`.
macro_rules! warning {
    ($($rest:tt)+) => { $crate::event::tell(|| tracing::warn!($($rest)+)) };
}

pub(crate) use warning as warn;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_subscriber_and_of_what_it_threw_ends_there() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the drop of what was thrown");
            }
        }
        tell(|| panic!("a subscriber"));
        tell(|| std::panic::panic_any(Bomb));
    }
}
