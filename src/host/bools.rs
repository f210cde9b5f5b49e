//! Normalises bools received from peers: no byte other than 0 and 1 may ever be read as a `bool`.
//!
//! Peers must send the same element type, but a faulty peer can send any bytes. A call that fails or panics leaves what
//! it has written so far. So a destination is normalised before its owner gets it back, however the call ends. The
//! input of a custom op is normalised too. As in every fold, any byte other than 0 counts as 1.

#![expect(unsafe_code, reason = "reads the bytes of a call's destination when nothing else holds it any more")]

use std::marker::PhantomData;

use crate::base::tuning::copy::BOOLS_BLOCK_BYTES;
use crate::call::element::TypeTag;

/// Turns bytes into valid bools. Does not write to blocks that hold only 0 and 1.
pub(crate) fn normalise(bytes: &mut [u8]) {
    for block in bytes.chunks_mut(BOOLS_BLOCK_BYTES) {
        if block.iter().fold(0, |all, byte| all | byte) > 1 {
            block.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
    }
}

/// The destination of a call, which is normalised on drop if its elements are bools.
#[derive(Debug)]
pub(crate) struct NormalisedBools<'a> {
    start: *mut u8,
    /// 0 if there is nothing to normalise.
    bytes: usize,
    lent: PhantomData<&'a mut [u8]>,
}

impl NormalisedBools<'_> {
    /// Normalises `bytes` bytes from `start` on when dropped, if `element` is made of bools.
    ///
    /// # Safety
    ///
    /// If `bytes` is not 0, that many bytes at `start` are initialised and may be written until the value is dropped.
    /// While it is dropped, nothing else uses them.
    #[inline]
    pub(crate) unsafe fn new(element: TypeTag, start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes: if element.is_bool() { bytes } else { 0 }, lent: PhantomData }
    }

    #[cold]
    fn normalise(&self) {
        // SAFETY: `new`'s caller promised that they are initialised, and ours to write during the drop. `drop` found
        // that there are some, so the pointer is not null.
        normalise(unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) });
    }
}

impl Drop for NormalisedBools<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.normalise();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_byte_but_0_becomes_1() {
        let mut bytes: Vec<u8> = (0..2 * BOOLS_BLOCK_BYTES + 300).map(|at| (at % 256) as u8).collect();
        bytes[BOOLS_BLOCK_BYTES..2 * BOOLS_BLOCK_BYTES].iter_mut().for_each(|byte| *byte &= 1);
        let expected: Vec<u8> = bytes.iter().map(|byte| u8::from(*byte != 0)).collect();
        normalise(&mut bytes);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn only_bools_are_normalised() {
        let mut bytes = [0, 1, 2, 0xff];
        for element in [TypeTag::of::<u8>(), TypeTag::of::<[u8; 4]>(), TypeTag::Plain(4)] {
            // SAFETY: the array outlives the value, which is dropped at once.
            drop(unsafe { NormalisedBools::new(element, bytes.as_mut_ptr(), 4) });
            assert_eq!(bytes, [0, 1, 2, 0xff]);
        }
        // SAFETY: there are no bytes, so none need to be valid.
        drop(unsafe { NormalisedBools::new(TypeTag::of::<bool>(), std::ptr::null_mut(), 0) });
        // SAFETY: the array outlives the value, which is dropped at once.
        drop(unsafe { NormalisedBools::new(TypeTag::of::<[[bool; 2]; 2]>(), bytes.as_mut_ptr(), 4) });
        assert_eq!(bytes, [0, 1, 1, 1]);
    }
}
