//! The CUDA driver: whether it is there with everything we call, and the device a communicator uses.

#![expect(unsafe_code, reason = "the CUDA driver is C")]

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use libloading::Library;

use crate::buffer::device_events;
use crate::error::Error;

/// A device and the context in which it is used.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// Tells devices and their parts (MIG) apart.
    pub(crate) uuid: [u8; 16],
    /// Its address on the PCI bus, as `0000:3b:00.0`.
    pub(crate) pci: String,
    /// The compute capability, as (9, 0).
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: u32,
}

/// What we and the parts of cudarc that we use call. cudarc panics where one is missing.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    if sys::CUDA_VERSION >= 13000 { "cuDeviceGetUuid_v2" } else { "cuDeviceGetUuid" },
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// The files that cudarc tries for a library, in its order: whichever opens first is the one it uses. cudarc itself says so only where
/// no crate of the program has it linked in place of loaded.
pub(crate) fn candidates(name: &str) -> impl Iterator<Item = String> {
    let (major, minor) = (sys::CUDA_VERSION / 1000, sys::CUDA_VERSION % 1000 / 10);
    let endings = [
        ".so".to_owned(),
        "64.so".to_owned(),
        format!("64_{major}.so"),
        format!("64_{major}{minor}.so"),
        format!("64_{major}{minor}_0.so"),
        format!("64_{major}0_{minor}.so"),
        "64_10.so".to_owned(),
        "64_11.so".to_owned(),
        "64_12.so".to_owned(),
        format!("64_{major}0_0.so"),
        "64_9.so".to_owned(),
        format!(".so.{major}"),
        ".so.12".to_owned(),
        ".so.11".to_owned(),
        ".so.10".to_owned(),
        ".so.9".to_owned(),
        ".so.1".to_owned(),
    ];
    endings.map(|ending| format!("lib{name}{ending}")).into_iter()
}

/// The driver's library, opened for good, with the name under which it was found.
fn opened() -> Option<&'static (Library, String)> {
    static OPENED: OnceLock<Option<(Library, String)>> = OnceLock::new();
    let open = |name: String| {
        // SAFETY: the initialisers of the driver ask for nothing; that a file of this name is the driver is trusted, as by cudarc.
        let library = unsafe { Library::new(&name) }.ok()?;
        Some((library, name))
    };
    OPENED.get_or_init(|| candidates("cuda").chain(candidates("nvcuda")).find_map(open)).as_ref()
}

/// Whether the driver has a function.
pub(crate) fn has(symbol: &str) -> bool {
    // SAFETY: the type says no more than that it is an address, and the address is not called.
    opened().is_some_and(|(library, _)| unsafe { library.get::<*const ()>(symbol) }.is_ok())
}

/// Whether the driver is there, has every function that we call, and works; where not, why not, in words.
pub(crate) fn check() -> Result<(), String> {
    static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
    CHECKED.get_or_init(probe).clone()
}

fn probe() -> Result<(), String> {
    let Some((_, name)) = opened() else {
        return Err("libcuda.so.1 was not found: install the NVIDIA driver, or use memory of the host".to_owned());
    };
    let missing: Vec<_> = SYMBOLS.iter().copied().filter(|symbol| !has(symbol)).collect();
    if !missing.is_empty() {
        let list = missing.join(", ");
        return Err(format!("the CUDA driver ({name}) lacks {list}: it is too old, install one for CUDA 12 or later"));
    }
    cudarc::driver::result::init().map_err(|error| format!("the CUDA driver ({name}) does not start: {}", words(error)))
}

/// How many devices there are.
pub(crate) fn count() -> Result<usize, String> {
    check()?;
    let count = CudaContext::device_count().map_err(|error| format!("cannot count the devices: {}", words(error)))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// The device of this number, with its primary context.
pub(crate) fn open(ordinal: usize) -> Result<Gpu, String> {
    let count = count()?;
    if ordinal >= count {
        let there = match count {
            0 => "there is none; look at nvidia-smi and CUDA_VISIBLE_DEVICES".to_owned(),
            1 => "there is 1 device, 0".to_owned(),
            count => format!("there are {count} devices, 0 to {}", count - 1),
        };
        return Err(format!("there is no device {ordinal}: {there}"));
    }
    let context = CudaContext::new(ordinal).map_err(|error| format!("cannot open device {ordinal}: {}", words(error)))?;
    of(&context)
}

/// The device of a context.
pub(crate) fn of(context: &Arc<CudaContext>) -> Result<Gpu, String> {
    check()?;
    let ordinal = context.ordinal();
    describe(context).map_err(|error| format!("cannot ask device {ordinal} what it is: {}", words(error)))
}

fn describe(context: &Arc<CudaContext>) -> Result<Gpu, DriverError> {
    let attribute = |attribute| context.attribute(attribute);
    let place = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    );
    Ok(Gpu {
        context: Arc::clone(context),
        ordinal: context.ordinal(),
        name: context.name()?,
        uuid: context.uuid()?.bytes.map(|byte| byte as u8),
        pci: format!("{:04x}:{:02x}:{:02x}.0", place.0, place.1, place.2),
        capability: context.compute_capability()?,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.unsigned_abs(),
    })
}

