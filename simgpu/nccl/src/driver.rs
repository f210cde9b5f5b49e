//! The driver calls of this library, looked up in the `libcuda` that the process has loaded. There is no other
//! dependency on it.

#![expect(unsafe_code, reason = "driver calls")]
#![expect(non_snake_case, reason = "the names are CUDA's")]

use crate::abi::{Code, Stream};
use crate::fault::{Fault, Outcome};
use crate::operation::Region;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A function that a stream can call on the host.
pub(crate) type HostFunction = extern "C" fn(*mut c_void);

/// A buffer that a host function reads or writes, for a driver that checks accesses.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Access {
    /// Its address.
    pub(crate) address: u64,
    /// Its length.
    pub(crate) bytes: u64,
    /// Whether it is written.
    pub(crate) write: u8,
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the library is never closed.
    let found = unsafe { libc::dlsym(library()?, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

fn library() -> Option<*mut c_void> {
    [c"libcuda.so", c"libcuda.so.1"].iter().find_map(|name| {
        // SAFETY: `RTLD_NOLOAD` loads nothing, so no initialiser runs.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!library.is_null()).then_some(library)
    })
}

macro_rules! driver {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// # Safety
        /// The driver's own rules apply.
        unsafe fn $name($($argument: $type),*) -> Outcome<()> {
            let name = concat!(stringify!($name), "\0");
            let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default();
            let missing = "Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'";
            let symbol = symbol(name).ok_or_else(|| Fault::new(Code::UNHANDLED_CUDA_ERROR, missing))?;
            // SAFETY: the driver's function of this name has this type.
            let function: extern "C" fn($($type),*) -> c_int = unsafe { std::mem::transmute(symbol) };
            match function($($argument),*) {
                0 => Ok(()),
                code => Err(Fault::cuda(stringify!($name), code)),
            }
        }
    )*};
}

driver! {
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int);
    fn cuCtxGetCurrent(context: *mut *mut c_void);
    fn cuCtxSetCurrent(context: *mut c_void);
    fn cuCtxGetDevice(device: *mut c_int);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, pointer: u64);
    fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize);
    fn cuMemFree_v2(pointer: u64);
    fn cuStreamGetCaptureInfo_v2(stream: Stream, status: *mut c_int, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize);
    fn cuUserObjectCreate(object: *mut usize, data: *mut c_void, destructor: HostFunction, references: c_uint, flags: c_uint);
    fn cuGraphRetainUserObject(graph: usize, object: usize, count: c_uint, flags: c_uint);
    fn cuMemRetainAllocationHandle(handle: *mut u64, pointer: u64);
    fn cuMemRelease(handle: u64);
    fn cuStreamGetCtx(stream: Stream, context: *mut *mut c_void);
    fn cuStreamWaitEvent(stream: Stream, event: *mut c_void, flags: c_uint);
    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint);
    fn cuEventRecord(event: *mut c_void, stream: Stream);
    fn cuEventDestroy_v2(event: *mut c_void);
    fn cuLaunchHostFunc(stream: Stream, function: HostFunction, data: *mut c_void);
    fn simgpu_launch_host_func_with_accesses(stream: Stream, function: HostFunction, data: *mut c_void, accesses: *const Access, count: usize);
}

/// The device of a context, with the properties needed here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: c_int,
    /// The context in which all calls for this device are made.
    context: usize,
    pub(crate) uuid: [u8; 16],
    /// Major compute capability.
    pub(crate) generation: c_int,
}

