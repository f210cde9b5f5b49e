//! `mov`.

use super::{Builder, Lowered};
use crate::integer;
use crate::program::Op;
use crate::syntax::{Operand, Text};
use crate::types::Type;

impl<'a> Builder<'a, '_> {
    /// Lowers `mov`: copies, addresses, packing and unpacking.
    pub(super) fn mov(&mut self, text: &Text<'a>) -> Lowered<()> {
        let &[kind] = &text.suffixes[..] else { return Err(self.unsupported(text)) };
        let kind = Type::named(kind).ok_or_else(|| self.unsupported(text))?;
        match self.operands(text)? {
            [Operand::Vector(parts), whole] => self.unpack(parts, whole, kind),
            [whole, Operand::Vector(parts)] => self.pack(whole, parts, kind),
            [to, Operand::Name("%clock" | "%clock64" | "%clock_hi" | "%globaltimer" | "%globaltimer_lo", 0)] => {
                let to = self.target(to, kind)?;
                self.emit(Op::Clock { to });
                Ok(())
            }
            [to, from] => {
                let from = self.source(from, kind)?;
                let to = self.target(to, kind)?;
                self.emit(Op::Copy { to, from });
                Ok(())
            }
        }
    }

    fn element(&self, parts: usize, kind: Type) -> Lowered<Type> {
        match (kind.bits(), parts) {
            (bits @ (16 | 32 | 64), 2 | 4) if bits / parts as u32 >= 8 => Ok(Type::B(bits / parts as u32)),
            _ => Err(self.error(format!("{parts} elements do not make up {} bits", kind.bits()))),
        }
    }

    fn unpack(&mut self, parts: &[Operand<'a>], whole: &Operand<'a>, kind: Type) -> Lowered<()> {
        let element = self.element(parts.len(), kind)?;
        let whole = self.source(whole, kind)?;
        let zero = self.zero();
        for (place, part) in parts.iter().enumerate() {
            if matches!(part, Operand::Sink) {
                continue;
            }
            let (to, width) = self.any_target(part, element)?;
            if width < element.bits() {
                return Err(self.error("an element is wider than its register"));
            }
            let shift = self.bits(place as u64 * u64::from(element.bits()));
            let run = integer::instance!(element, integer::field).ok_or_else(|| self.error("an element has no type"))?;
            self.alu(run, to, [whole, shift, zero]);
        }
        Ok(())
    }

    fn pack(&mut self, whole: &Operand<'a>, parts: &[Operand<'a>], kind: Type) -> Lowered<()> {
        let element = self.element(parts.len(), kind)?;
        let to = self.target(whole, kind)?;
        let zero = self.zero();
        let run = integer::instance!(element, integer::field).ok_or_else(|| self.error("an element has no type"))?;
        let mut sum = None;
        for (place, part) in parts.iter().enumerate() {
            let (slot, width) = self.any_source(part, element)?;
            let slot = if width == element.bits() { slot } else { self.computed(run, slot, zero, zero) };
            sum = Some(match sum {
                None => slot,
                Some(low) => {
                    let below = self.bits(place as u64 * u64::from(element.bits()));
                    self.computed(integer::pack, low, slot, below)
                }
            });
        }
        if let Some(from) = sum {
            self.emit(Op::Copy { to, from });
        }
        Ok(())
    }
}
