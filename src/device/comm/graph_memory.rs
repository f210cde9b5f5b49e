//! Words of pinned host memory that the nodes of graphs write, and the host reads without a driver call.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use cudarc::driver::sys::{self, CUdeviceptr};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use crate::base::tuning::device::GRAPH_WORDS;
use crate::device::driver;

/// Pinned memory of one context, each word of which is handed out once.
#[derive(Debug)]
pub(super) struct Page {
    memory: ManuallyDrop<Memory>,
    given: AtomicUsize,
}

/// A word of a page. It keeps the page alive.
#[derive(Debug)]
pub(super) struct Word {
    page: Arc<Page>,
    place: usize,
}

#[derive(Debug)]
struct Memory {
    context: Arc<CudaContext>,
    words: NonNull<AtomicU32>,
    /// The device's address of the same memory.
    address: CUdeviceptr,
}

// SAFETY: the memory belongs to the value until it is dropped, is accessed only as atomics, and may be freed by any
// thread.
unsafe impl Send for Memory {}
// SAFETY: through a shared reference words are read and written as atomics.
unsafe impl Sync for Memory {}

impl Page {
    /// Creates a page of zeros. Captures are not affected.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Arc<Self>, DriverError> {
        driver::bind(context)?;
        // SAFETY: the context is current. The memory is freed once, when the page is dropped.
        let start =
            driver::unseen_by_captures(|| unsafe { result::malloc_host(GRAPH_WORDS * size_of::<u32>(), sys::CU_MEMHOSTALLOC_DEVICEMAP) })?;
        let Some(words) = NonNull::new(start.cast::<AtomicU32>()) else { return Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) };
        let mut memory = Memory { context: Arc::clone(context), words, address: 0 };
        for place in 0..GRAPH_WORDS {
            // SAFETY: the allocation has this length, is aligned to pages, and is not known to others.
            unsafe { words.add(place).write(AtomicU32::new(0)) };
        }
        // SAFETY: the memory was allocated with a mapping, and the answer goes to our variable.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.address, start, 0) }.result()?;
        Ok(Arc::new(Self { memory: ManuallyDrop::new(memory), given: AtomicUsize::new(0) }))
    }

    /// Returns an unused word; `None` if all have been handed out. Words are not reused: that would require an order
    /// between the nodes of a graph that is gone and those of a new one.
    pub(super) fn word(self: &Arc<Self>) -> Option<Word> {
        let place = self.given.fetch_add(1, Ordering::Relaxed);
        (place < GRAPH_WORDS).then(|| Word { page: Arc::clone(self), place })
    }
}

impl Word {
    /// Returns the word as the host sees it.
    pub(super) fn value(&self) -> &AtomicU32 {
        // SAFETY: the index is inside the page (`Page::word`), which lives as long as this word; the only other writer,
        // a device, writes whole words.
        unsafe { self.page.memory.words.add(self.place).as_ref() }
    }

    /// Makes a stream set the word. The context is current.
    pub(super) fn set_in_order(&self, value: u32, stream: &CudaStream) -> Result<(), DriverError> {
        let address = self.page.memory.address + (self.place * size_of::<u32>()) as u64;
        // SAFETY: the word is memory that the device may write, of the stream's context. It is alive when the node
        // runs: the graph keeps it (`live_graphs.rs`).
        unsafe { sys::cuMemsetD32Async(address, value, 1, stream.cu_stream()) }.result()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the field is not used after this, the one time that the page is dropped.
        let memory = ManuallyDrop::new(unsafe { ManuallyDrop::take(&mut self.memory) });
        // The last user may be the driver's thread that reports a graph's end, which may not call the driver; and a
        // free waits for the device.
        let free = move || drop(ManuallyDrop::into_inner(memory));
        if let Err(error) = thread::Builder::new().name("collectives-free".to_owned()).spawn(free) {
            crate::base::event::warn!(
                %error,
                "no thread could be started to free memory that graphs wrote: 4 KiB of pinned memory are leaked"
            );
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A context that can no longer be bound has freed its memory.
        if driver::bind(&self.context).is_ok() {
            // SAFETY: the memory came from `malloc_host` and is freed only here. Its users are gone, on the device too:
            // graphs keep it while they run.
            let _ = driver::unseen_by_captures(|| unsafe { result::free_host(self.words.as_ptr().cast()) });
        }
    }
}
