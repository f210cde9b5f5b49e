//! Keeps a buffer alive and in place while a background call works on it through raw pointers.

#![expect(unsafe_code, reason = "a moved box invalidates pointers to its value, so the value lies in a raw allocation")]

use std::any::Any;
use std::ptr::NonNull;

/// A boxed value held by its raw pointer: moving the pinned buffer neither moves the value nor asserts anything about it.
pub(in crate::communicator) struct PinnedBuffer<B>(NonNull<B>);

// SAFETY: it owns its value, as a box does.
unsafe impl<B: Send> Send for PinnedBuffer<B> {}

impl<B> PinnedBuffer<B> {
    /// Boxes `value`.
    pub(in crate::communicator) fn new(value: B) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    /// Returns the value; used before the call starts. Pointers taken from it stay valid as long as the pinned buffer
    /// lives.
    pub(in crate::communicator) fn value(&mut self) -> &mut B {
        // SAFETY: the allocation is owned by this pinned buffer, initialised, and borrowed through it alone.
        unsafe { self.0.as_mut() }
    }
}

impl<B> Drop for PinnedBuffer<B> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box, and is given back once: `release` forgets the pinned buffer.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A pinned buffer whose type is erased.
pub(in crate::communicator) trait ErasedBuffer: Send {
    /// Returns the value as a box again. Call this only when nothing points into the value any more.
    fn release(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl<B: Send + 'static> ErasedBuffer for PinnedBuffer<B> {
    fn release(self: Box<Self>) -> Box<dyn Any + Send> {
        let pointer = self.0.as_ptr();
        std::mem::forget(*self);
        // SAFETY: the pointer came from a box, and is given back once: the pinned buffer is forgotten, so its drop does not run.
        unsafe { Box::from_raw(pointer) }
    }
}
