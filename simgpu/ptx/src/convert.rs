//! `cvt`: between integers of all widths and the floating-point formats.

use crate::float::clamp_unit;
use crate::format::{Format, Round};
use crate::integer::{Int, instance};
use crate::program::Alu;
use crate::types::Type;

/// The parts of a conversion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conversion {
    pub(crate) from: Type,
    pub(crate) to: Type,
    /// The rounding when a float is narrowed.
    pub(crate) round: Round,
    /// Whether a float becomes a whole number, rounded by `round`.
    pub(crate) whole: bool,
    pub(crate) saturate: bool,
    pub(crate) flush: bool,
}

/// Types by number, for conversions that are passed in an operand.
const TYPES: [Type; 14] = [
    Type::U(8),
    Type::U(16),
    Type::U(32),
    Type::U(64),
    Type::S(8),
    Type::S(16),
    Type::S(32),
    Type::S(64),
    Type::F16,
    Type::Bf16,
    Type::F32,
    Type::F64,
    Type::E4m3x2,
    Type::E5m2x2,
];

fn code(kind: Type) -> Option<u64> {
    let kind = if let Type::B(bits) = kind { Type::U(bits) } else { kind };
    TYPES.iter().position(|&t| t == kind).map(|place| place as u64)
}

impl Conversion {
    /// Returns the second operand of `convert`; `None` for types that no conversion supports.
    pub(crate) fn packed(self) -> Option<u64> {
        let flags = u64::from(self.whole) | u64::from(self.saturate) << 1 | u64::from(self.flush) << 2;
        Some(code(self.from)? | code(self.to)? << 8 | (self.round as u64) << 16 | flags << 24)
    }

    fn unpacked(bits: u64) -> Self {
        let kind = |at: u32| TYPES[(bits >> at & 0xf) as usize % TYPES.len()];
        let flag = |at: u32| bits >> at & 1 == 1;
        Self { from: kind(0), to: kind(8), round: Round::of((bits >> 16) as u8), whole: flag(24), saturate: flag(25), flush: flag(26) }
    }

    /// Returns a function for conversions between integers, which are frequent and need no check of the types.
    pub(crate) fn between_integers(self) -> Option<Alu> {
        if self.saturate {
            return None;
        }
        fn extend<T: Int>(a: u64, _: u64, _: u64) -> u64 {
            T::get(a).wide() as u64
        }
        instance!(if self.to.is_integer() { self.from } else { Type::Pred }, extend)
    }
}

/// Converts `a`; `b` is a packed `Conversion`.
pub(crate) fn convert(a: u64, b: u64, _: u64) -> u64 {
    let how = Conversion::unpacked(b);
    match (Format::of(how.from), Format::of(how.to)) {
        (Some(from), Some(to)) => between_floats(how, from, to, a),
        (Some(from), None) => to_integer(how, from, a),
        (None, Some(to)) => {
            let value = integer(how.from, a);
            let bits = to.round(value < 0, value.unsigned_abs() as u64, 0, how.round);
            if how.saturate { to.narrow(clamp_unit(to.widen(bits)), Round::Nearest) } else { bits }
        }
        (None, None) => clamped(how.to, integer(how.from, a)),
    }
}

fn between_floats(how: Conversion, from: Format, to: Format, a: u64) -> u64 {
    let a = if how.flush && how.from == Type::F32 { from.flush(a) } else { a };
    let mut value = from.widen(a);
    if how.whole {
        value = whole(value, how.round);
    }
    if how.saturate {
        value = clamp_unit(value);
    }
    let bits = to.narrow(value, how.round);
    if how.flush && how.to == Type::F32 { to.flush(bits) } else { bits }
}

fn whole(value: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => value.round_ties_even(),
        Round::Zero => value.trunc(),
        Round::Down => value.floor(),
        Round::Up => value.ceil(),
        Round::Away => value.round(),
    }
}

/// Converts to an integer. Values beyond the range become its ends. NaN becomes zero, or the top bit alone if either
/// type has 64 bits.
fn to_integer(how: Conversion, from: Format, a: u64) -> u64 {
    let a = if how.flush && how.from == Type::F32 { from.flush(a) } else { a };
    let value = from.widen(a);
    if value.is_nan() {
        let wide = how.from == Type::F64 || how.to.bits() == 64;
        return if wide { 1 << (how.to.bits() - 1) } else { 0 };
    }
    clamped(how.to, whole(value, how.round) as i128)
}

fn integer(kind: Type, a: u64) -> i128 {
    let unused = 64 - kind.bits();
    if kind.is_signed() { i128::from((a << unused) as i64 >> unused) } else { i128::from(a << unused >> unused) }
}

fn clamped(kind: Type, value: i128) -> u64 {
    fn clamp<T: Int>(value: i128) -> u64 {
        T::clamped(value).put()
    }
    match (kind.is_signed(), kind.bits()) {
        (false, 8) => clamp::<u8>(value),
        (false, 16) => clamp::<u16>(value),
        (false, 32) => clamp::<u32>(value),
        (false, _) => clamp::<u64>(value),
        (true, 8) => clamp::<i8>(value),
        (true, 16) => clamp::<i16>(value),
        (true, 32) => clamp::<i32>(value),
        (true, _) => clamp::<i64>(value),
    }
}
