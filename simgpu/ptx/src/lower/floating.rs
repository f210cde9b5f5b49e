//! Floating-point arithmetic, one lane at a time.

use super::arithmetic::Suffixes;
use super::{Builder, Lowered};
use crate::float;
use crate::format::Round;
use crate::integer as int;
use crate::program::{Alu, Op, Slot};
use crate::syntax::Text;
use crate::types::Type;

impl<'a> Builder<'a, '_> {
    pub(super) fn floating(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
        if suffixes.carry {
            return Err(self.unsupported(text));
        }
        let lane = match kind {
            Type::F16x2 => Type::F16,
            Type::Bf16x2 => Type::Bf16,
            other => other,
        };
        let run = self.float_function(text, suffixes, lane)?;
        let [to, operands @ ..] = &text.operands[..] else { return Err(self.unsupported(text)) };
        if operands.is_empty() || operands.len() > 3 || operands.len() != float_sources(text.opcode) {
            return Err(self.error(format!("{} has the wrong number of operands", text.full())));
        }
        let mut sources = [self.zero(); 3];
        for (source, operand) in sources.iter_mut().zip(operands) {
            *source = self.source(operand, kind)?;
        }
        let to = self.target(to, kind)?;
        if lane == kind {
            let result = self.float_lane(run, text, suffixes, lane, sources, operands.len())?;
            self.emit_last(to, result);
            return Ok(());
        }
        let zero = self.zero();
        let sixteen = self.bits(16);
        let low = sources.map(|source| self.computed(int::field::<u16>, source, zero, zero));
        let high = sources.map(|source| self.computed(int::field::<u16>, source, sixteen, zero));
        let low = self.float_lane(run, text, suffixes, lane, low, operands.len())?;
        let high = self.float_lane(run, text, suffixes, lane, high, operands.len())?;
        self.alu(int::pack, to, [low, high, sixteen]);
        Ok(())
    }

    /// Writes the result of the last step to its register, without a copy if possible.
    pub(super) fn emit_last(&mut self, register: Slot, result: Slot) {
        if let Some(Op::Alu { to, .. }) = self.function.code.last_mut().map(|last| &mut last.op)
            && *to == result
        {
            *to = register;
            return;
        }
        self.emit(Op::Copy { to: register, from: result });
    }

    fn float_lane(
        &mut self,
        run: Alu,
        text: &Text<'a>,
        suffixes: &Suffixes<'a>,
        kind: Type,
        mut sources: [Slot; 3],
        count: usize,
    ) -> Lowered<Slot> {
        let zero = self.zero();
        let flush = if suffixes.flush { Some(float::flush(kind).ok_or_else(|| self.unsupported(text))?) } else { None };
        if let Some(flush) = flush {
            for source in &mut sources[..count] {
                *source = self.computed(flush, *source, zero, zero);
            }
        }
        let mut result = self.computed(run, sources[0], sources[1], sources[2]);
        let after = [
            flush,
            if suffixes.saturate { Some(float::saturate(kind).ok_or_else(|| self.unsupported(text))?) } else { None },
            if text.has("relu") { Some(float::relu(kind).ok_or_else(|| self.unsupported(text))?) } else { None },
        ];
        for step in after.into_iter().flatten() {
            result = self.computed(step, result, zero, zero);
        }
        Ok(result)
    }

    fn float_function(&self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<Alu> {
        let opcode = if text.opcode == "mad" { "fma" } else { text.opcode };
        let variant: Vec<_> = suffixes.variant.iter().copied().filter(|&v| v != "relu").collect();
        let half = matches!(kind, Type::F16 | Type::Bf16);
        let found = match (opcode, &variant[..], suffixes.round) {
            ("neg" | "abs" | "copysign", [], None) => float::sign(opcode, kind),
            ("min" | "max", [], None) => float::nearest(opcode, kind),
            ("min", ["NaN"], None) => float::nearest("min.NaN", kind),
            ("max", ["NaN"], None) => float::nearest("max.NaN", kind),
            ("add" | "sub" | "mul" | "fma", [], None | Some(Round::Nearest)) => float::nearest(opcode, kind),
            ("div" | "rcp" | "sqrt", [], Some(Round::Nearest)) if !half => float::nearest(opcode, kind),
            ("add" | "sub" | "mul" | "fma" | "div" | "rcp" | "sqrt", [], Some(round)) if kind == Type::F32 => {
                float::directed(opcode, round)
            }
            (_, ["approx"], None) => float::approximate(opcode, kind),
            ("div", ["full"], None) => float::approximate(opcode, kind),
            _ => None,
        };
        found.ok_or_else(|| self.unsupported(text))
    }
}

fn float_sources(opcode: &str) -> usize {
    match opcode {
        "fma" | "mad" => 3,
        "add" | "sub" | "mul" | "div" | "min" | "max" | "copysign" => 2,
        _ => 1,
    }
}
