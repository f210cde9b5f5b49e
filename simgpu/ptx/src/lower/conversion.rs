//! `cvt`.

use super::{Builder, Lowered};
use crate::convert::{Conversion, convert};
use crate::float;
use crate::format::Round;
use crate::integer::{self as int, instance};
use crate::program::{Op, Slot};
use crate::syntax::Text;
use crate::types::Type;

impl<'a> Builder<'a, '_> {
    pub(super) fn cvt(&mut self, text: &Text<'a>) -> Lowered<()> {
        let (how, relu) = self.conversion(text)?;
        if matches!(how.to, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2) {
            return self.cvt_pair(text, how, relu);
        }
        let [to, from] = self.operands(text)?;
        let (from, width) = self.any_source(from, how.from)?;
        if width < how.from.bits() {
            return Err(self.error(format!("a register of {width} bits holds no {} bits to convert", how.from.bits())));
        }
        let (to, width) = self.any_target(to, how.to)?;
        if width < how.to.bits() {
            return Err(self.error(format!("a result of {} bits goes to a register of {width}", how.to.bits())));
        }
        if how.between_integers().is_some() {
            return self.cvt_integers(text, how, to, from, width);
        }
        let mut result = self.converted(text, how, from)?;
        if relu {
            let zero = self.zero();
            let run = float::relu(how.to).ok_or_else(|| self.unsupported(text))?;
            result = self.computed(run, result, zero, zero);
        }
        if how.to.is_signed() && width > how.to.bits() {
            result = self.extended(text, how.to, result, width)?;
        }
        self.emit(Op::Copy { to, from: result });
        Ok(())
    }

    /// Classifies the suffixes; the last two types are those converted to and from.
    fn conversion(&self, text: &Text<'a>) -> Lowered<(Conversion, bool)> {
        let (mut kinds, mut round, mut whole, mut saturate, mut flush, mut relu) = (Vec::new(), None, false, false, false, false);
        for &suffix in &text.suffixes {
            match suffix {
                "rni" | "rzi" | "rmi" | "rpi" => (round, whole) = (Round::named(suffix), true),
                "rn" | "rz" | "rm" | "rp" => round = Round::named(suffix),
                "sat" => saturate = true,
                "ftz" => flush = true,
                "relu" => relu = true,
                // The only form of those two formats.
                "satfinite" if text.has("e4m3x2") || text.has("e5m2x2") => {}
                _ => kinds.push(Type::named(suffix).ok_or_else(|| self.unsupported(text))?),
            }
        }
        let &[to, from] = &kinds[..] else { return Err(self.unsupported(text)) };
        if to == Type::Pred || from == Type::Pred || (relu && !matches!(to, Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2)) {
            return Err(self.unsupported(text));
        }
        Ok((Conversion { from, to, round: round.unwrap_or(Round::Nearest), whole, saturate, flush }, relu))
    }

    fn converted(&mut self, text: &Text<'a>, how: Conversion, from: Slot) -> Lowered<Slot> {
        let packed = how.packed().ok_or_else(|| self.unsupported(text))?;
        let (packed, zero) = (self.bits(packed), self.zero());
        Ok(self.computed(convert, from, packed, zero))
    }

    /// Truncates or extends; the usual cases take one step.
    fn cvt_integers(&mut self, text: &Text<'a>, how: Conversion, to: Slot, from: Slot, width: u32) -> Lowered<()> {
        let zero = self.zero();
        let mut value = from;
        if how.to.bits() > how.from.bits() {
            let run = how.between_integers().ok_or_else(|| self.unsupported(text))?;
            value = self.computed(run, value, zero, zero);
            if how.from.is_signed() && how.to.bits() < 64 {
                let run = instance!(how.to, int::field).ok_or_else(|| self.unsupported(text))?;
                value = self.computed(run, value, zero, zero);
            }
        } else {
            let run = instance!(how.to, int::field).ok_or_else(|| self.unsupported(text))?;
            value = self.computed(run, value, zero, zero);
        }
        if how.to.is_signed() && width > how.to.bits() {
            value = self.extended(text, how.to, value, width)?;
        }
        self.emit_last(to, value);
        Ok(())
    }

    /// Sign-extends a signed value up to the width of a wider register.
    fn extended(&mut self, text: &Text<'a>, kind: Type, value: Slot, width: u32) -> Lowered<Slot> {
        let zero = self.zero();
        let how = Conversion { from: kind, to: Type::S(64), round: Round::Nearest, whole: false, saturate: false, flush: false };
        let run = how.between_integers().ok_or_else(|| self.unsupported(text))?;
        let wide = self.computed(run, value, zero, zero);
        let run = instance!(Type::B(width), int::field).ok_or_else(|| self.unsupported(text))?;
        Ok(self.computed(run, wide, zero, zero))
    }

    /// Converts two floats into one register, the first one above, or a pair of eight-bit floats into a pair of
    /// halves.
    fn cvt_pair(&mut self, text: &Text<'a>, how: Conversion, relu: bool) -> Lowered<()> {
        let zero = self.zero();
        let to_lane = match how.to {
            Type::F16x2 => Type::F16,
            Type::Bf16x2 => Type::Bf16,
            other => other,
        };
        let (high, low, from_lane, operand) = match (&text.operands[..], how.from) {
            ([to, a, b], Type::F32) => (self.source(a, Type::F32)?, self.source(b, Type::F32)?, Type::F32, to),
            ([to, a], Type::E4m3x2 | Type::E5m2x2 | Type::F16x2) => {
                let pair = self.source(a, how.from)?;
                let half = how.from.bits() / 2;
                let run = instance!(Type::B(half), int::field).ok_or_else(|| self.unsupported(text))?;
                let half = self.bits(half.into());
                let lane = if how.from == Type::F16x2 { Type::F16 } else { how.from };
                (self.computed(run, pair, half, zero), self.computed(run, pair, zero, zero), lane, to)
            }
            _ => return Err(self.unsupported(text)),
        };
        let lane = Conversion { from: from_lane, to: to_lane, ..how };
        let (mut high, mut low) = (self.converted(text, lane, high)?, self.converted(text, lane, low)?);
        if relu {
            let run = float::relu(to_lane).ok_or_else(|| self.unsupported(text))?;
            (high, low) = (self.computed(run, high, zero, zero), self.computed(run, low, zero, zero));
        }
        let half = self.bits(u64::from(how.to.bits() / 2));
        let to = self.target(operand, how.to)?;
        self.alu(int::pack, to, [low, high, half]);
        Ok(())
    }
}
