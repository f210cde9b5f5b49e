//! The flat buffer of a bucket on a device. Reductions are queued on the communicator's stream, and all other work on
//! gradients is queued on the caller's stream.

#![expect(unsafe_code, reason = "copies between addresses of the device, and kernels that take them")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::interop::{DeviceMemory, DeviceMemoryMut, Memory, MemoryMut};
use collectives::{Buffer as _, BufferMut as _, Communicator, Error, Result};
use cudarc::driver::sys::{self, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, DevicePtrMut, DeviceSlice, DriverError, result};

use super::kernels::{Kernels, MOST_PARTIALS};
use super::parameter::Float;
use super::tuning::{UNLOAD_PATIENCE, UNLOAD_POLL};

/// Set once a wait for kernels to end has failed. After that, no thread waits for them again.
static IN_VAIN: AtomicBool = AtomicBool::new(false);

/// The caller's stream, and our kernels on its device. All buckets of a model share one.
#[derive(Debug)]
pub(super) struct Workplace {
    stream: Arc<CudaStream>,
    /// Set when the kernels are first needed.
    kernels: OnceLock<Arc<Kernels>>,
    /// Whether a kernel was ever queued on the stream.
    launched: AtomicBool,
    /// Whether a kernel ever became part of a graph, which may be launched after training.
    captured: AtomicBool,
}

impl Workplace {
    pub(super) fn new(stream: &Arc<CudaStream>) -> Arc<Self> {
        Arc::new(Self {
            stream: Arc::clone(stream),
            kernels: OnceLock::new(),
            launched: AtomicBool::new(false),
            captured: AtomicBool::new(false),
        })
    }

    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Refuses memory of another context.
    pub(super) fn check_reach<T>(&self, memory: &DeviceMemory<'_, T>) -> Result<()> {
        same_context(&self.stream, memory.context())
    }

    /// Returns our kernels.
    fn loaded(&self) -> Result<&Arc<Kernels>> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        // Nothing can be loaded during a capture.
        if is_capturing(&self.stream) {
            let reason = "the stream is being captured into a graph, and no kernels can be loaded during a capture: make the buckets \
                          before the capture";
            return Err(Error::unsupported("on_device", reason));
        }
        let kernels = Kernels::on(self.stream.context())?;
        Ok(self.kernels.get_or_init(|| kernels))
    }

    /// Returns our kernels, to be queued on the stream.
    fn kernels(&self) -> Result<&Kernels> {
        let kernels = self.loaded()?;
        self.launched.store(true, Ordering::Relaxed);
        if is_capturing(&self.stream) {
            self.captured.store(true, Ordering::Relaxed);
        }
        Ok(kernels)
    }

    /// Returns whether the work that is now on the stream ends within [`UNLOAD_PATIENCE`].
    fn is_done_soon(&self) -> bool {
        let Ok(event) = self.stream.record_event(None) else { return false };
        let began = Instant::now();
        loop {
            match is_complete(&event) {
                Ok(false) if began.elapsed() < UNLOAD_PATIENCE && !IN_VAIN.load(Ordering::Relaxed) => std::thread::sleep(UNLOAD_POLL),
                Ok(false) => {
                    IN_VAIN.store(true, Ordering::Relaxed);
                    return false;
                }
                // A broken context runs nothing any more.
                outcome => return outcome.unwrap_or(true),
            }
        }
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if *self.captured.get_mut() || *self.launched.get_mut() && !self.is_done_soon() {
            // Kernels that may still run, on a hanging device or in a graph, must be leaked rather than unloaded while
            // they run.
            std::mem::forget(self.kernels.take());
        }
    }
}

