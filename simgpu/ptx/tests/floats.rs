//! Floating-point instructions and conversions, compared with the processor's, and with exact integer arithmetic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Random, check, evaluate, triples};

const NAN: u64 = 0x7fff_ffff;

/// Zeros, subnormal numbers, the ends of the range, infinities, NaN with payloads.
const ODD: [u32; 18] = [
    0,
    0x8000_0000,
    1,
    0x8000_0001,
    0x007f_ffff,
    0x0080_0000,
    0x3f80_0000,
    0xbf80_0000,
    0x3f80_0001,
    0x4b80_0000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7fc0_1234,
    0xffc0_0000,
    0x7f80_0001,
    0x3effffff,
];

fn operands() -> Vec<[u64; 3]> {
    let odd = ODD.map(u64::from);
    triples(&odd, &odd)
}

fn doubles() -> Vec<[u64; 3]> {
    let odd: Vec<u64> =
        ODD.iter().map(|&bits| f64::from(f32::from_bits(bits)).to_bits()).chain([1, 1 << 63 | 5, 1 << 52, !0 >> 12]).collect();
    triples(&odd, &[0, 1.5_f64.to_bits(), 1_u64 << 63])
}

fn single(value: f32) -> u64 {
    if value.is_nan() { NAN } else { value.to_bits().into() }
}
fn double(value: f64) -> u64 {
    if value.is_nan() { 0x7ff8_0000_0000_0000 } else { value.to_bits() }
}
fn f(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}
fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

#[test]
fn arithmetic_rounds_as_ieee_and_writes_one_nan() {
    let singles = operands();
    check("add.f32 %f9, %f0, %f1;", "f", &singles, |a, b, _| single(f(a) + f(b)));
    check("sub.rn.f32 %f9, %f0, %f1;", "f", &singles, |a, b, _| single(f(a) - f(b)));
    check("mul.f32 %f9, %f0, %f1;", "f", &singles, |a, b, _| single(f(a) * f(b)));
    check("fma.rn.f32 %f9, %f0, %f1, %f2;", "f", &singles, |a, b, c| single(f(a).mul_add(f(b), f(c))));
    check("mad.rn.f32 %f9, %f0, %f1, %f2;", "f", &singles, |a, b, c| single(f(a).mul_add(f(b), f(c))));
    check("div.rn.f32 %f9, %f0, %f1;", "f", &singles, |a, b, _| single(f(a) / f(b)));
    check("rcp.rn.f32 %f9, %f0;", "f", &singles, |a, _, _| single(1.0 / f(a)));
    check("sqrt.rn.f32 %f9, %f0;", "f", &singles, |a, _, _| single(f(a).sqrt()));
    check("neg.f32 %f9, %f0;", "f", &singles, |a, _, _| (a ^ 0x8000_0000) & 0xffff_ffff);
    check("abs.f32 %f9, %f0;", "f", &singles, |a, _, _| a & 0x7fff_ffff);
    check("add.f32 %f9, %f0, 0fBF800000;", "f", &singles, |a, _, _| single(f(a) - 1.0));
    check("mul.f32 %f9, %f0, 2.5;", "f", &singles, |a, _, _| single(f(a) * 2.5));
    let doubles = doubles();
    check("add.f64 %fd9, %fd0, %fd1;", "fd", &doubles, |a, b, _| double(d(a) + d(b)));
    check("sub.f64 %fd9, %fd0, %fd1;", "fd", &doubles, |a, b, _| double(d(a) - d(b)));
    check("mul.rn.f64 %fd9, %fd0, %fd1;", "fd", &doubles, |a, b, _| double(d(a) * d(b)));
    check("fma.rn.f64 %fd9, %fd0, %fd1, %fd2;", "fd", &doubles, |a, b, c| double(d(a).mul_add(d(b), d(c))));
    check("div.rn.f64 %fd9, %fd0, %fd1;", "fd", &doubles, |a, b, _| double(d(a) / d(b)));
    check("sqrt.rn.f64 %fd9, %fd0;", "fd", &doubles, |a, _, _| double(d(a).sqrt()));
    check("neg.f64 %fd9, %fd0;", "fd", &doubles, |a, _, _| a ^ 1 << 63);
}

