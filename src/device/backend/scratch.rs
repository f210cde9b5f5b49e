//! The backend's memory for folds and exchanges in place: a small part from the start, and the full amount from the
//! first call that needs more.
//!
//! A process can have many communicators, and most of them never fold large data. So the 256 MiB are allocated when
//! they are first needed. How a call is cut into pieces depends only on the setting and the call, so that all ranks cut
//! it in the same way. The ranks agree whether all of them could allocate, as at the first use of a custom kernel
//! (`DeviceBackend::first_use`). The memory grows only once, because memory that a graph has captured must not move.

#![expect(unsafe_code, reason = "device memory is allocated and freed by hand")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaStream, DriverError, result};

use crate::base::event;
use crate::base::tuning::device_folds::FIRST_SCRATCH_BYTES;
use crate::device::driver::{self, Gpu, cuda_error};
use crate::device::plan::Scratch;
use crate::error::Error;
use crate::error::Result;

/// Returns the offset of the room for words, which follows this much scratch memory.
const fn begin_of_words(scratch_bytes: usize) -> usize {
    scratch_bytes.next_multiple_of(256)
}

/// The memory of one backend.
#[derive(Debug)]
pub(super) struct ScratchMemory {
    gpu: Gpu,
    first: Scratch,
    /// The number of bytes that a call may use.
    most: usize,
    /// The memory of a call that needs more than the first part. 0 if it is not allocated yet.
    rest: Mutex<u64>,
    /// Whether every rank has that memory.
    is_agreed: AtomicBool,
}

impl ScratchMemory {
    /// Creates the memory of a backend of `n` ranks that may use `most` bytes, plus room for `words` bytes of words.
    ///
    /// # Errors
    ///
    /// `Cuda` if the driver refuses the first part.
    pub(super) fn new(gpu: &Gpu, n: usize, most: usize, words: usize) -> Result<Self> {
        let most = if n == 1 { 0 } else { most };
        let bytes = most.min(FIRST_SCRATCH_BYTES);
        let address = if n == 1 { 0 } else { allocate(gpu, begin_of_words(bytes) + words)? };
        Ok(Self { gpu: gpu.clone(), first: Scratch { address, bytes }, most, rest: Mutex::default(), is_agreed: AtomicBool::new(false) })
    }

    /// Returns the address of the room for words.
    pub(super) fn words(&self) -> u64 {
        self.first.address + begin_of_words(self.first.bytes) as u64
    }

    /// Returns the number of bytes that a call may use, which is the same on every rank.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Whether the memory is sufficient for every call.
    pub(super) fn is_whole(&self) -> bool {
        self.most == self.first.bytes || self.is_agreed.load(Ordering::Acquire)
    }

    /// Whether `room` bytes are more than the first part.
    pub(super) fn is_large(&self, room: usize) -> bool {
        room > self.first.bytes
    }

    /// Returns the memory, for a call that uses `room` bytes of it. Allocates it at the first call that needs more than
    /// the first part.
    ///
    /// # Errors
    ///
    /// `Unsupported` if it would be allocated while the stream is captured; `Cuda` if the driver refuses it.
    pub(super) fn take(&self, room: usize, stream: &CudaStream) -> Result<Scratch> {
        if !self.is_large(room) {
            return Ok(Scratch { bytes: self.most, ..self.first });
        }
        let mut rest = event::lock(&self.rest);
        if *rest == 0 {
            if driver::is_capturing(stream) {
                let reason = format!(
                    "it needs {room} B of scratch memory, but only {} B have been allocated so far: make one call of this size before \
                     the capture",
                    self.first.bytes
                );
                return Err(Error::unsupported("the first large reduction or in-place exchange during the capture of a graph", reason));
            }
            *rest = allocate(&self.gpu, self.most)?;
        }
        self.is_agreed.store(true, Ordering::Release);
        Ok(Scratch { address: *rest, bytes: self.most })
    }

    /// Notes that some rank could not allocate the rest. This rank's memory is kept for the next attempt, because
    /// freeing it would wait for the device.
    pub(super) fn retract(&self) {
        self.is_agreed.store(false, Ordering::Release);
    }

    /// Moves all memory out, so that none remains here.
    pub(super) fn take_all(&mut self) -> Self {
        let none = Scratch { address: 0, bytes: 0 };
        let (first, rest) = (std::mem::replace(&mut self.first, none), std::mem::take(&mut self.rest));
        Self { gpu: self.gpu.clone(), first, most: self.most, rest, is_agreed: AtomicBool::new(false) }
    }

    /// Returns the number of bytes that are allocated.
    pub(super) fn allocated(&self) -> usize {
        self.first.bytes + if *event::lock(&self.rest) == 0 { 0 } else { self.most }
    }

    /// Frees the memory.
    ///
    /// # Safety
    ///
    /// No queued work uses the memory, no such work will be queued, and this is called once.
    pub(super) unsafe fn free(&self) {
        let addresses = [self.first.address, *event::lock(&self.rest)];
        if driver::bind(&self.gpu.context).is_err() {
            return;
        }
        for address in addresses.into_iter().filter(|address| *address != 0) {
            // SAFETY: allocated here by `allocate`, and freed by this function alone, which is called once and when
            // nothing uses it any longer: its contract.
            let _ = unsafe { result::free_sync(address) };
        }
    }
}

/// Allocates device memory outside of any pool: NCCL may access it from other devices.
fn allocate(gpu: &Gpu, bytes: usize) -> Result<u64> {
    let failed = |error: DriverError| {
        let doing = format!("allocating {bytes} B of scratch memory on device {} (Config::device_scratch_bytes)", gpu.ordinal);
        cuda_error(doing, error)
    };
    driver::bind(&gpu.context).map_err(failed)?;
    // SAFETY: the context is current; `ScratchMemory::free` frees the memory.
    unsafe { result::malloc_sync(bytes) }.map_err(failed)
}