/// An error of the driver with what was being done.
pub(crate) fn cuda_error(doing: impl Into<String>, error: DriverError) -> Error {
    Error::Cuda { doing: doing.into(), code: error.0 as u32, text: words(error) }
}

/// The driver's own words for an error.
pub(crate) fn words(error: DriverError) -> String {
    let name = error.error_name().map_or("unknown error".into(), |name| name.to_string_lossy());
    let text = error.error_string().map_or("the driver has no words for it".into(), |text| text.to_string_lossy());
    format!("{name}: {text}")
}

thread_local! {
    /// Whether this thread was given a context before.
    static HAS_CONTEXT: Cell<bool> = const { Cell::new(false) };
    static ANY_WILL_DO: Cell<bool> = const { Cell::new(false) };
}

/// Makes the context current on this thread, where not any will do (see [`AnyContext`]). Errors that others have parked in it stay there.
pub(crate) fn bind(context: &CudaContext) -> Result<(), DriverError> {
    if ANY_WILL_DO.get() { Ok(()) } else { device_events::bind(context) }
}

/// While it lives, this thread makes calls for which any context will do: [`bind`] does not ask the driver which one is current.
///
/// Such are collectives of NCCL's on a stream with a handle of its own: NCCL makes its device current for as long as it needs it, and the stream
/// knows its context. What does depend on the current context, such as making an event, calls [`device_events::bind`].
pub(crate) struct AnyContext(PhantomData<*const ()>);

impl AnyContext {
    /// For calls on a stream of this context. The first of a thread makes that current: NCCL would otherwise take the first device's, and make one
    /// there, where there is none.
    pub(crate) fn for_calls_on(stream: &CudaStream) -> Result<Option<Self>, DriverError> {
        if device_events::is_nameless(stream) {
            return Ok(None);
        }
        if !HAS_CONTEXT.get() {
            device_events::bind(stream.context())?;
            HAS_CONTEXT.set(true);
        }
        ANY_WILL_DO.set(true);
        Ok(Some(Self(PhantomData)))
    }
}

impl Drop for AnyContext {
    fn drop(&mut self) {
        ANY_WILL_DO.set(false);
    }
}

/// Whether work that is put on this stream becomes part of a graph, or would spoil one. So it counts where the driver will not tell.
pub(crate) fn is_capturing(stream: &CudaStream) -> bool {
    capture_status(stream).unwrap_or(true)
}

/// As [`is_capturing`], but what has nothing to do with captures is an error.
pub(crate) fn capture_status(stream: &CudaStream) -> Result<bool, DriverError> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive, for we hold a reference to it, and the answer is written to a variable of ours.
    let asked = unsafe { sys::cuStreamIsCapturing(stream.cu_stream(), &mut status) };
    match asked.result() {
        Ok(()) => Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
        // The default stream must be left alone while another stream that waits for it captures.
        Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Whether this is CUDA's name for "the calling thread's own stream": another one on each thread, which no other can look at.
pub(crate) fn is_per_thread(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() == 2
}

/// An event without times. Unlike cudarc's it leaves errors alone that others have parked in the context.
#[derive(Debug)]
pub(crate) struct Event {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's events may be used by any thread, and by several at once; the pointer is never followed here.
unsafe impl Send for Event {}
// SAFETY: a shared reference records and asks, both of which the driver takes from several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// An event of the context.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        device_events::bind(context)?;
        let event = cudarc::driver::result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    /// Records what is on the stream now, which is of the same context.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: event and stream are alive, for we own the one and hold a reference to the other.
        unsafe { cudarc::driver::result::event::record(self.event, stream.cu_stream()) }
    }

    /// Whether what was recorded has been done.
    pub(crate) fn is_complete(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive, for we own it.
        unsafe { query(self.event) }
    }
}

/// Whether what was recorded in an event has been done. Unlike cudarc's way it spoils nobody's capture.
pub(crate) fn is_complete(event: &CudaEvent) -> Result<bool, DriverError> {
    // SAFETY: the event is alive, for we hold a reference to it.
    unsafe { query(event.cu_event()) }
}

