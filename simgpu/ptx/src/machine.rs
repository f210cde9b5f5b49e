//! Runs the steps of one thread until it waits, ends, or its turn is over.

use std::cell::RefCell;
use std::time::Instant;

use crate::access::little;
use crate::fault::FaultKind;
use crate::launch::Limits;
use crate::memory::Global;
use crate::model::{LaunchModel, ThreadModel};
use crate::order::Scope;
use crate::program::{
    CallSite, Callee, Carrier, Function, Initial, Instruction, Kernel, LARGEST_LOCAL, Meeting, Op, Program, Slot, Special,
};
use crate::syntax::Prototype;
use crate::types::Space;

/// The greatest depth of nested calls.
const DEEPEST: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a barrier of the block: the site's number in its function.
    Barrier(u32),
    /// At an instruction at which the threads of the warp meet.
    Meeting(u32),
    Done,
}

/// The point at which a function continues after a call.
#[derive(Debug, Clone, Copy)]
struct Caller {
    function: usize,
    at: usize,
    base: usize,
    local: usize,
    site: u32,
}

pub(crate) struct Thread {
    pub(crate) state: State,
    /// The current function, and the step that is next or at which the thread waits.
    pub(crate) function: usize,
    pub(crate) at: usize,
    pub(crate) index: [u32; 3],
    pub(crate) lane: u32,
    slots: Vec<u64>,
    base: usize,
    memory: Vec<u8>,
    local: usize,
    callers: Vec<Caller>,
    executed: u64,
    pub(crate) model: ThreadModel,
}

/// The limit of kept threads: the most threads of a block.
const KEPT: usize = 1024;

