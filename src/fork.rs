//! Whether this process is a forked child of the one in which communicators were made.
//!
//! A child has its parent's shared memory and sockets, and none of its threads: a call would speak in the parent's name, and a drop would
//! take leave for it. So calls in a child are refused, and drops there say nothing to anyone.

#![expect(unsafe_code, reason = "a page that the kernel wipes in children is mapped by hand")]

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// A byte that is 1 here and 0 in every child.
#[derive(Debug, Clone, Copy)]
struct Mark(NonNull<AtomicU8>);

// SAFETY: an atomic byte in a page that is never unmapped.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

static MARK: OnceLock<Option<Mark>> = OnceLock::new();

/// Makes the mark, once for each process; from now on children can be told. Where the kernel cannot (before Linux 4.14), none is.
pub(crate) fn watch() {
    MARK.get_or_init(|| {
        let bytes = rustix::param::page_size();
        // SAFETY: a new mapping, which is not unmapped again.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }.ok()?;
        // SAFETY: the advice is for that page alone, which nobody else uses.
        unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) }.ok()?;
        let mark = Mark(NonNull::new(page.cast())?);
        // SAFETY: mapped, zeroed, aligned to a page, and for good.
        unsafe { mark.0.as_ref() }.store(1, Ordering::Relaxed);
        Some(mark)
    });
}

/// Whether this process was forked from one that had called [`watch`].
#[inline]
pub(crate) fn is_child() -> bool {
    match MARK.get() {
        // SAFETY: as in `watch`.
        Some(Some(mark)) => unsafe { mark.0.as_ref() }.load(Ordering::Relaxed) == 0,
        _ => false,
    }
}