#[test]
fn subnormal_numbers_are_flushed_where_asked() {
    let operands = operands();
    check("add.ftz.f32 %f9, %f0, %f1;", "f", &operands, |a, b, _| single(flushed(flushed(f(a)) + flushed(f(b)))));
    check("mul.ftz.f32 %f9, %f0, %f1;", "f", &operands, |a, b, _| single(flushed(flushed(f(a)) * flushed(f(b)))));
    check("setp.gt.ftz.f32 %p9, %f0, %f1;", "p", &operands, |a, b, _| u64::from(flushed(f(a)) > flushed(f(b))));
    check("add.sat.f32 %f9, %f0, %f1;", "f", &operands, |a, b, _| {
        let sum = f(a) + f(b);
        single(if sum > 0.0 { sum.min(1.0) } else { 0.0 })
    });
}

#[test]
fn a_number_beats_nan_and_zeros_have_an_order() {
    let pick = |a: f32, b: f32, less: bool| match (a.is_nan(), b.is_nan()) {
        (true, _) => single(b),
        (_, true) => single(a),
        _ if a == b => single(if (a.is_sign_negative() == less) || a.to_bits() == b.to_bits() { a } else { b }),
        _ => single(if (a < b) == less { a } else { b }),
    };
    let operands = operands();
    check("min.f32 %f9, %f0, %f1;", "f", &operands, |a, b, _| pick(f(a), f(b), true));
    check("max.f32 %f9, %f0, %f1;", "f", &operands, |a, b, _| pick(f(a), f(b), false));
    check(
        "max.NaN.f32 %f9, %f0, %f1;",
        "f",
        &operands,
        |a, b, _| {
            if f(a).is_nan() || f(b).is_nan() { NAN } else { pick(f(a), f(b), false) }
        },
    );
}

#[test]
fn comparisons_know_nan() {
    let operands = operands();
    type Holds = fn(f32, f32) -> bool;
    let cases: [(&str, Holds); 14] = [
        ("eq", |a, b| a == b),
        ("ne", |a, b| a != b && !a.is_nan() && !b.is_nan()),
        ("lt", |a, b| a < b),
        ("le", |a, b| a <= b),
        ("gt", |a, b| a > b),
        ("ge", |a, b| a >= b),
        ("equ", |a, b| a == b || a.is_nan() || b.is_nan()),
        ("neu", |a, b| a != b),
        ("ltu", |a, b| a < b || a.is_nan() || b.is_nan()),
        ("leu", |a, b| a <= b || a.is_nan() || b.is_nan()),
        ("gtu", |a, b| a > b || a.is_nan() || b.is_nan()),
        ("geu", |a, b| a >= b || a.is_nan() || b.is_nan()),
        ("num", |a, b| !a.is_nan() && !b.is_nan()),
        ("nan", |a, b| a.is_nan() || b.is_nan()),
    ];
    for (name, oracle) in cases {
        check(&format!("setp.{name}.f32 %p9, %f0, %f1;"), "p", &operands, |a, b, _| oracle(f(a), f(b)).into());
    }
    check("testp.subnormal.f32 %p9, %f0;", "p", &operands, |a, _, _| f(a).is_subnormal().into());
    check("testp.number.f32 %p9, %f0;", "p", &operands, |a, _, _| (!f(a).is_nan()).into());
}

/// Checks that the two directed results enclose the exact one: they are neighbours, or equal if the exact one is an
/// `f32`.
#[test]
fn directed_rounding_encloses_the_exact_result() {
    let mut random = Random(11);
    let number = |random: &mut Random| {
        let bits = random.next() as u32;
        u64::from(bits & 0x807f_ffff | ((bits >> 23 & 31) + 112) << 23)
    };
    let mut operands: Vec<[u64; 3]> = (0..4000).map(|_| [number(&mut random), number(&mut random), number(&mut random)]).collect();
    operands.extend([
        [0x3f80_0000, 0xbf80_0000, 0],
        [0x3f80_0000, 0x3f80_0000, 0xbf80_0000],
        [1, 0x3f00_0000, 0],
        [0x7f7f_ffff, 0x7f7f_ffff, 0],
    ]);
    for (name, operation) in [
        ("add", "%f0, %f1"),
        ("sub", "%f0, %f1"),
        ("mul", "%f0, %f1"),
        ("fma", "%f0, %f1, %f2"),
        ("div", "%f0, %f1"),
        ("sqrt", "%f0"),
        ("rcp", "%f0"),
    ] {
        let [nearest, down, up, zero] =
            ["rn", "rm", "rp", "rz"].map(|round| evaluate(&format!("{name}.{round}.f32 %f9, {operation};"), "f", &operands));
        let mut inexact = 0;
        for (i, operand) in operands.iter().enumerate() {
            let (low, high, near, cut) = (f(down[i]), f(up[i]), f(nearest[i]), f(zero[i]));
            let what = format!("{name} of {operand:x?}: {low:e} {near:e} {high:e} {cut:e}");
            if near.is_nan() {
                assert_eq!([down[i], up[i], zero[i]], [NAN; 3], "{what}");
                continue;
            }
            assert!(near == low || near == high, "{what}");
            assert_eq!(cut.to_bits() & 0x7fff_ffff, (if near.is_sign_negative() { high } else { low }).to_bits() & 0x7fff_ffff, "{what}");
            assert!(low.to_bits() == high.to_bits() || low.next_up() == high || low == high, "{what}");
            inexact += u32::from(low != high);
        }
        assert!(inexact > 1000, "{name} was inexact {inexact} times only");
    }
    let sums = evaluate("add.rm.f32 %f9, %f0, %f1;", "f", &[[0x3f80_0000, 0xbf80_0000, 0]]);
    assert_eq!(sums, [0x8000_0000]);
}

