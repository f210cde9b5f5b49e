//! Distinguishes a process from the processes that were forked from it.
//!
//! A child has its parent's shared memory and sockets, but none of its threads. A call in the child would send in the
//! parent's name, and a drop would notify peers that the parent leaves. So calls in a child are refused, and drops
//! there send nothing.

#![expect(unsafe_code, reason = "maps a page that the kernel fills with zeros in forked children")]

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// A number that differs from process to process, and is 0 until it is first requested.
#[derive(Debug, Clone, Copy)]
struct Mark(NonNull<AtomicU64>);

// SAFETY: an atomic number in a page that is never unmapped.
unsafe impl Send for Mark {}
// SAFETY: the number is atomic, in a page that is never unmapped, and nothing else is reached through this.
unsafe impl Sync for Mark {}

static MARK: OnceLock<Option<Mark>> = OnceLock::new();

/// The count of numbers that this process, and those that it was forked from, have given out.
static GIVEN: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process(u64);

impl Default for Process {
    fn default() -> Self {
        Self::this()
    }
}

impl Process {
    /// Returns the current process. If the kernel cannot distinguish children (before Linux 4.14), all processes count
    /// as the same.
    pub(crate) fn this() -> Self {
        let Some(number) = mark() else { return Self(0) };
        match number.load(Ordering::Relaxed) {
            0 => {
                let fresh = GIVEN.fetch_add(1, Ordering::Relaxed) + 1;
                let raced = number.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
                Self(raced.err().unwrap_or(fresh))
            }
            known => Self(known),
        }
    }

    /// Returns whether the current process is a different one, which was forked from this one.
    #[inline]
    pub(crate) fn is_foreign(self) -> bool {
        mark().is_some_and(|number| number.load(Ordering::Relaxed) != self.0)
    }
}

/// Returns the number, which is in a page that the kernel wipes in children.
#[inline]
fn mark() -> Option<&'static AtomicU64> {
    let mark = (*MARK.get_or_init(map))?;
    // SAFETY: `map` has mapped the page, which is zeroed and never unmapped; a page is aligned for the number.
    Some(unsafe { mark.0.as_ref() })
}

#[cold]
fn map() -> Option<Mark> {
    let bytes = rustix::param::page_size();
    // SAFETY: a new mapping, which is not unmapped again.
    let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }.ok()?;
    // Miri has neither children nor such pages.
    if cfg!(not(miri)) {
        // SAFETY: the advice is for that page alone, which no other code uses.
        unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.ok()?;
    }
    Some(Mark(NonNull::new(page.cast())?))
}
