//! Launches: the checks beforehand, and the run of all blocks in order.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::block::Block;
use crate::fault::{Fault, FaultKind};
use crate::machine::Machine;
use crate::memory::{Global, Memory, Touched};
use crate::model::LaunchModel;
use crate::program::Kernel;

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The number of blocks.
    pub grid: [u32; 3],
    /// The number of threads of a block.
    pub block: [u32; 3],
    /// Bytes of shared memory beyond what the kernel declares.
    pub dynamic_shared_bytes: u32,
}

/// Instructions that one thread may run before it counts as endless: some seconds of work.
pub const INSTRUCTIONS_PER_THREAD: u64 = 1 << 30;

/// Instructions of a launch in which no block ended, before one more block begins beside the running ones: they may
/// wait for it.
const BEFORE_ONE_MORE: u64 = 1 << 20;

/// Blocks that run at once from the beginning if the memory order is modelled: the order between blocks shows only then.
const TOGETHER: usize = 4;

/// The time limit of a launch, and how its threads and blocks take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Instructions that one thread may run before it counts as endless.
    pub instructions: u64,
    /// The time a launch may always take: before that no thread counts as endless, since it may wait for data that
    /// another process writes. If it is zero, a launch is stopped sooner. Once no thread has reached a wait or its end
    /// for as many instructions as one thread may run, the next thread runs on to its limit. So an endless launch is
    /// found as fast as an endless thread.
    pub patience: Duration,
    /// Instructions in one turn of a thread.
    pub turn: u64,
    /// Blocks that may run at once. More than one run only while none of them ends.
    pub blocks: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { instructions: INSTRUCTIONS_PER_THREAD, patience: Duration::ZERO, turn: 2000, blocks: 32 }
    }
}

/// The most shared memory that a block of any GPU can have.
const MOST_SHARED: usize = 227 << 10;

/// Runs a kernel to its end. `parameters` holds the bytes of all parameters at their offsets; `globals` is the device
/// address of the module's variables, 0 if it has none. Costs about ten nanoseconds per instruction and thread.
///
/// # Errors
/// The launch does not fit the kernel or any GPU, or a thread did something that is not allowed; the fault names both.
pub fn launch(kernel: &Kernel, launch: &Launch, parameters: &[u8], globals: u64, memory: &dyn Memory) -> Result<Touched, Fault> {
    launch_within(&Limits::default(), kernel, launch, parameters, globals, memory)
}

/// Runs a kernel like [`launch()`], with other limits.
///
/// # Errors
/// As for [`launch()`].
pub fn launch_within(
    limits: &Limits,
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
        model: memory.model().map(LaunchModel::new),
        grid: launch.grid,
        block: launch.block,
        current: [0; 3],
        shared: Vec::new(),
        shared_bytes: shared,
        dynamic: dynamic.min(shared) as u64,
        limits: Limits { turn: limits.turn.max(1), blocks: limits.blocks.max(1), ..*limits },
        begun: Instant::now(),
        steps: 0,
        waits: 0,
        idle: 0,
    };
    let [x, y, z] = launch.grid;
    run(&mut machine, (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k]))))?;
    Ok(machine.global.touched())
}

/// Runs all blocks: one after another, or several in turns if they do not end or the memory order is modelled.
fn run(machine: &mut Machine<'_>, mut left: impl Iterator<Item = [u32; 3]>) -> Result<(), Fault> {
    let first = if machine.model.is_some() { TOGETHER.min(machine.limits.blocks) } else { 1 };
    let mut blocks: Vec<Block> = left.by_ref().take(first).map(|index| Block::new(machine, index)).collect();
    let mut mark = 0;
    while !blocks.is_empty() {
        let mut ended = false;
        let mut at = 0;
        while let Some(block) = blocks.get_mut(at) {
            if !block.run(machine)? {
                at += 1;
                continue;
            }
            (ended, mark) = (true, machine.steps);
            match left.next() {
                Some(index) => block.begin(machine, index),
                None => drop(blocks.remove(at)),
            }
        }
        if !ended && machine.model.as_mut().is_none_or(LaunchModel::yields) {
            // Threads may wait for data that another stream, another process or the host writes.
            std::thread::yield_now();
        }
        if machine.steps - mark >= BEFORE_ONE_MORE && blocks.len() < machine.limits.blocks {
            mark = machine.steps;
            blocks.extend(left.next().map(|index| Block::new(machine, index)));
        }
    }
    while !machine.model.as_mut().is_none_or(LaunchModel::end) {
        std::hint::spin_loop();
    }
    Ok(())
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
