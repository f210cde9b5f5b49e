//! GPU memory that is passed to a call, and the order of the call relative to other uses of that memory.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, DriverError};

use super::device_events::{MemoryEvent, SilentStream, Written};
use crate::call::element::{AnyElement, DType, Data, TypeTag};
use crate::error::{Error, Result};

/// Device memory that can be read, regardless of its element type.
pub(crate) trait DeviceRead {
    /// Returns the context that the memory belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// Returns the stream on which the memory will be freed, if known.
    fn owner(&self) -> Option<&Arc<CudaStream>>;

    /// Makes `stream` wait for the last write, and returns the address and a guard. Drop the guard when the read has
    /// been queued.
    fn read<'a>(&'a self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// Device memory that can be written.
pub(crate) trait DeviceWrite {
    /// Returns the context that the memory belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// Makes `stream` wait for the last reads and writes, and returns the address and a guard. Drop the guard when the
    /// write has been queued.
    fn write<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// Guards a buffer from the moment a stream is made to wait for its last use until the call has been queued on that
/// stream.
pub(crate) enum Ordered<'a> {
    /// The buffer has cudarc events.
    Tracked(Tracked<'a>),
    /// All uses of the buffer follow the order of one stream.
    Followed(#[expect(dead_code, reason = "its drop makes the buffer's own stream wait for the call")] Followed<'a>),
    /// The caller orders the uses.
    Unordered,
}

/// A use of memory on a stream. When this is dropped, an event of the memory records the use.
pub(crate) struct Tracked<'a> {
    event: Option<MemoryEvent<'a>>,
    stream: &'a CudaStream,
    /// Whether the use is recorded even if the stream's `CudaContext` has only one stream. It is if the memory belongs
    /// to another `CudaContext`.
    always: bool,
}

/// A call on memory whose uses follow a stream other than the call's. That other stream continues after the call.
pub(crate) struct Followed<'a> {
    home: Arc<CudaStream>,
    stream: &'a CudaStream,
    /// For cudarc's memory, in case its context gets a second stream.
    _event: Option<Tracked<'a>>,
}

/// Returns whether `first` and `second` are known to be the same stream. Handle 2 (`CU_STREAM_PER_THREAD`) stands for a
/// different stream on every thread, so two streams with this handle are never known to be the same.
fn same(first: &CudaStream, second: &CudaStream) -> bool {
    first.cu_stream() == second.cu_stream() && first.cu_stream().addr() != 2
}

/// Returns whether cudarc assumes that all work in `context` is on one stream. cudarc counts the streams of each
/// `CudaContext`, although several `CudaContext`s can stand for one driver context.
fn has_one_stream(context: &CudaContext) -> bool {
    context.is_event_tracking() && !context.is_in_multi_stream_mode()
}

/// Returns the stream that all uses of cudarc's memory follow, if cudarc keeps no events for that memory.
pub(crate) fn only_stream(owner: &Arc<CudaStream>) -> Option<Arc<CudaStream>> {
    has_one_stream(owner.context()).then(|| Arc::clone(owner))
}

impl<'a> Ordered<'a> {
    /// Makes `stream` wait for the work queued on `home`. When this is dropped, makes `home` wait for the work queued
    /// on `stream` by then.
    pub(crate) fn after(home: &Arc<CudaStream>, stream: &'a CudaStream) -> Self {
        // Inside a graph the other stream would become part of it. Memory that a graph uses is ordered where the graph
        // is launched.
        if same(home, stream) || is_capturing(stream) {
            return Self::Unordered;
        }
        Self::follow(home, stream, None)
    }

    fn follow(home: &Arc<CudaStream>, stream: &'a CudaStream, event: Option<Tracked<'a>>) -> Self {
        if is_capturing(home) {
            stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
            return Self::Unordered;
        }
        stream.context().record_err(stream.join(home));
        Self::Followed(Followed { home: Arc::clone(home), stream, _event: event })
    }

