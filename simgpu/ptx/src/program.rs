//! The decoded form of a module, which the machine runs.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::ParseError;
use crate::fault::FaultKind;
use crate::link::Names;
use crate::lower;
use crate::module::Options;
use crate::order::Order;
use crate::syntax::{FunctionText, Prototype, Stands};
use crate::types::{FUNCTIONS, Space};

/// The limit for the local memory of a thread, as on the hardware.
pub(crate) const LARGEST_LOCAL: usize = 512 << 10;

/// The index of a value in the frame of a function: a register, a constant, or a special value of the thread.
pub(crate) type Slot = u32;

/// An instruction that only computes a result.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// One step of the machine. Guards, vectors and flags were resolved when it was decoded.
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
    /// Jumps if the predicate is set, or, with `unless`, if it is not.
    Branch {
        on: Slot,
        unless: bool,
        target: u32,
    },
    /// Jumps to an entry of a table.
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
    /// Converts an address in a space to a generic one, or back (`cvta`).
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
    /// Tests whether a generic address is in a space (`isspacep`).
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
    Fence {
        order: Order,
    },
    /// Reads the number of instructions that this thread has run, as a clock.
    Clock {
        to: Slot,
    },
    /// Raises a fault for something that is not supported.
    Unsupported {
        message: u32,
    },
    /// Raises a fault if the register was never written; `flag` holds whether it was.
    Check {
        flag: Slot,
        register: u32,
    },
}

/// A memory access of one to eight elements.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) base: Slot,
    pub(crate) offset: i64,
    /// Bytes of an element.
    pub(crate) bytes: u32,
    /// Whether an element is sign-extended to the width of the register.
    pub(crate) sign: bool,
    /// The registers read or written; `None` is the sink `_`.
    pub(crate) slots: Vec<Option<Slot>>,
    /// Widths of those registers in bits.
    pub(crate) width: u32,
    pub(crate) atomic: Option<Atomic>,
    pub(crate) order: Order,
    /// The number of this access in the whole module.
    pub(crate) id: usize,
}

/// The operation of an atomic access on the element and its operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Atomic {
    /// Computes the new value from the old one and both operands.
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
    /// The number of threads that it waits for; `None` for all of the block.
    pub(crate) count: Option<Slot>,
    /// Whether the thread waits, or only arrives.
    pub(crate) waits: bool,
    /// Whether all threads of a warp have to arrive by the same instruction.
    pub(crate) aligned: bool,
    pub(crate) reduction: Option<(Reduction, Slot, Slot)>,
}

/// Instructions at which the threads of a warp meet.
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
    /// The threads that have to come; if there is no mask, those that happen to come.
    pub(crate) mask: Option<Slot>,
    pub(crate) a: Slot,
    pub(crate) b: Slot,
    pub(crate) c: Slot,
    pub(crate) to: Option<Slot>,
    /// The slot that receives whether a shuffle's source was in range, or whether all match.
    pub(crate) flag: Option<Slot>,
}

/// The place of an argument or a result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// Bytes of the function's local memory.
    Memory {
        offset: u32,
        bytes: u32,
    },
    Register(Slot),
}

impl Carrier {
    /// Returns the bytes of a value in memory.
    pub(crate) fn bytes(self) -> Option<usize> {
        if let Self::Memory { bytes, .. } = self { Some(bytes as usize) } else { None }
    }
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
    /// A function of the driver, such as `vprintf`.
    External(String),
    /// A call through a pointer to a function of this prototype or, if the text gives none, to one of these targets.
    Pointer {
        register: Slot,
        prototype: Option<Prototype>,
        targets: Vec<usize>,
    },
}

/// The value of a slot when a frame is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Initial {
    Bits(u64),
    /// The value of registers that are read before they are set.
    Unset(u64),
    /// Zero until a register is written.
    Flag(u32),
    /// An address in the block of the module's variables.
    Global(u64),
    /// The address of a shared variable, by its number, and an offset.
    Shared(usize, i64),
    /// The address after the static shared memory, plus an offset.
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
    pub(crate) code: Vec<Instruction>,
    /// Slots with their values at the beginning of the function; those that differ from block to block come first.
    pub(crate) initial: Vec<(Slot, Initial)>,
    /// The number of slots that differ from block to block.
    pub(crate) varying: usize,
    /// Slots of a frame. Registers are not cleared: a value that is read was written before, or is checked.
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
    /// Names of registers that have to be checked, and descriptions of what is not supported.
    pub(crate) registers: Vec<String>,
}

