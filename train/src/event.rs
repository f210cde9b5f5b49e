//! How this crate tells of what it could not do: a subscriber of `tracing` is the program's code, and its panics end nothing here.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Tells a subscriber of something. To be called without a lock: the subscriber may call this crate.
pub(crate) fn tell(telling: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(telling)) {
        // What was thrown may be a type of the program's, whose drop is its code once more.
        std::mem::forget(panic);
    }
}

/// An event of a warning, as `tracing::warn!` takes it.
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
