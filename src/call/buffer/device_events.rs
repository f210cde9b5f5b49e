//! The events of cudarc's memory, used with as few calls of the driver as it takes.
//!
//! cudarc asks the driver before each use of an event which context is current. An event and a stream that has a handle of its own know their
//! context: CUDA takes them whichever is current, as long as one is.

#![expect(unsafe_code, reason = "the driver's functions on events and streams")]

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUevent, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop, result};

/// Makes the context current on this thread. Unlike cudarc's way it leaves errors alone that others have parked in the context.
pub(crate) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if result::ctx::get_current()? == Some(context.cu_ctx()) {
        return Ok(());
    }
    // SAFETY: the context is alive, for we hold a reference to it.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// Whether it has no handle of its own, but one that names another stream in each context, or on each thread.
pub(crate) fn is_nameless(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() <= 2
}

/// Makes a call that takes a stream, and an event if any, of one context.
fn of_stream(stream: &CudaStream, call: impl Fn() -> Result<(), DriverError>) -> Result<(), DriverError> {
    if is_nameless(stream) {
        bind(stream.context())?;
    }
    match call() {
        // No context is current on this thread, or one that is gone. The driver has done nothing.
        Err(DriverError(CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)) => {
            bind(stream.context())?;
            call()
        }
        outcome => outcome,
    }
}

/// An event of memory that is borrowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryEvent<'a> {
    event: CUevent,
    memory: PhantomData<&'a CudaEvent>,
}

impl<'a> MemoryEvent<'a> {
    /// The event that a guard of cudarc's would record, which it does no more.
    pub(crate) fn of(guard: SyncOnDrop<'a>) -> Option<Self> {
        taken(guard).map(|event| Self { event, memory: PhantomData })
    }

    /// Has the stream wait for what was recorded.
    pub(crate) fn await_on(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive, for we hold a reference to it, and so is the event, whose memory is borrowed for longer.
        of_stream(stream, || unsafe { result::stream::wait_event(stream.cu_stream(), self.event, CU_EVENT_WAIT_DEFAULT) })
    }

    /// Records what is on the stream now. One of another context than the event's is refused by the driver.
    pub(crate) fn record(self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive, for we hold a reference to it, and so is the event, whose memory is borrowed for longer.
        of_stream(stream, || unsafe { result::event::record(self.event, stream.cu_stream()) })
    }
}

/// The event that a guard of cudarc's would record, which it does no more. One that waits for its stream waits now: no memory of a device has it.
fn taken(mut guard: SyncOnDrop<'_>) -> Option<CUevent> {
    match &mut guard {
        SyncOnDrop::Record(record) => record.take().map(|(event, _)| event.cu_event()),
        SyncOnDrop::Sync(_) => None,
    }
}

/// Where memory lies that is to be written, and its events.
pub(crate) struct Written<'a> {
    pub(crate) address: u64,
    pub(crate) read: Option<MemoryEvent<'a>>,
    pub(crate) write: Option<MemoryEvent<'a>>,
}

/// A stream on which cudarc waits for nothing.
///
/// cudarc says where memory lies to those alone who name a stream, which it makes wait. It calls the driver for a stream only where no error is
/// parked in that stream's `CudaContext`, and parks it again: so it makes no call for a stream of a context in which there is always one. Were it
/// to make one, that stream would wait, on which nothing is ever queued. It is used by one thread at a time, for an error that is being parked is gone
/// for a moment.
pub(crate) struct SilentStream(Mutex<Arc<CudaStream>>);

impl SilentStream {
    /// The one of this process; nothing where the driver would not have it. It is made at the first use.
    pub(crate) fn get(like: &CudaContext) -> Option<&'static Self> {
        static SILENT: OnceLock<Option<SilentStream>> = OnceLock::new();
        let make = || {
            // SAFETY: - the context is alive, for we hold a reference to it, and of that device;
            // - the value that is made here takes nothing from its owner: it lives in a static, so that it never destroys the context, and after
            //   this call nobody uses it with the driver (see the type), so that the context may go before it.
            let context = unsafe { CudaContext::from_raw_context(like.ordinal(), like.cu_device(), like.cu_ctx()) }.ok()?;
            Some(Self(Mutex::new(context.default_stream())))
        };
        SILENT.get_or_init(make).as_ref()
    }

    /// The address of cudarc's memory and both its events. The driver is not called, and no stream waits for them yet.
    pub(crate) fn look_at<'a, T, M: DevicePtr<T> + DevicePtrMut<T>>(&self, memory: &'a mut M) -> Written<'a> {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Any error will do.
        stream.context().record_err(Err::<(), _>(DriverError(CUresult::CUDA_ERROR_NOT_PERMITTED)));
        let read = taken(memory.device_ptr(&stream).1);
        let (address, guard) = memory.device_ptr_mut(&stream);
        // The events are the memory's, and it is borrowed for this long.
        let of = |event| MemoryEvent { event, memory: PhantomData };
        Written { address, read: read.map(of), write: taken(guard).map(of) }
    }
}
