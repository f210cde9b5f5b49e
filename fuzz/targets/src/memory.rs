//! The amount of memory that a thread holds.

#![expect(unsafe_code, reason = "counts what the system's allocator does")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// The bytes that this thread has allocated and not freed, and their maximum so far.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Adds a number of bytes to the count, negative for freed ones.
fn note(bytes: isize) {
    // When a thread ends, it frees memory after its thread-local count is gone.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: all calls are passed to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        note(new_size as isize);
        note(-(layout.size() as isize));
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Starts counting from zero.
pub(crate) fn begin() {
    HELD.set((0, 0));
}

/// Returns the most bytes held at any time since [`begin`].
pub(crate) fn most() -> usize {
    HELD.get().1.max(0) as usize
}