impl Device {
    /// Returns the device of the current context or, as CUDA's runtime does, device 0 if none is current.
    pub(crate) fn current() -> Outcome<Device> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the result has room in `context`.
        unsafe { cuCtxGetCurrent(&raw mut context)? };
        if context.is_null() {
            let device = Device::primary(0)?;
            // SAFETY: the context was just retained.
            unsafe { cuCtxSetCurrent(device.context as *mut c_void)? };
            return Ok(device);
        }
        Device::of(context)
    }

    /// Returns a device by number, in its primary context.
    pub(crate) fn primary(ordinal: c_int) -> Outcome<Device> {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` receives the result. It is never released: communicators may outlive any one user of it.
        unsafe { cuDevicePrimaryCtxRetain(&raw mut context, ordinal)? };
        Device::of(context)
    }

    fn of(context: *mut c_void) -> Outcome<Device> {
        let mut device = Device { ordinal: 0, context: context as usize, uuid: [0; 16], generation: 0 };
        let _there = device.enter()?;
        const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
        // SAFETY: all results have room in `device`.
        unsafe {
            cuCtxGetDevice(&raw mut device.ordinal)?;
            cuDeviceGetUuid_v2(&raw mut device.uuid, device.ordinal)?;
            cuDeviceGetAttribute(&raw mut device.generation, COMPUTE_CAPABILITY_MAJOR, device.ordinal)?;
        }
        Ok(device)
    }

    /// Makes this device's context current until the result is dropped.
    pub(crate) fn enter(&self) -> Outcome<Entered> {
        let mut before = std::ptr::null_mut();
        // SAFETY: `before` receives the result; the context lives as long as its user keeps it.
        unsafe {
            cuCtxGetCurrent(&raw mut before)?;
            cuCtxSetCurrent(self.context as *mut c_void)?;
        }
        Ok(Entered(before))
    }

    /// Whether the context no longer runs anything.
    pub(crate) fn is_broken(&self) -> bool {
        self.enter().and_then(|_there| Event::new()).is_err()
    }

    /// Checks that a stream belongs to this device.
    pub(crate) fn check_stream(&self, stream: Stream, name: &str) -> Outcome<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` receives the result; the driver detects a bad stream.
        unsafe { cuStreamGetCtx(stream, &raw mut context)? };
        let owner = if context as usize == self.context { *self } else { Device::of(context)? };
        if owner.ordinal == self.ordinal {
            return Ok(());
        }
        let (theirs, ours) = (owner.ordinal, self.ordinal);
        Err(Fault::new(Code::UNHANDLED_CUDA_ERROR, format!("{name} : stream of device {theirs} given to a communicator of device {ours}")))
    }

    /// Checks that a region is memory that this device can reach, within one allocation.
    pub(crate) fn check_region(&self, region: Region, name: &str, which: &str) -> Outcome<()> {
        const MEMORY_TYPE: c_int = 2;
        const DEVICE_ORDINAL: c_int = 9;
        const RANGE_START: c_int = 11;
        const RANGE_SIZE: c_int = 12;
        if region.bytes == 0 {
            return Ok(());
        }
        let Some(kind) = attribute::<c_uint>(region.address, MEMORY_TYPE) else {
            return Err(Fault::argument(format!("{name} : {which} {:#x} is not a valid pointer", region.address)));
        };
        let ordinal = attribute::<c_int>(region.address, DEVICE_ORDINAL).unwrap_or(self.ordinal);
        if kind == 2 && ordinal != self.ordinal {
            let ours = self.ordinal;
            return Err(Fault::argument(format!("{name} : {which} allocated on device {ordinal} mismatchs with NCCL device {ours}")));
        }
        let extent = attribute::<u64>(region.address, RANGE_START).zip(attribute::<usize>(region.address, RANGE_SIZE));
        match extent {
            Some((start, size)) if region.address + region.bytes > start as usize + size => {
                let inside = start as usize + size - region.address;
                let text = format!("{name} : {which} of {} bytes runs past its allocation, which has {inside} from there", region.bytes);
                Err(Fault::argument(text))
            }
            _ => Ok(()),
        }
    }
}

fn attribute<T: Default>(pointer: usize, attribute: c_int) -> Option<T> {
    let mut value = T::default();
    // SAFETY: the callers use the types that belong to the attributes.
    unsafe { cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer as u64) }.ok().map(|()| value)
}

/// A context that is current until this is dropped.
pub(crate) struct Entered(*mut c_void);

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: this was the current context before.
        let _ = unsafe { cuCtxSetCurrent(self.0) };
    }
}

/// A guard under which a driver that counts its callers attributes this thread's calls to NCCL.
pub(crate) struct Inside(Option<extern "C" fn(c_int)>);

impl Inside {
    pub(crate) fn enter() -> Inside {
        static TELL: OnceLock<extern "C" fn(c_int)> = OnceLock::new();
        // SAFETY: the simulated driver's function of this name has this type.
        let found =
            || symbol(c"simgpu_inside_nccl").map(|symbol| unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(symbol) });
        // A driver may be loaded later.
        let tell = TELL.get().copied().or_else(|| found().map(|found| *TELL.get_or_init(|| found)));
        if let Some(tell) = tell {
            tell(1);
        }
        Inside(tell)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(tell) = self.0 {
            tell(-1);
        }
    }
}