/// # Safety
///
/// The event is alive.
unsafe fn query(event: sys::CUevent) -> Result<bool, DriverError> {
    // A question from a thread that does not ignore captures ends those that go on, wherever they are.
    let mode = exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    // SAFETY: the event is alive: this function's contract.
    let answer = unsafe { cudarc::driver::result::event::query(event) };
    if let Some(mode) = mode {
        exchange_capture_mode(mode);
    }
    match answer {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A context that cannot be bound any more has taken its events with it.
        if bind(&self.context).is_ok() {
            // SAFETY: the event is ours and is used no more. The driver waits for nothing here.
            let _ = unsafe { cudarc::driver::result::event::destroy(self.event) };
        }
    }
}

/// Makes this thread's calls invisible to stream captures of others: they would end a capture otherwise, wherever it is.
pub(crate) fn ignore_captures() {
    exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
}

/// Sets how this thread treats captures, and returns how it did before; `None` where the driver has no such setting.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    static THERE: OnceLock<bool> = OnceLock::new();
    if !*THERE.get_or_init(|| has("cuThreadExchangeStreamCaptureMode")) {
        return None;
    }
    // SAFETY: the function is there, and swaps a variable of ours with one of this thread.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().ok().map(|()| mode)
}

/// What `cuMemPoolSetAccess` reads, in the form that all releases of CUDA share; cudarc's has one form for each.
#[repr(C)]
struct Access {
    /// 1: the number is a device's.
    location: u32,
    device: c_int,
    /// 3: reading and writing.
    flags: u32,
}

const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

/// Opens the pool of a device to others of this process, as far as they can reach it at all.
///
/// NCCL gives ranks that are threads of one process each other's addresses, and reads and writes through them. Other devices reach memory of
/// a pool, from which cudarc allocates, only where the pool says so, unlike memory of `cuMemAlloc`.
pub(crate) fn share_pool(gpu: &Gpu, others: &[usize]) -> Result<(), DriverError> {
    let functions = ["cuDeviceGetDefaultMemPool", "cuMemPoolSetAccess", "cuDeviceCanAccessPeer"];
    if others.is_empty() || !functions.into_iter().all(has) {
        return Ok(());
    }
    bind(&gpu.context)?;
    let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the function is there (checked), and answers into a variable of ours.
    match unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, gpu.context.cu_device()) }.result() {
        // Without pools cudarc allocates in the old way, and NCCL can reach it.
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => return Ok(()),
        answer => answer?,
    }
    for other in others {
        let (device, mut can) = (*other as c_int, 0);
        // SAFETY: the function is there (checked), takes numbers of devices, and answers into a variable of ours.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, gpu.context.cu_device()) }.result()?;
        if can != 0 {
            let access = Access { location: 1, device, flags: 3 };
            // SAFETY: the pool is the device's own, and the description is as large as the driver reads.
            unsafe { sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1) }.result()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_looked_for_where_cudarc_looks_and_in_its_order() {
        for name in ["cuda", "nvcuda", "nvrtc"] {
            assert_eq!(candidates(name).collect::<Vec<_>>(), cudarc::get_lib_name_candidates(name));
        }
    }

    #[test]
    fn no_function_is_listed_twice() {
        let mut symbols = SYMBOLS.to_vec();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), SYMBOLS.len());
    }

    #[test]
    fn devices_are_described_and_those_that_are_not_there_are_named() {
        simgpu::install();
        assert_eq!((check(), count()), (Ok(()), Ok(8)));
        let gpu = open(3).unwrap();
        assert_eq!((gpu.ordinal, gpu.pci.as_str(), gpu.capability), (3, "0000:04:00.0", (9, 0)));
        assert!(gpu.multiprocessors > 0 && gpu.name.contains("Simulated"));
        assert_eq!(of(&gpu.context).unwrap().uuid, gpu.uuid);
        assert_ne!(open(4).unwrap().uuid, gpu.uuid);
        let words = open(8).unwrap_err();
        assert!(words.contains("device 8") && words.contains("8 devices, 0 to 7"), "{words}");
        let error = cuda_error("testing", DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(error.to_string().starts_with("testing: the CUDA driver says 2: CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    }

    #[test]
    fn binding_leaves_parked_errors_alone() {
        simgpu::install();
        let gpu = open(5).unwrap();
        gpu.context.record_err(Err::<(), _>(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)));
        bind(&gpu.context).unwrap();
        Event::new(&gpu.context).unwrap();
        assert!(gpu.context.check_err().is_err());
    }
}
