//! Operands: maps names, numbers and special registers to slots.

use super::{Builder, Lowered, Symbol};
use crate::program::{Initial, Slot, Special};
use crate::syntax::{Literal, Operand, Text};
use crate::types::Type;

impl<'a> Builder<'a, '_> {
    /// Returns the operands of an instruction that has exactly `N`.
    pub(super) fn operands<'t, const N: usize>(&self, text: &'t Text<'a>) -> Lowered<&'t [Operand<'a>; N]> {
        let count = text.operands.len();
        (&text.operands[..]).try_into().map_err(|_| self.error(format!("{} has {count} operands, not {N}", text.full())))
    }

    pub(super) fn find(&self, name: &str) -> Lowered<Symbol> {
        let inner = self.scopes.iter().rev().find_map(|scope| scope.names.get(name).copied());
        let outer = || self.module.variables.get(name).map(|&(place, space, bytes)| Symbol::Variable(place, space, bytes));
        inner.or_else(outer).ok_or_else(|| self.error(format!("{name} is not declared")))
    }

    /// Returns a slot that holds an operand of exactly this type's width.
    pub(super) fn source(&mut self, operand: &Operand<'a>, kind: Type) -> Lowered<Slot> {
        let (slot, width) = self.any_source(operand, kind)?;
        if width != kind.bits() {
            return Err(self.error(format!("an operand of {width} bits stands where {} are needed", kind.bits())));
        }
        Ok(slot)
    }

    /// Returns a slot that holds an operand, and its width; numbers take the width of the type.
    pub(super) fn any_source(&mut self, operand: &Operand<'a>, kind: Type) -> Lowered<(Slot, u32)> {
        match operand {
            Operand::Number(Literal::Integer(value)) if matches!(kind, Type::F32 | Type::F64) && *value != 0 => {
                Err(self.error(format!("the integer {value} stands where a float is needed")))
            }
            Operand::Number(number) => Ok((self.bits(number.bits(kind)), kind.bits())),
            Operand::Component(register, component) => {
                let special = special(register, component).ok_or_else(|| self.error(format!("{register}.{component} is not supported")))?;
                Ok((self.constant(Initial::Special(special)), kind.bits()))
            }
            Operand::Not(inner) => {
                let slot = self.source(inner, Type::Pred)?;
                let zero = self.zero();
                Ok((self.computed(|a, _, _| a & 1 ^ 1, slot, zero, zero), 1))
            }
            Operand::Name(name, offset) => self.named_source(name, *offset, kind),
            _ => Err(self.error("an operand of this form is not supported here")),
        }
    }

    fn named_source(&mut self, name: &str, offset: i64, kind: Type) -> Lowered<(Slot, u32)> {
        if let Some(special) = plain_special(name) {
            return Ok((self.constant(special), kind.bits()));
        }
        if let Some(address) = self.function_address(name)? {
            return Ok((self.bits(address.wrapping_add_signed(offset)), kind.bits()));
        }
        match self.find(name)? {
            Symbol::Register(slot, kind) => Ok((slot, kind.bits())),
            Symbol::Variable(place, ..) => Ok((self.constant(place.at(offset)), kind.bits())),
        }
    }

    /// Returns the value of a pointer to the function of this name; `None` if there is no such function.
    fn function_address(&self, name: &str) -> Lowered<Option<u64>> {
        match self.module.functions.get(name) {
            Some(_) if self.find(name).is_ok() => Ok(None),
            Some(Some(number)) => Ok(Some(self.program.address(*number))),
            Some(None) => Err(self.error(format!("the address of {name} cannot be taken: it is a function of the driver"))),
            None => Ok(None),
        }
    }

    /// Returns the register that receives a result of this width, or a slot that is never read.
    pub(super) fn target(&mut self, operand: &Operand<'a>, kind: Type) -> Lowered<Slot> {
        let (slot, width) = self.any_target(operand, kind)?;
        if width != kind.bits() {
            return Err(self.error(format!("a result of {} bits goes to a register of {width}", kind.bits())));
        }
        Ok(slot)
    }

    pub(super) fn any_target(&mut self, operand: &Operand<'a>, kind: Type) -> Lowered<(Slot, u32)> {
        match operand {
            Operand::Sink => Ok((self.temporary(), kind.bits())),
            Operand::Name(name, 0) => match self.find(name)? {
                Symbol::Register(slot, kind) => Ok((slot, kind.bits())),
                Symbol::Variable(..) => Err(self.error(format!("{name} is no register"))),
            },
            _ => Err(self.error("a register is needed as the first operand")),
        }
    }
}

fn special(register: &str, component: &str) -> Option<Special> {
    let axis = match component {
        "x" => 0,
        "y" => 1,
        "z" => 2,
        _ => return None,
    };
    Some(match register {
        "%tid" => Special::Thread(axis),
        "%ntid" => Special::BlockSize(axis),
        "%ctaid" => Special::Block(axis),
        "%nctaid" => Special::GridSize(axis),
        _ => return None,
    })
}

fn plain_special(name: &str) -> Option<Initial> {
    Some(match name {
        "%laneid" => Initial::Special(Special::Lane),
        "%warpid" => Initial::Special(Special::WarpIndex),
        "%nwarpid" => Initial::Special(Special::Warps),
        "%lanemask_eq" => Initial::Special(Special::LanesEqual),
        "%lanemask_lt" => Initial::Special(Special::LanesBelow),
        "%lanemask_le" => Initial::Special(Special::LanesUpTo),
        "%lanemask_gt" => Initial::Special(Special::LanesAbove),
        "%lanemask_ge" => Initial::Special(Special::LanesFrom),
        "%dynamic_smem_size" => Initial::Special(Special::DynamicShared),
        "%total_smem_size" => Initial::Special(Special::TotalShared),
        // The simulated device has one multiprocessor and runs one grid at a time.
        "%smid" | "%gridid" => Initial::Bits(0),
        "%nsmid" => Initial::Bits(1),
        _ => return None,
    })
}
