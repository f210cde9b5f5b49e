//! Memory of a GPU that a call is given, and what orders the call among its other uses.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, SyncOnDrop};

use crate::element::{AnyElement, DType, Data, TypeTag};

/// Device memory that can be read, whatever its elements are.
pub(crate) trait DeviceRead {
    /// The context that it belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// The stream on which it will be freed, where that is known.
    fn owner(&self) -> Option<&Arc<CudaStream>>;

    /// Its address, once `stream` waits for the last write; the guard is dropped when the read has been queued.
    fn read<'a>(&'a self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// Device memory that can be written.
pub(crate) trait DeviceWrite {
    /// The context that it belongs to.
    fn context(&self) -> &Arc<CudaContext>;

    /// Its address, once `stream` waits for the last reads and writes; the guard is dropped when the write has been queued.
    fn write<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, Ordered<'a>);
}

/// What is held from when a stream was made to wait for a buffer's last use until the call has been queued on it.
pub(crate) enum Ordered<'a> {
    /// The buffer has events of cudarc's.
    Tracked(SyncOnDrop<'a>),
    /// It has, but cudarc would not record the one for a call on this stream, whose context has no second stream.
    Recorded(Recorded<'a>),
    /// All uses of the buffer follow one stream.
    Followed(#[expect(dead_code, reason = "what it does it does when it is dropped")] Followed<'a>),
    /// The caller sees to it.
    Unordered,
}

/// An event that is recorded when this is dropped.
pub(crate) struct Recorded<'a>(&'a CudaEvent, &'a CudaStream);

/// A call on memory whose uses follow another stream than the call's: that stream goes on after the call.
pub(crate) struct Followed<'a> {
    home: Arc<CudaStream>,
    stream: &'a CudaStream,
    /// Of cudarc's memory: for the day when its context has a second stream.
    _event: Option<SyncOnDrop<'a>>,
}

/// Whether both are the same. The handle 2 means another stream on every thread, so that it is not known to be.
fn same(first: &CudaStream, second: &CudaStream) -> bool {
    first.cu_stream() == second.cu_stream() && first.cu_stream().addr() != 2
}

/// Whether cudarc takes everything here to be on one stream. It counts those of each `CudaContext`, though several can stand for one
/// context of the driver's.
fn has_one_stream(context: &CudaContext) -> bool {
    context.is_event_tracking() && !context.is_in_multi_stream_mode()
}

/// The stream that all uses of cudarc's memory follow, where no events are kept for it.
pub(crate) fn only_stream(owner: &Arc<CudaStream>) -> Option<Arc<CudaStream>> {
    has_one_stream(owner.context()).then(|| Arc::clone(owner))
}

impl<'a> Ordered<'a> {
    /// Has `stream` wait for what is queued on `home`; and `home`, when this is dropped, for what is queued on `stream` by then.
    pub(crate) fn after(home: &Arc<CudaStream>, stream: &'a CudaStream) -> Self {
        // Inside a graph the other stream would be drawn into it; what a graph uses is ordered where it is launched.
        if same(home, stream) || is_capturing(stream) {
            return Self::Unordered;
        }
        Self::follow(home, stream, None)
    }

    fn follow(home: &Arc<CudaStream>, stream: &'a CudaStream, event: Option<SyncOnDrop<'a>>) -> Self {
        if is_capturing(home) {
            stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
            return Self::Unordered;
        }
        stream.context().record_err(stream.join(home));
        Self::Followed(Followed { home: Arc::clone(home), stream, _event: event })
    }

    /// What cudarc's `guard` does for a use on `stream`, and what it leaves out because the memory belongs to another `CudaContext` than
    /// the stream; `only` is what [`only_stream`] says of the memory.
    pub(crate) fn tracked(guard: SyncOnDrop<'a>, only: Option<&Arc<CudaStream>>, stream: &'a CudaStream) -> Self {
        match (only, &guard) {
            (Some(home), _) if same(home, stream) => Self::Tracked(guard),
            // Its owner knows of no other stream, and so would not order a graph's launch either.
            (Some(_), _) if is_capturing(stream) => {
                stream.context().record_err(Err::<(), _>(DriverError(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)));
                // Dropped, it would make the memory's event a part of the graph.
                std::mem::forget(guard);
                Self::Unordered
            }
            (Some(home), _) => Self::follow(home, stream, Some(guard)),
            (None, SyncOnDrop::Record(Some((event, _)))) if has_one_stream(stream.context()) => Self::Recorded(Recorded(event, stream)),
            (None, _) => Self::Tracked(guard),
        }
    }

    /// The event of cudarc's memory that tells of this use.
    fn event(&self) -> Option<&'a CudaEvent> {
        match self {
            Self::Tracked(SyncOnDrop::Record(Some((event, _)))) | Self::Recorded(Recorded(event, _)) => Some(*event),
            _ => None,
        }
    }
}

fn is_capturing(stream: &CudaStream) -> bool {
    stream.capture_status().is_ok_and(|status| status != CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        self.1.context().record_err(self.0.record(self.1));
    }
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.stream.context().record_err(self.home.join(self.stream));
    }
}

