//! Floating-point instructions: pure functions of up to three raw operands.
//!
//! A NaN result is the one that the hardware writes: `0x7fffffff` for `f32`, `0x7fff` for the two 16-bit formats, and
//! for `f64` the quiet one without payload, `0x7ff8000000000000`. `neg` and `abs` change only the sign. Approximate
//! instructions return the correctly rounded result; hardware may differ within the error that PTX documents.

use crate::format::{self, BF16, F16, F32, Format, Round};
use crate::program::Alu;
use crate::types::Type;

#[inline(always)]
fn get32(slot: u64) -> f32 {
    f32::from_bits(slot as u32)
}
#[inline(always)]
fn put32(value: f32) -> u64 {
    if value.is_nan() { 0x7fff_ffff } else { u64::from(value.to_bits()) }
}
#[inline(always)]
fn get64(slot: u64) -> f64 {
    f64::from_bits(slot)
}
#[inline(always)]
fn put64(value: f64) -> u64 {
    if value.is_nan() { 0x7ff8_0000_0000_0000 } else { value.to_bits() }
}

/// An operation in each format. Those of 16 bits are calculated in `f64` and rounded once.
struct Family {
    single: Alu,
    double: Alu,
    half: Alu,
    brain: Alu,
}

impl Family {
    fn of(self, kind: Type) -> Option<Alu> {
        Some(match kind {
            Type::F32 => self.single,
            Type::F64 => self.double,
            Type::F16 => self.half,
            Type::Bf16 => self.brain,
            _ => return None,
        })
    }
}

macro_rules! family {
    ($single:expr, $double:expr, $wide:expr) => {
        Family {
            single: |a, b, c| put32($single(get32(a), get32(b), get32(c))),
            double: |a, b, c| put64($double(get64(a), get64(b), get64(c))),
            half: |a, b, c| F16.narrow($wide(F16.widen(a), F16.widen(b), F16.widen(c)), Round::Nearest),
            brain: |a, b, c| BF16.narrow($wide(BF16.widen(a), BF16.widen(b), BF16.widen(c)), Round::Nearest),
        }
    };
}

fn fma_to_odd(a: f64, b: f64, c: f64) -> f64 {
    format::sum_to_odd(a * b, c)
}

/// Returns an operation that rounds to the nearest.
pub(crate) fn nearest(name: &str, kind: Type) -> Option<Alu> {
    match name {
        "add" => family!(|a: f32, b: f32, _| a + b, |a: f64, b: f64, _| a + b, |a, b, _| format::sum_to_odd(a, b)),
        "sub" => family!(|a: f32, b: f32, _| a - b, |a: f64, b: f64, _| a - b, |a, b: f64, _| format::sum_to_odd(a, -b)),
        "mul" => family!(|a: f32, b: f32, _| a * b, |a: f64, b: f64, _| a * b, |a: f64, b: f64, _| a * b),
        "fma" => family!(|a: f32, b, c| a.mul_add(b, c), |a: f64, b, c| a.mul_add(b, c), fma_to_odd),
        "div" => family!(|a: f32, b: f32, _| a / b, |a: f64, b: f64, _| a / b, |_, _, _| f64::NAN),
        "rcp" => family!(|a: f32, _, _| 1.0 / a, |a: f64, _, _| 1.0 / a, |_, _, _| f64::NAN),
        "sqrt" => family!(|a: f32, _, _| a.sqrt(), |a: f64, _, _| a.sqrt(), |_, _, _| f64::NAN),
        "min" => family!(|a: f32, b: f32, _| minimum(a.into(), b.into()) as f32, |a, b, _| minimum(a, b), |a, b, _| minimum(a, b)),
        "max" => family!(|a: f32, b: f32, _| maximum(a.into(), b.into()) as f32, |a, b, _| maximum(a, b), |a, b, _| maximum(a, b)),
        "min.NaN" => family!(|a: f32, b: f32, _| or_nan(a.into(), b.into(), minimum) as f32, |a, b, _| or_nan(a, b, minimum), |a, b, _| {
            or_nan(a, b, minimum)
        }),
        "max.NaN" => family!(|a: f32, b: f32, _| or_nan(a.into(), b.into(), maximum) as f32, |a, b, _| or_nan(a, b, maximum), |a, b, _| {
            or_nan(a, b, maximum)
        }),
        _ => return None,
    }
    .of(kind)
}

/// Returns the smaller number; a number takes precedence over a NaN, and -0 is smaller than +0.
fn minimum(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || a == b && a.is_sign_negative() {
        a
    } else {
        b
    }
}
fn maximum(a: f64, b: f64) -> f64 {
    -minimum(-a, -b)
}
fn or_nan(a: f64, b: f64, pick: fn(f64, f64) -> f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { pick(a, b) }
}

