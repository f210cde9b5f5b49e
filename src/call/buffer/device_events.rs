//! The events of cudarc's memory, used with as few driver calls as possible.
//!
//! cudarc asks the driver before each use of an event which context is current. An event, and a stream with its own
//! handle, know their context. CUDA accepts them whichever context is current, as long as one is.

#![expect(unsafe_code, reason = "the driver's functions on events and streams")]

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUevent, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result};

/// Makes the context current on this thread. Unlike cudarc's function, it leaves alone errors that others have stored
/// in the context.
pub(crate) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: the context is alive, because we hold a reference to it.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Returns whether the stream has no handle of its own, but one that names another stream in each context, or on each
/// thread.
pub(crate) fn is_nameless(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() <= 2
}

/// Makes a driver call that takes a stream, and possibly an event, of one context.
fn of_stream(stream: &CudaStream, call: impl Fn() -> Result<(), DriverError>) -> Result<(), DriverError> {
    if is_nameless(stream) {
        bind(stream.context())?;
    }
    match call() {
        // No context is current on this thread, or a destroyed one. The driver has done nothing.
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)) => {
            bind(stream.context())?;
            call()
        }
        outcome => outcome,
    }
}

/// An event of borrowed memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryEvent<'a> {
    event: CUevent,
    memory: PhantomData<&'a CudaEvent>,
}

impl<'a> MemoryEvent<'a> {
    /// Takes the event that a cudarc guard would record. The guard no longer records it.
    pub(crate) fn of(guard: SyncOnDrop<'a>) -> Option<Self> {
        taken(guard).map(|event| Self { event, memory: PhantomData })
    }

    /// Makes the stream wait for what was recorded.
    pub(crate) fn await_on(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive, because we hold a reference to it, and so is the event, whose memory is borrowed
        // for longer.
        of_stream(stream, || unsafe { result::stream::wait_event(stream.cu_stream(), self.event, CU_EVENT_WAIT_DEFAULT) })
    }

    /// Records the work that is on the stream now. The driver refuses a stream of another context than the event's.
    pub(crate) fn record(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive, because we hold a reference to it, and so is the event, whose memory is borrowed
        // for longer.
        of_stream(stream, || unsafe { result::event::record(self.event, stream.cu_stream()) })
    }
}

/// Takes the event that a cudarc guard would record. A guard that waits for its stream waits now; device memory never
/// has such a guard.
fn taken(mut guard: SyncOnDrop<'_>) -> Option<CUevent> {
    match &mut guard {
        SyncOnDrop::Record(record) => record.take().map(|(event, _)| event.cu_event()),
        SyncOnDrop::Sync(_) => None,
    }
}

/// The address of memory that is to be written, and its events.
pub(crate) struct Written<'a> {
    pub(crate) address: u64,
    pub(crate) read: Option<MemoryEvent<'a>>,
    pub(crate) write: Option<MemoryEvent<'a>>,
}

/// A stream on which cudarc waits for nothing.
///
/// cudarc returns the address of memory only to callers that name a stream, which it makes wait. It calls the driver
/// for a stream only if no error is stored in that stream's `CudaContext`, and stores the error again. So it makes no
/// call for a stream of a context that always holds an error. If it did make one, only this stream would wait, and
/// nothing is ever queued on it. One thread at a time uses it, because an error that is being stored again is absent
/// for a moment.
pub(crate) struct SilentStream(Mutex<Arc<CudaStream>>);

impl SilentStream {
    /// Returns the stream of this process, created at the first use; `None` if the driver refuses it.
    pub(crate) fn get(like: &CudaContext) -> Option<&'static Self> {
        static SILENT: OnceLock<Option<SilentStream>> = OnceLock::new();
        let make = || {
            // SAFETY: - the context is alive, because we hold a reference to it, and it is of that device;
            // - the value that is made here takes nothing from its owner: it lives in a static, so it never destroys
            //   the context, and after this call no code uses it with the driver (see the type), so the context may be
            //   destroyed before it.
            let context = unsafe { CudaContext::from_raw_context(like.ordinal(), like.cu_device(), like.cu_ctx()) }.ok()?;
            Some(Self(Mutex::new(context.default_stream())))
        };
        SILENT.get_or_init(make).as_ref()
    }

    /// Returns the address of cudarc's memory and both its events. The driver is not called, and no stream waits for
    /// them yet.
    pub(crate) fn look_at<'a, T, M: DevicePtr<T> + DevicePtrMut<T>>(&self, memory: &'a mut M) -> Written<'a> {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Any error works.
        stream.context().record_err(Err::<(), _>(DriverError(CUresult::CUDA_ERROR_NOT_PERMITTED)));
        let read = taken(memory.device_ptr(&stream).1);
        let (address, guard) = memory.device_ptr_mut(&stream);
        // The events belong to the memory, which is borrowed for this long.
        let of = |event| MemoryEvent { event, memory: PhantomData };
        Written { address, read: read.map(of), write: taken(guard).map(of) }
    }
}