/// Rounds an exact value in units of 2^-48 to `digits` significant bits, but not below the unit `least`.
fn round_exactly(value: i128, digits: u32, least: u32) -> i128 {
    let magnitude = value.unsigned_abs();
    let drop = (128 - magnitude.leading_zeros()).saturating_sub(digits).max(least);
    let (kept, rest) = (magnitude >> drop, magnitude & ((1 << drop) - 1));
    let half = 1_u128 << drop >> 1;
    let up = drop > 0 && (rest > half || rest == half && kept & 1 == 1);
    (((kept + u128::from(up)) << drop) as i128) * value.signum()
}

/// Returns a finite `f16` in units of 2^-24.
fn half_units(bits: u64) -> i128 {
    let (exponent, fraction) = (bits >> 10 & 31, i128::from(bits & 0x3ff));
    let magnitude = if exponent == 0 { fraction } else { (fraction | 0x400) << (exponent - 1) };
    if bits >> 15 & 1 == 1 { -magnitude } else { magnitude }
}

#[test]
fn half_precision_rounds_once() {
    let odd = [0, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x3555, 0x5bff, 0x0bff, 0x1234, 0x9876];
    let operands: Vec<_> = triples(&odd, &odd).into_iter().map(|row| row.map(|bits| bits & 0xdfff)).collect();
    let operands: Vec<_> = operands.into_iter().filter(|row| row.iter().all(|bits| bits >> 10 & 31 < 24)).collect();
    assert!(operands.len() > 1500);
    let pieces = [
        ("add.f16 %rs9, %rs0, %rs1;", (|a, b, _| (a + b) << 24) as fn(i128, i128, i128) -> i128),
        ("sub.f16 %rs9, %rs0, %rs1;", |a, b, _| (a - b) << 24),
        ("mul.f16 %rs9, %rs0, %rs1;", |a, b, _| a * b),
        ("fma.rn.f16 %rs9, %rs0, %rs1, %rs2;", |a, b, c| a * b + (c << 24)),
    ];
    for (piece, oracle) in pieces {
        for (row, got) in operands.iter().zip(evaluate(piece, "rs", &operands)) {
            let [a, b, c] = row.map(|bits| half_units(bits & 0xffff));
            let expected = round_exactly(oracle(a, b, c), 11, 24);
            if expected >> 48 >= 65520 || -expected >> 48 >= 65520 {
                assert_eq!(got & 0x7fff, 0x7c00, "{piece} {row:x?}");
            } else {
                assert_eq!(half_units(got) << 24, expected, "{piece} {row:x?}: {got:#x}");
            }
        }
    }
    check("add.f16x2 %r9, %r0, %r1;", "r", &[[0x3c00_4000, 0x3c00_c000, 0], [0x7c00_7bff, 0xfc00_7bff, 0]], |a, _, _| {
        if a == 0x3c00_4000 { 0x4000_0000 } else { 0x7fff_7c00 }
    });
    check("max.f16x2 %r9, %r0, %r1;", "r", &[[0x7e00_8000, 0x3c00_0000, 0]], |_, _, _| 0x3c00_0000);
    check("neg.f16x2 %r9, %r0;", "r", &[[0x7e00_8000, 0, 0]], |a, _, _| a ^ 0x8000_0000 & 0xffff_ffff ^ 0x8000);
}