    /// Creates the guard for a use of cudarc's memory on `stream`. `event` records the use, even if cudarc does not
    /// record it because the memory and the stream belong to different `CudaContext`s. `only` is the result of
    /// [`only_stream`] for the memory.
    fn tracked(event: Option<MemoryEvent<'a>>, only: Option<&Arc<CudaStream>>, stream: &'a CudaStream) -> Self {
        let tracked = |always| Tracked { event, stream, always };
        match only {
            None => Self::Tracked(tracked(true)),
            Some(home) if same(home, stream) => Self::Tracked(tracked(false)),
            // The memory's owner knows no other stream, so it would not order the launch of a graph either.
            Some(_) if is_capturing(stream) => {
                stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
                Self::Unordered
            }
            Some(home) => Self::follow(home, stream, Some(tracked(false))),
        }
    }
}

/// Makes `stream` wait until memory with cudarc's tracking may be read. Returns its address and the guard to hold until
/// the read has been queued.
pub(crate) fn read_in_order<'a, T, M: DevicePtr<T>>(memory: &'a M, stream: &'a CudaStream) -> (u64, Ordered<'a>) {
    let only = only_stream(memory.stream());
    let (address, guard) = memory.device_ptr(stream);
    (address, Ordered::tracked(MemoryEvent::of(guard), only.as_ref(), stream))
}

/// Makes `stream` wait until memory with cudarc's tracking may be written. Returns its address and the guard to hold
/// until the write has been queued.
pub(crate) fn write_in_order<'a, T, M: DevicePtrMut<T>>(memory: &'a mut M, stream: &'a CudaStream) -> (u64, Ordered<'a>) {
    let only = only_stream(memory.stream());
    let (address, guard) = memory.device_ptr_mut(stream);
    (address, Ordered::tracked(MemoryEvent::of(guard), only.as_ref(), stream))
}

/// Does the same as [`write_in_order`] for cudarc's own memory, with half the driver calls: cudarc asks for the current
/// context before each of its waits.
pub(crate) fn write_slice_in_order<'a, T, M>(memory: &'a mut M, stream: &'a CudaStream) -> (u64, Ordered<'a>)
where
    M: DevicePtr<T> + DevicePtrMut<T>,
{
    let Some(silent) = SilentStream::get(stream.context()) else { return write_in_order(memory, stream) };
    let (only, is_managed) = (only_stream(memory.stream()), memory.stream().context().is_managing_stream_synchronization());
    let Written { address, read, write } = silent.look_at(memory);
    // The events that cudarc would wait for, on the same condition.
    if is_managed {
        for event in [read, write].into_iter().flatten() {
            stream.context().record_err(event.await_on(stream));
        }
    }
    (address, Ordered::tracked(write, only.as_ref(), stream))
}

fn is_capturing(stream: &CudaStream) -> bool {
    stream.capture_status().is_ok_and(|status| status != CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for Tracked<'_> {
    fn drop(&mut self) {
        let context = self.stream.context();
        let is_told = context.is_event_tracking() && (self.always || context.is_in_multi_stream_mode());
        if let (Some(event), true) = (self.event, is_told) {
            context.record_err(event.record(self.stream));
        }
    }
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.stream.context().record_err(self.home.join(self.stream));
    }
}

/// A read of cudarc's memory on a stream other than the one on which the memory will be freed.
///
/// A cudarc slice remembers only its last reader. Once there is a later one, the free would no longer wait for this
/// reader. So the stream on which the memory will be freed is made to wait at once. One limitation of cudarc remains: a
/// writer on a third stream, after a reader from outside this crate, waits only for that reader.
pub(crate) struct Reading<'a> {
    owner: &'a CudaStream,
    event: MemoryEvent<'a>,
}

