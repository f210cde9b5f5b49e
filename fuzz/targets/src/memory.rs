//! How much memory a thread holds.

#![expect(unsafe_code, reason = "counts what the system's allocator does")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// What this thread has allocated and not freed, and the most that it was.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Takes note of so many bytes more, or less.
fn note(bytes: isize) {
    // A thread that ends frees what it held when there is nobody left to ask.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: everything is the system allocator's doing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both may be there for a moment.
        note(new_size as isize);
        note(-(layout.size() as isize));
        // SAFETY: passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Begins to count: what is held now counts as nothing.
pub(crate) fn begin() {
    HELD.set((0, 0));
}

/// The most that was held at a time since then.
pub(crate) fn most() -> usize {
    HELD.get().1.max(0) as usize
}