#[test]
fn brain_floats_round_once() {
    let mut random = Random(5);
    // Exponents near that of 1, so that sums and products are whole numbers of 2^-48.
    let number = |random: &mut Random| random.next() & 0x807f | (random.next() % 16 + 119) << 7;
    let operands: Vec<[u64; 3]> = (0..5000).map(|_| [number(&mut random), number(&mut random), number(&mut random)]).collect();
    let units = |bits: u64| (f64::from(f32::from_bits((bits as u32) << 16)) * f64::from(1 << 24)) as i128;
    for (row, got) in operands.iter().zip(evaluate("fma.rn.bf16 %rs9, %rs0, %rs1, %rs2;", "rs", &operands)) {
        let [a, b, c] = row.map(units);
        let expected = round_exactly(a * b + (c << 24), 8, 0);
        let got = (f64::from(f32::from_bits((got as u32) << 16)) * 2_f64.powi(48)) as i128;
        assert_eq!(got, expected, "{row:x?}");
    }
    let operands = self::operands();
    let rounded = |a: u64| if f(a).is_nan() { 0x7fff } else { ((a & 0xffff_ffff) + 0x7fff + (a >> 16 & 1)) >> 16 };
    check("cvt.rn.bf16.f32 %rs9, %f0;", "rs", &operands, |a, _, _| rounded(a));
    check("cvt.rn.bf16x2.f32 %r9, %f0, %f1;", "r", &operands, |a, b, _| rounded(a) << 16 | rounded(b));
    check("cvt.f32.bf16 %f9, %rs0;", "f", &operands, |a, _, _| single(f32::from_bits((a as u32) << 16)));
}

#[test]
fn conversions_to_integers_round_and_saturate() {
    let mut operands = operands();
    for value in
        [0.5_f32, 1.5, 2.5, -0.5, -1.5, -2.5, 255.5, 256.0, -129.0, 2147483648.0, 4294967296.0, -2147483904.0, 9.3e18, 1.9e19, -9.3e18]
    {
        operands.push([value.to_bits().into(), 0, 0]);
    }
    type Rounds = fn(f32) -> f32;
    let rounds: [(&str, Rounds); 4] = [("rni", f32::round_ties_even), ("rzi", f32::trunc), ("rmi", f32::floor), ("rpi", f32::ceil)];
    for (name, round) in rounds {
        let zero = |a: u64| f(a).is_nan();
        check(&format!("cvt.{name}.s32.f32 %r9, %f0;"), "r", &operands, |a, _, _| u64::from(round(f(a)) as i32 as u32));
        check(&format!("cvt.{name}.u32.f32 %r9, %f0;"), "r", &operands, |a, _, _| u64::from(round(f(a)) as u32));
        check(
            &format!("cvt.{name}.s64.f32 %rd9, %f0;"),
            "rd",
            &operands,
            |a, _, _| if zero(a) { 1 << 63 } else { round(f(a)) as i64 as u64 },
        );
        check(&format!("cvt.{name}.u64.f32 %rd9, %f0;"), "rd", &operands, |a, _, _| if zero(a) { 1 << 63 } else { round(f(a)) as u64 });
        check(&format!("cvt.{name}.u8.f32 %r9, %f0;"), "r", &operands, |a, _, _| u64::from(round(f(a)) as u8));
        check(&format!("cvt.{name}.s8.f32 %r9, %f0;"), "r", &operands, |a, _, _| u64::from(i32::from(round(f(a)) as i8) as u32));
        check(&format!("cvt.{name}.f32.f32 %f9, %f0;"), "f", &operands, |a, _, _| single(round(f(a))));
    }
    let doubles = doubles();
    check("cvt.rzi.s32.f64 %r9, %fd0;", "r", &doubles, |a, _, _| if d(a).is_nan() { 1 << 31 } else { u64::from(d(a) as i32 as u32) });
    check(
        "cvt.rni.s64.f64 %rd9, %fd0;",
        "rd",
        &doubles,
        |a, _, _| if d(a).is_nan() { 1 << 63 } else { d(a).round_ties_even() as i64 as u64 },
    );
}