impl Function {
    const fn empty() -> Self {
        Self {
            code: Vec::new(),
            initial: Vec::new(),
            varying: 0,
            slots: 0,
            local: 0,
            parameters: Vec::new(),
            results: Vec::new(),
            accesses: Vec::new(),
            barriers: Vec::new(),
            warps: Vec::new(),
            calls: Vec::new(),
            tables: Vec::new(),
            registers: Vec::new(),
        }
    }
}

/// A variable in shared memory.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) bytes: usize,
    pub(crate) align: usize,
}

/// The position of a function in its text; decoded at once, or at its first call.
#[derive(Debug)]
pub(crate) struct Definition {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) text: usize,
    pub(crate) line: u32,
    pub(crate) stands: Stands,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) parameter_bytes: usize,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) exact_threads: bool,
    pub(crate) decoded: OnceLock<Result<Function, ParseError>>,
}

impl Definition {
    pub(crate) fn new(function: &FunctionText<'_>, text: usize, stands: Stands) -> Self {
        let mut end = 0_usize;
        let mut parameters = Vec::new();
        for formal in &function.parameters {
            let (bytes, align) = (formal.variable.bytes, formal.variable.align.max(1));
            let offset = end.next_multiple_of(align);
            end = offset + bytes;
            parameters.push(Parameter { offset, bytes, align });
        }
        Self {
            name: function.name.to_owned(),
            entry: function.entry,
            text,
            line: function.line,
            stands,
            parameters,
            parameter_bytes: end,
            max_threads: function.max_threads,
            exact_threads: function.exact_threads,
            decoded: OnceLock::new(),
        }
    }
}

/// An initial value that is an address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Relocation {
    /// Its position among the bytes of the variables, and its size.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    /// The bits of the address that are used.
    pub(crate) mask: u64,
    pub(crate) target: Target,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// An offset from the start of the variables.
    Global(u64),
    Bits(u64),
}

/// Texts of which parts can be read at any time.
pub trait Texts: Send + Sync {
    /// Returns a part of a text: the number of the text among those that were linked, and a range of bytes.
    ///
    /// # Errors
    /// The part no longer exists; the text describes why.
    fn part(&self, text: usize, place: Range<usize>) -> Result<String, String>;
}

/// Texts that are kept whole.
impl Texts for Vec<String> {
    fn part(&self, text: usize, place: Range<usize>) -> Result<String, String> {
        let part = self.get(text).and_then(|whole| whole.get(place));
        part.map(str::to_owned).ok_or_else(|| "the text has no such part".to_owned())
    }
}

pub(crate) struct Program {
    /// Its number among the programs of this process, by which a pointer to a function of another one is recognised.
    id: u64,
    pub(crate) options: Options,
    pub(crate) target: u32,
    pub(crate) version: (u32, u32),
    pub(crate) functions: Vec<Definition>,
    /// The texts, if some functions are not decoded yet.
    pub(crate) texts: Option<Box<dyn Texts>>,
    /// The names that each text uses.
    pub(crate) names: Vec<Names>,
    pub(crate) shared: Vec<Shared>,
    /// The initial values of the module's variables, without those that are addresses.
    pub(crate) globals: Vec<u8>,
    /// The range of each variable among them.
    pub(crate) variables: HashMap<String, Range<usize>>,
    pub(crate) relocations: Vec<Relocation>,
    /// Functions whose address is an initial value.
    pub(crate) pointed: Vec<usize>,
    /// Number of accesses in all functions that were decoded.
    pub(crate) accesses: AtomicUsize,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("id", &self.id).field("functions", &self.functions.len()).finish_non_exhaustive()
    }
}

