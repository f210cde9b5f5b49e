//! The data movement of a collective once all ranks have provided their input.
#![expect(unsafe_code, reason = "device memory is read and written by its address")]

use crate::fold::{Contribution, fold};
use crate::operation::{Operation, Region, Verb};
use std::ops::Range;

/// Returns the bytes of a region.
///
/// # Safety
/// The region must be readable memory that no thread writes to while the slice lives.
pub(crate) unsafe fn bytes<'a>(region: Region) -> &'a [u8] {
    if region.bytes == 0 {
        return &[];
    }
    // SAFETY: promised by the caller; the length is not zero, so the address is one of real memory.
    unsafe { std::slice::from_raw_parts(region.address as *const u8, region.bytes) }
}

/// Copies as much of `from` as fits into a region.
///
/// # Safety
/// The region must be writable memory that no other thread accesses during the call, and not part of `from`.
pub(crate) unsafe fn fill(region: Region, from: &[u8]) {
    let length = region.bytes.min(from.len());
    // SAFETY: promised by the caller; no more than the region holds is written.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), region.address as *mut u8, length) };
}

/// Moves bytes between two regions of equal length, which may overlap.
///
/// # Safety
/// Both must be live memory that no other thread accesses during the call.
pub(crate) unsafe fn copy(from: Region, into: Region) {
    // SAFETY: promised by the caller; no more than either holds is moved.
    unsafe { std::ptr::copy(from.address as *const u8, into.address as *mut u8, from.bytes.min(into.bytes)) };
}

/// Runs one collective for all ranks. The operations agree and are in the order of the ranks.
///
/// # Safety
/// All regions must be live memory that no other thread accesses during the call.
pub(crate) unsafe fn perform(operations: &[Operation]) {
    let part = operations[0].signature.count * operations[0].signature.kind.size();
    // SAFETY: promised by the caller. The pool is a copy, so results may overwrite inputs.
    let pool = unsafe { pool(operations) };
    for (rank, operation) in operations.iter().enumerate() {
        let range = share(operation.signature.verb, rank, operations.len(), part, pool.len());
        // SAFETY: promised by the caller; the pool is this function's own memory.
        unsafe { fill(operation.output, &pool[range]) };
    }
}

/// Returns the part of the pool that is rank `rank`'s result.
fn share(verb: Verb, rank: usize, size: usize, part: usize, whole: usize) -> Range<usize> {
    match verb {
        Verb::ReduceScatter | Verb::Scatter => rank * part..(rank + 1) * part,
        Verb::AlltoAll => rank * size * part..(rank + 1) * size * part,
        _ => 0..whole,
    }
}

/// Returns all results, concatenated.
///
/// # Safety
/// As for [`perform`].
unsafe fn pool(operations: &[Operation]) -> Vec<u8> {
    let signature = operations[0].signature;
    // SAFETY: promised by the caller.
    let inputs: Vec<&[u8]> = operations.iter().map(|operation| unsafe { bytes(operation.input) }).collect();
    match signature.verb {
        Verb::AllReduce | Verb::Reduce | Verb::ReduceScatter => {
            let contributions: Vec<_> =
                inputs.iter().zip(operations).map(|(bytes, operation)| Contribution { bytes, scalar: operation.scalar }).collect();
            fold(signature.kind, signature.fold, &contributions)
        }
        Verb::AllGather | Verb::Gather => inputs.concat(),
        Verb::AlltoAll => transpose(&inputs, signature.count * signature.kind.size()),
        Verb::Broadcast | Verb::Scatter => inputs[signature.root].to_vec(),
        Verb::Send | Verb::Recv => Vec::new(),
    }
}

/// Makes part `s` of rank `r` part `r` of rank `s`.
fn transpose(inputs: &[&[u8]], part: usize) -> Vec<u8> {
    (0..inputs.len()).flat_map(|to| inputs.iter().flat_map(move |from| &from[to * part..(to + 1) * part])).copied().collect()
}