#[test]
fn conversions_from_integers_and_between_floats() {
    let operands =
        triples(&[0, 1, 0x7fff_ffff, 0x8000_0000, 0x0100_0001, 0x0100_0003, u64::MAX, 1 << 63, (1 << 53) + 1, 0x7fff_ff80_0000_0001], &[0]);
    check("cvt.rn.f32.s32 %f9, %r0;", "f", &operands, |a, _, _| single(a as i32 as f32));
    check("cvt.rn.f32.u32 %f9, %r0;", "f", &operands, |a, _, _| single(a as u32 as f32));
    check("cvt.rn.f32.u64 %f9, %rd0;", "f", &operands, |a, _, _| single(a as f32));
    check("cvt.rn.f32.s64 %f9, %rd0;", "f", &operands, |a, _, _| single(a as i64 as f32));
    check("cvt.rn.f64.u64 %fd9, %rd0;", "fd", &operands, |a, _, _| double(a as f64));
    check("cvt.rn.f64.s32 %fd9, %r0;", "fd", &operands, |a, _, _| double(f64::from(a as i32)));
    check("cvt.rn.f32.u8 %f9, %rs0;", "f", &operands, |a, _, _| single(f32::from(a as u8)));
    let [low, near, high] = ["rm", "rn", "rp"].map(|round| evaluate(&format!("cvt.{round}.f32.u64 %f9, %rd0;"), "f", &operands));
    for (i, &[value, ..]) in operands.iter().enumerate() {
        assert!(f(low[i]) as u128 <= u128::from(value) && u128::from(value) <= f(high[i]) as u128, "{value:#x}");
        assert!(f(near[i]) == f(low[i]) || f(near[i]) == f(high[i]), "{value:#x}");
    }
    let doubles = doubles();
    check("cvt.rn.f32.f64 %f9, %fd0;", "f", &doubles, |a, _, _| single(d(a) as f32));
    let singles = self::operands();
    check("cvt.f64.f32 %fd9, %f0;", "fd", &singles, |a, _, _| double(f64::from(f(a))));
    check("cvt.sat.f32.f32 %f9, %f0;", "f", &singles, |a, _, _| single(if f(a) > 0.0 { f(a).min(1.0) } else { 0.0 }));
    check("cvt.ftz.f64.f32 %fd9, %f0;", "fd", &singles, |a, _, _| double(f64::from(flushed(f(a)))));
}

#[test]
fn half_precision_converts_both_ways() {
    let all: Vec<[u64; 3]> = (0..0x1_0000).map(|bits| [bits, 0, 0]).collect();
    let widened = evaluate("cvt.f32.f16 %f9, %rs0;", "f", &all);
    for (bits, got) in widened.iter().enumerate() {
        let bits = bits as u64;
        let expected = match (bits >> 10 & 31, bits & 0x3ff) {
            (31, 0) => single(f32::INFINITY.copysign(if bits >> 15 == 1 { -1.0 } else { 1.0 })),
            (31, _) => NAN,
            _ => u64::from((half_units(bits) as f32 / 16_777_216.0).to_bits()) | bits >> 15 << 31,
        };
        assert_eq!(*got, expected, "{bits:#x}");
    }
    let back: Vec<[u64; 3]> = widened.iter().map(|&bits| [bits, 0, 0]).collect();
    check("cvt.rn.f16.f32 %rs9, %f0;", "rs", &back[..0x7c01], |a, _, _| widened.iter().position(|&bits| bits == a).unwrap() as u64);
    // Between two neighbours, a little to either side of the middle, and on it.
    for low in (0..0x7bff_u64).step_by(37) {
        let (a, b) = (f(widened[low as usize]), f(widened[low as usize + 1]));
        let middle = (a + b) / 2.0;
        let row = [middle, middle.next_down(), middle.next_up(), -middle].map(|value| [u64::from(value.to_bits()), 0, 0]);
        let even = low + (low & 1);
        assert_eq!(evaluate("cvt.rn.f16.f32 %rs9, %f0;", "rs", &row), [even, low, low + 1, even | 0x8000], "{low:#x}");
        assert_eq!(evaluate("cvt.rz.f16.f32 %rs9, %f0;", "rs", &row), [low, low, low, low | 0x8000], "{low:#x}");
    }
    let ends = [65519.996_f32, 65520.0, f32::INFINITY, f32::NAN, 2.9802322e-8, 2.980233e-8].map(|value| [u64::from(value.to_bits()), 0, 0]);
    assert_eq!(evaluate("cvt.rn.f16.f32 %rs9, %f0;", "rs", &ends), [0x7bff, 0x7c00, 0x7c00, 0x7fff, 0, 1]);
}

