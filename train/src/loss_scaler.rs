//! Scales losses so that gradients of `f16` do not become zero, and skips steps in which a gradient became infinite.

use super::parameter::Float;
use collectives::Communicator;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Options that set when the scale changes, and by which factors. A *good step* is a step in which no gradient
/// overflowed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerOptions {
    /// The first scale. Default: 65,536.
    pub initial_scale: f32,
    /// The factor by which the scale is multiplied after `growth_interval` good steps. Default: 2.
    pub growth_factor: f32,
    /// The factor by which the scale is multiplied after a step in which a gradient overflowed. Default: 0.5.
    pub backoff_factor: f32,
    /// The number of consecutive good steps before the scale grows. Default: 2000.
    pub growth_interval: u32,
}

impl Default for LossScalerOptions {
    fn default() -> Self {
        Self { initial_scale: 65_536.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000 }
    }
}

/// The state of a scaler, to be saved in a checkpoint, or sent to newcomers. It can be converted to two numbers and
/// back:
///
/// ```
/// # use collectives_train::LossScalerState;
/// let state = LossScalerState { scale: 1024.0, good_steps: 7 };
/// let numbers: [f64; 2] = state.into();
/// assert_eq!((numbers, LossScalerState::from(numbers)), ([1024.0, 7.0], state));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerState {
    /// The scale.
    pub scale: f32,
    /// The number of good steps since the scale last changed.
    pub good_steps: u32,
}

impl From<LossScalerState> for [f64; 2] {
    fn from(state: LossScalerState) -> Self {
        [state.scale.into(), state.good_steps.into()]
    }
}

impl From<[f64; 2]> for LossScalerState {
    /// Converts numbers that were made from a state. [`LossScaler::restore`] refuses other numbers.
    fn from([scale, good_steps]: [f64; 2]) -> Self {
        Self { scale: scale as f32, good_steps: good_steps as u32 }
    }
}

/// Scales losses like torch's `GradScaler`, with the same scale on every rank.
///
/// In each step:
///
/// 1. Multiply the loss by [`scale`](Self::scale), and run the backward pass.
/// 2. Call [`unscale`](Self::unscale) with the gradients that this rank's optimiser uses: the averaged gradients, or
///    this rank's share of them. [`Averaged`](crate::Averaged), [`Shards`](crate::Shards) and
///    [`ReducedGradients`](crate::ReducedGradients) have a method `unscale` for their own gradients.
/// 3. Call [`update`](Self::update). If `update` returns `true`, take the optimiser's step.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::LossScaler;
///
/// let scales = Communicator::run_local(2, |comm| {
///     let mut scaler = LossScaler::default();
///     let mut gradients = [3.0 * scaler.scale(), if comm.rank() == 1 { f32::INFINITY } else { 1.0 }];
///     scaler.unscale(&mut gradients);
///     assert_eq!(gradients[0], 3.0);
///     assert!(!scaler.update(comm)?, "after an overflow on rank 1, all ranks skip the step");
///     Ok(scaler.scale())
/// })?;
/// assert_eq!(scales, [32_768.0; 2]);
/// # Ok::<(), collectives::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[doc(alias = "GradScaler")]
pub struct LossScaler {
    options: LossScalerOptions,
    state: LossScalerState,
    has_overflowed: bool,
}

impl Default for LossScaler {
    fn default() -> Self {
        let options = LossScalerOptions::default();
        Self { options, state: LossScalerState { scale: options.initial_scale, good_steps: 0 }, has_overflowed: false }
    }
}

impl LossScaler {
    /// Creates a scaler with your own options.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` in these cases:
    ///
    /// - The initial scale is not a positive number.
    /// - The growth factor is not above 1.
    /// - The backoff factor is not between 0 and 1.
    /// - The growth interval is 0.
    pub fn new(options: LossScalerOptions) -> Result<Self> {
        let LossScalerOptions { initial_scale, growth_factor, backoff_factor, growth_interval } = options;
        let refused = |reason: String| Err(Error::argument("LossScaler::new", reason));
        if !(initial_scale.is_normal() && initial_scale > 0.0) {
            return refused(format!("the initial scale is {initial_scale}; it must be a positive number"));
        }
        if !(growth_factor.is_finite() && growth_factor > 1.0) {
            return refused(format!("the growth factor is {growth_factor}; it must be above 1"));
        }
        if !(backoff_factor > 0.0 && backoff_factor < 1.0) {
            return refused(format!("the backoff factor is {backoff_factor}; it must be between 0 and 1"));
        }
        if growth_interval == 0 {
            return refused("the growth interval is 0 steps; it must be 1 or more".to_owned());
        }
        Ok(Self { options, state: LossScalerState { scale: initial_scale, good_steps: 0 }, has_overflowed: false })
    }

