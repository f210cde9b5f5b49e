use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::call::{driver, offer, put};
use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::event;
use crate::job::{Task, Work};
use crate::module::{self, Function, Launch};
use crate::state::{self, Guard, Handle, State};
use crate::stream;
use crate::submit;

const JIT_ERROR_LOG_BUFFER: u32 = 5;
const JIT_ERROR_LOG_BUFFER_BYTES: u32 = 6;

/// Keys in the list of `extra`, which ends with 0: a buffer with all parameters, and the address of its size.
const PARAMETER_BUFFER: usize = 1;
const PARAMETER_BUFFER_SIZE: usize = 2;

/// The caller's buffer for error messages about its PTX.
struct Log {
    place: *mut u8,
    room: usize,
    /// The variable that receives the length written.
    written: *mut usize,
}

impl Log {
    const NONE: Log = Log { place: std::ptr::null_mut(), room: 0, written: std::ptr::null_mut() };

    /// Finds the log among the options of a load.
    ///
    /// # Safety
    ///
    /// There are `count` options and values, or the pointers are null.
    unsafe fn among(count: c_uint, options: *const c_uint, values: *mut usize) -> Log {
        let mut log = Log::NONE;
        if options.is_null() || values.is_null() {
            return log;
        }
        for at in 0..count as usize {
            // SAFETY: guaranteed by the caller.
            let (option, value) = unsafe { (*options.add(at), values.add(at)) };
            match option {
                // SAFETY: as above.
                JIT_ERROR_LOG_BUFFER => log.place = unsafe { *value } as *mut u8,
                JIT_ERROR_LOG_BUFFER_BYTES => {
                    // SAFETY: as above; the size is a 32-bit number in the place of a pointer.
                    log.room = unsafe { *value } as u32 as usize;
                    log.written = value;
                }
                _ => {}
            }
        }
        log
    }

    /// Writes the text to the log, truncated to its size; without a log, to the reports.
    ///
    /// # Safety
    ///
    /// The caller of the driver guaranteed the buffer.
    unsafe fn write(&self, text: &str) {
        if self.place.is_null() || self.room == 0 {
            state::lock().reports.add(format!("a module was not loaded: {text}"));
            return;
        }
        let length = text.len().min(self.room - 1);
        // SAFETY: at most `room` bytes are written.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.place, length);
            self.place.add(length).write(0);
            offer(self.written, length);
        }
    }
}

/// Locks the state once the current context is idle, as a driver may require before it loads code on a device or
/// unloads it.
fn at_rest() -> Guard<'static> {
    stream::rest(state::lock(), context::raw_current())
}

/// Loads an image: PTX that ends with a NUL, or machine code, which is refused.
///
/// # Safety
///
/// `place` is null or valid for writes; `image` is null or points to either.
unsafe fn load(place: *mut usize, image: *const u8, log: Log) -> Outcome {
    if place.is_null() || image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: PTX ends with a NUL, and machine code begins with four bytes that are not NUL, so the four are read one
    // by one up to a NUL.
    let start: [u8; 4] = unsafe {
        let mut start = [0; 4];
        for (at, byte) in start.iter_mut().enumerate() {
            *byte = *image.add(at);
            if *byte == 0 {
                break;
            }
        }
        start
    };
    drop(at_rest());
    let loaded = if module::is_binary(start) {
        Err((Code::NO_BINARY_FOR_GPU, "the image is machine code; the simulation runs PTX only".to_string()))
    } else {
        // SAFETY: an image that is not machine code ends with a NUL.
        module::load(&unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy())
    };
    match loaded {
        // SAFETY: guaranteed by the caller.
        Ok(handle) => unsafe { put(place, handle) },
        Err((code, text)) => {
            // SAFETY: guaranteed by the caller.
            unsafe { log.write(&text) };
            Err(code)
        }
    }
}

