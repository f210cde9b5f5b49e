//! The caller's memory, for as long as a request is under way.

#![expect(unsafe_code, reason = "requests outlive the call that posts them, so they hold addresses instead of borrows")]

use std::ops::Range;
use std::slice;

use crate::element::TypeTag;
use crate::host::bools;

/// The bytes of a message that is being sent. Exists only inside a pending request, dropped when that finishes or is cancelled, and for as
/// long as a call tries to do without one.
#[derive(Debug)]
pub(super) struct Source {
    start: *const u8,
    bytes: usize,
}

// SAFETY: an address of plain bytes; `Source::new` has the caller promise that they may be read as long as the value exists,
// on whichever thread.
unsafe impl Send for Source {}

impl Source {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised and nobody writes them.
    pub(super) unsafe fn new(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// The bytes.
    pub(super) fn as_slice(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: promised to `new`: initialised and unwritten as long as `self` exists, which the borrow does not outlive.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }
}

/// Where a message is being received. Exists only inside a pending request, as [`Source`]; when that ends, by whichever way, there is
/// nothing but truth values where there should be.
#[derive(Debug)]
pub(super) struct Destination {
    start: *mut u8,
    bytes: usize,
    /// Up to where a message was, or may have been, written that should be one of truth values.
    unnormalised: usize,
    is_bool: bool,
}

// SAFETY: an address of plain bytes; `Destination::new` has the caller promise that they are ours alone as long as the value
// exists, on whichever thread.
unsafe impl Send for Destination {}

impl Destination {
    /// # Safety
    ///
    /// As long as the value exists, the bytes at `start` are initialised, may be written, and nobody else reads or writes them.
    pub(super) unsafe fn new(element: TypeTag, start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes, unnormalised: 0, is_bool: element.is_bool() }
    }

    /// Some of the bytes, to be written; `None` where there are not as many.
    pub(super) fn part(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        if self.is_bool {
            self.unnormalised = self.unnormalised.max(range.end.min(self.bytes));
        }
        self.as_mut_slice().get_mut(range)
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: promised to `new`: initialised and ours alone as long as `self` exists; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// How many bytes there are.
    pub(super) fn capacity(&self) -> usize {
        self.bytes
    }
}

impl Drop for Destination {
    #[inline]
    fn drop(&mut self) {
        if self.unnormalised > 0 {
            let written = self.unnormalised;
            bools::normalise(&mut self.as_mut_slice()[..written]);
        }
    }
}
