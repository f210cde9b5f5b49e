//! What the host backend asks of a reduction, whatever its type and op.

#![expect(unsafe_code, reason = "a fold works on raw memory: buffers may be the same, and may lie in a shared mapping")]

use super::copy::Copy;

/// Folds blocks of elements. Implemented by the kernels of [`super::reduce`].
pub(crate) trait Fold {
    /// The size of one element in bytes; every span handed to `fold` is a multiple of it.
    fn element_bytes(&self) -> usize;

    /// Whether operands may be folded in any order.
    fn is_commutative(&self) -> bool;

    /// `into = inputs[0] op inputs[1] op …` over `bytes` bytes, in this order, with a wide accumulator where the type has one.
    /// `last`: nothing more is folded into this part, so an average divides here.
    ///
    /// # Safety
    ///
    /// - `into` and every input point to `bytes` bytes, valid for the access for the whole call, and aligned to the element or to
    ///   64 bytes, whichever is less.
    /// - `bytes` is a multiple of the element size.
    /// - `into` may be the same address as any of the inputs; apart from that it overlaps none.
    /// - The inputs are initialised, and nobody writes to them during the call. What peers have sent may be no value of the element's type:
    ///   whoever folds must read it as bytes, or make values of it first.
    unsafe fn fold(&self, into: *mut u8, inputs: &[*const u8], bytes: usize, last: bool);

    /// As [`Fold::fold`], with the result copied to `also` too, in such a way.
    ///
    /// # Safety
    ///
    /// As [`Fold::fold`]; `also` is such a destination as `into`, apart from it and from every input.
    unsafe fn fold_to_two(&self, (into, also): (*mut u8, *mut u8), copy: Copy, inputs: &[*const u8], bytes: usize, last: bool) {
        // SAFETY: it asks for what this function's caller has promised.
        unsafe { fold_and_copy(self, (into, also), copy, inputs, bytes, last) }
    }
}

/// What [`Fold::fold_to_two`] does where nothing better is known.
///
/// # Safety
///
/// As there.
pub(super) unsafe fn fold_and_copy<F: Fold + ?Sized>(
    fold: &F,
    (into, also): (*mut u8, *mut u8),
    copy: Copy,
    inputs: &[*const u8],
    bytes: usize,
    last: bool,
) {
    if !inputs.is_empty() {
        // SAFETY: the fold asks for what this function's caller has promised; what it has written to `into` goes to `also`, which is apart from it.
        unsafe {
            fold.fold(into, inputs, bytes, last);
            copy(into, also, bytes);
        }
    }
}
