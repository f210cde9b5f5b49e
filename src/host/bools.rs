//! Truth values that come from elsewhere: no byte but 0 and 1 may ever be seen as a `bool`.
//!
//! Peers are held to the same element type, but a peer that misbehaves can send any bytes. A call that fails, or is left by a panic, leaves
//! what it had written. So a destination is normalised before its owner has it back, however the call ends, and so is what a custom op is
//! given. As in every fold, any byte but 0 counts as 1.

#![expect(unsafe_code, reason = "looks at the destination of a call when nothing else holds it any more")]

use std::marker::PhantomData;

use crate::base::tuning::copy::BOOLS_BLOCK_BYTES;
use crate::call::element::TypeTag;

/// Makes truth values of bytes. Of memory that holds nothing else it writes nothing.
pub(crate) fn normalise(bytes: &mut [u8]) {
    for block in bytes.chunks_mut(BOOLS_BLOCK_BYTES) {
        if block.iter().fold(0, |all, byte| all | byte) > 1 {
            block.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
    }
}

/// The destination of a call: normalised when this is dropped, where its elements are bools.
#[derive(Debug)]
pub(crate) struct NormalisedBools<'a> {
    start: *mut u8,
    /// 0 where there is nothing to do.
    bytes: usize,
    lent: PhantomData<&'a mut [u8]>,
}

impl NormalisedBools<'_> {
    /// Normalises `bytes` bytes from `start` on at its end if `element` is made of bools.
    ///
    /// # Safety
    ///
    /// If `bytes` is not 0, that many are initialised at `start`, and may be written, until the value is dropped; while it is dropped
    /// nobody else uses them.
    #[inline]
    pub(crate) unsafe fn new(element: TypeTag, start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes: if element.is_bool() { bytes } else { 0 }, lent: PhantomData }
    }

    #[cold]
    fn normalise(&self) {
        // SAFETY: promised to `new`: initialised, ours to write while this is dropped; `drop` found that there are some, so that the
        // pointer is not null.
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
        // SAFETY: as there are none, none need be valid.
        drop(unsafe { NormalisedBools::new(TypeTag::of::<bool>(), std::ptr::null_mut(), 0) });
        // SAFETY: the array outlives the value, which is dropped at once.
        drop(unsafe { NormalisedBools::new(TypeTag::of::<[[bool; 2]; 2]>(), bytes.as_mut_ptr(), 4) });
        assert_eq!(bytes, [0, 1, 1, 1]);
    }
}
