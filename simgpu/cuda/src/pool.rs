//! Memory pools, from which device memory comes, and their attributes.

use crate::code::{Code, Outcome};

/// `CU_MEMPOOL_ATTR_*`: three about the reuse of memory, the threshold, and four counters that a caller may only set
/// to zero.
const REUSE: std::ops::RangeInclusive<u32> = 1..=3;
const RELEASE_THRESHOLD: u32 = 4;
const HIGH_MARKS: [u32; 2] = [6, 8];

#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    reuse: [u32; 3],
    release_threshold: u64,
}

impl Pool {
    pub(crate) fn new(device: usize) -> Pool {
        Pool { device, reuse: [1; 3], release_threshold: 0 }
    }

    /// Sets an attribute to the number at `value`.
    ///
    /// # Safety
    ///
    /// `value` points to a number of the attribute's size.
    pub(crate) unsafe fn set(&mut self, attribute: u32, value: *const u8) -> Outcome {
        if value.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null; the caller guarantees 4 bytes there for these attributes, and 8 for the others.
        let (short, long) = unsafe {
            match attribute {
                _ if REUSE.contains(&attribute) => (value.cast::<u32>().read_unaligned(), 0),
                _ if attribute == RELEASE_THRESHOLD || HIGH_MARKS.contains(&attribute) => (0, value.cast::<u64>().read_unaligned()),
                _ => return Err(Code::INVALID_VALUE),
            }
        };
        match attribute {
            RELEASE_THRESHOLD => self.release_threshold = long,
            _ if REUSE.contains(&attribute) => self.reuse[attribute as usize - 1] = short,
            _ if long != 0 => return Err(Code::INVALID_VALUE),
            _ => {}
        }
        Ok(())
    }
}