impl<'a> Reading<'a> {
    /// Returns the read of `buffer` that `ordered` orders on `stream`, if the owner's stream is a different one.
    pub(crate) fn of(buffer: &'a dyn DeviceRead, ordered: &Ordered<'a>, stream: &CudaStream) -> Option<Self> {
        let Ordered::Tracked(Tracked { event: Some(event), .. }) = *ordered else { return None };
        let owner = buffer.owner()?;
        if same(owner, stream) || !owner.context().is_managing_stream_synchronization() {
            return None;
        }
        // The event is about to forget the previous reader. So this stream waits for it, and a wait for this read
        // covers both.
        stream.context().record_err(event.await_on(stream));
        Some(Self { owner, event })
    }

    /// Makes the owner's stream wait for the read. Call it once the read has been queued on `stream` and its ordering
    /// guard has been dropped.
    pub(crate) fn hold_owner(&self, stream: &CudaStream) -> std::result::Result<(), DriverError> {
        // Inside a graph the other stream would become part of it.
        if is_capturing(stream) { Ok(()) } else { self.event.await_on(self.owner) }
    }
}

/// Device memory that a call reads.
pub struct DeviceMemory<'a, T> {
    pub(crate) inner: &'a dyn DeviceRead,
    length: usize,
    /// The type of [`AnyElement`]s; meaningless for other elements.
    dtype: Option<DType>,
    elements: PhantomData<&'a [T]>,
}

/// Device memory that a call writes.
pub struct DeviceMemoryMut<'a, T> {
    pub(crate) inner: &'a mut dyn DeviceWrite,
    length: usize,
    /// As for [`DeviceMemory`].
    dtype: Option<DType>,
    elements: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DeviceMemory<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceMemory<'_, T> {}

impl<'a, T> DeviceMemory<'a, T> {
    pub(crate) fn new(inner: &'a dyn DeviceRead, length: usize) -> Self {
        Self { inner, length, dtype: None, elements: PhantomData }
    }

    /// Returns the context that the memory belongs to.
    #[must_use]
    pub fn context(&self) -> &'a Arc<CudaContext> {
        self.inner.context()
    }

    /// Calls `queue` with the memory's address, so that it can queue copies and kernels that read the memory on
    /// `stream`. They run after all earlier writes, and before the memory is written again or freed. `doing` describes
    /// the operation in errors. While `queue` runs, the stream's context is current. If the memory belongs to another
    /// context, `queue` is not called.
    ///
    /// ```no_run
    /// # use collectives::{Error, Result, cudarc::driver::{CudaStream, result}, interop::DeviceMemory};
    /// /// Copies bytes to the host.
    /// fn fetch(memory: DeviceMemory<'_, u8>, stream: &CudaStream) -> Result<Vec<u8>> {
    ///     let failed = |error| Error::cuda("fetching", error);
    ///     let mut bytes = vec![0; memory.len()];
    ///     memory.read_on(stream, "fetching", |address| {
    ///         // SAFETY: as many bytes as the memory has, which may be read here; no code reads the copy before it has ended.
    ///         unsafe { result::memcpy_dtoh_async(&mut bytes, address, stream.cu_stream()) }.map_err(failed)
    ///     })?;
    ///     stream.synchronize().map_err(failed)?;
    ///     Ok(bytes)
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the memory and the stream belong to different contexts.
    /// - `Cuda` if the driver fails.
    /// - The errors of `queue`.
    pub fn read_on<R>(&self, stream: &CudaStream, doing: &str, queue: impl FnOnce(u64) -> Result<R>) -> Result<R> {
        let failed = |error: DriverError| Error::cuda(doing, error);
        same_context("read_on", stream, self.inner.context())?;
        stream.context().bind_to_thread().map_err(failed)?;
        let (address, guard) = self.inner.read(stream);
        let reading = Reading::of(self.inner, &guard, stream);
        stream.context().check_err().map_err(failed)?;
        let mut queuing = Queuing { guard: Some(guard), reading, stream };
        let queued = queue(address);
        // A failure may follow a read that was queued.
        let held = queuing.end().map_err(failed);
        queued.and_then(|queued| held.map(|()| queued))
    }
}

