//! What the crate's own benchmarks measure and fuzz targets try, behind functions that check what they are given. No part of the interface.

#![expect(unsafe_code, reason = "folds and copies take pointers")]
#![allow(missing_docs, reason = "seen by benchmarks alone")]

pub mod fuzz;
mod links;
mod mailboxes;

pub use links::Link;
pub use mailboxes::Mailboxes;

use crate::element::{DType, Element};
use crate::host::copy;
use crate::host::exchange::{Exchange, local};
use crate::host::fold::Fold;
use crate::host::reduce::Kernel as Inner;
use crate::{ReduceOp, Result};

/// The inputs that a fold here takes at most, besides its destination.
pub const MOST_INPUTS: usize = 16;

/// The instruction sets that this processor has, from the least.
pub fn levels() -> Vec<&'static str> {
    Inner::levels().collect()
}

/// The kernel of one op on one type, for a world of two.
#[derive(Debug)]
pub struct Kernel<T: Element> {
    inner: Inner,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Kernel<T> {
    /// The kernel on one of [`levels`]; the best one where there is no such.
    ///
    /// # Errors
    ///
    /// `Unsupported` where the operation cannot be done on the element type.
    pub fn new(op: ReduceOp, dtype: DType, level: &str) -> Result<Self> {
        assert_eq!(dtype.size_bytes(), size_of::<T>(), "{dtype} has another size");
        Ok(Self { inner: Inner::on(level, op, dtype, 2)?, element: std::marker::PhantomData })
    }

    /// `into = into op others[0] op …`
    pub fn in_place(&self, into: &mut [T], others: &[&[T]]) {
        let (into, bytes) = (into.as_mut_ptr().cast::<u8>(), size_of_val(into));
        let (pointers, count) = pointers(Some(into), others, bytes);
        // SAFETY: all slices are as long (checked), the destination is borrowed for us alone, and one of the inputs.
        unsafe { self.inner.fold(into, &pointers[..count], bytes, true) }
    }

    /// `into = inputs[0] op …`
    pub fn apart(&self, into: &mut [T], inputs: &[&[T]]) {
        let (pointers, count) = pointers(None, inputs, size_of_val(into));
        // SAFETY: all slices are as long (checked), and the destination is borrowed for us alone.
        unsafe { self.inner.fold(into.as_mut_ptr().cast(), &pointers[..count], size_of_val(into), true) }
    }

    /// As [`Kernel::apart`], to two destinations.
    pub fn to_two(&self, into: &mut [T], also: &mut [T], inputs: &[&[T]]) {
        assert_eq!(into.len(), also.len(), "one length");
        let (pointers, count) = pointers(None, inputs, size_of_val(into));
        let (into, also, bytes) = (into.as_mut_ptr().cast(), also.as_mut_ptr().cast(), size_of_val(into));
        // SAFETY: as for `apart`, and so is the second destination.
        unsafe { self.inner.fold_to_two(into, also, &pointers[..count], bytes, true) }
    }
}

/// The inputs' addresses, and how many there are.
fn pointers<T>(first: Option<*mut u8>, others: &[&[T]], bytes: usize) -> ([*const u8; MOST_INPUTS + 1], usize) {
    assert!(others.len() <= MOST_INPUTS, "too many inputs");
    let mut pointers = [std::ptr::null(); MOST_INPUTS + 1];
    let mut count = 0;
    for pointer in first.map(<*mut u8>::cast_const).into_iter().chain(others.iter().map(|other| other.as_ptr().cast())) {
        pointers[count] = pointer;
        count += 1;
    }
    assert!(others.iter().all(|other| size_of_val(*other) == bytes), "one length");
    (pointers, count)
}

/// What each rank of this process makes of an exchange with the others, by rank; each on a thread of its own meanwhile.
fn exchanging<T: Send>(ranks: usize, make: impl Fn(usize, &mut dyn Exchange) -> Result<T> + Sync) -> Result<Vec<T>> {
    let make = &make;
    std::thread::scope(|scope| {
        let ends = local::exchanges(ranks).into_iter().enumerate();
        let threads: Vec<_> = ends.map(|(rank, mut exchange)| scope.spawn(move || make(rank, &mut exchange))).collect();
        let failed = |_| Err(crate::Error::argument("internals", "a rank's thread panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
    })
}

/// A copy to a destination that is read again soon.
pub fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "one length");
    // SAFETY: two borrowed slices of one length.
    unsafe { copy::copy(from.as_ptr(), to.as_mut_ptr(), from.len()) }
}

/// A copy past the cache.
pub fn copy_streaming(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "one length");
    // SAFETY: two borrowed slices of one length.
    unsafe { copy::copy_streaming(from.as_ptr(), to.as_mut_ptr(), from.len()) }
}