/// Returns the bytes of all parameters of a launch.
///
/// # Safety
///
/// `pointers` is null or has a pointer for each parameter; `extra` is null or a list that ends with 0.
unsafe fn parameters(function: &Function, pointers: *const *const u8, extra: *const usize) -> Outcome<Vec<u8>> {
    let needed = function.kernel.parameter_bytes();
    let mut bytes = vec![0u8; needed];
    if !pointers.is_null() {
        for (at, parameter) in function.kernel.parameters().iter().enumerate() {
            // SAFETY: guaranteed by the caller: one pointer for each parameter, to as many bytes as it has.
            let given = unsafe { *pointers.add(at) };
            if given.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            // SAFETY: as above.
            let value = unsafe { std::slice::from_raw_parts(given, parameter.bytes) };
            bytes[parameter.offset..parameter.offset + parameter.bytes].copy_from_slice(value);
        }
        return Ok(bytes);
    }
    // SAFETY: guaranteed by the caller.
    let given = unsafe { buffer(extra)? };
    match given {
        // A kernel of a library may get fewer bytes than declared if it reads no more: NCCL's kernels do that.
        Some(given) if function.library || given.len() >= needed => {
            let length = needed.min(given.len());
            bytes[..length].copy_from_slice(&given[..length]);
            Ok(bytes)
        }
        Some(_) => Err(Code::INVALID_VALUE),
        None if needed == 0 => Ok(bytes),
        None => Err(Code::INVALID_VALUE),
    }
}

