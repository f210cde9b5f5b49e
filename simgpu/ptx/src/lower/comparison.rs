//! Comparisons and selections.

use super::arithmetic::{Shape, Suffixes, logic};
use super::{Builder, Lowered};
use crate::program::{Alu, Op, Slot};
use crate::syntax::{Operand, Text};
use crate::types::Type;
use crate::{float, integer as int};

impl<'a> Builder<'a, '_> {
    fn comparison(&self, text: &Text<'a>, name: &str, kind: Type) -> Lowered<Alu> {
        let found = if kind.is_integer() { int::compare(kind, name) } else { float::compare(kind, name) };
        found.ok_or_else(|| self.unsupported(text))
    }

    /// Lowers the comparison, with `.ftz` and the boolean operator applied.
    fn compared(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<(Slot, Option<(Alu, Slot)>)> {
        if suffixes.saturate || suffixes.round.is_some() || suffixes.carry {
            return Err(self.unsupported(text));
        }
        let Some(&name) = suffixes.variant.first() else { return Err(self.unsupported(text)) };
        let run = self.comparison(text, name, kind)?;
        let [_, a, b, rest @ ..] = &text.operands[..] else { return Err(self.unsupported(text)) };
        let (mut a, mut b) = (self.source(a, kind)?, self.source(b, kind)?);
        let zero = self.zero();
        if suffixes.flush {
            let flush = float::flush(kind).ok_or_else(|| self.unsupported(text))?;
            a = self.computed(flush, a, zero, zero);
            b = self.computed(flush, b, zero, zero);
        }
        let holds = self.computed(run, a, b, zero);
        let combined = match (&suffixes.variant[1..], rest) {
            ([], []) => None,
            ([operator], [predicate]) => {
                let (run, _) = logic(operator, Type::Pred).ok_or_else(|| self.unsupported(text))?;
                Some((run, self.source(predicate, Type::Pred)?))
            }
            _ => return Err(self.unsupported(text)),
        };
        Ok((holds, combined))
    }

    pub(super) fn setp(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
        if suffixes.kinds.len() != 1 || matches!(kind, Type::F16x2 | Type::Bf16x2) {
            return Err(self.unsupported(text));
        }
        let (holds, combined) = self.compared(text, suffixes, kind)?;
        let zero = self.zero();
        let (first, second) = match &text.operands[0] {
            Operand::Pair(first, second) => (&**first, Some(&**second)),
            other => (other, None),
        };
        let result = match combined {
            Some((run, with)) => self.computed(run, holds, with, zero),
            None => holds,
        };
        let Some(second) = second else {
            let to = self.target(first, Type::Pred)?;
            self.emit_last(to, result);
            return Ok(());
        };
        let fails = self.computed(|a, _, _| a & 1 ^ 1, holds, zero, zero);
        let other = match combined {
            Some((run, with)) => self.computed(run, fails, with, zero),
            None => fails,
        };
        for (operand, from) in [(first, result), (second, other)] {
            let to = self.target(operand, Type::Pred)?;
            self.emit(Op::Copy { to, from });
        }
        Ok(())
    }

    /// Lowers `set`: all ones, or 1.0, if the comparison is true.
    pub(super) fn set(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>) -> Lowered<()> {
        let &[to_kind, kind] = &suffixes.kinds[..] else { return Err(self.unsupported(text)) };
        let (holds, combined) = self.compared(text, suffixes, kind)?;
        let zero = self.zero();
        let holds = match combined {
            Some((run, with)) => self.computed(run, holds, with, zero),
            None => holds,
        };
        let one = match to_kind {
            Type::F32 => u64::from(1_f32.to_bits()),
            kind if kind.is_integer() && kind.bits() == 32 => 0xffff_ffff,
            _ => return Err(self.unsupported(text)),
        };
        let one = self.bits(one);
        let to = self.target(&text.operands[0], to_kind)?;
        self.alu(int::select, to, [one, zero, holds]);
        Ok(())
    }

    pub(super) fn select(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>) -> Lowered<()> {
        if !suffixes.plain() || !suffixes.variant.is_empty() {
            return Err(self.unsupported(text));
        }
        let (kind, by, run): (_, _, Alu) = match (text.opcode, &suffixes.kinds[..]) {
            ("selp", &[kind]) => (kind, Type::Pred, int::select),
            ("slct", &[kind, Type::S(32)]) => (kind, Type::S(32), int::select_sign),
            ("slct", &[kind, Type::F32]) => (kind, Type::F32, |a, b, c| if f32::from_bits(c as u32) >= 0.0 { a } else { b }),
            _ => return Err(self.unsupported(text)),
        };
        self.shaped(text, &Shape { run, to: kind, from: vec![kind, kind, by] })
    }
}
