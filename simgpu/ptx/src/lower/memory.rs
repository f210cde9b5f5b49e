//! Loads, stores, atomics and conversions of addresses.

use super::{Builder, Lowered, Place, Symbol};
use crate::format::F32;
use crate::integer::{self as int, instance};
use crate::order::Order;
use crate::program::{Access, Alu, Atomic, Initial, Op, Slot};
use crate::syntax::{Literal, Operand, Text};
use crate::types::{Space, Type};
use crate::{float, format};

/// An access, as described by its suffixes.
struct Kind<'a> {
    space: Space,
    element: Type,
    elements: usize,
    /// Suffixes that are neither of those, nor an ordering, a scope or a hint for caches.
    operation: Vec<&'a str>,
    /// Whether a cache policy follows as an operand.
    policy: bool,
    order: Order,
}

impl<'a> Builder<'a, '_> {
    pub(super) fn memory(&mut self, text: &Text<'a>) -> Lowered<()> {
        match text.opcode {
            "ld" | "ldu" => self.load(text),
            "st" => self.store(text),
            "atom" | "red" => self.atomic(text),
            "cvta" => self.cvta(text),
            "isspacep" => self.isspacep(text),
            // A policy for caches, which are not simulated.
            "createpolicy" => {
                let to = text.operands.first().ok_or_else(|| self.unsupported(text))?;
                let (to, from) = (self.target(to, Type::B(64))?, self.zero());
                self.emit(Op::Copy { to, from });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn kind(&self, text: &Text<'a>) -> Lowered<Kind<'a>> {
        let mut found = Kind {
            space: Space::Generic,
            element: Type::Pred,
            elements: 1,
            operation: Vec::new(),
            policy: false,
            order: Order::of_access(&text.suffixes),
        };
        for &suffix in &text.suffixes {
            match suffix {
                "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" | "weak" | "mmio" | "cta" | "gpu" | "sys" | "cluster" => {}
                "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "nc" => {}
                "L2::cache_hint" => found.policy = true,
                hint if hint.starts_with("L1::") || hint.starts_with("L2::") => {}
                "v2" => found.elements = 2,
                "v4" => found.elements = 4,
                "v8" => found.elements = 8,
                _ => match (Space::named(suffix), Type::named(suffix)) {
                    (Some(space), _) => found.space = space,
                    (_, Some(kind)) => found.element = kind,
                    _ => found.operation.push(suffix),
                },
            }
        }
        if found.element == Type::Pred { Err(self.unsupported(text)) } else { Ok(found) }
    }

    /// Returns the base, offset and space of an address. Parameters of functions and of calls lie in local memory.
    fn address(&mut self, operand: &Operand<'a>, space: Space) -> Lowered<(Slot, i64, Space)> {
        let Operand::Address(inner) = operand else { return Err(self.error("an address in brackets is needed")) };
        match &**inner {
            Operand::Number(Literal::Integer(address)) => Ok((self.bits(*address), 0, space)),
            &Operand::Name(name, offset) => match self.find(name)? {
                Symbol::Register(slot, Type::B(64) | Type::U(64) | Type::S(64)) => Ok((slot, offset, space)),
                Symbol::Register(slot, kind) if kind.bits() == 32 && matches!(space, Space::Shared | Space::Local | Space::Const) => {
                    Ok((slot, offset, space))
                }
                Symbol::Register(..) => Err(self.error(format!("{name} holds no address"))),
                Symbol::Variable(place, home, _) => {
                    let base = self.constant(place.at(0));
                    Ok((base, offset, self.reached(name, place, home, space)?))
                }
            },
            _ => Err(self.error("an address of this form is not supported")),
        }
    }

    fn reached(&self, name: &str, place: Place, home: Space, asked: Space) -> Lowered<Space> {
        match (asked, place) {
            (Space::Param, Place::Local(_)) => Ok(Space::Local),
            (Space::Generic, Place::Global(_)) => Ok(Space::Global),
            (Space::Generic, _) => Err(self.error(format!("{name} is reached by a generic address: cvta has to make it one"))),
            (asked, _) if asked == home => Ok(asked),
            _ => Err(self.error(format!("{name} is a variable of another state space"))),
        }
    }

    fn access(&mut self, kind: &Kind<'a>, address: &Operand<'a>, slots: Vec<Option<Slot>>, width: u32) -> Lowered<Access> {
        let (base, offset, space) = self.address(address, kind.space)?;
        let id = self.next_access();
        let (bytes, sign) = (kind.element.bytes() as u32, kind.element.is_signed());
        Ok(Access { space, base, offset, bytes, sign, slots, width, atomic: None, order: kind.order, id })
    }

    fn add_access(&mut self, access: Access) -> u32 {
        self.function.accesses.push(access);
        (self.function.accesses.len() - 1) as u32
    }

    fn elements<'t>(&self, operand: &'t Operand<'a>, count: usize) -> Lowered<Vec<&'t Operand<'a>>> {
        let elements: Vec<_> = match operand {
            Operand::Vector(elements) => elements.iter().collect(),
            other => vec![other],
        };
        if elements.len() != count {
            return Err(self.error(format!("{} registers stand where {count} are needed", elements.len())));
        }
        Ok(elements)
    }

    fn checked_count(&self, text: &Text<'a>, kind: &Kind<'a>) -> Lowered<()> {
        let count = 2 + usize::from(kind.policy);
        if text.operands.len() != count || !kind.operation.is_empty() { Err(self.unsupported(text)) } else { Ok(()) }
    }

    fn load(&mut self, text: &Text<'a>) -> Lowered<()> {
        let kind = self.kind(text)?;
        self.checked_count(text, &kind)?;
        let mut width = kind.element.bits();
        let mut slots = Vec::new();
        for element in self.elements(&text.operands[0], kind.elements)? {
            if matches!(element, Operand::Sink) {
                slots.push(None);
                continue;
            }
            let (slot, bits) = self.any_target(element, kind.element)?;
            width = bits;
            slots.push(Some(slot));
        }
        if width < kind.element.bits() {
            return Err(self.error(format!("{} bits are loaded into a register of {width}", kind.element.bits())));
        }
        let access = self.access(&kind, &text.operands[1], slots, width)?;
        let access = self.add_access(access);
        self.emit(Op::Load { access });
        Ok(())
    }

    fn store(&mut self, text: &Text<'a>) -> Lowered<()> {
        let kind = self.kind(text)?;
        self.checked_count(text, &kind)?;
        let mut slots = Vec::new();
        for element in self.elements(&text.operands[1], kind.elements)? {
            let (slot, bits) = self.any_source(element, kind.element)?;
            if bits < kind.element.bits() {
                return Err(self.error(format!("{} bits are stored from a register of {bits}", kind.element.bits())));
            }
            slots.push(Some(slot));
        }
        if kind.space == Space::Const || (kind.space == Space::Param && self.entry && self.is_kernel_parameter(&text.operands[0])) {
            return Err(self.error("constants and a kernel's parameters cannot be stored to"));
        }
        let access = self.access(&kind, &text.operands[0], slots, kind.element.bits())?;
        let access = self.add_access(access);
        self.emit(Op::Store { access });
        Ok(())
    }

    fn is_kernel_parameter(&self, operand: &Operand<'a>) -> bool {
        let Operand::Address(inner) = operand else { return false };
        let Operand::Name(name, _) = **inner else { return false };
        matches!(self.find(name), Ok(Symbol::Variable(Place::Param(_), ..)))
    }

    fn atomic(&mut self, text: &Text<'a>) -> Lowered<()> {
        let kind = self.kind(text)?;
        let (to, rest) = match (text.opcode, &text.operands[..]) {
            ("atom", [to, rest @ ..]) => (Some(to), rest),
            ("red", rest) => (None, rest),
            _ => return Err(self.unsupported(text)),
        };
        let run = operation(&kind).filter(|_| kind.elements == 1).ok_or_else(|| self.unsupported(text))?;
        let (address, values) = rest.split_first().ok_or_else(|| self.unsupported(text))?;
        let values = &values[..values.len().saturating_sub(usize::from(kind.policy))];
        let (b, c) = match (values, kind.operation.contains(&"cas")) {
            ([b], false) => (self.source(b, kind.element)?, self.zero()),
            ([b, c], true) => (self.source(b, kind.element)?, self.source(c, kind.element)?),
            _ => return Err(self.unsupported(text)),
        };
        let slot = match to {
            Some(Operand::Sink) | None => None,
            Some(to) => Some(self.target(to, kind.element)?),
        };
        let mut access = self.access(&kind, address, vec![slot], kind.element.bits())?;
        access.sign = false;
        access.atomic = Some(Atomic { run, b, c });
        let access = self.add_access(access);
        self.emit(Op::Atomic { access });
        Ok(())
    }

    fn cvta(&mut self, text: &Text<'a>) -> Lowered<()> {
        let (back, space) = match text.suffixes[..] {
            ["to", space, "u64"] => (true, Space::named(space)),
            [space, "u64"] => (false, Space::named(space)),
            _ => return Err(self.unsupported(text)),
        };
        let space = space.ok_or_else(|| self.unsupported(text))?;
        let [to, from] = self.operands(text)?;
        let from = self.source(from, Type::U(64))?;
        let to = self.target(to, Type::U(64))?;
        self.emit(match space {
            Space::Generic | Space::Global | Space::Const => Op::Copy { to, from },
            _ if back => Op::Within { to, from, space },
            _ => Op::Generic { to, from, space },
        });
        Ok(())
    }

    fn isspacep(&mut self, text: &Text<'a>) -> Lowered<()> {
        let [to, from] = self.operands(text)?;
        let &[space] = &text.suffixes[..] else { return Err(self.unsupported(text)) };
        let space = Space::named(space).filter(|&space| space != Space::Const).ok_or_else(|| self.unsupported(text))?;
        let from = self.source(from, Type::U(64))?;
        let to = self.target(to, Type::Pred)?;
        self.emit(Op::IsIn { to, from, space });
        Ok(())
    }

    /// Returns the offset of a place in local memory that a call passes.
    pub(super) fn offset_of(&self, place: Place) -> Option<u32> {
        match place.at(0) {
            Initial::Local(offset) => u32::try_from(offset).ok(),
            _ => None,
        }
    }
}

/// Returns the function that computes the new value of an atomic operation.
fn operation(kind: &Kind<'_>) -> Option<Alu> {
    let element = kind.element;
    let whole = element.is_integer() && element.bits() >= 32;
    match (&kind.operation[..], element) {
        (["exch"], _) if whole => Some(|_, b, _| b),
        (["cas"], _) if element.is_integer() && element.bits() >= 16 => Some(|old, b, c| if old == b { c } else { old }),
        (["add"], _) if whole => instance!(element, int::add),
        (["min"], _) if whole => instance!(element, int::min),
        (["max"], _) if whole => instance!(element, int::max),
        (["and"], _) if whole => instance!(element, int::and),
        (["or"], _) if whole => instance!(element, int::or),
        (["xor"], _) if whole => instance!(element, int::xor),
        (["inc"], Type::U(32)) => Some(|old, b, _| if old >= b { 0 } else { old + 1 }),
        (["dec"], Type::U(32)) => Some(|old, b, _| if old == 0 || old > b { b } else { old - 1 }),
        // Subnormal numbers are kept in shared memory only.
        (["add"], Type::F32) if kind.space == Space::Shared => float::nearest("add", Type::F32),
        (["add"], Type::F32) => Some(add_flushed),
        (["add"], Type::F64) => float::nearest("add", Type::F64),
        (["add", "noftz"], Type::F16 | Type::Bf16) => float::nearest("add", element),
        (["add", "noftz"], Type::F16x2) => Some(|a, b, _| add_pair(format::F16, a, b)),
        (["add", "noftz"], Type::Bf16x2) => Some(|a, b, _| add_pair(format::BF16, a, b)),
        _ => None,
    }
}

fn add_flushed(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (f32::from_bits(F32.flush(a) as u32), f32::from_bits(F32.flush(b) as u32));
    let sum = a + b;
    F32.flush(if sum.is_nan() { 0x7fff_ffff } else { u64::from(sum.to_bits()) })
}

fn add_pair(format: format::Format, a: u64, b: u64) -> u64 {
    let lane = |shift: u32| {
        let sum = format::sum_to_odd(format.widen(a >> shift & 0xffff), format.widen(b >> shift & 0xffff));
        format.narrow(sum, format::Round::Nearest) << shift
    };
    lane(0) | lane(16)
}
