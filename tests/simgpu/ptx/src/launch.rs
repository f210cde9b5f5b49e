//! Launches: the checks before, and all blocks in order.

use std::sync::atomic::Ordering;

use crate::block::Block;
use crate::fault::{Fault, FaultKind};
use crate::machine::{Machine, Thread};
use crate::memory::{Global, Memory, Touched};
use crate::program::Kernel;

/// How large a launch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond what the kernel declares.
    pub dynamic_shared_bytes: u32,
}

/// Instructions that one thread may run before it counts as endless: some seconds' worth.
pub const INSTRUCTIONS_PER_THREAD: u64 = 1 << 30;

/// The most shared memory that a block of any GPU can have.
const MOST_SHARED: usize = 227 << 10;

/// Runs a kernel to its end. `parameters` holds the bytes of all parameters at their offsets; `globals` is the device
/// address of the module's variables, 0 if it has none. Costs about ten nanoseconds per instruction and thread.
///
/// # Errors
/// The launch does not fit the kernel or any GPU, or a thread did what it must not do; the fault names both.
pub fn launch(kernel: &Kernel, launch: &Launch, parameters: &[u8], globals: u64, memory: &dyn Memory) -> Result<Touched, Fault> {
    launch_within(INSTRUCTIONS_PER_THREAD, kernel, launch, parameters, globals, memory)
}

/// Like [`launch()`], with another number of instructions that a thread may run.
///
/// # Errors
/// As for [`launch()`].
pub fn launch_within(
    instructions: u64,
    kernel: &Kernel,
    launch: &Launch,
    parameters: &[u8],
    globals: u64,
    memory: &dyn Memory,
) -> Result<Touched, Fault> {
    check(kernel, launch, parameters, globals).map_err(|kind| Fault { kernel: kernel.name().to_owned(), kind, place: None })?;
    kernel.program.ready(kernel.function).map_err(|kind| Fault { kernel: kernel.name().to_owned(), kind, place: None })?;
    let dynamic = kernel.shared_bytes.next_multiple_of(16);
    let shared = if launch.dynamic_shared_bytes == 0 { kernel.shared_bytes } else { dynamic + launch.dynamic_shared_bytes as usize };
    let mut machine = Machine {
        program: &kernel.program,
        kernel,
        parameters,
        globals,
        global: Global::new(memory, kernel.program.accesses.load(Ordering::Relaxed)),
        grid: launch.grid,
        block: launch.block,
        current: [0; 3],
        shared: vec![0xA5; shared],
        dynamic: dynamic.min(shared) as u64,
        budget: instructions,
    };
    let mut threads: Vec<Thread> = (0..launch.block.iter().product()).map(|number| machine.thread(number)).collect();
    let [x, y, z] = launch.grid;
    for block in (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k]))) {
        machine.current = block;
        machine.shared.fill(0xA5);
        threads.iter_mut().for_each(|thread| machine.restart(thread));
        Block::new(&mut threads).run(&mut machine)?;
    }
    Ok(machine.global.touched())
}

fn check(kernel: &Kernel, launch: &Launch, parameters: &[u8], globals: u64) -> Result<(), FaultKind> {
    let refuse = |message: String| Err(FaultKind::Launch(message));
    let (grid, block) = (launch.grid, launch.block);
    if grid.contains(&0) || block.contains(&0) {
        return refuse(format!("a grid of {grid:?} blocks of {block:?} threads is empty"));
    }
    if grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
        return refuse(format!("a grid of {grid:?} blocks is larger than [2147483647, 65535, 65535]"));
    }
    let threads = block.iter().map(|&size| u64::from(size)).fold(1, u64::saturating_mul);
    if threads > 1024 || block[2] > 64 {
        return refuse(format!("a block of {block:?} threads is larger than 1024 threads or [1024, 1024, 64]"));
    }
    if let Some(most) = kernel.max_threads() {
        if kernel.definition().exact_threads && most != block {
            return refuse(format!("a block of {block:?} threads is not the {most:?} that the kernel is made for (.reqntid)"));
        }
        if threads > most.iter().map(|&size| u64::from(size)).fold(1, u64::saturating_mul) {
            return refuse(format!("a block of {block:?} threads is larger than the {most:?} that the kernel is made for (.maxntid)"));
        }
    }
    if kernel.shared_bytes.saturating_add(launch.dynamic_shared_bytes as usize) > MOST_SHARED {
        let (own, dynamic) = (kernel.shared_bytes, launch.dynamic_shared_bytes);
        return refuse(format!("{own} bytes of shared memory and {dynamic} more are beyond the {MOST_SHARED} of any GPU"));
    }
    if parameters.len() < kernel.parameter_bytes() {
        return Err(FaultKind::Parameters { needed: kernel.parameter_bytes(), given: parameters.len() });
    }
    if globals == 0 && !kernel.program.globals.is_empty() {
        return refuse(format!("the module has {} bytes of variables, but no address was given for them", kernel.program.globals.len()));
    }
    Ok(())
}
