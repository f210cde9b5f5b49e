//! The parser's result for a module's text, before anything is decoded.

use std::ops::Range;

use crate::types::{Space, Type};

#[derive(Debug, Default)]
pub(crate) struct Source<'a> {
    pub(crate) version: (u32, u32),
    pub(crate) target: u32,
    pub(crate) variables: Vec<Variable<'a>>,
    pub(crate) functions: Vec<FunctionText<'a>>,
}

#[derive(Debug, Clone)]
pub(crate) struct Variable<'a> {
    pub(crate) name: &'a str,
    pub(crate) space: Space,
    pub(crate) kind: Type,
    pub(crate) align: usize,
    pub(crate) bytes: usize,
    pub(crate) linkage: Linkage,
    pub(crate) initial: Vec<u8>,
    /// Initial values that are addresses; in `initial` they are zero.
    pub(crate) addresses: Vec<Address<'a>>,
    pub(crate) line: u32,
}

/// The texts that may refer to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Linkage {
    /// This text only.
    Internal,
    /// All texts; defined once among them.
    Visible,
    /// All texts; a visible definition, or the first weak one, takes precedence.
    Weak,
    /// All texts; any other definition, or a larger common one, takes precedence.
    Common,
    /// Defined by another text.
    External,
}

/// An initial value that is the address of a variable or of a function.
#[derive(Debug, Clone)]
pub(crate) struct Address<'a> {
    /// Its position among the bytes of the variable, and its size.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    pub(crate) name: &'a str,
    pub(crate) offset: i64,
    /// The bits of the address that are used.
    pub(crate) mask: u64,
    pub(crate) line: u32,
}

/// A parameter or result: in memory (`.param`) or in a register (`.reg`).
#[derive(Debug, Clone)]
pub(crate) struct Formal<'a> {
    pub(crate) variable: Variable<'a>,
    pub(crate) register: bool,
}

#[derive(Debug)]
pub(crate) struct FunctionText<'a> {
    pub(crate) name: &'a str,
    pub(crate) entry: bool,
    pub(crate) results: Vec<Formal<'a>>,
    pub(crate) parameters: Vec<Formal<'a>>,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) exact_threads: bool,
    pub(crate) linkage: Linkage,
    /// `None` for a declaration.
    pub(crate) definition: Option<Stands>,
    pub(crate) line: u32,
}

/// The position of a function's definition in its text: from the end of `.func` or `.entry` to the closing brace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stands {
    pub(crate) place: Range<usize>,
    /// Whether it declares variables in shared memory.
    pub(crate) shared: bool,
}

