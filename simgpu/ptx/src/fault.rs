//! Errors and faults, with their place in the text and in the grid.

use std::fmt;

/// The error of a text that could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    /// The index of the text among those that were linked, from 0.
    pub text: usize,
    /// The line of the text, from 1.
    pub line: u32,
    /// A description of the error.
    pub message: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, message: impl Into<String>) -> Self {
        Self { text: 0, line, message: message.into() }
    }

    /// Moves the error to another text.
    pub(crate) fn of(self, text: usize) -> Self {
        Self { text, ..self }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}{}: {}", self.line, Which(self.text), self.message)
    }
}

impl std::error::Error for ParseError {}

/// The name of a text in messages: empty for the first one, which is usually the only one.
struct Which(usize);

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " of text {}", self.0 + 1) }
    }
}

/// The reason why a launch stopped. It may have written memory before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name.
    pub kernel: String,
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The place of the fault; `None` if the launch itself was wrong.
    pub place: Option<FaultPlace>,
}

/// The instruction and the thread of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultPlace {
    /// The index of the text among those that were linked, from 0.
    pub text: usize,
    /// The line of the PTX text, from 1.
    pub line: u32,
    /// The thread's index in its block.
    pub thread: [u32; 3],
    /// The block's index in the grid.
    pub block: [u32; 3],
}

/// The kind of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// Bytes outside every allocation, or beyond the end of one.
    OutOfBounds {
        /// `"global"`, `"shared"`, `"local"` or `"param"`.
        space: &'static str,
        /// The first byte of the access.
        address: u64,
        /// Its size.
        bytes: u32,
        /// Whether it is a write.
        write: bool,
        /// Start and size of the nearest allocation of global memory, or of the whole other space.
        nearest: Option<(u64, u64)>,
    },
    /// An address that is not a multiple of the access's size.
    Misaligned {
        /// The first byte of the access.
        address: u64,
        /// Its size.
        bytes: u32,
        /// Whether it is a write.
        write: bool,
    },
    /// The grid, the block or the shared memory is too large, empty, or does not match the kernel.
    Launch(String),
    /// The parameters are missing or short.
    Parameters {
        /// Bytes that the kernel needs.
        needed: usize,
        /// Bytes that were given.
        given: usize,
    },
    /// A register was read that the thread never wrote.
    Unset(String),
    /// The thread ran more instructions than allowed: it probably never ends.
    Endless(u64),
    /// Threads wait for others that never come.
    Divergence(String),
    /// The kernel gave up: `trap`, or a failed assertion.
    Trap,
    /// A call through a pointer to no function, or to a function of another prototype.
    Call(String),
    /// An unsupported operation that shows only at run time.
    Unsupported(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.kernel)?;
        if let Some(FaultPlace { text, line, thread, block }) = self.place {
            let ([x, y, z], [i, j, k]) = (thread, block);
            write!(f, ", PTX line {line}{}, thread ({x},{y},{z}) of block ({i},{j},{k})", Which(text))?;
        }
        write!(f, ": {}", self.kind)
    }
}

impl std::error::Error for Fault {}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = |write: &bool| if *write { "write" } else { "read" };
        match self {
            Self::OutOfBounds { space, address, bytes, write, nearest } => {
                write!(f, "{} of {bytes} bytes at {address:#x} is outside {space} memory", verb(write))?;
                let Some((start, size)) = *nearest else { return write!(f, "; no allocation is near") };
                let end = start.saturating_add(size);
                write!(f, "; the nearest allocation is {start:#x}..{end:#x} ({size} bytes)")?;
                match address.saturating_add(u64::from(*bytes)) {
                    beyond if beyond > end => write!(f, ", {} bytes past its end", beyond - end),
                    _ => write!(f, ", {} bytes before its start", start.saturating_sub(*address)),
                }
            }
            Self::Misaligned { address, bytes, write } => {
                write!(f, "{} of {bytes} bytes at {address:#x}, which is not a multiple of {bytes}", verb(write))
            }
            Self::Launch(message) | Self::Divergence(message) | Self::Call(message) | Self::Unsupported(message) => f.write_str(message),
            Self::Parameters { needed, given } => write!(f, "{given} bytes of parameters were given, {needed} are needed"),
            Self::Unset(register) if register.is_empty() => f.write_str("a value is read that was never set"),
            Self::Unset(register) => write!(f, "register {register} is read but was never set"),
            Self::Endless(budget) => write!(f, "the thread ran {budget} instructions and did not end"),
            Self::Trap => f.write_str("the kernel ran into a trap"),
        }
    }
}
