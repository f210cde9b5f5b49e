//! Modules and kernels: PTX, run by the interpreter.

use simgpu_ptx::{Fault, FaultKind, Kernel, Limits, Memory, MemoryModel, Region};

use crate::checker::Verb;
use crate::code::{Code, Outcome};
use crate::device;
use crate::job::Span;
use crate::library;
use crate::memory::{Freed, Kind};
use crate::memory_model;
use crate::run::{Failure, touched};
use crate::state::{self, Handle, State};

pub(crate) struct Module {
    pub(crate) context: Handle,
    pub(crate) code: simgpu_ptx::Module,
    /// The address of its variables; 0 if it has none.
    globals: u64,
    /// Whether it is the code of a library ([`crate::library`]).
    library: bool,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) context: Handle,
    pub(crate) module: Handle,
    pub(crate) kernel: Kernel,
    pub(crate) globals: u64,
    pub(crate) target: u32,
    /// The largest dynamic shared memory that a launch may request.
    pub(crate) dynamic_shared: u32,
    pub(crate) library: bool,
}

impl Function {
    /// Returns the largest number of threads of a block.
    pub(crate) fn max_threads(&self) -> u32 {
        let own = self.kernel.max_threads().map(|[x, y, z]| x.saturating_mul(y).saturating_mul(z));
        own.unwrap_or(device::MAX_THREADS).min(device::MAX_THREADS)
    }

    /// Returns how many blocks fit into a multiprocessor at once.
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, dynamic_shared: usize) -> u32 {
        if threads == 0 || threads > self.max_threads() {
            return 0;
        }
        let by_threads = device::THREADS_PER_MULTIPROCESSOR / threads.next_multiple_of(32);
        let shared = (self.kernel.shared_bytes() + dynamic_shared + (1 << 10)) as u64;
        by_threads.min(32).min((u64::from(device::SHARED_BYTES_OPT_IN + (1 << 10)) / shared) as u32)
    }
}

/// One launch of a kernel, with the values of its parameters at that time.
pub(crate) struct Launch {
    pub(crate) kernel: Kernel,
    pub(crate) shape: simgpu_ptx::Launch,
    pub(crate) parameters: Vec<u8>,
    pub(crate) globals: u64,
    pub(crate) library: bool,
}

/// Returns the newest PTX that a driver of this version accepts: 80 is 8.0.
fn newest_ptx(driver: u32) -> u32 {
    match driver {
        ..12000 => 78,
        12000..12010 => 80,
        12010..12020 => 81,
        12020..12030 => 82,
        12030..12040 => 83,
        12040..12050 => 84,
        12050..12070 => 85,
        12070..12080 => 86,
        12080..12090 => 87,
        12090..13000 => 88,
        _ => 90 + (driver - 13000) / 10,
    }
}

const CUBIN: [u8; 4] = [0x7f, b'E', b'L', b'F'];
const FATBIN: [u8; 4] = [0x50, 0xed, 0x55, 0xba];

/// Whether an image is machine code, which the simulation cannot run.
pub(crate) fn is_binary(start: [u8; 4]) -> bool {
    start == CUBIN || start == FATBIN
}

/// Loads a module into the current context. An error has a code and a text.
pub(crate) fn load(text: &str) -> Result<Handle, (Code, String)> {
    let code = simgpu_ptx::Module::parse(text).map_err(|error| (Code::INVALID_PTX, error.to_string()))?;
    let mut state = state::lock();
    let context = state.current().map_err(|code| (code, "no context is current".to_string()))?;
    let (major, minor) = code.version();
    let driver = state.configuration.driver_version;
    if major * 10 + minor > newest_ptx(driver) {
        return Err((Code::UNSUPPORTED_PTX_VERSION, format!("PTX {major}.{minor} is too new for a driver of version {driver}")));
    }
    let (target, capability) = (code.target(), state.configuration.capability);
    if target > capability {
        return Err((Code::NO_BINARY_FOR_GPU, format!("PTX for sm_{target} does not run on a device of capability {capability}")));
    }
    insert(&mut state, context, code, false)
}

/// Loads the code of a library into the current context. The device for which it was compiled does not matter here.
pub(crate) fn load_library(names: &[u8]) -> Result<Handle, (Code, String)> {
    let code = library::module(names)?;
    let mut state = state::lock();
    let context = state.current().map_err(|code| (code, "no context is current".to_string()))?;
    insert(&mut state, context, code, true)
}

fn insert(state: &mut State, context: Handle, code: simgpu_ptx::Module, library: bool) -> Result<Handle, (Code, String)> {
    let globals = place_globals(state, &code, context).map_err(|code| (code, "no memory for the variables".to_string()))?;
    let handle = state.handle();
    state.modules.insert(handle, Module { context, code, globals, library });
    Ok(handle)
}

fn place_globals(state: &mut State, code: &simgpu_ptx::Module, context: Handle) -> Outcome<u64> {
    if code.globals_bytes() == 0 {
        return Ok(0);
    }
    let start = state.allocate(code.globals_bytes(), Kind::Globals, context)?;
    let image = code.globals_image(start);
    // SAFETY: the allocation was just made, with the size of the image.
    unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), start as *mut u8, image.len()) };
    Ok(start)
}

/// Returns the handle of a kernel of a module; the same one every time.
pub(crate) fn function(state: &mut State, module: Handle, name: &str) -> Outcome<Handle> {
    let of = state.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
    let kernel = of.code.kernel(name).ok_or(Code::NOT_FOUND)?.clone();
    let known = state.functions.iter().find(|(_, function)| function.module == module && function.kernel.name() == name);
    if let Some((&handle, _)) = known {
        return Ok(handle);
    }
    let dynamic_shared = device::SHARED_BYTES.saturating_sub(kernel.shared_bytes() as u32);
    let function = Function {
        context: of.context,
        module,
        kernel,
        globals: of.globals,
        target: of.code.target(),
        dynamic_shared,
        library: of.library,
    };
    let handle = state.handle();
    state.functions.insert(handle, function);
    Ok(handle)
}

