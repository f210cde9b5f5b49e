//! Element-wise folds on the processor.
//!
//! A [`Kernel`] is created once for a call: it looks up the loop for the operation and element type, compiled for the
//! best instruction set that the processor has. Folding is then a call of that function, which neither allocates nor
//! locks.
//!
//! These rules go beyond the contract of [`ReduceOp`], so that the same inputs give the same bits everywhere:
//!
//! - The result does not depend on the instruction set, on where a buffer starts, or on which input is the destination.
//! - Min and Max treat -0 as less than +0.
//! - A computed NaN is the type's positive quiet NaN. (A fold of one input computes nothing: it copies.)
//!
//! # Design
//!
//! There is one generic body for each op, instantiated for the baseline, AVX2 and AVX-512, and chosen once when a
//! kernel is created. All give the same bits. 16-bit and 8-bit floats are widened to `f32`, accumulated over all inputs
//! of a fold, and rounded once. A computed NaN is the type's one quiet NaN, and −0 counts as less than +0, so that
//! results do not depend on the order of operands.

mod block;
mod custom;
#[cfg(target_arch = "x86_64")]
mod f16_x86;
mod level;
mod numeric;
mod operation;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use self::level::Level;
use self::table::Functions;
use super::copy::Copy;
use super::fold::{self, Fold};
use crate::base::tuning::reduce::TWICE_READ_BYTES;
use crate::call::element::DType;
use crate::call::element::TypeTag;
use crate::call::op::{ErasedFold, ReductionKind};
use crate::call::op::{ReduceOp, Reduction};
use crate::error::{Error, Result};

pub(crate) use self::table::premultiply;

/// One reduction, ready to fold blocks of its elements.
#[derive(Clone)]
pub(crate) struct Kernel {
    element_bytes: usize,
    is_commutative: bool,
    needs_premultiply: bool,
    work: Work,
}

/// The function that a kernel calls.
#[derive(Clone)]
enum Work {
    Builtin { functions: Functions, divisor: NonZeroU64 },
    Custom(Arc<dyn ErasedFold>),
}

impl Kernel {
    /// Returns the kernel of a reduction of such elements. A mean divides by `world_size`, the number of ranks.
    ///
    /// # Errors
    ///
    /// `Unsupported` if the operation cannot be done on the element type.
    pub(crate) fn of<T>(reduction: &Reduction<T>, element: TypeTag, world_size: usize) -> Result<Self> {
        match &reduction.kind {
            ReductionKind::Builtin(op) => Self::builtin(Level::best(), *op, op.fits(element)?, world_size),
            ReductionKind::Custom(op) => {
                op.check(element)?;
                let reason = "it was made for device buffers only; give it a function with CustomOp::new";
                let fold = op.fold.as_ref().ok_or_else(|| Error::unsupported(format!("{:?} on host memory", op.name), reason))?;
                Ok(Self {
                    // A zero-sized element has no blocks to fold; 1 avoids divisions by zero elsewhere.
                    element_bytes: op.element_bytes.max(1),
                    is_commutative: op.commutative,
                    needs_premultiply: false,
                    work: Work::Custom(Arc::clone(fold)),
                })
            }
        }
    }

    /// Returns the kernel of a built-in operation, on an instruction set that the processor has.
    fn builtin(level: Level, op: ReduceOp, dtype: DType, world_size: usize) -> Result<Self> {
        let divisor = NonZeroU64::new(world_size as u64).unwrap_or(NonZeroU64::MIN);
        let functions = table::functions(level, op, dtype, divisor)?;
        Ok(Self {
            element_bytes: dtype.size_bytes(),
            is_commutative: true,
            needs_premultiply: matches!(op, ReduceOp::PreMulSum(_)),
            work: Work::Builtin { functions, divisor },
        })
    }

    /// Returns the names of the instruction sets that this processor has, lowest first.
    #[cfg(feature = "__internals")]
    pub(crate) fn levels() -> impl Iterator<Item = &'static str> {
        Level::ALL.iter().filter(|level| level.is_available()).map(|level| level.name())
    }

    /// Returns the kernel of a built-in operation on the instruction set of this name, or on the best one if the
    /// processor lacks it.
    #[cfg(feature = "__internals")]
    pub(crate) fn on(level: &str, op: ReduceOp, dtype: DType, world_size: usize) -> Result<Self> {
        let level = Level::ALL.iter().copied().find(|known| known.is_available() && known.name() == level);
        Self::builtin(level.unwrap_or(Level::best()), op, dtype, world_size)
    }

    /// Whether each rank's own elements must go through [`premultiply`] before they are folded.
    pub(crate) fn needs_premultiply(&self) -> bool {
        self.needs_premultiply
    }
}

#[expect(unsafe_code, reason = "a fold works on raw memory, and only its caller knows what lies there")]
impl Fold for Kernel {
    fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    fn is_commutative(&self) -> bool {
        self.is_commutative
    }

    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize, last: bool) {
        if bytes == 0 {
            return;
        }
        match &self.work {
            // SAFETY: the caller's contract is the same.
            Work::Builtin { functions, divisor } => unsafe { functions.fold(into, inputs, 0..bytes, (last, *divisor)) },
            // SAFETY: the caller's contract is the same, and the operation was made for this element type.
            Work::Custom(op) => unsafe { op.fold(into, inputs, bytes) },
        }
    }

    unsafe fn fold_to_two(&self, (into, also): (*mut u8, *mut u8), copy: Copy, inputs: &[*const u8], bytes: usize, last: bool) {
        let Work::Builtin { functions, divisor } = &self.work else {
            // SAFETY: it requires what this function's caller has promised.
            return unsafe { fold::fold_and_copy(self, (into, also), copy, inputs, bytes, last) };
        };
        for start in (0..if inputs.is_empty() { 0 } else { bytes }).step_by(TWICE_READ_BYTES) {
            let end = bytes.min(start + TWICE_READ_BYTES);
            // SAFETY: within what the caller guarantees, and of whole elements. The result is copied while it is in the
            // cache.
            unsafe {
                functions.fold(into.add(start), inputs, start..end, (last, *divisor));
                copy(into.add(start), also.add(start), end - start);
            }
        }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("element_bytes", &self.element_bytes)
            .field("is_commutative", &self.is_commutative)
            .field("needs_premultiply", &self.needs_premultiply)
            .finish_non_exhaustive()
    }
}
