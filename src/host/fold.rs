//! What the host backend requires of a reduction, for every type and op.

#![expect(unsafe_code, reason = "a fold works on raw memory: buffers may be the same, and may lie in a shared mapping")]

use super::copy::Copy;

/// A fold of blocks of elements. Implemented by the kernels of [`super::reduce`].
pub(crate) trait Fold {
    /// The size of one element in bytes. The length of every span that is passed to `fold` is a multiple of this size.
    fn element_bytes(&self) -> usize;

    /// Whether operands may be folded in any order.
    fn is_commutative(&self) -> bool;

    /// Computes `into = inputs[0] op inputs[1] op …` over `bytes` bytes, in this order, with a wide accumulator if the
    /// type has one. If `last` is true, nothing more is folded into this part, so a mean is divided in this call.
    ///
    /// # Safety
    ///
    /// - `into` must point to `bytes` bytes that are valid for writing during the whole call.
    /// - Every input must point to `bytes` bytes that are valid for reading during the whole call.
    /// - All these addresses must be aligned to the element or to 64 bytes, whichever is less.
    /// - `bytes` must be a multiple of the element size.
    /// - For each input, `into` must be the same address, or must not overlap the input.
    /// - The inputs must be initialised, and no other code may write to them during the call. Bytes from peers are not
    ///   always valid values of the element's type. An implementation must read such bytes as bytes, or first turn them
    ///   into valid values.
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize, last: bool);

    /// Folds like [`Fold::fold`], and copies the result to `also` with `copy`.
    ///
    /// # Safety
    ///
    /// As for [`Fold::fold`]. `also` must meet the same conditions as `into`, and must overlap neither `into` nor any
    /// input.
    unsafe fn fold_to_two(&self, (into, also): (*mut u8, *mut u8), copy: Copy, inputs: &[*const u8], bytes: usize, last: bool) {
        // SAFETY: this function's caller promised what the callee requires.
        unsafe { fold_and_copy(self, (into, also), copy, inputs, bytes, last) }
    }
}

/// Folds, then copies: the default of [`Fold::fold_to_two`].
///
/// # Safety
///
/// As for [`Fold::fold_to_two`].
pub(super) unsafe fn fold_and_copy<F: Fold + ?Sized>(
    fold: &F,
    (into, also): (*mut u8, *mut u8),
    copy: Copy,
    inputs: &[*const u8],
    bytes: usize,
    last: bool,
) {
    if !inputs.is_empty() {
        // SAFETY: this function's caller promised what the fold requires. The result in `into` is copied to `also`,
        // which does not overlap it.
        unsafe {
            fold.fold(into, inputs, bytes, last);
            copy(into, also, bytes);
        }
    }
}
