//! Element-wise folds on the processor.
//!
//! A [`Kernel`] is made once for a call: it looks up the loop for the operation and element type, compiled for the best
//! instruction set that the processor has. Folding is then a call of that function, which neither allocates nor locks.
//!
//! Beyond the contract of [`ReduceOp`], so that the same inputs give the same bits everywhere:
//!
//! - The result does not depend on the instruction set, on where a buffer starts, or on which input is the destination.
//! - Min and Max take -0 for less than +0.
//! - A computed NaN is the type's positive quiet one. (A fold of one input computes nothing: it copies.)

mod block;
mod custom;
#[cfg(target_arch = "x86_64")]
mod half_x86;
mod lane;
mod level;
mod operation;
mod scale;
mod scratch;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use self::custom::{CustomFold, ErasedFold};
use self::level::Level;
use self::table::Functions;
use super::fold::Fold;
use crate::element::Data;
use crate::op::ReductionKind;
use crate::{DType, Error, ReduceOp, Reduction, Result};

pub(crate) use self::scale::premultiply;

/// One reduction, ready to fold blocks of its elements.
#[derive(Clone)]
pub(crate) struct Kernel {
    element_bytes: usize,
    is_commutative: bool,
    needs_premultiply: bool,
    work: Work,
}

/// What a kernel calls.
#[derive(Clone)]
enum Work {
    Builtin { functions: Functions, divisor: NonZeroU64 },
    Custom(Arc<dyn ErasedFold>),
}

impl Kernel {
    /// The kernel of a reduction over `world_size` ranks, which is what a mean divides by.
    ///
    /// # Errors
    ///
    /// `Unsupported` where the operation cannot be done on the element type.
    pub(crate) fn of<T: Data>(reduction: &Reduction<T>, world_size: usize) -> Result<Self> {
        match &reduction.0 {
            ReductionKind::Builtin(op, dtype) => Self::builtin(Level::best(), *op, *dtype, world_size),
            ReductionKind::Custom(op) => {
                let reason = "it was made for device buffers only; give it a function with CustomOp::new";
                let function = op.function().ok_or_else(|| Error::unsupported(format!("{:?} on host memory", op.name()), reason))?;
                Ok(Self {
                    // An element without bytes has no blocks to fold; 1 spares everyone a division by zero.
                    element_bytes: size_of::<T>().max(1),
                    is_commutative: op.is_commutative(),
                    needs_premultiply: false,
                    work: Work::Custom(Arc::new(CustomFold(Arc::clone(function)))),
                })
            }
        }
    }

    /// The kernel of a built-in operation, on an instruction set that the processor has.
    fn builtin(level: Level, op: ReduceOp, dtype: DType, world_size: usize) -> Result<Self> {
        let functions = table::functions(level, op, dtype)?;
        let divisor = NonZeroU64::new(world_size as u64).unwrap_or(NonZeroU64::MIN);
        Ok(Self {
            element_bytes: dtype.size_bytes(),
            is_commutative: true,
            needs_premultiply: matches!(op, ReduceOp::PreMulSum(_)),
            work: Work::Builtin { functions, divisor },
        })
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
            Work::Builtin { functions, divisor } => {
                let function = if last { functions.last } else { functions.partial };
                // SAFETY: the caller's contract is the function's; the function was chosen for the element type, and its
                // instruction set was found to be there.
                unsafe { function(into, inputs, bytes / functions.unit_bytes, *divisor) }
            }
            // SAFETY: the caller's contract is the same, and the operation was made for this element type.
            Work::Custom(op) => unsafe { op.fold(into, inputs, bytes) },
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