#[derive(Debug)]
pub(crate) enum Statement<'a> {
    Open,
    Close,
    Label(&'a str, u32),
    /// A table of labels (`.branchtargets`) or of functions (`.calltargets`).
    Targets(&'a str, Vec<&'a str>),
    /// The bytes of each result and parameter of a function called through a pointer (`.callprototype`).
    Prototype(&'a str, Prototype),
    Registers(Vec<Registers<'a>>, Type),
    Variable(Variable<'a>),
    Instruction(Text<'a>),
}

/// Bytes of the results and of the parameters of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prototype {
    pub(crate) results: Vec<usize>,
    pub(crate) parameters: Vec<usize>,
}

/// One name, or a numbered family of them.
#[derive(Debug)]
pub(crate) struct Registers<'a> {
    pub(crate) name: &'a str,
    pub(crate) count: Option<u32>,
}

/// An instruction in its written form.
#[derive(Debug)]
pub(crate) struct Text<'a> {
    /// The guarding predicate, and whether it has to be unset.
    pub(crate) guard: Option<(&'a str, bool)>,
    pub(crate) opcode: &'a str,
    pub(crate) suffixes: Vec<&'a str>,
    pub(crate) operands: Vec<Operand<'a>>,
    pub(crate) line: u32,
}

impl Text<'_> {
    /// Returns the opcode with all its suffixes.
    pub(crate) fn full(&self) -> String {
        self.suffixes.iter().fold(self.opcode.to_owned(), |name, suffix| name + "." + suffix)
    }

    pub(crate) fn has(&self, suffix: &str) -> bool {
        self.suffixes.contains(&suffix)
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Operand<'a> {
    /// A register, variable, function or label, plus an offset.
    Name(&'a str, i64),
    /// `%tid.x`: a register with a component.
    Component(&'a str, &'a str),
    Number(Literal),
    Address(Box<Operand<'a>>),
    Vector(Vec<Operand<'a>>),
    /// `a|b`.
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
    Not(Box<Operand<'a>>),
    /// `(a, b)` of a call.
    Group(Vec<Operand<'a>>),
    Sink,
}

/// A number in the text; its type comes from the instruction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Literal {
    Integer(u64),
    Single(u32),
    Double(f64),
}

impl Literal {
    /// Reads `12`, `0x1f`, `017`, `0b11`, `7U`, `0f3F800000`, `0d3FF0000000000000`, `1.5`.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let lower = text.to_ascii_lowercase();
        if let Some(bits) = lower.strip_prefix("0f").filter(|bits| bits.len() == 8) {
            return u32::from_str_radix(bits, 16).ok().map(Self::Single);
        }
        if let Some(bits) = lower.strip_prefix("0d").filter(|bits| bits.len() == 16) {
            return u64::from_str_radix(bits, 16).ok().map(|bits| Self::Double(f64::from_bits(bits)));
        }
        let integer = lower.strip_suffix('u').unwrap_or(&lower);
        let value = if let Some(digits) = integer.strip_prefix("0x") {
            u64::from_str_radix(digits, 16)
        } else if let Some(digits) = integer.strip_prefix("0b") {
            u64::from_str_radix(digits, 2)
        } else if integer.len() > 1 && integer.starts_with('0') && integer.bytes().all(|b| b.is_ascii_digit()) {
            u64::from_str_radix(&integer[1..], 8)
        } else if integer.bytes().all(|b| b.is_ascii_digit()) {
            integer.parse()
        } else {
            return lower.parse().ok().map(Self::Double);
        };
        value.ok().map(Self::Integer)
    }

    pub(crate) fn negated(self) -> Self {
        match self {
            Self::Integer(value) => Self::Integer(value.wrapping_neg()),
            Self::Single(bits) => Self::Single(bits ^ 0x8000_0000),
            Self::Double(value) => Self::Double(-value),
        }
    }

    /// Returns the bits of the number in an operand of this type.
    pub(crate) fn bits(self, kind: Type) -> u64 {
        let raw = match (self, kind) {
            (Self::Integer(value), _) => value,
            (Self::Single(bits), Type::F64) => f64::from(f32::from_bits(bits)).to_bits(),
            (Self::Single(bits), _) => u64::from(bits),
            (Self::Double(value), Type::F32) => u64::from((value as f32).to_bits()),
            (Self::Double(value), _) => value.to_bits(),
        };
        if kind.bits() == 64 { raw } else { raw & ((1 << kind.bits()) - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_every_notation() {
        for (text, expected) in
            [("12", 12), ("0x1F", 31), ("017", 15), ("0b11", 3), ("7U", 7), ("0", 0), ("18446744073709551615", u64::MAX)]
        {
            assert_eq!(Literal::read(text), Some(Literal::Integer(expected)), "{text}");
        }
        assert_eq!(Literal::read("0f3F800000"), Some(Literal::Single(0x3f80_0000)));
        assert_eq!(Literal::read("0d3FF0000000000000"), Some(Literal::Double(1.0)));
        assert_eq!(Literal::read("1.5e-3"), Some(Literal::Double(0.0015)));
        assert_eq!(Literal::read("18446744073709551616"), None);
        assert_eq!(Literal::read("12x"), None);
    }

    #[test]
    fn numbers_take_the_type_of_the_instruction() {
        assert_eq!(Literal::Integer(1).negated().bits(Type::S(32)), 0xffff_ffff);
        assert_eq!(Literal::Double(1.0).bits(Type::F32), 0x3f80_0000);
        assert_eq!(Literal::Single(0x3f80_0000).bits(Type::F64), 1.0_f64.to_bits());
    }
}
