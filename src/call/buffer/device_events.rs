//! The CUDA events that cudarc keeps for its allocations, used with as few driver calls as possible.
//!
//! Before each use of an event, cudarc asks the driver which context is current. That is not necessary: an event knows
//! its context, and so does a stream with its own handle. CUDA accepts both as long as any context is current.

#![expect(unsafe_code, reason = "the driver's functions on events and streams")]

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUevent, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result};

/// Makes the context current on this thread. Unlike cudarc's function, this leaves errors that other code has stored in
/// the context untouched.
pub(crate) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: the context is alive, because we hold a reference to it.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Returns whether the stream has a handle that names a different stream in each context or on each thread, instead of
/// a handle of its own.
pub(crate) fn is_nameless(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() <= 2
}

/// Makes a driver call that takes a stream, and possibly an event, of one context.
fn of_stream(stream: &CudaStream, call: impl Fn() -> Result<(), DriverError>) -> Result<(), DriverError> {
    if is_nameless(stream) {
        bind(stream.context())?;
    }
    match call() {
        // On this thread no context is current, or the current one was destroyed. The driver has done nothing.
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

    /// Makes the stream wait for the recorded work.
    pub(crate) fn await_on(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive, because we hold a reference to it, and so is the event, whose memory is borrowed
        // for longer.
        of_stream(stream, || unsafe { result::stream::wait_event(stream.cu_stream(), self.event, CU_EVENT_WAIT_DEFAULT) })
    }

    /// Records the work that is on the stream now. The driver refuses a stream of a context other than the event's.
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
/// cudarc returns the address of memory only to callers that name a stream, and makes that stream wait. It calls the
/// driver for a stream only if no error is stored in the stream's `CudaContext`; after this check it stores the error
/// again. So it makes no call for a stream whose context always holds an error. Even if it made one, only this stream
/// would wait, and nothing is ever queued on it. Only one thread at a time uses the stream, because an error that is
/// being stored again is absent for a moment.
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