/// Returns a single-precision operation with a rounding direction.
pub(crate) fn directed(name: &str, round: Round) -> Option<Alu> {
    macro_rules! each {
        ($function:ident) => {
            match round {
                Round::Zero => $function::<1> as Alu,
                Round::Down => $function::<2> as Alu,
                Round::Up => $function::<3> as Alu,
                Round::Nearest | Round::Away => return None,
            }
        };
    }
    Some(match name {
        "add" => each!(add_directed),
        "sub" => each!(sub_directed),
        "mul" => each!(mul_directed),
        "fma" => each!(fma_directed),
        "div" => each!(div_directed),
        "rcp" => each!(rcp_directed),
        "sqrt" => each!(sqrt_directed),
        _ => return None,
    })
}

fn wide(slot: u64) -> f64 {
    f64::from(get32(slot))
}
/// Rounds a sum; the sign of an exact zero that is a difference depends on the direction.
fn rounded<const R: u8>(sum: f64, a: f64, b: f64) -> u64 {
    let zero = sum == 0.0 && a.is_sign_negative() != b.is_sign_negative();
    F32.narrow(if zero && R == Round::Down as u8 { -0.0 } else { sum }, Round::of(R))
}
fn add_directed<const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    rounded::<R>(format::sum_to_odd(wide(a), wide(b)), wide(a), wide(b))
}
fn sub_directed<const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    rounded::<R>(format::sum_to_odd(wide(a), -wide(b)), wide(a), -wide(b))
}
fn mul_directed<const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    F32.narrow(wide(a) * wide(b), Round::of(R))
}
fn fma_directed<const R: u8>(a: u64, b: u64, c: u64) -> u64 {
    rounded::<R>(fma_to_odd(wide(a), wide(b), wide(c)), wide(a) * wide(b), wide(c))
}
fn div_directed<const R: u8>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (wide(a), wide(b));
    let quotient = a / b;
    let rest = if b.is_finite() { (-quotient).mul_add(b, a) } else { 0.0 };
    F32.narrow(format::to_odd(quotient, if b < 0.0 { -rest } else { rest }), Round::of(R))
}
fn rcp_directed<const R: u8>(a: u64, _: u64, _: u64) -> u64 {
    div_directed::<R>(u64::from(1_f32.to_bits()), a, 0)
}
fn sqrt_directed<const R: u8>(a: u64, _: u64, _: u64) -> u64 {
    let a = wide(a);
    let root = a.sqrt();
    F32.narrow(format::to_odd(root, (-root).mul_add(root, a)), Round::of(R))
}

/// Returns an approximate instruction, which is rounded correctly here.
pub(crate) fn approximate(name: &str, kind: Type) -> Option<Alu> {
    let single = |function: Alu| (kind == Type::F32).then_some(function);
    match (name, kind) {
        // These two read only the upper half of the operand, and write only the upper half of the result.
        ("rsqrt", Type::F64) => Some(|a, _, _| put64(1.0 / get64(a >> 32 << 32).sqrt()) >> 32 << 32),
        ("rcp", Type::F64) => Some(|a, _, _| put64(1.0 / get64(a >> 32 << 32)) >> 32 << 32),
        ("tanh", Type::F16) => Some(|a, _, _| F16.narrow(F16.widen(a).tanh(), Round::Nearest)),
        ("tanh", Type::Bf16) => Some(|a, _, _| BF16.narrow(BF16.widen(a).tanh(), Round::Nearest)),
        ("ex2", Type::F16) => Some(|a, _, _| F16.narrow(F16.widen(a).exp2(), Round::Nearest)),
        ("ex2", Type::Bf16) => Some(|a, _, _| BF16.narrow(BF16.widen(a).exp2(), Round::Nearest)),
        ("div" | "rcp" | "sqrt", _) => single(nearest(name, Type::F32)?),
        ("rsqrt", _) => single(|a, _, _| F32.narrow(1.0 / wide(a).sqrt(), Round::Nearest)),
        ("ex2", _) => single(|a, _, _| F32.narrow(wide(a).exp2(), Round::Nearest)),
        ("lg2", _) => single(|a, _, _| F32.narrow(wide(a).log2(), Round::Nearest)),
        ("sin", _) => single(|a, _, _| F32.narrow(wide(a).sin(), Round::Nearest)),
        ("cos", _) => single(|a, _, _| F32.narrow(wide(a).cos(), Round::Nearest)),
        ("tanh", _) => single(|a, _, _| F32.narrow(wide(a).tanh(), Round::Nearest)),
        _ => None,
    }
}

/// Returns an operation that changes only the sign bit.
pub(crate) fn sign(name: &str, kind: Type) -> Option<Alu> {
    Some(match (name, kind.bits()) {
        ("neg", 16) => |a, _, _| (a ^ 0x8000) & 0xffff,
        ("abs", 16) => |a, _, _| a & 0x7fff,
        ("neg", 32) => |a, _, _| (a ^ 0x8000_0000) & 0xffff_ffff,
        ("abs", 32) => |a, _, _| a & 0x7fff_ffff,
        ("neg", 64) => |a, _, _| a ^ 1 << 63,
        ("abs", 64) => |a, _, _| a & !(1 << 63),
        ("copysign", 32) => |a, b, _| a & 0x8000_0000 | b & 0x7fff_ffff,
        ("copysign", 64) => |a, b, _| a & 1 << 63 | b & !(1 << 63),
        _ => return None,
    })
}

