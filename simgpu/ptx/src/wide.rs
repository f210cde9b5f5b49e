//! Single accesses of 16 bytes: no thread, stream or process sees half of one.
//!
//! On x86-64, aligned loads and stores of an SSE register are one access on every processor that has AVX: Intel and
//! AMD document it. Older ones compare and exchange 16 bytes under a lock. On aarch64, pairs of registers are loaded
//! and stored exclusively. Elsewhere a lock replaces the processor's; it works within this process only.
#![expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod processor {
    use std::arch::asm;
    use std::arch::x86_64::{__m128i, _mm_cvtsi128_si64, _mm_set_epi64x, _mm_unpackhi_epi64};

    /// # Safety
    /// `at` is a multiple of 16, and valid for reads and writes of 16 bytes.
    #[inline]
    pub(super) unsafe fn read(at: *mut u8) -> [u64; 2] {
        if std::arch::is_x86_feature_detected!("avx") {
            let value: __m128i;
            // SAFETY: aligned and readable by the caller's promise. A load of the processor has no data race; for the
            // compiler the block may read any memory.
            unsafe { asm!("movdqa {}, [{}]", out(xmm_reg) value, in(reg) at, options(nostack, preserves_flags, readonly)) };
            // SAFETY: every processor of this kind has SSE2.
            return unsafe { [_mm_cvtsi128_si64(value) as u64, _mm_cvtsi128_si64(_mm_unpackhi_epi64(value, value)) as u64] };
        }
        // SAFETY: passed on.
        unsafe { exchange(at, |old| old) }
    }

    /// # Safety
    /// As for [`read`].
    #[inline]
    pub(super) unsafe fn write(at: *mut u8, value: [u64; 2]) {
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: every processor of this kind has SSE2.
            let value = unsafe { _mm_set_epi64x(value[1] as i64, value[0] as i64) };
            // SAFETY: aligned and writable by the caller's promise. A store of the processor has no data race; for the
            // compiler the block may write any memory.
            unsafe { asm!("movdqa [{}], {}", in(reg) at, in(xmm_reg) value, options(nostack, preserves_flags)) };
            return;
        }
        // SAFETY: passed on.
        unsafe { exchange(at, |_| value) };
    }

    /// Replaces a value and returns the old one.
    ///
    /// # Safety
    /// As for [`read`].
    pub(super) unsafe fn exchange(at: *mut u8, new: impl Fn([u64; 2]) -> [u64; 2]) -> [u64; 2] {
        if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
            // SAFETY: passed on.
            return unsafe { super::locked::exchange(at, new) };
        }
        let mut old = [0; 2];
        loop {
            // SAFETY: the processor has the instruction; the rest is the caller's promise.
            let found = unsafe { swap(at, old, new(old)) };
            if found == old {
                return old;
            }
            old = found;
        }
    }

    /// Writes `new` if the current value is `old`, and returns the current value.
    ///
    /// # Safety
    /// As for [`read`], on a processor that has the instruction.
    unsafe fn swap(at: *mut u8, old: [u64; 2], new: [u64; 2]) -> [u64; 2] {
        let [mut low, mut high] = old;
        // SAFETY: aligned and valid by the caller's promise. The compiler reserves rbx: its old value is restored at
        // the end, from rsi, and no operand lies in it.
        unsafe {
            asm!("xchg rbx, rsi", "lock cmpxchg16b [rdi]", "mov rbx, rsi", in("rdi") at, inout("rsi") new[0] => _,
                in("rcx") new[1], inout("rax") low, inout("rdx") high, options(nostack));
        }
        [low, high]
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod processor {
    use std::arch::asm;

    /// # Safety
    /// `at` is a multiple of 16, and valid for reads and writes of 16 bytes.
    pub(super) unsafe fn read(at: *mut u8) -> [u64; 2] {
        let (low, high): (u64, u64);
        // SAFETY: aligned and valid by the caller's promise. The loaded value is stored again, because only the
        // success of the store shows that both halves were loaded at once.
        unsafe {
            asm!("2:", "ldaxp {low}, {high}, [{at}]", "stlxp {failed:w}, {low}, {high}, [{at}]", "cbnz {failed:w}, 2b",
                low = out(reg) low, high = out(reg) high, failed = out(reg) _, at = in(reg) at, options(nostack, preserves_flags));
        }
        [low, high]
    }

    /// # Safety
    /// As for [`read`].
    pub(super) unsafe fn write(at: *mut u8, value: [u64; 2]) {
        // SAFETY: aligned and valid by the caller's promise.
        unsafe {
            asm!("2:", "ldaxp {old}, {other}, [{at}]", "stlxp {failed:w}, {low}, {high}, [{at}]", "cbnz {failed:w}, 2b",
                old = out(reg) _, other = out(reg) _, failed = out(reg) _, low = in(reg) value[0], high = in(reg) value[1],
                at = in(reg) at, options(nostack, preserves_flags));
        }
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod processor {
    /// # Safety
    /// `at` is a multiple of 16, and valid for reads and writes of 16 bytes.
    pub(super) unsafe fn read(at: *mut u8) -> [u64; 2] {
        // SAFETY: passed on.
        unsafe { super::locked::exchange(at, |old| old) }
    }

    /// # Safety
    /// As for [`read`].
    pub(super) unsafe fn write(at: *mut u8, value: [u64; 2]) {
        // SAFETY: passed on.
        unsafe { super::locked::exchange(at, |_| value) };
    }
}

#[cfg(not(all(target_arch = "aarch64", not(miri))))]
mod locked {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, PoisonError};

    /// Replaces a value and returns the old one, in halves under a lock: for processors that have nothing better.
    ///
    /// # Safety
    /// `at` is a multiple of 16, and valid for reads and writes of 16 bytes.
    pub(super) unsafe fn exchange(at: *mut u8, new: impl Fn([u64; 2]) -> [u64; 2]) -> [u64; 2] {
        static LOCK: Mutex<()> = Mutex::new(());
        let _held = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: aligned and valid by the caller's promise; atomic accesses do not race with one another.
        let [low, high] = [0, 8].map(|offset| unsafe { AtomicU64::from_ptr(at.add(offset).cast()) });
        let old = [low.load(Ordering::Acquire), high.load(Ordering::Acquire)];
        let value = new(old);
        low.store(value[0], Ordering::Release);
        high.store(value[1], Ordering::Release);
        old
    }
}

/// Reads 16 bytes at once.
///
/// # Safety
/// `at` is a multiple of 16, and valid for reads and writes of 16 bytes.
#[inline]
pub(crate) unsafe fn read(at: *mut u8) -> [u64; 2] {
    // SAFETY: passed on.
    unsafe { processor::read(at) }
}

/// Writes 16 bytes at once.
///
/// # Safety
/// As for [`read`].
#[inline]
pub(crate) unsafe fn write(at: *mut u8, value: [u64; 2]) {
    // SAFETY: passed on.
    unsafe { processor::write(at, value) }
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;

    use super::*;

    #[repr(align(16))]
    struct Cell(UnsafeCell<[u64; 2]>);

    // SAFETY: the threads of the test access it only through the functions under test.
    unsafe impl Sync for Cell {}

    /// Makes one thread write numbers with two equal halves, and another read them.
    fn hammer(write: impl Fn(*mut u8, [u64; 2]) + Send, read: impl Fn(*mut u8) -> [u64; 2]) {
        const ROUNDS: u64 = if cfg!(miri) { 50 } else { 300_000 };
        let cell = Cell(UnsafeCell::new([0; 2]));
        let all = &cell;
        std::thread::scope(|scope| {
            scope.spawn(move || (1..=ROUNDS).for_each(|number| write(all.0.get().cast(), [number; 2])));
            let mut last = 0;
            while last < ROUNDS {
                let found = read(all.0.get().cast());
                assert_eq!(found[0], found[1], "half of an access was seen");
                assert!(found[0] >= last, "time went backwards");
                last = found[0];
            }
        });
    }

    #[test]
    fn nobody_sees_half_of_an_access() {
        // SAFETY: `Cell` is aligned, and lives as long as both threads.
        hammer(|at, value| unsafe { write(at, value) }, |at| unsafe { read(at) });
        // SAFETY: as before.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        hammer(|at, value| _ = unsafe { processor::exchange(at, |_| value) }, |at| unsafe { processor::exchange(at, |old| old) });
        // SAFETY: as before.
        #[cfg(not(all(target_arch = "aarch64", not(miri))))]
        hammer(|at, value| _ = unsafe { locked::exchange(at, |_| value) }, |at| unsafe { locked::exchange(at, |old| old) });
    }
}