    /// Returns the scale. Multiply the loss by this number.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// Divides gradients by the scale, in place, and records whether a gradient is infinite or NaN, before or after the
    /// division. Reads and writes each gradient once.
    ///
    /// In `f16`, small values can become zero when they are divided by the scale. So convert gradients of `f16` to
    /// `f32` first. The optimiser should use `f32` too.
    pub fn unscale<T: Float>(&mut self, gradients: &mut [T]) {
        // In f64 the quotient of any gradient is more exact than the gradient's type, even if the scale is not a power
        // of two.
        let inverse = self.inverse();
        let mut is_finite = true;
        for gradient in gradients {
            // A scale below 1 makes gradients larger. A value that was not finite stays so.
            *gradient = T::from_f64(gradient.to_f64() * inverse);
            is_finite &= gradient.to_f64().is_finite();
        }
        self.note(is_finite);
    }

    /// Returns the factor for gradients of the scaled loss.
    pub(super) fn inverse(&self) -> f64 {
        1.0 / f64::from(self.state.scale)
    }

    /// Records whether gradients that were divided elsewhere are finite.
    pub(super) fn note(&mut self, is_finite: bool) {
        self.has_overflowed |= !is_finite;
    }

    /// Ends a step, and returns whether the optimiser should take the step. Returns `false` on every rank if a gradient
    /// overflowed on any rank. In that case, the scale falls. After enough good steps, the scale grows. Makes one
    /// all-reduce of 24 B. Collective.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` on every rank if ranks have different states, for example because only some ranks called
    /// [`restore`](Self::restore). In that case, no state changes. The call also returns the errors of
    /// [`Communicator::all_reduce`].
    pub fn update(&mut self, comm: &Communicator) -> Result<bool> {
        let bits = u64::from(self.state.scale.to_bits()) << 32 | u64::from(self.state.good_steps);
        // The maximum of the numbers. The maximum of the complements gives the minimum.
        let mut said = [u64::from(self.has_overflowed), bits, !bits];
        comm.all_reduce(&mut said, ReduceOp::Max)?;
        let [has_overflowed, largest, least] = said;
        if largest != !least {
            let scale = |bits: u64| f32::from_bits((bits >> 32) as u32);
            let reason = format!(
                "the scales (from {} to {}) or the numbers of good steps differ between ranks: restore all ranks from one checkpoint",
                scale(!least),
                scale(largest)
            );
            return Err(Error::argument("LossScaler::update", reason));
        }
        self.has_overflowed = false;
        self.advance(has_overflowed == 0);
        Ok(has_overflowed == 0)
    }

    fn advance(&mut self, is_good: bool) {
        let LossScalerState { scale, good_steps } = &mut self.state;
        if !is_good {
            // Gradients could not be divided by a smaller scale.
            *scale = (*scale * self.options.backoff_factor).max(f32::MIN_POSITIVE);
            *good_steps = 0;
            return;
        }
        *good_steps = good_steps.saturating_add(1);
        if *good_steps >= self.options.growth_interval {
            let grown = *scale * self.options.growth_factor;
            *scale = if grown.is_finite() { grown } else { *scale };
            *good_steps = 0;
        }
    }