/// Returns the number of devices.
pub(crate) fn devices() -> Outcome<c_int> {
    let mut count = 0;
    // SAFETY: the result has room in `count`.
    unsafe { cuDeviceGetCount(&raw mut count)? };
    Ok(count)
}

/// A graph that a stream is captured into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Graph(usize);

/// Returns the graph that captures a stream's work, if any.
pub(crate) fn captured_by(stream: Stream) -> Outcome<Option<Graph>> {
    const ACTIVE: c_int = 1;
    let (mut status, mut id, mut graph, mut nodes, mut count) = (0, 0, 0, std::ptr::null(), 0);
    // SAFETY: all results have room in these variables.
    unsafe { cuStreamGetCaptureInfo_v2(stream, &raw mut status, &raw mut id, &raw mut graph, &raw mut nodes, &raw mut count)? };
    Ok((status == ACTIVE).then_some(Graph(graph)))
}

impl Graph {
    /// Registers a function to be called, with a number, when the graph and everything made from it are destroyed.
    pub(crate) fn on_destruction(self, function: HostFunction, data: usize) -> Outcome<()> {
        const NOBODY_WAITS: c_uint = 1;
        const MOVE: c_uint = 1;
        let mut object = 0;
        // SAFETY: the result has room in `object`; `data` is a number, and the graph is being captured.
        unsafe {
            cuUserObjectCreate(&raw mut object, data as *mut c_void, function, 1, NOBODY_WAITS)?;
            cuGraphRetainUserObject(self.0, object, 1, MOVE)
        }
    }
}

/// Allocates device memory in the current context.
pub(crate) fn allocate(bytes: usize) -> Outcome<u64> {
    let mut pointer = 0;
    // SAFETY: the result has room in `pointer`.
    unsafe { cuMemAlloc_v2(&raw mut pointer, bytes)? };
    Ok(pointer)
}

/// Frees device memory.
pub(crate) fn free(pointer: u64) -> Outcome<()> {
    // SAFETY: the driver checks the pointer.
    unsafe { cuMemFree_v2(pointer) }
}

/// Whether memory comes from `cuMemCreate`: memory of pools and of `cuMemAlloc` has no handle to retain.
pub(crate) fn has_allocation_handle(region: Region) -> bool {
    let mut handle = 0;
    // SAFETY: `handle` receives the result, and is released.
    unsafe { cuMemRetainAllocationHandle(&raw mut handle, region.address as u64).and_then(|()| cuMemRelease(handle)) }.is_ok()
}

/// An event, destroyed with its owner.
#[derive(Debug)]
pub(crate) struct Event(usize);

impl Event {
    pub(crate) fn new() -> Outcome<Event> {
        const WITHOUT_TIME: c_uint = 2;
        let mut event = std::ptr::null_mut();
        // SAFETY: the result has room in `event`.
        unsafe { cuEventCreate(&raw mut event, WITHOUT_TIME)? };
        Ok(Event(event as usize))
    }

    /// Makes `later` wait for the work that `earlier` has now.
    pub(crate) fn order(&self, earlier: Stream, later: Stream) -> Outcome<()> {
        self.record(earlier)?;
        self.await_on(later)
    }

    pub(crate) fn record(&self, stream: Stream) -> Outcome<()> {
        // SAFETY: the event lives until it is dropped.
        unsafe { cuEventRecord(self.0 as *mut c_void, stream) }
    }

    pub(crate) fn await_on(&self, stream: Stream) -> Outcome<()> {
        // SAFETY: the event lives until it is dropped.
        unsafe { cuStreamWaitEvent(stream, self.0 as *mut c_void, 0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nothing else destroys the event.
        let _ = unsafe { cuEventDestroy_v2(self.0 as *mut c_void) };
    }
}

/// Enqueues a host function that accesses these regions.
pub(crate) fn launch(stream: Stream, function: HostFunction, data: usize, accesses: &[Access]) -> Outcome<()> {
    let data = data as *mut c_void;
    if symbol(c"simgpu_launch_host_func_with_accesses").is_some() {
        // SAFETY: the list outlives the call; `data` is a number.
        return unsafe { simgpu_launch_host_func_with_accesses(stream, function, data, accesses.as_ptr(), accesses.len()) };
    }
    // SAFETY: `data` is a number.
    unsafe { cuLaunchHostFunc(stream, function, data) }
}