/// A read of memory of cudarc's on another stream than the one it will be freed on.
///
/// A slice of cudarc's remembers its last reader only: once somebody else has read it, whoever frees it would no longer wait for this
/// reader. So the stream on which it will be freed is made to wait at once. What remains is cudarc's own: a writer on a third stream, after
/// a reader that is not ours, waits for that reader alone.
pub(crate) struct Reading<'a> {
    owner: &'a CudaStream,
    event: &'a CudaEvent,
}

impl<'a> Reading<'a> {
    /// The read of `buffer` that `ordered` orders on `stream`, where that is another stream than its owner's.
    pub(crate) fn of(buffer: &'a dyn DeviceRead, ordered: &Ordered<'a>, stream: &CudaStream) -> Option<Self> {
        let (owner, event) = (buffer.owner()?, ordered.event()?);
        if same(owner, stream) || !owner.context().is_managing_stream_synchronization() {
            return None;
        }
        // The event is about to forget the reader before this one: whoever waits for this one waits for both.
        stream.context().record_err(stream.wait(event));
        Some(Self { owner, event })
    }

    /// Has the owner's stream wait for the read, once it has been queued on `stream` and what ordered it was dropped.
    pub(crate) fn hold_owner(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // Inside a graph the other stream would be drawn into it.
        if is_capturing(stream) { Ok(()) } else { self.owner.wait(self.event) }
    }
}

/// Memory of a GPU that a call reads.
pub struct DeviceMemory<'a, T> {
    pub(crate) inner: &'a dyn DeviceRead,
    length: usize,
    /// What [`AnyElement`]s are; of no meaning for other elements.
    dtype: Option<DType>,
    elements: PhantomData<&'a [T]>,
}

/// Memory of a GPU that a call writes.
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
}

impl<'a, T> DeviceMemoryMut<'a, T> {
    pub(crate) fn new(inner: &'a mut dyn DeviceWrite, length: usize) -> Self {
        Self { inner, length, dtype: None, elements: PhantomData }
    }
}

/// What a call asks of device memory, read or written.
macro_rules! asked {
    ($($memory:ident),*) => {$(
        impl<T: Data> $memory<'_, T> {
            /// How many elements it has.
            pub(crate) fn len(&self) -> usize {
                self.length
            }

            /// What its elements are.
            pub(crate) fn element(&self) -> TypeTag {
                TypeTag::held::<T>(self.dtype)
            }

            /// The size of one.
            pub(crate) fn element_bytes(&self) -> usize {
                TypeTag::held_bytes::<T>(self.dtype)
            }

            /// The size of all.
            pub(crate) fn bytes(&self) -> usize {
                self.length * self.element_bytes()
            }
        }

        impl<'a> $memory<'a, u8> {
            /// The bytes as elements of a type.
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