    /// Returns the state, to be saved in a checkpoint.
    #[must_use]
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Restores the state from a checkpoint. The options of this scaler stay the same.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` for a scale that is not a positive number.
    pub fn restore(&mut self, state: LossScalerState) -> Result<()> {
        if !(state.scale.is_normal() && state.scale > 0.0) {
            return Err(Error::argument("LossScaler::restore", format!("the scale is {}; it must be a positive number", state.scale)));
        }
        (self.state, self.has_overflowed) = (state, false);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use half::{bf16, f16};

    const QUICK: LossScalerOptions = LossScalerOptions { initial_scale: 8.0, growth_factor: 2.0, backoff_factor: 0.25, growth_interval: 3 };

    #[test]
    fn scales_grow_after_good_steps_and_fall_after_bad_ones() {
        for ranks in [1, 2, 3, 13] {
            let outcomes = Communicator::run_local(ranks, |comm| {
                let mut scaler = LossScaler::new(QUICK)?;
                let mut seen = Vec::new();
                for step in 0..9 {
                    let bad = step == 4 && comm.rank() == ranks / 2;
                    scaler.unscale(&mut [1.0_f32, if bad { f32::NAN } else { 2.0 }]);
                    seen.push((scaler.update(comm)?, scaler.scale()));
                }
                Ok(seen)
            });
            let good = |scale| (true, scale);
            let expected = [good(8.0), good(8.0), good(16.0), good(16.0), (false, 4.0), good(4.0), good(4.0), good(8.0), good(8.0)];
            outcomes.unwrap().into_iter().for_each(|seen| assert_eq!(seen, expected, "{ranks} ranks"));
        }
    }

    #[test]
    fn every_type_is_divided_and_looked_at() {
        fn check<T: Float + PartialEq + std::fmt::Debug>(infinity: T) {
            let mut scaler = LossScaler::new(QUICK).unwrap();
            let mut gradients = [T::from_f32(8.0), T::from_f32(-20.0), T::from_f32(0.0)];
            scaler.unscale(&mut gradients);
            assert_eq!(gradients, [T::from_f32(1.0), T::from_f32(-2.5), T::from_f32(0.0)]);
            assert!(!scaler.has_overflowed);
            scaler.unscale(&mut [T::from_f32(1.0), infinity]);
            assert!(scaler.has_overflowed);
            scaler.unscale(&mut [T::from_f32(1.0)]);
            assert!(scaler.has_overflowed, "one bad gradient of many is enough");
            scaler.restore(LossScalerState { scale: 1e-37, good_steps: u32::MAX }).unwrap();
            let mut large = [T::from_f32(30_000.0)];
            scaler.unscale(&mut large);
            assert_eq!(scaler.has_overflowed, !large[0].to_f64().is_finite(), "{large:?}");
        }
        check(f32::INFINITY);
        check(f64::NEG_INFINITY);
        check(f16::NAN);
        check(bf16::INFINITY);
    }

    #[test]
    fn ranks_with_different_scales_are_told() {
        let errors = Communicator::run_local(3, |comm| {
            let mut scaler = LossScaler::new(QUICK)?;
            if comm.rank() == 1 {
                scaler.restore(LossScalerState { scale: 2.0, good_steps: 1 })?;
            }
            let before = scaler.clone();
            let error = scaler.update(comm).unwrap_err().to_string();
            assert_eq!(scaler, before);
            Ok(error)
        });
        errors.unwrap().iter().for_each(|error| assert!(error.contains("from 2 to 8"), "{error}"));
    }

    #[test]
    fn a_scale_stays_a_number_whatever_happens() {
        Communicator::run_local(1, |comm| {
            let mut scaler = LossScaler::new(QUICK)?;
            for _ in 0..200 {
                scaler.unscale(&mut [f32::INFINITY]);
                assert!(!scaler.update(comm)?);
            }
            assert_eq!(scaler.scale(), f32::MIN_POSITIVE);
            scaler.restore(LossScalerState { scale: f32::MAX / 1.5, good_steps: 2 })?;
            assert!(scaler.update(comm)?);
            assert_eq!(scaler.state(), LossScalerState { scale: f32::MAX / 1.5, good_steps: 0 });
            scaler.restore(LossScalerState { scale: 1.0, good_steps: u32::MAX })?;
            assert!(scaler.update(comm)?);
            assert_eq!(scaler.state(), LossScalerState { scale: 2.0, good_steps: 0 });
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn options_that_cannot_be_right_are_refused() {
        let wrong = [
            LossScalerOptions { initial_scale: 0.0, ..QUICK },
            LossScalerOptions { initial_scale: f32::NAN, ..QUICK },
            LossScalerOptions { growth_factor: 1.0, ..QUICK },
            LossScalerOptions { backoff_factor: 1.0, ..QUICK },
            LossScalerOptions { backoff_factor: f32::NAN, ..QUICK },
            LossScalerOptions { growth_interval: 0, ..QUICK },
        ];
        wrong.into_iter().for_each(|options| assert!(LossScaler::new(options).is_err(), "{options:?}"));
        assert!(LossScaler::default().restore(LossScalerState { scale: -1.0, good_steps: 0 }).is_err());
    }
}