/// Keeps the memory from being freed before a queued read, even if the program's code panics after queuing it.
struct Queuing<'a> {
    guard: Option<Ordered<'a>>,
    reading: Option<Reading<'a>>,
    stream: &'a CudaStream,
}

impl Queuing<'_> {
    fn end(&mut self) -> std::result::Result<(), DriverError> {
        drop(self.guard.take());
        self.reading.take().map_or(Ok(()), |reading| reading.hold_owner(self.stream))
    }
}

impl Drop for Queuing<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            self.stream.context().record_err::<()>(Err(error));
        }
    }
}

/// Refuses memory of a context other than the stream's.
fn same_context(call: &'static str, stream: &CudaStream, context: &CudaContext) -> Result<()> {
    if stream.context().cu_ctx() == context.cu_ctx() {
        return Ok(());
    }
    let (own, other) = (stream.context().ordinal(), context.ordinal());
    let reason = format!("the memory is on device {other} and the stream on device {own}, or their contexts differ");
    Err(Error::argument(call, reason))
}

impl<'a, T> DeviceMemoryMut<'a, T> {
    pub(crate) fn new(inner: &'a mut dyn DeviceWrite, length: usize) -> Self {
        Self { inner, length, dtype: None, elements: PhantomData }
    }

    /// Returns the context that the memory belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        self.inner.context()
    }

    /// Calls `queue` with the memory's address, so that it can queue copies and kernels that write the memory, or read
    /// and write it, on `stream`. They run after all earlier uses of the memory, and before all later ones. In all
    /// other respects, this method is like [`DeviceMemory::read_on`].
    ///
    /// # Errors
    ///
    /// The errors of [`DeviceMemory::read_on`].
    pub fn write_on<R>(&mut self, stream: &CudaStream, doing: &str, queue: impl FnOnce(u64) -> Result<R>) -> Result<R> {
        let failed = |error: DriverError| Error::cuda(doing, error);
        same_context("write_on", stream, self.inner.context())?;
        stream.context().bind_to_thread().map_err(failed)?;
        let (address, _guard) = self.inner.write(stream);
        stream.context().check_err().map_err(failed)?;
        queue(address)
    }
}

/// The queries that [`DeviceMemory`] and [`DeviceMemoryMut`] have in common.
macro_rules! asked {
    ($($memory:ident),*) => {$(
        impl<T: Data> $memory<'_, T> {
            /// Returns the number of elements.
            #[must_use]
            pub fn len(&self) -> usize {
                self.length
            }

            /// Returns whether there are no elements.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.length == 0
            }

            /// Returns the type of its elements.
            pub(crate) fn element(&self) -> TypeTag {
                TypeTag::held::<T>(self.dtype)
            }

            /// Returns the size of one element.
            pub(crate) fn element_bytes(&self) -> usize {
                TypeTag::held_bytes::<T>(self.dtype)
            }

            /// Returns the size of all elements.
            pub(crate) fn bytes(&self) -> usize {
                self.length * self.element_bytes()
            }
        }

        impl<'a> $memory<'a, u8> {
            /// Returns the bytes as elements of a type.
            pub(super) fn typed(self, dtype: DType) -> $memory<'a, AnyElement> {
                let Self { inner, length, .. } = self;
                $memory { inner, length: length / dtype.size_bytes(), dtype: Some(dtype), elements: PhantomData }
            }
        }
    )*};
}

asked!(DeviceMemory, DeviceMemoryMut);

impl<T> fmt::Debug for DeviceMemory<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} elements on device {})", self.length, self.inner.context().ordinal())
    }
}

impl<T> fmt::Debug for DeviceMemoryMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemoryMut({} elements on device {})", self.length, self.inner.context().ordinal())
    }
}