thread_local! {
    /// Registers and local memory of threads that have ended, reused by the next launch because their pages are mapped
    /// already.
    static ENDED: RefCell<Vec<(Vec<u64>, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Thread {
    fn drop(&mut self) {
        let own = (std::mem::take(&mut self.slots), std::mem::take(&mut self.memory));
        // If the host's thread ends, too, they are dropped.
        let _ = ENDED.try_with(|ended| {
            let mut ended = ended.borrow_mut();
            if ended.len() < KEPT {
                ended.push(own);
            }
        });
    }
}

/// Extends the slots to `count`. Unused parts of a large frame take no memory: fresh pages are zeros that are mapped
/// when they are touched.
fn grow(slots: &mut Vec<u64>, count: usize) {
    if count > slots.len() {
        let mut more = vec![0; count];
        more[..slots.len()].copy_from_slice(slots);
        *slots = more;
    }
}

impl Thread {
    pub(crate) fn slot(&self, slot: Slot) -> u64 {
        self.slots[self.base + slot as usize]
    }

    pub(crate) fn set(&mut self, slot: Slot, value: u64) {
        let place = self.base + slot as usize;
        self.slots[place] = value;
    }

    /// Lets a waiting thread continue.
    pub(crate) fn resume(&mut self) {
        self.state = State::Ready;
        self.at += 1;
    }
}

/// The state that all threads of a launch share.
pub(crate) struct Machine<'m> {
    pub(crate) program: &'m Program,
    pub(crate) kernel: &'m Kernel,
    pub(crate) parameters: &'m [u8],
    pub(crate) globals: u64,
    pub(crate) global: Global<'m>,
    /// The memory order, unless it is that of the host.
    pub(crate) model: Option<LaunchModel<'m>>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// The running block, and its shared memory.
    pub(crate) current: [u32; 3],
    pub(crate) shared: Vec<u8>,
    pub(crate) shared_bytes: usize,
    /// The start of the dynamic part of the shared memory.
    pub(crate) dynamic: u64,
    pub(crate) limits: Limits,
    pub(crate) begun: Instant,
    /// The steps that all threads ran, how often a thread reached a wait or its end, and the steps since.
    pub(crate) steps: u64,
    pub(crate) waits: u64,
    pub(crate) idle: u64,
}

impl Machine<'_> {
    pub(crate) fn thread(&self, number: u32) -> Thread {
        let [x, y, _] = self.block;
        let function = self.program.function(self.kernel.function);
        let (mut slots, mut memory) = ENDED.with_borrow_mut(Vec::pop).unwrap_or_default();
        grow(&mut slots, function.slots);
        memory.clear();
        let mut thread = Thread {
            state: State::Ready,
            function: self.kernel.function,
            at: 0,
            index: [number % x, number / x % y, number / x / y],
            lane: number % 32,
            slots,
            base: 0,
            memory,
            local: 0,
            callers: Vec::new(),
            executed: 0,
            model: ThreadModel::default(),
        };
        self.fill(&mut thread, &function.initial);
        thread
    }

    /// Reuses a thread of the last block for the next one.
    pub(crate) fn restart(&self, thread: &mut Thread) {
        let function = self.program.function(self.kernel.function);
        (thread.state, thread.function, thread.at, thread.base, thread.local) = (State::Ready, self.kernel.function, 0, 0, 0);
        (thread.executed, thread.callers) = (0, Vec::new());
        thread.memory.clear();
        thread.memory.resize(function.local, 0xA5);
        self.fill(thread, &function.initial[..function.varying]);
    }

    fn fill(&self, thread: &mut Thread, initial: &[(Slot, Initial)]) {
        for &(slot, initial) in initial {
            let value = match initial {
                Initial::Bits(bits) | Initial::Unset(bits) => bits,
                Initial::Flag(_) => 0,
                Initial::Global(offset) => self.globals.wrapping_add(offset),
                Initial::Shared(variable, offset) => self.kernel.shared_offsets[variable].unwrap_or(0).wrapping_add_signed(offset),
                Initial::Dynamic(offset) => self.dynamic.wrapping_add_signed(offset),
                Initial::Local(offset) => (thread.local as u64).wrapping_add(offset),
                Initial::Param(offset) => offset,
                Initial::Special(special) => self.special(thread, special),
            };
            thread.set(slot, value);
        }
    }

    fn special(&self, thread: &Thread, special: Special) -> u64 {
        let [x, y, z] = self.block;
        let number = thread.index[0] + x * (thread.index[1] + y * thread.index[2]);
        let below = (1_u32 << thread.lane) - 1;
        let own = 1_u32 << thread.lane;
        u64::from(match special {
            Special::Thread(axis) => thread.index[axis],
            Special::BlockSize(axis) => self.block[axis],
            Special::Block(axis) => self.current[axis],
            Special::GridSize(axis) => self.grid[axis],
            Special::Lane => thread.lane,
            Special::WarpIndex => number / 32,
            Special::Warps => (x * y * z).div_ceil(32),
            Special::LanesEqual => own,
            Special::LanesBelow => below,
            Special::LanesUpTo => below | own,
            Special::LanesAbove => !(below | own),
            Special::LanesFrom => !below,
            Special::DynamicShared => (self.shared_bytes as u64 - self.dynamic) as u32,
            Special::TotalShared => self.shared_bytes as u32,
        })
    }

    /// Runs a thread for one turn. On a fault the thread stays at the faulting step.
    pub(crate) fn run(&mut self, thread: &mut Thread) -> Result<(), FaultKind> {
        let program = self.program;
        self.go_on(&mut thread.model);
        let turn = self.turn(thread.executed);
        let mut left = turn;
        let result = loop {
            let function = program.function(thread.function);
            let outcome = match self.model {
                None => self.go::<false>(function, thread, &mut left, turn),
                Some(_) => self.go::<true>(function, thread, &mut left, turn),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(fault) => break Err(fault),
            }
        };
        thread.executed += turn - left;
        self.steps += turn - left;
        let waits = thread.state != State::Ready;
        self.waits += u64::from(waits);
        self.idle = if waits { 0 } else { self.idle + turn - left };
        result?;
        let endless = thread.executed >= self.limits.instructions && thread.state == State::Ready;
        if endless && self.begun.elapsed() >= self.limits.patience { Err(FaultKind::Endless(self.limits.instructions)) } else { Ok(()) }
    }

    /// Returns the steps that a thread may run now.
    fn turn(&mut self, executed: u64) -> u64 {
        let left = self.limits.instructions.saturating_sub(executed);
        let turn = self.model.as_mut().map_or(self.limits.turn, |model| model.turn().min(self.limits.turn));
        match (self.limits.patience.is_zero(), left) {
            (true, _) if self.idle > self.limits.instructions => left,
            (true, _) => left.min(turn),
            (false, 0) => turn,
            (false, _) => left.min(turn),
        }
    }

    /// Runs steps of one function, with or without a model of the memory order; returns whether to continue in another
    /// one.
    fn go<const MODEL: bool>(&mut self, function: &Function, thread: &mut Thread, left: &mut u64, turn: u64) -> Result<bool, FaultKind> {
        let base = thread.base;
        let code = &function.code[..];
        let mut at = thread.at;
        let mut remaining = *left;
        let slots = &mut thread.slots[base..base + function.slots];
        let outcome = loop {
            (at, remaining) = simple(code, slots, at, remaining);
            if remaining == 0 {
                break Ok(false);
            }
            remaining -= 1;
            let op = code[at].op;
            match op {
                // Steps that `simple` runs.
                Op::Alu { .. } | Op::Copy { .. } | Op::Branch { .. } | Op::Jump { .. } => {
                    remaining += 1;
                    continue;
                }
                Op::Load { access } => {
                    let access = &function.accesses[access as usize];
                    let loaded = match MODEL {
                        false => self.load(access, slots, &mut thread.memory),
                        true => self.model_load(access, slots, &mut thread.memory, &mut thread.model),
                    };
                    if let Err(fault) = loaded {
                        break Err(fault);
                    }
                }
                Op::Store { access } => {
                    let access = &function.accesses[access as usize];
                    let stored = match MODEL {
                        false => self.store(access, slots, &mut thread.memory),
                        true => self.model_store(access, slots, &mut thread.memory, &mut thread.model),
                    };
                    if let Err(fault) = stored {
                        break Err(fault);
                    }
                }
                Op::Atomic { access } => {
                    let access = &function.accesses[access as usize];
                    let done = match MODEL {
                        false => self.atomic(access, slots, &mut thread.memory),
                        true => self.model_atomic(access, slots, &mut thread.memory, &mut thread.model),
                    };
                    if let Err(fault) = done {
                        break Err(fault);
                    }
                }
                Op::Switch { index, table } => match function.tables[table as usize].get(slots[index as usize] as usize) {
                    Some(&target) => {
                        at = target as usize;
                        continue;
                    }
                    None => break Err(FaultKind::Unsupported(format!("a branch to place {} of its table", slots[index as usize]))),
                },
                Op::Generic { to, from, space } => slots[to as usize] = slots[from as usize].wrapping_add(space.window()),
                Op::Within { to, from, space } => slots[to as usize] = slots[from as usize].wrapping_sub(space.window()),
                Op::IsIn { to, from, space } => slots[to as usize] = u64::from(Space::of_generic(slots[from as usize]).0 == space),
                Op::Clock { to } => slots[to as usize] = thread.executed + turn - remaining,
                Op::Fence { order } if MODEL => self.model_fence(order, &mut thread.model),
                Op::Fence { .. } => std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst),
                Op::Check { flag, register } => {
                    if slots[flag as usize] == 0 {
                        break Err(FaultKind::Unset(function.registers[register as usize].clone()));
                    }
                }
                Op::Barrier { site } => {
                    if MODEL {
                        self.release(&mut thread.model, Scope::Block);
                        thread.model.met = function.barriers[site as usize].waits;
                    }
                    thread.state = State::Barrier(site);
                    break Ok(false);
                }
                Op::Warp { site } => {
                    if MODEL && matches!(function.warps[site as usize].meeting, Meeting::Sync) {
                        self.release(&mut thread.model, Scope::Block);
                        thread.model.met = true;
                    }
                    thread.state = State::Meeting(site);
                    break Ok(false);
                }
                Op::Exit if MODEL && !self.ends(&mut thread.model) => break Ok(false),
                Op::Exit => {
                    thread.state = State::Done;
                    break Ok(false);
                }
                Op::Trap => break Err(FaultKind::Trap),
                Op::Unsupported { message } => break Err(unsupported(function, message)),
                Op::Call { .. } | Op::Return => {
                    thread.at = at;
                    *left = remaining;
                    return if let Op::Call { site } = op { self.call(function, thread, site) } else { self.back(function, thread) };
                }
            }
            at += 1;
        };
        thread.at = at;
        *left = remaining;
        outcome
    }

    fn call(&self, caller: &Function, thread: &mut Thread, site: u32) -> Result<bool, FaultKind> {
        let call = &caller.calls[site as usize];
        let number = match &call.callee {
            Callee::Defined(number) => *number,
            Callee::External(name) if name == "__assertfail" => return Err(FaultKind::Trap),
            Callee::External(name) => {
                return Err(FaultKind::Unsupported(format!("function {name} is one of the driver, which is not there")));
            }
            Callee::Pointer { register, prototype, targets } => {
                let number = self.program.pointed_by(thread.slot(*register)).map_err(FaultKind::Call)?;
                self.fits(number, prototype.as_ref(), targets)?;
                number
            }
        };
        let callee = self.program.ready(number)?;
        if (callee.parameters.len(), callee.results.len()) != (call.arguments.len(), call.results.len()) {
            return Err(self.other_form(number));
        }
        let values: Vec<Vec<u8>> = call.arguments.iter().map(|&carrier| take(thread, carrier)).collect();
        let (base, local) = (thread.base + caller.slots, thread.local + caller.local);
        if thread.callers.len() >= DEEPEST || local + callee.local > LARGEST_LOCAL {
            return Err(FaultKind::Unsupported(format!("calls nest {} deep with {local} bytes of local memory", thread.callers.len())));
        }
        thread.callers.push(Caller { function: thread.function, at: thread.at + 1, base: thread.base, local: thread.local, site });
        (thread.function, thread.at, thread.base, thread.local) = (number, 0, base, local);
        grow(&mut thread.slots, base + callee.slots);
        thread.memory.truncate(local);
        thread.memory.resize(local + callee.local, 0xA5);
        self.fill(thread, &callee.initial);
        callee.parameters.iter().zip(&values).for_each(|(&carrier, value)| give(thread, carrier, value));
        Ok(true)
    }

    /// Checks that a function matches the prototype of a call through a pointer, or is one of its targets.
    fn fits(&self, number: usize, prototype: Option<&Prototype>, targets: &[usize]) -> Result<(), FaultKind> {
        let name = &self.program.functions[number].name;
        if prototype.is_none() && !targets.contains(&number) {
            return Err(FaultKind::Call(format!("the call leads to {name}, which is not among its targets")));
        }
        let callee = self.program.ready(number)?;
        let bytes = |carriers: &[Carrier]| carriers.iter().map(|carrier| carrier.bytes()).collect::<Vec<_>>();
        let fits = |own: &[Carrier], wanted: &[usize]| {
            own.len() == wanted.len() && bytes(own).iter().zip(wanted).all(|(own, &wanted)| own.is_none_or(|own| own == wanted))
        };
        let has_form = |form: &Prototype| fits(&callee.parameters, &form.parameters) && fits(&callee.results, &form.results);
        if prototype.is_none_or(has_form) { Ok(()) } else { Err(self.other_form(number)) }
    }

    fn other_form(&self, number: usize) -> FaultKind {
        let name = &self.program.functions[number].name;
        FaultKind::Call(format!("the call leads to {name}, whose parameters or results are not those of the call"))
    }

    fn back(&self, callee: &Function, thread: &mut Thread) -> Result<bool, FaultKind> {
        let Some(caller) = thread.callers.pop() else {
            thread.state = State::Done;
            return Ok(false);
        };
        let values: Vec<Vec<u8>> = callee.results.iter().map(|&carrier| take(thread, carrier)).collect();
        (thread.function, thread.at, thread.base, thread.local) = (caller.function, caller.at, caller.base, caller.local);
        let call: &CallSite = &self.program.function(caller.function).calls[caller.site as usize];
        call.results.iter().zip(&values).for_each(|(&carrier, value)| give(thread, carrier, value));
        Ok(true)
    }
}

