//! The decoded form of a module: what the machine runs.

use std::sync::Arc;

use crate::types::Space;

/// Local memory of a thread, as on the hardware.
pub(crate) const LARGEST_LOCAL: usize = 512 << 10;

/// A value's place in the frame of a function: a register, a constant, or what a thread has of its own.
pub(crate) type Slot = u32;

/// An instruction without effect beyond its result.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// One step of the machine. Guards, vectors and flags were taken apart when it was decoded.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Alu {
        run: Alu,
        to: Slot,
        a: Slot,
        b: Slot,
        c: Slot,
    },
    Copy {
        to: Slot,
        from: Slot,
    },
    Jump {
        target: u32,
    },
    /// Jumps if the predicate is set, or `unless` it is.
    Branch {
        on: Slot,
        unless: bool,
        target: u32,
    },
    /// Jumps to a place of a table.
    Switch {
        index: Slot,
        table: u32,
    },
    Load {
        access: u32,
    },
    Store {
        access: u32,
    },
    Atomic {
        access: u32,
    },
    /// The generic address of a value in a space, or the other way round (`cvta`).
    Generic {
        to: Slot,
        from: Slot,
        space: Space,
    },
    Within {
        to: Slot,
        from: Slot,
        space: Space,
    },
    /// Whether a generic address is in a space (`isspacep`).
    IsIn {
        to: Slot,
        from: Slot,
        space: Space,
    },
    Barrier {
        site: u32,
    },
    Warp {
        site: u32,
    },
    Call {
        site: u32,
    },
    Return,
    Exit,
    Trap,
    Fence,
    /// Instructions that this thread has run, as a clock.
    Clock {
        to: Slot,
    },
    /// A fault if the register was never written; `flag` says whether it was.
    Check {
        flag: Slot,
        register: u32,
    },
}

/// An access of memory: of one to eight elements.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) base: Slot,
    pub(crate) offset: i64,
    /// Bytes of an element.
    pub(crate) bytes: u32,
    /// Whether an element's sign is repeated up to the width of the register.
    pub(crate) sign: bool,
    /// What is read from or written to; `None` is the sink `_`.
    pub(crate) slots: Vec<Option<Slot>>,
    /// Widths of those registers in bits.
    pub(crate) width: u32,
    pub(crate) atomic: Option<Atomic>,
    /// Number of this access in the whole module.
    pub(crate) id: usize,
}

/// What an atomic access does with the element and its operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Atomic {
    /// The new value of the old one and of both operands.
    pub(crate) run: Alu,
    pub(crate) b: Slot,
    pub(crate) c: Slot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Popc,
    And,
    Or,
}

/// A barrier of the block.
#[derive(Debug, Clone)]
pub(crate) struct Barrier {
    pub(crate) id: Slot,
    /// Threads that it waits for; all of the block where none is given.
    pub(crate) count: Option<Slot>,
    /// Whether the thread waits, or only tells that it came.
    pub(crate) waits: bool,
    /// Whether all threads of a warp have to come by the same instruction.
    pub(crate) aligned: bool,
    pub(crate) reduction: Option<(Reduction, Slot, Slot)>,
}

/// Instructions for which the threads of a warp meet.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Meeting {
    Sync,
    ActiveMask,
    ShuffleUp,
    ShuffleDown,
    ShuffleXor,
    ShuffleIndex,
    VoteAll,
    VoteAny,
    VoteUniform,
    Ballot,
    MatchAny,
    MatchAll,
    /// Folds 32-bit values.
    Reduce(Alu),
}

#[derive(Debug, Clone)]
pub(crate) struct WarpSite {
    pub(crate) meeting: Meeting,
    /// Threads that have to come; those that happen to come where none is given.
    pub(crate) mask: Option<Slot>,
    pub(crate) a: Slot,
    pub(crate) b: Slot,
    pub(crate) c: Slot,
    pub(crate) to: Option<Slot>,
    /// Receives whether a shuffle's source was in range, or whether all match.
    pub(crate) flag: Option<Slot>,
}

/// Where an argument or a result of a call is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Bytes of the function's local memory.
    Memory {
        offset: u32,
        bytes: u32,
    },
    Register(Slot),
}

#[derive(Debug, Clone)]
pub(crate) struct CallSite {
    pub(crate) callee: Callee,
    pub(crate) arguments: Vec<Carrier>,
    pub(crate) results: Vec<Carrier>,
}

#[derive(Debug, Clone)]
pub(crate) enum Callee {
    Defined(usize),
    /// Declared only, like `vprintf`.
    External(String),
}

/// What a slot holds when a frame is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Initial {
    Bits(u64),
    /// Zero until a register is written.
    Flag(u32),
    /// An address in the block of the module's variables.
    Global(u64),
    /// The address of a shared variable, by its number, and an offset.
    Shared(usize, i64),
    /// The address behind the static shared memory, and an offset.
    Dynamic(i64),
    /// The address of a local variable or a parameter of the function.
    Local(u64),
    /// A parameter of the kernel.
    Param(u64),
    Special(Special),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread(usize),
    BlockSize(usize),
    Block(usize),
    GridSize(usize),
    Lane,
    WarpIndex,
    Warps,
    LanesEqual,
    LanesBelow,
    LanesUpTo,
    LanesAbove,
    LanesFrom,
    DynamicShared,
    TotalShared,
}

#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub(crate) op: Op,
    pub(crate) line: u32,
}

/// A function or the body of a kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) code: Vec<Instruction>,
    /// Slots with what they hold when the function begins; those that differ from block to block come first.
    pub(crate) initial: Vec<(Slot, Initial)>,
    /// How many of them differ from block to block.
    pub(crate) varying: usize,
    /// Slots of a frame. Registers are not cleared: what is read was written before, or is checked.
    pub(crate) slots: usize,
    /// Bytes of local memory: parameters, results, variables.
    pub(crate) local: usize,
    pub(crate) parameters: Vec<Carrier>,
    pub(crate) results: Vec<Carrier>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) barriers: Vec<Barrier>,
    pub(crate) warps: Vec<WarpSite>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) tables: Vec<Vec<u32>>,
    /// Names of registers that have to be checked.
    pub(crate) registers: Vec<String>,
}

/// A variable in shared memory.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) bytes: usize,
    pub(crate) align: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) functions: Vec<Function>,
    pub(crate) shared: Vec<Shared>,
    /// The module's variables, as they are first.
    pub(crate) globals: Vec<u8>,
    /// Number of accesses in all functions.
    pub(crate) accesses: usize,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Where it begins among the bytes of all parameters.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// What its offset is a multiple of.
    pub align: usize,
}

/// A kernel: an entry of a module.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub(crate) program: Arc<Program>,
    pub(crate) function: usize,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) parameter_bytes: usize,
    pub(crate) max_threads: Option<[u32; 3]>,
    /// `max_threads` is the only size allowed.
    pub(crate) exact_threads: bool,
    /// Offsets of shared variables, `None` for those it does not use.
    pub(crate) shared_offsets: Vec<Option<u64>>,
    pub(crate) shared_bytes: usize,
}

impl Kernel {
    /// The name it is asked for by.
    pub fn name(&self) -> &str {
        &self.program.functions[self.function].name
    }

    /// Its parameters in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Bytes of all parameters with the gaps between them.
    pub fn parameter_bytes(&self) -> usize {
        self.parameter_bytes
    }

    /// The largest block it may be launched with, where it says so (`.maxntid`, `.reqntid`).
    pub fn max_threads(&self) -> Option<[u32; 3]> {
        self.max_threads
    }

    /// Bytes of static shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }
}