impl Program {
    pub(crate) fn new(options: Options) -> Self {
        static PROGRAMS: AtomicU64 = AtomicU64::new(1);
        Self {
            id: PROGRAMS.fetch_add(1, Ordering::Relaxed) & 0xfff_ffff,
            options,
            target: 0,
            version: (0, 0),
            functions: Vec::new(),
            texts: None,
            names: Vec::new(),
            shared: Vec::new(),
            globals: Vec::new(),
            variables: HashMap::new(),
            relocations: Vec::new(),
            pointed: Vec::new(),
            accesses: AtomicUsize::new(0),
        }
    }

    /// Returns a decoded function; each is decoded before it runs.
    pub(crate) fn function(&self, number: usize) -> &Function {
        static NONE: Function = Function::empty();
        match self.functions[number].decoded.get() {
            Some(Ok(function)) => function,
            _ => &NONE,
        }
    }

    /// Returns a function that is about to run, and decodes it if necessary.
    pub(crate) fn ready(&self, number: usize) -> Result<&Function, FaultKind> {
        let definition = &self.functions[number];
        let decode = || {
            let part = self.texts.as_ref().map(|texts| texts.part(definition.text, definition.stands.place.clone()));
            let part = part.unwrap_or_else(|| Err("there is no text".to_owned()));
            let part = part.map_err(|why| ParseError::new(definition.line, format!("its text cannot be read: {why}")))?;
            let mut shared = Vec::new();
            let function = lower::function(self, number, &part, &mut shared)?;
            // Functions that declare some were decoded when the module was made, since a launch has to know the size.
            if shared.is_empty() { Ok(function) } else { Err(ParseError::new(definition.line, "shared memory was found too late")) }
        };
        let decoded = definition.decoded.get_or_init(|| decode().map_err(|error| error.of(definition.text)));
        decoded.as_ref().map_err(|error| FaultKind::Unsupported(format!("function {} cannot be decoded: {error}", definition.name)))
    }

    /// Returns the parts of a function that are a fault when a thread reaches them.
    pub(crate) fn unsupported(&self, number: usize) -> Vec<ParseError> {
        let text = self.functions[number].text;
        let function = match self.ready(number) {
            Ok(function) => function,
            Err(_) => return self.functions[number].decoded.get().and_then(|decoded| decoded.clone().err()).into_iter().collect(),
        };
        let message = |step: &Instruction| match step.op {
            Op::Unsupported { message } => Some(ParseError::new(step.line, function.registers[message as usize].clone()).of(text)),
            _ => None,
        };
        function.code.iter().filter_map(message).collect()
    }

    /// Returns the value of a pointer to a function.
    pub(crate) fn address(&self, number: usize) -> u64 {
        FUNCTIONS | self.id << 28 | (number as u64) << 4
    }

    /// Returns the function that a pointer points to.
    pub(crate) fn pointed_by(&self, address: u64) -> Result<usize, String> {
        let number = (address >> 4 & 0xff_ffff) as usize;
        if address & 0xff00_0000_0000_0000 != FUNCTIONS || address & 15 != 0 {
            return Err(format!("{address:#x} is the address of no function"));
        }
        if address >> 28 & 0xfff_ffff != self.id || number >= self.functions.len() {
            return Err(format!("{address:#x} is the address of a function of another module, or of none"));
        }
        match &self.functions[number] {
            Definition { entry: true, name, .. } => Err(format!("{address:#x} is the address of kernel {name}, which cannot be called")),
            _ => Ok(number),
        }
    }
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Its offset among the bytes of all parameters.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// Its alignment.
    pub align: usize,
}

/// A kernel: an entry of a module.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub(crate) program: Arc<Program>,
    pub(crate) function: usize,
    /// Offsets of shared variables, `None` for those it does not use.
    pub(crate) shared_offsets: Vec<Option<u64>>,
    pub(crate) shared_bytes: usize,
}

impl Kernel {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.definition().name
    }

    pub(crate) fn definition(&self) -> &Definition {
        &self.program.functions[self.function]
    }

    /// Returns its parameters in order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.definition().parameters
    }

    /// Returns the bytes of all parameters, including the gaps between them.
    pub fn parameter_bytes(&self) -> usize {
        self.definition().parameter_bytes
    }

    /// Returns the largest block it may be launched with, if it states one (`.maxntid`, `.reqntid`).
    pub fn max_threads(&self) -> Option<[u32; 3]> {
        self.definition().max_threads
    }

    /// Returns the bytes of static shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }
}