#[test]
fn conversions_between_integers_cut_extend_and_saturate() {
    let operands = triples(&[0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff_ffff, 0x8000_0000, u64::MAX, 1 << 63], &[0]);
    check("cvt.s32.s8 %r9, %rs0;", "r", &operands, |a, _, _| u64::from(i32::from(a as i8) as u32));
    check("cvt.u32.u16 %r9, %rs0;", "r", &operands, |a, _, _| a & 0xffff);
    check("cvt.s64.s32 %rd9, %r0;", "rd", &operands, |a, _, _| i64::from(a as i32) as u64);
    check("cvt.u64.u32 %rd9, %r0;", "rd", &operands, |a, _, _| a & 0xffff_ffff);
    check("cvt.u16.u64 %rs9, %rd0;", "rs", &operands, |a, _, _| a & 0xffff);
    check("cvt.s16.s8 %rs9, %r0;", "rs", &operands, |a, _, _| u64::from(i16::from(a as i8) as u16));
    check("cvt.s8.s32 %r9, %r0;", "r", &operands, |a, _, _| u64::from(i32::from(a as i8) as u32));
    check("cvt.u8.u32 %r9, %r0;", "r", &operands, |a, _, _| a & 0xff);
    check("cvt.sat.u8.s32 %r9, %r0;", "r", &operands, |a, _, _| (a as i32).clamp(0, 255) as u64);
    check("cvt.sat.s16.s64 %rs9, %rd0;", "rs", &operands, |a, _, _| u64::from((a as i64).clamp(-32768, 32767) as u16));
    check("cvt.sat.s32.u64 %r9, %rd0;", "r", &operands, |a, _, _| a.min(0x7fff_ffff));
}

#[test]
fn approximations_are_as_near_as_documented() {
    let operands: Vec<[u64; 3]> =
        (1..2000).map(|i| [u64::from((i as f32 * 0.037).to_bits()), u64::from((i as f32 * 1.7).to_bits()), 0]).collect();
    let near = |piece: &str, oracle: fn(f64, f64) -> f64| {
        for (row, got) in operands.iter().zip(evaluate(piece, "f", &operands)) {
            let expected = oracle(f(row[0]).into(), f(row[1]).into());
            assert!((f64::from(f(got)) - expected).abs() <= expected.abs() * 2e-7 + 1e-7, "{piece} {row:x?}: {} {expected}", f(got));
        }
    };
    near("ex2.approx.ftz.f32 %f9, %f0;", |a, _| a.exp2());
    near("lg2.approx.f32 %f9, %f0;", |a, _| a.log2());
    near("rsqrt.approx.f32 %f9, %f0;", |a, _| 1.0 / a.sqrt());
    near("sin.approx.f32 %f9, %f0;", |a, _| a.sin());
    near("div.full.f32 %f9, %f0, %f1;", |a, b| a / b);
    near("div.approx.ftz.f32 %f9, %f0, %f1;", |a, b| a / b);
}

#[test]
fn pairs_and_eight_bit_formats() {
    let pair = |a: f32, b: f32| [[u64::from(a.to_bits()), u64::from(b.to_bits()), 0]];
    assert_eq!(evaluate("cvt.rn.f16x2.f32 %r9, %f0, %f1;", "r", &pair(1.0, -2.0)), [0x3c00_c000]);
    assert_eq!(evaluate("cvt.rn.relu.bf16x2.f32 %r9, %f0, %f1;", "r", &pair(-1.0, f32::NAN)), [0x0000_7fff]);
    assert_eq!(evaluate("cvt.rn.satfinite.e4m3x2.f32 %rs9, %f0, %f1;", "rs", &pair(1e9, -0.001953125)), [0x7e81]);
    assert_eq!(evaluate("cvt.rn.satfinite.e5m2x2.f32 %rs9, %f0, %f1;", "rs", &pair(f32::NAN, 1.125)), [0x7f3c]);
    // 448 and the smallest number of the format, both as halves.
    assert_eq!(evaluate("cvt.rn.f16x2.e4m3x2 %r9, %rs0;", "r", &[[0x7e01, 0, 0]]), [0x5f00_1800]);
    assert_eq!(evaluate("cvt.rn.f16x2.e5m2x2 %r9, %rs0;", "r", &[[0x7cbc, 0, 0]]), [0x7c00_bc00]);
    assert_eq!(evaluate("fma.rn.relu.f16 %rs9, %rs0, %rs1, %rs2;", "rs", &[[0x3c00, 0xbc00, 0], [0x3c00, 0x3c00, 0x3c00]]), [0, 0x4000]);
}
