//! Arithmetic, logic, shifts, comparisons and selections.

use super::{Builder, Lowered};
use crate::format::Round;
use crate::integer as int;
use crate::program::{Alu, Op, Slot};
use crate::syntax::{Operand, Text};
use crate::types::Type;
use crate::{float, types};

/// The suffixes of an instruction, sorted.
struct Suffixes<'a> {
    kinds: Vec<Type>,
    /// What is neither a type nor one of the modifiers below.
    variant: Vec<&'a str>,
    round: Option<Round>,
    flush: bool,
    saturate: bool,
    carry: bool,
}

impl<'a> Suffixes<'a> {
    fn of(text: &Text<'a>) -> Self {
        let mut found = Self { kinds: Vec::new(), variant: Vec::new(), round: None, flush: false, saturate: false, carry: false };
        for &suffix in &text.suffixes {
            match suffix {
                "ftz" => found.flush = true,
                "sat" => found.saturate = true,
                "cc" => found.carry = true,
                "rn" | "rz" | "rm" | "rp" => found.round = Round::named(suffix),
                _ => match Type::named(suffix) {
                    Some(kind) => found.kinds.push(kind),
                    None => found.variant.push(suffix),
                },
            }
        }
        found
    }

    fn plain(&self) -> bool {
        self.round.is_none() && !self.flush && !self.saturate && !self.carry
    }
}

/// How an integer instruction is run: the function, the type of its result and of its operands.
struct Shape {
    run: Alu,
    to: Type,
    from: Vec<Type>,
}

fn wide(kind: Type) -> Type {
    match kind {
        Type::U(bits) => Type::U(bits * 2),
        Type::S(bits) => Type::S(bits * 2),
        other => other,
    }
}

/// Integer instructions by opcode, variant and type.
fn shape(opcode: &str, variant: &[&str], kind: Type) -> Option<Shape> {
    const AMOUNT: Type = Type::U(32);
    let same = |run: Option<Alu>, sources: usize| Some(Shape { run: run?, to: kind, from: vec![kind; sources] });
    let to_u32 = |run: Option<Alu>| Some(Shape { run: run?, to: AMOUNT, from: vec![kind] });
    match (opcode, variant) {
        ("add", []) => same(int::instance!(kind, int::add), 2),
        ("sub", []) => same(int::instance!(kind, int::sub), 2),
        ("mul", ["lo"]) => same(int::instance!(kind, int::mul_low), 2),
        ("mul", ["hi"]) => same(int::instance!(kind, int::mul_high), 2),
        ("mul", ["wide"]) => Some(Shape { run: int::instance!(kind, int::mul_wide)?, to: wide(kind), from: vec![kind; 2] }),
        ("mad", ["lo"]) => same(int::instance!(kind, int::mad_low), 3),
        ("mad", ["hi"]) => same(int::instance!(kind, int::mad_high), 3),
        ("mad", ["wide"]) => Some(Shape { run: int::instance!(kind, int::mad_wide)?, to: wide(kind), from: vec![kind, kind, wide(kind)] }),
        ("mul24", ["lo"]) => same(int::instance!(kind, int::mul24_low), 2),
        ("mul24", ["hi"]) => same(int::instance!(kind, int::mul24_high), 2),
        ("div", []) => same(int::instance!(kind, int::div), 2),
        ("rem", []) => same(int::instance!(kind, int::rem), 2),
        ("abs", []) => same(int::instance!(kind, int::abs), 1),
        ("neg", []) => same(int::instance!(kind, int::neg), 1),
        ("min", []) => same(int::instance!(kind, int::min), 2),
        ("max", []) => same(int::instance!(kind, int::max), 2),
        ("sad", []) => same(int::instance!(kind, int::sad), 3),
        ("cnot", []) => same(int::instance!(kind, int::cnot), 1),
        ("shl", []) => Some(Shape { run: int::instance!(kind, int::shl)?, to: kind, from: vec![kind, AMOUNT] }),
        ("shr", []) => Some(Shape { run: int::instance!(kind, int::shr)?, to: kind, from: vec![kind, AMOUNT] }),
        ("popc", []) => to_u32(int::instance!(kind, int::popc)),
        ("clz", []) => to_u32(int::instance!(kind, int::clz)),
        ("bfind", []) => to_u32(int::instance!(kind, int::bfind)),
        ("bfind", ["shiftamt"]) => to_u32(int::instance!(kind, int::bfind_shift)),
        ("brev", []) => same(int::instance!(kind, int::brev), 1),
        ("bfe", []) => Some(Shape { run: int::instance!(kind, int::bfe)?, to: kind, from: vec![kind, AMOUNT, AMOUNT] }),
        ("prmt", []) => same(Some(int::prmt), 3),
        ("prmt", [mode]) => same(int::prmt_mode(mode), 3),
        ("shf", ["l", "clamp"]) => same(Some(int::shf_left_clamp), 3),
        ("shf", ["l", "wrap"]) => same(Some(int::shf_left_wrap), 3),
        ("shf", ["r", "clamp"]) => same(Some(int::shf_right_clamp), 3),
        ("shf", ["r", "wrap"]) => same(Some(int::shf_right_wrap), 3),
        _ => None,
    }
}