/// Returns a function that turns subnormal numbers into zeros (`.ftz`).
pub(crate) fn flush(kind: Type) -> Option<Alu> {
    Some(match kind {
        Type::F32 => |a, _, _| F32.flush(a & 0xffff_ffff),
        Type::F64 => |a, _, _| format::F64.flush(a),
        Type::F16 => |a, _, _| F16.flush(a & 0xffff),
        _ => return None,
    })
}

/// Returns a function that clamps to the range from 0 to 1; NaN becomes 0 (`.sat`).
pub(crate) fn saturate(kind: Type) -> Option<Alu> {
    fn in_format(format: Format, bits: u64) -> u64 {
        format.narrow(clamp_unit(format.widen(bits)), Round::Nearest)
    }
    Some(match kind {
        Type::F32 => |a, _, _| in_format(F32, a),
        Type::F64 => |a, _, _| in_format(format::F64, a),
        Type::F16 => |a, _, _| in_format(F16, a),
        Type::Bf16 => |a, _, _| in_format(BF16, a),
        _ => return None,
    })
}

/// Clamps to the range from +0 to 1; NaN becomes +0.
pub(crate) fn clamp_unit(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// Returns a function that turns negative numbers into zero and keeps NaN (`.relu`).
pub(crate) fn relu(kind: Type) -> Option<Alu> {
    fn in_format(format: Format, bits: u64) -> u64 {
        format.narrow(or_nan(format.widen(bits), 0.0, maximum), Round::Nearest)
    }
    Some(match kind {
        Type::F16 => |a, _, _| in_format(F16, a),
        Type::Bf16 => |a, _, _| in_format(BF16, a),
        _ => return None,
    })
}

fn unordered(a: f64, b: f64) -> bool {
    a.is_nan() || b.is_nan()
}

/// Returns the comparison of two floats that a suffix names; names that end in `u` are true for NaN.
pub(crate) fn compare(kind: Type, name: &str) -> Option<Alu> {
    macro_rules! test {
        ($holds:expr) => {
            match kind {
                Type::F32 => |a, b, _| u64::from($holds(f64::from(get32(a)), f64::from(get32(b)))),
                Type::F64 => |a, b, _| u64::from($holds(get64(a), get64(b))),
                Type::F16 => |a, b, _| u64::from($holds(F16.widen(a), F16.widen(b))),
                Type::Bf16 => |a, b, _| u64::from($holds(BF16.widen(a), BF16.widen(b))),
                _ => return None,
            }
        };
    }
    let test: Alu = match name {
        "eq" => test!(|a: f64, b: f64| a == b),
        "ne" => test!(|a: f64, b: f64| a != b && !unordered(a, b)),
        "lt" => test!(|a: f64, b: f64| a < b),
        "le" => test!(|a: f64, b: f64| a <= b),
        "gt" => test!(|a: f64, b: f64| a > b),
        "ge" => test!(|a: f64, b: f64| a >= b),
        "equ" => test!(|a: f64, b: f64| a == b || unordered(a, b)),
        "neu" => test!(|a: f64, b: f64| a != b),
        "ltu" => test!(|a: f64, b: f64| a < b || unordered(a, b)),
        "leu" => test!(|a: f64, b: f64| a <= b || unordered(a, b)),
        "gtu" => test!(|a: f64, b: f64| a > b || unordered(a, b)),
        "geu" => test!(|a: f64, b: f64| a >= b || unordered(a, b)),
        "num" => test!(|a: f64, b: f64| !unordered(a, b)),
        "nan" => test!(unordered),
        _ => return None,
    };
    Some(test)
}

/// Returns the property that `testp` names.
pub(crate) fn property(kind: Type, name: &str) -> Option<Alu> {
    macro_rules! test {
        ($method:ident) => {
            match kind {
                Type::F32 => |a, _, _| u64::from(get32(a).$method()),
                Type::F64 => |a, _, _| u64::from(get64(a).$method()),
                _ => return None,
            }
        };
    }
    let test: Alu = match name {
        "finite" => test!(is_finite),
        "infinite" => test!(is_infinite),
        "notanumber" => test!(is_nan),
        "normal" => test!(is_normal),
        "subnormal" => test!(is_subnormal),
        "number" => match kind {
            Type::F32 => |a, _, _| u64::from(!get32(a).is_nan()),
            Type::F64 => |a, _, _| u64::from(!get64(a).is_nan()),
            _ => return None,
        },
        _ => return None,
    };
    Some(test)
}