/// Runs the steps that only read and write slots, by far the most frequent, up to one of another kind or the limit. It
/// is a separate function, so that the processor's registers hold everything this loop needs. Returns the next step,
/// and the steps left.
#[inline(never)]
fn simple(code: &[Instruction], slots: &mut [u64], mut at: usize, mut left: u64) -> (usize, u64) {
    while left > 0 {
        match code[at].op {
            Op::Alu { run, to, a, b, c } => slots[to as usize] = run(slots[a as usize], slots[b as usize], slots[c as usize]),
            Op::Copy { to, from } => slots[to as usize] = slots[from as usize],
            Op::Branch { on, unless, target } if (slots[on as usize] & 1 == 1) != unless => at = (target as usize).wrapping_sub(1),
            Op::Branch { .. } => {}
            Op::Jump { target } => at = (target as usize).wrapping_sub(1),
            _ => break,
        }
        at = at.wrapping_add(1);
        left -= 1;
    }
    (at, left)
}

#[cold]
fn unsupported(function: &Function, message: u32) -> FaultKind {
    FaultKind::Unsupported(function.registers[message as usize].clone())
}

/// Returns the bytes of an argument or a result.
fn take(thread: &Thread, carrier: Carrier) -> Vec<u8> {
    match carrier {
        Carrier::Register(slot) => thread.slot(slot).to_le_bytes().to_vec(),
        Carrier::Memory { offset, bytes } => thread.memory[thread.local + offset as usize..][..bytes as usize].to_vec(),
    }
}

fn give(thread: &mut Thread, carrier: Carrier, value: &[u8]) {
    match carrier {
        Carrier::Register(slot) => thread.set(slot, little(&value[..value.len().min(8)])),
        Carrier::Memory { offset, bytes } => {
            let length = value.len().min(bytes as usize);
            let start = thread.local + offset as usize;
            thread.memory[start..start + length].copy_from_slice(&value[..length]);
        }
    }
}
