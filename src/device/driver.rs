//! The CUDA driver: a check that every function called by this crate exists, and the device that a communicator uses.

#![expect(unsafe_code, reason = "the CUDA driver is C")]

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use libloading::Library;

pub(crate) use crate::call::buffer::device_events::{bind, is_nameless};
use crate::error::Error;

/// A device and the context in which it is used.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    /// The id that distinguishes devices and their parts (MIG).
    pub(crate) uuid: [u8; 16],
    /// The device's address on the PCI bus, such as `0000:3b:00.0`.
    pub(crate) pci: String,
    /// The compute capability, such as (9, 0).
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: u32,
}

/// The functions that we, and the parts of cudarc that we use, call. cudarc panics if one is missing.
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
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    CAPTURE_INFO,
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemAllocAsync",
    "cuMemFree_v2",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuFuncGetAttribute",
    "cuLaunchKernel",
];

/// Returns the files that cudarc tries for a library, in the order in which it tries them; cudarc uses the first that
/// opens. cudarc itself offers this list only if no crate of the program makes it link the library instead of loading
/// it.
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

/// Returns the driver's library, opened permanently, with the name under which it was found.
fn opened() -> Option<&'static (Library, String)> {
    static OPENED: OnceLock<Option<(Library, String)>> = OnceLock::new();
    let open = |name: String| {
        // SAFETY: the driver's initialisers have no preconditions; that a file of this name is the driver is trusted,
        // as by cudarc.
        let library = unsafe { Library::new(&name) }.ok()?;
        Some((library, name))
    };
    OPENED.get_or_init(|| candidates("cuda").chain(candidates("nvcuda")).find_map(open)).as_ref()
}

/// Whether the driver has a function.
pub(crate) fn has(symbol: &str) -> bool {
    // SAFETY: the type states only that it is an address, and the address is not called.
    opened().is_some_and(|(library, _)| unsafe { library.get::<*const ()>(symbol) }.is_ok())
}

/// Checks that the driver exists, has every function that this crate calls, and works. The error states what is wrong.
pub(crate) fn check() -> Result<(), String> {
    static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
    CHECKED.get_or_init(probe).clone()
}

fn probe() -> Result<(), String> {
    let Some((_, name)) = opened() else {
        return Err("libcuda.so.1 was not found: install the NVIDIA driver, or use host memory".to_owned());
    };
    let missing: Vec<_> = SYMBOLS.iter().copied().filter(|symbol| !has(symbol)).collect();
    if !missing.is_empty() {
        let list = missing.join(", ");
        return Err(format!("the CUDA driver ({name}) lacks {list}: it is too old; install one for CUDA 12 or later"));
    }
    cudarc::driver::result::init().map_err(|error| format!("the CUDA driver ({name}) failed to start: {}", words(error)))
}

