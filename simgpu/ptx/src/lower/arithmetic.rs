//! Arithmetic, logic, shifts, comparisons and selections.

use super::{Builder, Lowered};
use crate::float;
use crate::format::Round;
use crate::integer as int;
use crate::program::{Alu, Op, Slot};
use crate::syntax::Text;
use crate::types::Type;

/// The suffixes of an instruction, sorted.
pub(super) struct Suffixes<'a> {
    pub(super) kinds: Vec<Type>,
    /// Suffixes that are neither a type nor one of the modifiers below.
    pub(super) variant: Vec<&'a str>,
    pub(super) round: Option<Round>,
    pub(super) flush: bool,
    pub(super) saturate: bool,
    pub(super) carry: bool,
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

    pub(super) fn plain(&self) -> bool {
        self.round.is_none() && !self.flush && !self.saturate && !self.carry
    }
}

/// The execution of an integer instruction: the function, the type of its result and of its operands.
pub(super) struct Shape {
    pub(super) run: Alu,
    pub(super) to: Type,
    pub(super) from: Vec<Type>,
}

fn wide(kind: Type) -> Type {
    match kind {
        Type::U(bits) => Type::U(bits * 2),
        Type::S(bits) => Type::S(bits * 2),
        other => other,
    }
}

/// Returns integer instructions by opcode, variant and type.
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

/// Returns logic operations, which also work on predicates.
pub(super) fn logic(opcode: &str, kind: Type) -> Option<(Alu, usize)> {
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

    pub(super) fn shaped(&mut self, text: &Text<'a>, shape: &Shape) -> Lowered<()> {
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

    /// Lowers `add.cc`, `addc`, `sub.cc`, `subc`, `mad.lo.cc`, `madc.hi` and similar instructions.
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
}
