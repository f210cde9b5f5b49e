//! The order of operations on a step's gradients: reduced over replicas of the model, divided by a loss's scale,
//! clipped.

use collectives::{Error, Result};

/// The last operation on the gradients of a finished step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Done {
    /// The gradients were reduced over the communicator's ranks.
    #[default]
    Reduced,
    /// The gradients were also reduced over ranks with replicas of the model.
    ReducedOver,
    /// The gradients were divided by a loss's scale.
    Unscaled,
    /// The gradients were clipped. Clipping may be repeated.
    Clipped,
}

impl Done {
    /// Refuses an operation that comes too late, because its result would not be the one that the caller expects.
    pub(super) fn check(self, call: &'static str, next: Self) -> Result<()> {
        let before = match self {
            Self::Reduced => return Ok(()),
            Self::ReducedOver => "reduced over replicas",
            Self::Unscaled => "unscaled",
            Self::Clipped => "clipped",
        };
        if self < next || next == Self::Clipped {
            return Ok(());
        }
        let order = "in each step, call reduce_over at most once, then unscale at most once, and then clip_norm or clip_to";
        Err(Error::argument(call, format!("the gradients of this step are already {before}: {order}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_comes_once_and_in_its_order_and_clipping_again() {
        use Done::{Clipped, Reduced, ReducedOver, Unscaled};
        let allowed = |before: Done, next: Done| before.check("train", next).is_ok();
        for next in [ReducedOver, Unscaled, Clipped] {
            assert!(allowed(Reduced, next), "{next:?}");
            assert!(allowed(next, Clipped), "{next:?}");
        }
        assert!(allowed(ReducedOver, Unscaled));
        for (before, next) in
            [(ReducedOver, ReducedOver), (Unscaled, ReducedOver), (Unscaled, Unscaled), (Clipped, ReducedOver), (Clipped, Unscaled)]
        {
            assert!(!allowed(before, next), "{before:?} then {next:?}");
        }
    }
}