/// Returns the number of devices.
pub(crate) fn count() -> Result<usize, String> {
    check()?;
    let count = CudaContext::device_count().map_err(|error| format!("cannot count the devices: {}", words(error)))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Checks that there is a device with this number.
pub(crate) fn check_ordinal(ordinal: usize) -> Result<(), String> {
    let count = count()?;
    if ordinal >= count {
        let there = match count {
            0 => "no device was found; check nvidia-smi and CUDA_VISIBLE_DEVICES".to_owned(),
            1 => "there is 1 device, 0".to_owned(),
            count => format!("there are {count} devices, 0 to {}", count - 1),
        };
        return Err(format!("there is no device {ordinal}: {there}"));
    }
    Ok(())
}

/// Opens the device with this number, with its primary context.
pub(crate) fn open(ordinal: usize) -> Result<Gpu, String> {
    check_ordinal(ordinal)?;
    let context = CudaContext::new(ordinal).map_err(|error| format!("cannot open device {ordinal}: {}", words(error)))?;
    of(&context)
}

/// Returns the id of the device with this number, without opening it.
pub(crate) fn uuid(ordinal: usize) -> Option<[u8; 16]> {
    check().ok()?;
    let device = cudarc::driver::result::device::get(c_int::try_from(ordinal).ok()?).ok()?;
    cudarc::driver::result::device::get_uuid(device).ok().map(|uuid| uuid.bytes.map(|byte| byte as u8))
}

/// Returns the device of a context.
pub(crate) fn of(context: &Arc<CudaContext>) -> Result<Gpu, String> {
    check()?;
    let ordinal = context.ordinal();
    describe(context).map_err(|error| format!("cannot use device {ordinal}: {}", words(error)))
}

fn describe(context: &Arc<CudaContext>) -> Result<Gpu, DriverError> {
    // A context that has failed still describes its device, but creates nothing new.
    bind(context)?;
    drop(Event::new(context)?);
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

/// Returns a driver error, with a description of the operation.
pub(crate) fn cuda_error(doing: impl Into<String>, error: DriverError) -> Error {
    Error::Cuda { doing: doing.into(), code: error.0 as u32, text: words(error) }
}

impl Error {
    /// Wraps an error of the CUDA driver with a description of the operation. If the process cannot recover from the
    /// error, the error's text says what to do.
    pub fn cuda(doing: impl Into<String>, error: DriverError) -> Self {
        cuda_error(doing, error)
    }
}

/// Driver errors after which this process cannot use the device any longer: a kernel, or the hardware below it, has
/// failed. Every later call on that device returns the error. They are errors of memory and of NVLink; failed launches
/// (because of addresses, time, assertions, stacks, instructions and other causes); and an end by CUDA's multi-process
/// server. A peer that is killed in the middle of a transfer over NVLink can cause such an error.
const FINAL: [u32; 13] = [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 809];

/// Returns the driver's own text for an error. If the process cannot recover, the text says what to do.
pub(crate) fn words(error: DriverError) -> String {
    let name = error.error_name().map_or("unknown error".into(), |name| name.to_string_lossy());
    let text = error.error_string().map_or("the driver gives no description".into(), |text| text.to_string_lossy());
    let advice = if FINAL.contains(&(error.0 as u32)) { "; this process cannot use the device any more: restart the process" } else { "" };
    format!("{name}: {text}{advice}")
}

/// Creates a stream whose kernels run before those of ordinary streams if there is no room for both.
pub(crate) fn urgent_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, DriverError> {
    bind(context)?;
    let (least, greatest) = cudarc::driver::result::stream::get_priority_range()?;
    // One step up, not the highest: streams that a program made for more urgent work remain ahead of ours.
    context.new_stream_with_priority((least - 1).max(greatest))
}

/// Makes a context current like [`bind`], but asks the driver only once per thread, as long as the thread uses one
/// context here. For callers that only need some context to be current and switch contexts themselves, as NCCL does.
#[inline]
pub(crate) fn bind_once(context: &CudaContext) -> Result<(), DriverError> {
    thread_local! {
        static BOUND: Cell<usize> = const { Cell::new(0) };
    }
    let this = context.cu_ctx().addr();
    if BOUND.get() == this {
        return Ok(());
    }
    bind(context)?;
    BOUND.set(this);
    Ok(())
}

/// Whether work that is put on this stream becomes part of a graph, or would invalidate a capture. Also true if the
/// driver does not report it.
pub(crate) fn is_capturing(stream: &CudaStream) -> bool {
    capture_status(stream).unwrap_or(true)
}

/// Does the same as [`is_capturing`], but returns errors that have nothing to do with captures.
pub(crate) fn capture_status(stream: &CudaStream) -> Result<bool, DriverError> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive, for we hold a reference to it, and the answer is written to our variable.
    let asked = unsafe { sys::cuStreamIsCapturing(stream.cu_stream(), &mut status) };
    match asked.result() {
        Ok(()) => Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
        // The default stream must not be used while another stream that waits for it captures.
        Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The function that returns the graph. CUDA releases prefer different ones; drivers have this one from 11.3 on.
const CAPTURE_INFO: &str = "cuStreamGetCaptureInfo_v2";

/// Returns the capture that work on this stream becomes part of, as a unique number, and its graph; `None` if there is
/// no capture, or it has been invalidated.
pub(crate) fn capture_of(stream: &CudaStream) -> Result<Option<(u64, sys::CUgraph)>, DriverError> {
    type Function = unsafe extern "C" fn(
        sys::CUstream,
        *mut CUstreamCaptureStatus,
        *mut u64,
        *mut sys::CUgraph,
        *mut *const sys::CUgraphNode,
        *mut usize,
    ) -> sys::CUresult;
    // SAFETY: the type is that of the driver's documentation for this name.
    let function = opened().and_then(|(library, _)| unsafe { library.get::<Function>(CAPTURE_INFO) }.ok());
    let function = function.ok_or(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
    let (mut status, mut number, mut graph) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0, std::ptr::null_mut());
    // SAFETY: the stream is alive, for we hold a reference to it; the answers go to our variables, and null omits
    // the rest.
    unsafe { function(stream.cu_stream(), &mut status, &mut number, &mut graph, std::ptr::null_mut(), std::ptr::null_mut()) }.result()?;
    Ok((status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some((number, graph)))
}

/// Waits for two events that record times, and returns the milliseconds between them.
///
/// # Errors
///
/// The errors of the driver.
pub fn milliseconds_between(from: &CudaEvent, to: &CudaEvent) -> Result<f32, DriverError> {
    type Function = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    from.synchronize()?;
    to.synchronize()?;
    // cudarc calls a newer function, which drivers have from 12.8 on, and panics without it.
    // SAFETY: the type is that of the driver's documentation for this name.
    let function = opened().and_then(|(library, _)| unsafe { library.get::<Function>("cuEventElapsedTime") }.ok());
    let function = function.ok_or(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
    let mut milliseconds = 0.0;
    // SAFETY: both events are alive, for we hold references to them; the answer goes to our variable.
    unsafe { function(&mut milliseconds, from.cu_event(), to.cu_event()) }.result()?;
    Ok(milliseconds)
}

/// Whether this is CUDA's name for "the calling thread's own stream". It differs on each thread, and no other thread
/// can query it.
pub(crate) fn is_per_thread(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() == 2
}

/// An event without times. Unlike cudarc's, it leaves errors that other code has stored in the context untouched.
#[derive(Debug)]
pub(crate) struct Event {
    event: sys::CUevent,
    context: Arc<CudaContext>,
}

// SAFETY: the driver's events may be used by any thread, and by several at once; the pointer is never followed here.
unsafe impl Send for Event {}
// SAFETY: a shared reference records and queries, and the driver accepts both from several threads at once.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event of the context.
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        bind(context)?;
        let event = cudarc::driver::result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Self { event, context: Arc::clone(context) })
    }

    /// Records what is on the stream now. The stream belongs to the same context.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: event and stream are alive, for we own the one and hold a reference to the other.
        unsafe { cudarc::driver::result::event::record(self.event, stream.cu_stream()) }
    }

    /// Whether the recorded work has completed.
    pub(crate) fn is_complete(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive, for we own it.
        unsafe { query(self.event) }
    }
}

/// Whether the work recorded in an event has completed. Unlike cudarc's query, this invalidates no capture.
pub(crate) fn is_complete(event: &CudaEvent) -> Result<bool, DriverError> {
    // SAFETY: the event is alive, for we hold a reference to it.
    unsafe { query(event.cu_event()) }
}

/// # Safety
///
/// The event is alive.
unsafe fn query(event: sys::CUevent) -> Result<bool, DriverError> {
    // SAFETY: the event is alive: this function's contract.
    match unseen_by_captures(|| unsafe { cudarc::driver::result::event::query(event) }) {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a stream has completed all its work so far. This invalidates no capture, unless this stream itself is
/// captured.
pub(crate) fn is_idle(stream: &CudaStream) -> Result<bool, DriverError> {
    bind(stream.context())?;
    // SAFETY: the stream is alive, for we hold a reference to it.
    match unseen_by_captures(|| unsafe { sys::cuStreamQuery(stream.cu_stream()) }.result()) {
        Ok(()) => Ok(true),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the error means that nothing runs on a device any longer, and nothing will in this process.
pub(crate) fn is_final(error: DriverError) -> bool {
    error.0 == sys::CUresult::CUDA_ERROR_DEINITIALIZED || FINAL.contains(&(error.0 as u32))
}

impl Drop for Event {
    fn drop(&mut self) {
        // A context that can no longer be bound has destroyed its events.
        if bind(&self.context).is_ok() {
            // SAFETY: the event is ours and is used no longer. The driver waits for nothing here.
            let _ = unsafe { cudarc::driver::result::event::destroy(self.event) };
        }
    }
}

/// Makes this thread's calls invisible to stream captures of other threads. A visible call would end any capture.
pub(crate) fn ignore_captures() {
    exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
}

/// Calls the driver in such a way that no capture is affected. Without this, a call that cannot be part of a graph ends
/// every capture in progress.
pub(crate) fn unseen_by_captures<R>(call: impl FnOnce() -> R) -> R {
    let mode = exchange_capture_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    let answer = call();
    if let Some(mode) = mode {
        exchange_capture_mode(mode);
    }
    answer
}

/// Sets how this thread treats captures, and returns the previous mode; `None` if the driver refuses.
fn exchange_capture_mode(mut mode: sys::CUstreamCaptureMode) -> Option<sys::CUstreamCaptureMode> {
    // SAFETY: the function exists (`check`), and swaps our variable with one of this thread.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().ok().map(|()| mode)
}

/// Whether the NVLink switch can send to several devices at once and add, for this device. NCCL makes the same query.
pub(crate) fn has_multicast(gpu: &Gpu) -> bool {
    /// `CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED`, which some CUDA releases that cudarc supports have no name for.
    const MULTICAST_SUPPORTED: c_int = 132;
    type Ask = unsafe extern "C" fn(*mut c_int, c_int, sys::CUdevice) -> c_int;
    let Some((library, _)) = opened() else { return false };
    // SAFETY: the driver's function of this name has had this type, with all numbers as C's int, since its first
    // release.
    let Ok(ask) = (unsafe { library.get::<Ask>("cuDeviceGetAttribute") }) else { return false };
    let mut value = 0;
    // SAFETY: the answer is written to our variable; the device came from the driver, which refuses attributes
    // that it does not know.
    let answer = unsafe { ask(&mut value, MULTICAST_SUPPORTED, gpu.context.cu_device()) };
    answer == 0 && value != 0
}

/// The structure that `cuMemPoolSetAccess` reads, in the form common to all CUDA releases; cudarc has one form for
/// each.
#[repr(C)]
struct Access {
    /// Always 1: the number is a device's.
    location: u32,
    device: c_int,
    /// Always 3: reading and writing.
    flags: u32,
}

const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

/// Opens the memory pool of a device to other devices of this process, if they can reach it at all.
///
/// If ranks are threads of one process, NCCL passes their addresses to each other, and reads and writes at these
/// addresses. cudarc allocates from a pool. Unlike memory of `cuMemAlloc`, memory from a pool can be reached by other
/// devices only if the pool permits that.
pub(crate) fn share_pool(gpu: &Gpu, others: &[usize]) -> Result<(), DriverError> {
    let functions = ["cuDeviceGetDefaultMemPool", "cuMemPoolSetAccess", "cuDeviceCanAccessPeer"];
    if others.is_empty() || !functions.into_iter().all(has) {
        return Ok(());
    }
    bind(&gpu.context)?;
    let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the function exists (checked), and writes to our variable.
    match unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, gpu.context.cu_device()) }.result() {
        // Without pools cudarc allocates in the old way, and NCCL can reach the memory.
        Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) => return Ok(()),
        answer => answer?,
    }
    for other in others {
        let (device, mut can) = (*other as c_int, 0);
        // SAFETY: the function exists (checked), takes numbers of devices, and writes to our variable.
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
#[cfg(simgpu)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_looked_for_where_cudarc_looks_and_in_its_order() {
        for name in ["cuda", "nvcuda", "nvrtc"] {
            assert_eq!(candidates(name).collect::<Vec<_>>(), cudarc::get_lib_name_candidates(name));
        }
    }

    #[test]
    fn errors_that_no_process_gets_over_say_what_to_do() {
        use sys::CUresult as Code;
        simgpu::install();
        let last = [Code::CUDA_ERROR_ILLEGAL_ADDRESS, Code::CUDA_ERROR_LAUNCH_FAILED, Code::CUDA_ERROR_ASSERT];
        for code in last.into_iter().chain([Code::CUDA_ERROR_ECC_UNCORRECTABLE, Code::CUDA_ERROR_NVLINK_UNCORRECTABLE]) {
            assert!(words(DriverError(code)).ends_with("restart the process"), "{}", words(DriverError(code)));
        }
        for code in [Code::CUDA_ERROR_OUT_OF_MEMORY, Code::CUDA_ERROR_INVALID_VALUE, Code::CUDA_ERROR_NOT_SUPPORTED] {
            assert!(!words(DriverError(code)).contains("restart the process"), "{}", words(DriverError(code)));
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
        assert!(error.to_string().starts_with("testing: the CUDA driver returned 2: CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
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