/// Returns whether work queued on this stream becomes part of a graph, or would invalidate one. Also returns `true` if
/// the driver gives no answer.
fn is_capturing(stream: &CudaStream) -> bool {
    // SAFETY: the stream is alive, because we hold a reference to it.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) };
    status != Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Returns whether the work recorded in an event is done. The query cannot be part of a graph, and would invalidate
/// other threads' captures, unless this thread's capture mode allows the query.
fn is_complete(event: &CudaEvent) -> std::result::Result<bool, DriverError> {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: it swaps our local variable with this thread's mode.
    let is_changed = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().is_ok();
    let answer = event.try_is_complete();
    if is_changed {
        // SAFETY: as above; this restores the thread's previous mode.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    answer
}

/// Elements on a device, and their owner's stream.
#[derive(Debug)]
pub(super) struct DeviceFlat<T> {
    // The slice comes first, so that it is dropped before `place`, whose drop may wait for kernels that use the slice.
    // The caller may have replaced it with a slice of another length or on another device, so every use checks the
    // length and the context.
    pub(super) slice: CudaSlice<T>,
    place: Arc<Workplace>,
}

/// Refuses memory whose context is not the stream's.
fn same_context(stream: &CudaStream, context: &Arc<CudaContext>) -> Result<()> {
    if stream.context().cu_ctx() == context.cu_ctx() {
        return Ok(());
    }
    let (own, other) = (stream.context().ordinal(), context.ordinal());
    Err(Error::argument(
        "train",
        format!("the buffer (device {other}) and the buckets (device {own}) are on different devices or in different contexts"),
    ))
}

/// Returns the error for elements that a buffer does not have.
fn outside(range: &Range<usize>, len: usize) -> Error {
    Error::argument("train", format!("elements {range:?} are outside the buffer, which has {len} elements"))
}

impl<T> From<CudaSlice<T>> for DeviceFlat<T> {
    fn from(slice: CudaSlice<T>) -> Self {
        Self { place: Workplace::new(slice.stream()), slice }
    }
}

/// Refuses addresses that are misaligned for kernels.
fn aligned<T>(address: u64) -> Result<()> {
    match address % size_of::<T>() as u64 {
        0 => Ok(()),
        _ => Err(Error::argument(
            "train",
            format!("a gradient begins at {address:#x}, but its address must be a multiple of the element size, {} B", size_of::<T>()),
        )),
    }
}

/// Calls `work` with the address of `memory`, to queue reads of it on the stream. The reads run after earlier writes,
/// and before the memory is written again or freed.
fn reading<T>(stream: &CudaStream, memory: DeviceMemory<'_, T>, doing: &str, work: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    same_context(stream, memory.context())?;
    memory.read_on(stream, doing, work)
}

impl<T: Float> DeviceFlat<T> {
    /// Allocates `len` zeros.
    pub(super) fn new(place: &Arc<Workplace>, len: usize) -> Result<Self> {
        // The kernels are loaded now, while a failure can still become every rank's error.
        place.loaded()?;
        let stream = &place.stream;
        let failed = |error| Error::cuda(format!("allocating a bucket of {len} elements"), error);
        let too_long = || Error::argument("train", format!("a bucket of {len} elements does not fit into the address space"));
        // A driver need not return memory for zero bytes.
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(too_long)?.max(1);
        let bytes = stream.alloc_zeros::<u8>(bytes).map_err(failed)?;
        // Leaking the slice loses its events, so its initialisation must end first.
        stream.synchronize().map_err(failed)?;
        // SAFETY: the allocation has at least that many bytes, and no other value owns it any more. All bytes are
        // zeros, which are a value of every float type.
        let slice = unsafe { stream.upgrade_device_ptr(bytes.leak(), len) };
        Ok(Self { slice, place: Arc::clone(place) })
    }

    /// Returns whether a slice of the caller can replace this one. cudarc orders only streams of the same context
    /// object. Two context objects may refer to the same driver context, but cudarc does not order their streams.
    pub(super) fn can_be(&self, given: &Self) -> bool {
        Arc::ptr_eq(self.place.stream.context(), given.slice.context())
    }

    /// Replaces this slice with one of the caller, if it [can](Self::can_be). The new slice is used on this one's
    /// stream.
    pub(super) fn replaced_by(&self, given: Self) -> Self {
        Self { slice: given.slice, place: Arc::clone(&self.place) }
    }

    /// Returns a copy of the elements in a range.
    pub(super) fn copied(&self, range: Range<usize>) -> Result<Self> {
        let mut copy = Self::new(&self.place, range.len())?;
        if let MemoryMut::Device(destination) = copy.slice.memory_mut() {
            self.copy_to(range, destination)?;
        }
        Ok(copy)
    }

    /// Makes the stream wait for other users of a range, and calls `work` with the range's address, which belongs to
    /// the stream's context. Does nothing for an empty range.
    fn at(&mut self, range: Range<usize>, work: impl FnOnce(u64, &Workplace) -> Result<()>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let (place, len) = (Arc::clone(&self.place), self.slice.len());
        same_context(&place.stream, self.slice.context())?;
        let mut view = self.slice.try_slice_mut(range.clone()).ok_or_else(|| outside(&range, len))?;
        let MemoryMut::Device(mut memory) = view.memory_mut() else { return Ok(()) };
        memory.write_on(&place.stream, "using a bucket", |address| work(address, &place))
    }

    /// Returns the elements in a range for reading; `None` for an empty range.
    fn part(&self, range: Range<usize>) -> Result<Option<CudaView<'_, T>>> {
        if range.is_empty() {
            return Ok(None);
        }
        self.view(range.clone()).map(Some).ok_or_else(|| outside(&range, self.slice.len()))
    }

    pub(super) fn place(&self) -> &Arc<Workplace> {
        &self.place
    }

    /// Copies a gradient's elements, from element `first` on, into `range`, or adds them to the elements there.
    pub(super) fn put(&mut self, range: Range<usize>, gradient: DeviceMemory<'_, T>, first: usize, add: bool) -> Result<()> {
        let count = range.len();
        self.at(range, |into, place| {
            let stream = &place.stream;
            reading(stream, gradient, "putting a gradient into its bucket", |from| {
                let from = from + (first * size_of::<T>()) as u64;
                if add {
                    aligned::<T>(from)?;
                    // SAFETY: both are memory of this context (checked, here and by `at`) with that many elements (the
                    // caller compares lengths, and `at` the range with the slice), aligned (checked; a slice's elements
                    // are), disjoint, since one is borrowed to be written, and borrowed until later users wait for the
                    // kernel.
                    return unsafe { place.kernels()?.accumulate(T::ELEMENT_TYPE, into, from, count as u64, stream) };
                }
                // SAFETY: both are memory of this context (checked, here and by `at`) with that many elements (the
                // caller compares lengths, and `at` the range with the slice), disjoint, since one is borrowed to be
                // written, and borrowed until later users wait for the copy.
                let copied = unsafe { result::memcpy_dtod_async(into, from, count * size_of::<T>(), stream.cu_stream()) };
                copied.map_err(|error| Error::cuda("copying a gradient into its bucket", error))
            })
        })
    }

    /// Copies a range into a destination of the same length.
    pub(super) fn copy_to(&self, range: Range<usize>, mut destination: DeviceMemoryMut<'_, T>) -> Result<()> {
        let Some(view) = self.part(range)? else { return Ok(()) };
        let Memory::Device(memory) = view.memory() else { return Ok(()) };
        let (stream, doing) = (&self.place.stream, "copying a gradient out of its bucket");
        same_context(stream, destination.context())?;
        reading(stream, memory, doing, |from| {
            destination.write_on(stream, doing, |into| {
                // SAFETY: both are memory of this context (checked) with that many bytes (the caller compares lengths),
                // borrowed until later users wait for the copy.
                let copied = unsafe { result::memcpy_dtod_async(into, from, view.num_bytes(), stream.cu_stream()) };
                copied.map_err(|error| Error::cuda(doing, error))
            })
        })
    }

    /// Overwrites elements with zeros.
    pub(super) fn clear(&mut self, range: Range<usize>) -> Result<()> {
        let bytes = range.len() * size_of::<T>();
        self.at(range, |address, place| {
            // SAFETY: memory of the slice with that many bytes (`at` compares), of the stream's context (`at` checks);
            // zeros are a value of every float type.
            unsafe { result::memset_d8_async(address, 0, bytes, place.stream.cu_stream()) }
                .map_err(|error| Error::cuda("clearing a part of a bucket", error))
        })
    }

    /// Multiplies elements, in `f64`, each product rounded once.
    pub(super) fn scale(&mut self, range: Range<usize>, factor: f64) -> Result<()> {
        let count = range.len() as u64;
        self.at(range, |address, place| {
            // SAFETY: memory of the slice with that many elements of its type (`at` compares), of the stream's context
            // (`at` checks); later users of it wait for the kernel.
            unsafe { place.kernels()?.weigh(T::ELEMENT_TYPE, address, count, factor, &place.stream) }
        })
    }

    /// Converts another buffer's elements, from element `first` on. Each is converted to `f32`, multiplied by the
    /// weight, rounded to `f32` and then to `T`.
    pub(super) fn convert_part<F: Float>(
        &mut self,
        range: Range<usize>,
        from: DeviceMemory<'_, F>,
        first: usize,
        weight: f64,
    ) -> Result<()> {
        let count = range.len() as u64;
        self.at(range, |into, place| {
            let stream = &place.stream;
            reading(stream, from, "converting elements", |from| {
                let from = from + (first * size_of::<F>()) as u64;
                aligned::<F>(from)?;
                let kernels = place.kernels()?;
                // SAFETY: both are memory of this context (checked, here and by `at`) with that many elements of their
                // types (the caller compares lengths, and `at` the range with the slice), aligned (checked; a slice's
                // elements are), disjoint, since one is borrowed to be written; later users wait for the kernel.
                unsafe { kernels.convert((F::ELEMENT_TYPE, from), (T::ELEMENT_TYPE, into), count, weight, stream) }
            })
        })
    }

    /// Adds up the squares of the elements in a range.
    pub(super) fn add_squares(&self, range: Range<usize>, sums: &mut Option<DeviceSquares>) -> Result<()> {
        let Some(view) = self.part(range)? else { return Ok(()) };
        let Memory::Device(memory) = view.memory() else { return Ok(()) };
        let sums = match sums {
            Some(sums) => sums,
            None => sums.insert(DeviceSquares::new(&self.place)?),
        };
        let stream = &self.place.stream;
        // The sums belong to the first buffer's context, which may be another one.
        same_context(stream, sums.numbers.context())?;
        reading(stream, memory, "adding up squares", |data| {
            let (partials, _written) = sums.numbers.device_ptr_mut(stream);
            let total = partials + (MOST_PARTIALS * size_of::<f64>()) as u64;
            // SAFETY: the range's elements (a view of the slice), and a slice of the greatest number of partial sums,
            // plus one: all of this context (checked), and later users wait for the kernels.
            unsafe { self.place.kernels()?.add_squares(T::ELEMENT_TYPE, (data, view.len() as u64), partials, total, stream) }
        })
    }

    /// Returns the elements in a range.
    pub(super) fn view(&self, range: Range<usize>) -> Option<CudaView<'_, T>> {
        self.slice.try_slice(range)
    }
}