/// Returns the address and the size of a variable of a module.
pub(crate) fn variable(state: &State, module: Handle, name: &str) -> Outcome<(u64, usize)> {
    let of = state.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
    let place = of.code.variable(name).ok_or(Code::NOT_FOUND)?;
    Ok((of.globals + place.start as u64, place.len()))
}

/// Forgets a module and its kernels. Queued launches keep the kernels they need, but not the variables.
pub(crate) fn unload(state: &mut State, module: Handle) -> Outcome {
    let gone = state.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
    state.functions.retain(|_, function| function.module != module);
    if gone.globals != 0 {
        let (stamp, number) = (state.host_stamp(), state.next_number());
        state.free(gone.globals, Freed { stamp, what: "cuModuleUnload of the host".into(), number });
        state.release(gone.globals);
    }
    state.healthy(gone.context)
}

/// The largest word that compiled code reads beyond the bytes it uses.
const WORD: u64 = 16;

/// The memory that a kernel can access, and the order of its accesses.
pub(crate) struct Sight {
    reach: Reach,
    order: Option<&'static MemoryModel>,
}

enum Reach {
    Nothing,
    /// The memory that its device could reach at the launch: start and size, in the order of the starts.
    Snapshot(Vec<(u64, u64)>),
    /// The memory of a kernel of a library: that of its own device as of the launch, and that of other devices as of
    /// each access. Such kernels send each other the addresses of buffers while they run.
    Live {
        device: usize,
        peers: Vec<usize>,
        number: u64,
    },
}

impl Sight {
    pub(crate) const NOTHING: Sight = Sight { reach: Reach::Nothing, order: None };

    pub(crate) fn of(state: &State, context: Handle, number: u64, library: bool) -> Sight {
        let Some(context) = state.contexts.get(&context) else { return Sight::NOTHING };
        let order = memory_model::of(context.device);
        if library {
            return Sight { reach: Reach::Live { device: context.device, peers: context.peers.clone(), number }, order };
        }
        let reached = state.memory.all().filter(|found| found.usable(number) && found.reachable(context.device, &context.peers));
        Sight { reach: Reach::Snapshot(reached.map(|found| (found.start, found.bytes)).collect()), order }
    }
}

impl Memory for Sight {
    fn find(&self, address: u64) -> Option<Region> {
        let (start, bytes) = match &self.reach {
            Reach::Nothing => return None,
            Reach::Snapshot(ranges) => ranges[..ranges.partition_point(|&(start, _)| start <= address)].last().copied()?,
            Reach::Live { device, peers, number } => {
                let state = state::lock();
                let found = state.memory.at(address).filter(|found| found.reachable(*device, peers))?;
                let usable = found.usable(*number) || (found.device != *device && !found.released());
                (found.start, usable.then_some(found.bytes)?)
            }
        };
        // GPU memory comes in larger pieces, and host pages have that many bytes, too.
        let readable = if matches!(self.reach, Reach::Live { .. }) { (start + bytes).next_multiple_of(WORD) - start } else { bytes };
        (address - start < bytes).then_some(Region { start, bytes, readable, host: start as *mut u8 })
    }

    fn model(&self) -> Option<&MemoryModel> {
        self.order
    }
}

/// Runs a kernel. Returns the memory that it used.
pub(crate) fn run(launch: &Launch, sight: &Sight) -> Result<Vec<Span>, Failure> {
    let limits = if launch.library { library::limits() } else { Limits::default() };
    match simgpu_ptx::launch_within(&limits, &launch.kernel, &launch.shape, &launch.parameters, launch.globals, sight) {
        Ok(used) => {
            let reads = used.reads.into_iter().map(|range| touched(range.start, range.end, Verb::Read));
            Ok(reads.chain(used.writes.into_iter().map(|range| touched(range.start, range.end, Verb::Write))).collect())
        }
        Err(fault) => Err(Failure { code: code(&fault.kind), text: explain(&fault) }),
    }
}

fn code(kind: &FaultKind) -> Code {
    match kind {
        FaultKind::OutOfBounds { .. } => Code::ILLEGAL_ADDRESS,
        FaultKind::Misaligned { .. } => Code::MISALIGNED_ADDRESS,
        FaultKind::Endless(_) => Code::LAUNCH_TIMEOUT,
        FaultKind::Launch(_) | FaultKind::Parameters { .. } => Code::LAUNCH_OUT_OF_RESOURCES,
        FaultKind::Unsupported(_) => Code::ILLEGAL_INSTRUCTION,
        _ => Code::LAUNCH_FAILED,
    }
}

/// Describes the fault, with what the driver knows of an address that the kernel could not reach.
fn explain(fault: &Fault) -> String {
    let FaultKind::OutOfBounds { address, .. } = fault.kind else { return fault.to_string() };
    let state = state::lock();
    let why = state.memory.at(address).map(|found| match &found.freed {
        Some(freed) => format!("; this is {}, freed by {}", found.name(), freed.what),
        None => format!("; this is {}, to which no peer access was enabled, or which the access leaves", found.name()),
    });
    format!("{fault}{}", why.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::newest_ptx;

    #[test]
    fn drivers_take_the_ptx_of_their_toolkits() {
        let expected = [(11080, 78), (12000, 80), (12040, 84), (12080, 87), (12090, 88), (13000, 90), (13020, 92)];
        assert!(expected.iter().all(|&(driver, ptx)| newest_ptx(driver) == ptx));
    }
}