/// Returns the buffer of parameters in a list of `extra`.
///
/// # Safety
///
/// `extra` is null or a list that ends with 0.
unsafe fn buffer<'a>(extra: *const usize) -> Outcome<Option<&'a [u8]>> {
    if extra.is_null() {
        return Ok(None);
    }
    let (mut place, mut size) = (std::ptr::null::<u8>(), None);
    let mut at = 0;
    loop {
        // SAFETY: the list continues until a 0 is found.
        let (key, value) = unsafe { (*extra.add(at), extra.add(at + 1)) };
        match key {
            0 => break,
            // SAFETY: a key is followed by its value.
            PARAMETER_BUFFER => place = unsafe { *value } as *const u8,
            // SAFETY: as above; the value is the address of a size.
            PARAMETER_BUFFER_SIZE => size = Some(unsafe { *(*value as *const usize) }),
            _ => return Err(Code::INVALID_VALUE),
        }
        at += 2;
    }
    match size {
        // SAFETY: the caller states that `size` bytes lie there.
        Some(size) if !place.is_null() => Ok(Some(unsafe { std::slice::from_raw_parts(place, size) })),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn check_shape(function: &Function, grid: [u32; 3], block: [u32; 3], shared: u32) -> Outcome {
    let threads: u64 = block.iter().map(|&size| u64::from(size)).product();
    let fits = |sizes: [u32; 3], most: [u32; 3]| sizes.iter().zip(most).all(|(&size, most)| size > 0 && size <= most);
    if !fits(grid, device::MAX_GRID) || !fits(block, device::MAX_BLOCK) || threads > u64::from(device::MAX_THREADS) {
        return Err(Code::INVALID_VALUE);
    }
    if threads > u64::from(function.max_threads()) {
        return Err(Code::LAUNCH_OUT_OF_RESOURCES);
    }
    if shared > function.dynamic_shared { Err(Code::INVALID_VALUE) } else { Ok(()) }
}

fn submit_kernel(state: &mut State, named: Handle, launch: Launch) -> Outcome {
    let stream = state.stream(named)?;
    stream::require_current(state, stream)?;
    let what = format!("kernel {}", launch.kernel.name()).into();
    submit::submit(state, stream, Task { work: Work::Kernel(Arc::new(launch)), what, spans: Vec::new() }).map(drop)
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    attributes: *const Attribute,
    count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: u32,
    padding: u32,
    value: [u64; 8],
}

/// `CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`.
const LAUNCH_COMPLETION_EVENT: u32 = 12;

/// Returns the event to record when the kernel has begun, if any. Other attributes concern properties of real
/// hardware.
///
/// # Safety
///
/// There are as many attributes as `config` states.
unsafe fn begun_event(config: &Config) -> Outcome<Option<Handle>> {
    if config.attributes.is_null() && config.count > 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    let mut attributes = (0..config.count as usize).map(|at| unsafe { &*config.attributes.add(at) });
    Ok(attributes.find(|attribute| attribute.id == LAUNCH_COMPLETION_EVENT).map(|attribute| attribute.value[0] as Handle))
}

/// Launches a kernel. The event `begun` is recorded before it, which is the latest possible point for a driver whose
/// kernels begin at once.
///
/// # Safety
///
/// The parameters are as [`parameters`] requires.
unsafe fn launch(
    function: Handle,
    (grid, block): ([u32; 3], [u32; 3]),
    shared: u32,
    stream: Handle,
    (pointers, extra): (*const *const u8, *const usize),
    begun: Option<Handle>,
) -> Outcome {
    let mut state = stream::with_room(stream);
    let of = state.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
    if of.context != state.current()? {
        return Err(Code::INVALID_HANDLE);
    }
    check_shape(of, grid, block, shared)?;
    let shape = simgpu_ptx::Launch { grid, block, dynamic_shared_bytes: shared };
    // SAFETY: guaranteed by the caller.
    let parameters = unsafe { parameters(of, pointers, extra)? };
    let launch = Launch { kernel: of.kernel.clone(), shape, parameters, globals: of.globals, library: of.library };
    if let Some(event) = begun {
        event::record(&mut state, event, stream, false)?;
    }
    submit_kernel(&mut state, stream, launch)
}

fn occupancy(blocks: *mut c_int, function: Handle, threads: c_int, shared: usize) -> Outcome {
    let state = state::lock();
    let function = state.functions.get(&function).ok_or(Code::INVALID_HANDLE)?;
    let threads = u32::try_from(threads).ok().filter(|&threads| threads > 0).ok_or(Code::INVALID_VALUE)?;
    // SAFETY: the caller of the driver guarantees the pointer.
    unsafe { put(blocks, function.blocks_per_multiprocessor(threads, shared) as c_int) }
}

driver! {
    fn cuModuleLoad(place: *mut usize, path: *const c_char) {
        if path.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut image = std::fs::read(CStr::from_ptr(path).to_string_lossy().as_ref()).map_err(|_| Code::FILE_NOT_FOUND)?;
        image.push(0);
        load(place, image.as_ptr(), Log::NONE)
    }

    fn cuModuleLoadData(place: *mut usize, image: *const c_void) {
        load(place, image.cast(), Log::NONE)
    }

    fn cuModuleLoadDataEx(place: *mut usize, image: *const c_void, count: c_uint, options: *const c_uint, values: *mut usize) {
        load(place, image.cast(), Log::among(count, options, values))
    }

    fn cuModuleUnload(handle: usize) {
        module::unload(&mut at_rest(), handle)
    }

    fn cuModuleGetFunction(place: *mut usize, handle: usize, name: *const c_char) {
        if place.is_null() || name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(place, module::function(&mut state::lock(), handle, &CStr::from_ptr(name).to_string_lossy())?)
    }

    fn cuModuleGetGlobal_v2(place: *mut u64, bytes: *mut usize, handle: usize, name: *const c_char) {
        if name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let (start, size) = module::variable(&state::lock(), handle, &CStr::from_ptr(name).to_string_lossy())?;
        offer(place, start);
        offer(bytes, size);
        Ok(())
    }

    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, handle: usize) {
        let state = state::lock();
        let function = state.functions.get(&handle).ok_or(Code::INVALID_HANDLE)?;
        put(value, match attribute {
            0 => function.max_threads() as c_int,
            1 => function.kernel.shared_bytes() as c_int,
            2 | 3 | 7 => 0,
            // A number that is still available if all threads of a multiprocessor are in use.
            4 => 32,
            5 | 6 => function.target as c_int,
            8 => function.dynamic_shared as c_int,
            9 => -1,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuFuncSetAttribute(handle: usize, attribute: c_uint, value: c_int) {
        let mut state = state::lock();
        let function = state.functions.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        let most = device::SHARED_BYTES_OPT_IN.saturating_sub(function.kernel.shared_bytes() as u32);
        match (attribute, u32::try_from(value)) {
            (8, Ok(bytes)) if bytes <= most => function.dynamic_shared = bytes,
            (9, _) if (-1..=100).contains(&value) => {}
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    fn cuFuncSetCacheConfig(handle: usize, config: c_uint) {
        if config > 3 {
            return Err(Code::INVALID_VALUE);
        }
        state::lock().functions.get(&handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: usize, threads: c_int, shared: usize) {
        occupancy(blocks, function, threads, shared)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: *mut c_int, function: usize, threads: c_int, shared: usize, _flags: c_uint,
    ) {
        occupancy(blocks, function, threads, shared)
    }

    fn cuLaunchKernel(
        function: usize, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: usize, pointers: *const *const u8, extra: *const usize,
    ) {
        let grid_and_block = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(function, grid_and_block, shared, stream, (pointers, extra), None)
    }

    fn cuLaunchKernelEx(config: *const Config, function: usize, pointers: *const *const u8, extra: *const usize) {
        if config.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let begun = begun_event(&*config)?;
        let Config { grid, block, shared, stream, .. } = *config;
        launch(function, (grid, block), shared, stream, (pointers, extra), begun)
    }
}