/// A sum of squares on a device.
#[derive(Debug)]
pub(super) struct DeviceSquares {
    /// Partial sums, then the total.
    numbers: CudaSlice<f64>,
    place: Arc<Workplace>,
}

impl DeviceSquares {
    fn new(place: &Arc<Workplace>) -> Result<Self> {
        let numbers = place.stream.alloc_zeros(MOST_PARTIALS + 1).map_err(|error| Error::cuda("allocating sums of squares", error))?;
        Ok(Self { numbers, place: Arc::clone(place) })
    }

    /// Returns the total, waiting at most for the communicator's timeout.
    pub(super) fn total(&self, comm: &Communicator) -> Result<f64> {
        let failed = |error| Error::cuda("fetching a sum of squares", error);
        let stream = &self.place.stream;
        // A copy to host memory would wait for the stream without a limit.
        match comm.device() {
            Some(device) => device.wait_for(stream)?,
            None => stream.synchronize().map_err(failed)?,
        }
        let mut total = [0.0];
        stream.memcpy_dtoh(&self.numbers.slice(MOST_PARTIALS..), &mut total).map_err(failed)?;
        stream.synchronize().map_err(failed)?;
        Ok(total[0])
    }
}

#[cfg(test)]
#[cfg(simgpu)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use cudarc::driver::sys::CUgraphInstantiate_flags;

    use super::*;

    #[test]
    fn kernels_that_a_graph_has_are_never_unloaded() {
        simgpu::install();
        let _alone = simgpu::alone();
        // A device whose kernels no other test counts. They stay loaded.
        let stream = CudaContext::new(1).unwrap().new_stream().unwrap();
        let modules = || simgpu::counts().modules;
        let before = modules();
        let place = Workplace::new(&stream);
        place.kernels().unwrap();
        assert_eq!(modules(), before + 1);
        drop(place);
        assert_eq!(modules(), before);
        let place = Workplace::new(&stream);
        place.loaded().unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        place.kernels().unwrap();
        drop(stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap());
        drop(place);
        assert_eq!(modules(), before + 1);
    }
}