/// Logic, which also works on predicates.
fn logic(opcode: &str, kind: Type) -> Option<(Alu, usize)> {
    let bits = if kind == Type::Pred { Type::B(8) } else { kind };
    Some(match opcode {
        "and" => (int::instance!(bits, int::and)?, 2),
        "or" => (int::instance!(bits, int::or)?, 2),
        "xor" => (int::instance!(bits, int::xor)?, 2),
        "not" if kind == Type::Pred => (|a, _, _| a & 1 ^ 1, 1),
        "not" => (int::instance!(bits, int::not)?, 1),
        _ => return None,
    })
}

impl<'a> Builder<'a, '_> {
    pub(super) fn arithmetic(&mut self, text: &Text<'a>) -> Lowered<()> {
        let suffixes = Suffixes::of(text);
        let Some(&kind) = suffixes.kinds.last() else { return Err(self.unsupported(text)) };
        match text.opcode {
            "setp" => return self.setp(text, &suffixes, kind),
            "set" => return self.set(text, &suffixes),
            "selp" | "slct" => return self.select(text, &suffixes),
            "lop3" => return self.lop3(text),
            "bfi" => return self.bfi(text, kind),
            "dp4a" => return self.dp4a(text, &suffixes),
            "testp" => return self.testp(text, &suffixes, kind),
            "addc" | "subc" | "madc" => return self.carried(text, &suffixes, kind),
            _ if suffixes.carry => return self.carried(text, &suffixes, kind),
            _ => {}
        }
        if suffixes.kinds.len() != 1 {
            return Err(self.unsupported(text));
        }
        if let Some((run, sources)) = logic(text.opcode, kind).filter(|_| suffixes.plain() && suffixes.variant.is_empty()) {
            return self.shaped(text, &Shape { run, to: kind, from: vec![kind; sources] });
        }
        if kind.is_integer() { self.integral(text, &suffixes, kind) } else { self.floating(text, &suffixes, kind) }
    }

    fn integral(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
        let saturating = match (text.opcode, &suffixes.variant[..], kind) {
            _ if !suffixes.saturate => None,
            ("add", [], Type::S(32)) => Some(Shape { run: int::add_sat::<i32>, to: kind, from: vec![kind; 2] }),
            ("sub", [], Type::S(32)) => Some(Shape { run: int::sub_sat::<i32>, to: kind, from: vec![kind; 2] }),
            ("mad", ["hi"], Type::S(32)) => Some(Shape { run: int::mad_high_sat::<i32>, to: kind, from: vec![kind; 3] }),
            _ => return Err(self.unsupported(text)),
        };
        if suffixes.flush || suffixes.round.is_some() {
            return Err(self.unsupported(text));
        }
        let shape = saturating.or_else(|| shape(text.opcode, &suffixes.variant, kind)).ok_or_else(|| self.unsupported(text))?;
        self.shaped(text, &shape)
    }

    fn shaped(&mut self, text: &Text<'a>, shape: &Shape) -> Lowered<()> {
        if text.operands.len() != shape.from.len() + 1 {
            return Err(self.error(format!("{} has {} operands, not {}", text.full(), text.operands.len(), shape.from.len() + 1)));
        }
        let mut sources = [self.zero(); 3];
        for ((source, operand), &kind) in sources.iter_mut().zip(&text.operands[1..]).zip(&shape.from) {
            *source = self.source(operand, kind)?;
        }
        let to = self.target(&text.operands[0], shape.to)?;
        self.alu(shape.run, to, sources);
        Ok(())
    }

    fn lop3(&mut self, text: &Text<'a>) -> Lowered<()> {
        let [to, a, b, c, table] = self.operands(text)?;
        if text.suffixes[..] != ["b32"] {
            return Err(self.unsupported(text));
        }
        let kind = Type::B(32);
        let (a, b, c, table) = (self.source(a, kind)?, self.source(b, kind)?, self.source(c, kind)?, self.source(table, kind)?);
        let both = self.computed(int::join32, b, c, table);
        let to = self.target(to, kind)?;
        self.alu(int::lop3, to, [a, both, table]);
        Ok(())
    }

    fn bfi(&mut self, text: &Text<'a>, kind: Type) -> Lowered<()> {
        let [to, a, b, position, length] = self.operands(text)?;
        let run = int::instance!(kind, int::bfi).filter(|_| text.suffixes.len() == 1).ok_or_else(|| self.unsupported(text))?;
        let (a, b) = (self.source(a, kind)?, self.source(b, kind)?);
        let (position, length) = (self.source(position, Type::U(32))?, self.source(length, Type::U(32))?);
        let zero = self.zero();
        let field = self.computed(int::bfi_field, position, length, zero);
        let to = self.target(to, kind)?;
        self.alu(run, to, [a, b, field]);
        Ok(())
    }

    fn dp4a(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>) -> Lowered<()> {
        let run = match suffixes.kinds[..] {
            [Type::U(32), Type::U(32)] => int::dp4a::<false, false>,
            [Type::U(32), Type::S(32)] => int::dp4a::<false, true>,
            [Type::S(32), Type::U(32)] => int::dp4a::<true, false>,
            [Type::S(32), Type::S(32)] => int::dp4a::<true, true>,
            _ => return Err(self.unsupported(text)),
        };
        self.shaped(text, &Shape { run, to: Type::U(32), from: vec![Type::U(32); 3] })
    }

    fn testp(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
        let &[property] = &suffixes.variant[..] else { return Err(self.unsupported(text)) };
        let run = float::property(kind, property).ok_or_else(|| self.unsupported(text))?;
        self.shaped(text, &Shape { run, to: Type::Pred, from: vec![kind] })
    }

    /// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.lo.cc`, `madc.hi` and their kin.
    fn carried(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
        let takes = text.opcode.ends_with('c');
        let operation = text.opcode.trim_end_matches('c');
        let [to, sources @ ..] = &text.operands[..] else { return Err(self.unsupported(text)) };
        let mut slots = Vec::new();
        for source in sources {
            slots.push(self.source(source, kind)?);
        }
        let zero = self.zero();
        let (a, b) = match (operation, &slots[..], &suffixes.variant[..]) {
            ("add" | "sub", &[a, b], []) => (a, b),
            ("mad", &[a, b, c], ["lo"]) => (self.product(int::instance!(kind, int::mul_low), a, b, text)?, c),
            ("mad", &[a, b, c], ["hi"]) => (self.product(int::instance!(kind, int::mul_high), a, b, text)?, c),
            _ => return Err(self.unsupported(text)),
        };
        let flag = self.carry_flag();
        let carry_in = if takes { flag } else { zero };
        let (value, out) = if operation == "sub" {
            (int::instance!(kind, int::sub_borrow), int::instance!(kind, int::borrow))
        } else {
            (int::instance!(kind, int::add_carry), int::instance!(kind, int::carry))
        };
        let (Some(value), Some(out)) = (value, out) else { return Err(self.unsupported(text)) };
        let out = suffixes.carry.then(|| self.computed(out, a, b, carry_in));
        let to = self.target(to, kind)?;
        self.alu(value, to, [a, b, carry_in]);
        if let Some(from) = out {
            self.emit(Op::Copy { to: flag, from });
        }
        Ok(())
    }

    fn product(&mut self, run: Option<Alu>, a: Slot, b: Slot, text: &Text<'a>) -> Lowered<Slot> {
        let run = run.ok_or_else(|| self.unsupported(text))?;
        let zero = self.zero();
        Ok(self.computed(run, a, b, zero))
    }

    fn carry_flag(&mut self) -> Slot {
        match self.carry {
            Some(slot) => slot,
            None => {
                let slot = self.slot("the carry flag");
                self.carry = Some(slot);
                slot
            }
        }
    }

    fn floating(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
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

    /// Sends the result of the last step to its register; a step less than with a copy where that can be.
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
        let half = matches!(kind, types::Type::F16 | types::Type::Bf16);
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

    fn comparison(&self, text: &Text<'a>, name: &str, kind: Type) -> Lowered<Alu> {
        let found = if kind.is_integer() { int::compare(kind, name) } else { float::compare(kind, name) };
        found.ok_or_else(|| self.unsupported(text))
    }

    /// The comparison with `.ftz` and the boolean operator applied.
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

    fn setp(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>, kind: Type) -> Lowered<()> {
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

    /// `set`: all ones, or 1.0, where the comparison holds.
    fn set(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>) -> Lowered<()> {
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

    fn select(&mut self, text: &Text<'a>, suffixes: &Suffixes<'a>) -> Lowered<()> {
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

fn float_sources(opcode: &str) -> usize {
    match opcode {
        "fma" | "mad" => 3,
        "add" | "sub" | "mul" | "div" | "min" | "max" | "copysign" => 2,
        _ => 1,
    }
}
