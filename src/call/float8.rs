//! The two 8-bit float formats of OCP (OFP8, revision 1.0), stored as their bits, with exact conversions.
//!
//! The arithmetic is generic over floats of up to 16 bits and has no branches, so that loops over it vectorise. The
//! folds use it for `f16` too, if the processor cannot convert that type.

use std::cmp::Ordering;
use std::fmt;

/// Returns the `f32` bits of the magnitude `bits` of a float with `E` exponent and `M` mantissa bits. Infinities and
/// NaN are not handled.
#[inline(always)]
const fn expand_finite<const E: u32, const M: u32>(bits: u32) -> u32 {
    let shift = const { 23 - M };
    // The distance between the two biases, in units of the exponent field of `f32`.
    let rebias = const { (127 - ((1 << (E - 1)) - 1)) << 23 };
    let shifted = bits << shift;
    // A subnormal reads as 1.m at the least exponent; taking the 1 away is exact and normalises it.
    let least = const { ((127 - ((1 << (E - 1)) - 1)) + 1) << 23 };
    let subnormal = (f32::from_bits(least + shifted) - f32::from_bits(least)).to_bits();
    if bits < const { 1 << M } { subnormal } else { shifted + rebias }
}

/// Returns the magnitude nearest to the `f32` magnitude `bits`, ties to even. A value above the format's largest number
/// results in a value above its pattern. The caller clamps it, and handles NaN.
#[inline(always)]
const fn round_finite<const E: u32, const M: u32>(bits: u32) -> u32 {
    let shift = const { 23 - M };
    let rebias = const { (127 - ((1 << (E - 1)) - 1)) << 23 };
    let odd = (bits >> shift) & 1;
    let normal = bits.wrapping_sub(rebias).wrapping_add(const { (1 << (22 - M)) - 1 }).wrapping_add(odd) >> shift;
    // Adding a power of two whose last place is the format's least subnormal lets the addition do the rounding.
    let magic = const { (127 + 24 - ((1 << (E - 1)) - 1) - M) << 23 };
    let subnormal = (f32::from_bits(bits) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
    let least = const { ((127 - ((1 << (E - 1)) - 1)) + 1) << 23 };
    if bits < least { subnormal } else { normal }
}

/// Converts a float with infinities to `f32`: `E` exponent and `M` mantissa bits, the sign at bit `E + M`.
#[inline(always)]
pub(crate) const fn expand<const E: u32, const M: u32>(bits: u32) -> f32 {
    let sign = (bits >> const { E + M }) << 31;
    let magnitude = bits & const { (1 << (E + M)) - 1 };
    let special = 0x7f80_0000 | (magnitude << const { 23 - M });
    let is_special = magnitude >= const { ((1 << E) - 1) << M };
    f32::from_bits(sign | if is_special { special } else { expand_finite::<E, M>(magnitude) })
}

/// Reverses [`expand`]: nearest, ties to even, overflow to infinity. NaN becomes the quiet NaN with its sign kept.
#[inline(always)]
pub(crate) const fn round<const E: u32, const M: u32>(value: f32) -> u32 {
    let infinity = const { ((1 << E) - 1) << M };
    let sign = (value.to_bits() >> 31) << const { E + M };
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let rounded = round_finite::<E, M>(magnitude);
    let clamped = if rounded > infinity { infinity } else { rounded };
    let quiet = infinity | const { 1 << (M - 1) };
    sign | if magnitude > 0x7f80_0000 { quiet } else { clamped }
}

/// Converts `value` to an `f32` that any narrower format rounds as it would round `value` itself: truncated, with the
/// last bit set if bits were lost (rounding to odd).
#[inline]
pub(crate) const fn narrow_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = nearest as f64;
    if back == value || value.is_nan() {
        return nearest;
    }
    // One of the two neighbours of `value` is odd: the nearest, or the one on its other side.
    let bits = nearest.to_bits();
    if bits & 1 == 1 {
        nearest
    } else if (back > value) == (value > 0.0) {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

/// An 8-bit float with a sign bit, 4 exponent bits and 3 mantissa bits. It has no infinities. There is one NaN pattern
/// for each sign. Its largest number is 448.
///
/// Values compare as numbers: NaN is not equal to itself, and the two zeros are equal.
///
/// ```
/// use collectives::F8E4M3;
///
/// let x = F8E4M3::from_f32(0.3);
/// assert_eq!(x.to_f32(), 0.3125); // the nearest of the 253 numbers
/// assert_eq!(x.to_bits(), 0x2a);
/// assert_eq!(F8E4M3::from_f32(464.0), F8E4M3::MAX); // a tie, to even
/// assert!(F8E4M3::from_f32(f32::INFINITY).is_nan()); // there is no infinity
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// An 8-bit float with a sign bit, 5 exponent bits and 2 mantissa bits. Infinities and NaN are as in IEEE formats. Its
/// largest finite number is 57344.
///
/// Values compare as numbers: NaN is not equal to itself, and the two zeros are equal.
///
/// ```
/// use collectives::F8E5M2;
///
/// let x = F8E5M2::from_f32(-0.3);
/// assert_eq!(x.to_f32(), -0.3125);
/// assert_eq!(x.to_bits(), 0xb5);
/// assert_eq!(F8E5M2::from_f32(1e9), F8E5M2::INFINITY);
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F8E5M2(u8);

impl F8E4M3 {
    /// The largest number, 448.
    pub const MAX: Self = Self(0x7e);
    /// The least number, -448.
    pub const MIN: Self = Self(0xfe);
    /// The smallest number above zero, 2⁻⁹.
    pub const MIN_POSITIVE_SUBNORMAL: Self = Self(0x01);
    /// Not a number.
    pub const NAN: Self = Self(0x7f);

    /// Returns the value of this type that is nearest to `value`, with ties to even. Infinities, and values whose
    /// magnitude rounds to more than 448, become NaN. The sign is kept.
    #[inline(always)]
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        let sign = (value.to_bits() >> 31) << 7;
        let rounded = round_finite::<4, 3>(value.to_bits() & 0x7fff_ffff);
        // A NaN has the largest magnitude of all, so the same clamp handles it.
        let clamped = if rounded > 0x7f { 0x7f } else { rounded };
        Self((sign | clamped) as u8)
    }

    /// Converts the value to `f32`, exactly.
    #[inline(always)]
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        let magnitude = (self.0 & 0x7f) as u32;
        let bits = if magnitude == 0x7f { 0x7fc0_0000 } else { expand_finite::<4, 3>(magnitude) };
        f32::from_bits(((self.0 >> 7) as u32) << 31 | bits)
    }

    /// Returns whether the value is NaN.
    #[must_use]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7f == 0x7f
    }
}

impl F8E5M2 {
    /// The largest finite number, 57344.
    pub const MAX: Self = Self(0x7b);
    /// The least finite number, -57344.
    pub const MIN: Self = Self(0xfb);
    /// The smallest number above zero, 2⁻¹⁶.
    pub const MIN_POSITIVE_SUBNORMAL: Self = Self(0x01);
    /// Infinity.
    pub const INFINITY: Self = Self(0x7c);
    /// Not a number.
    pub const NAN: Self = Self(0x7e);

    /// Returns the value of this type that is nearest to `value`, with ties to even. Values whose magnitude rounds to
    /// more than 57344 become infinity, and NaN stays NaN. The sign is kept.
    #[inline(always)]
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        Self(round::<5, 2>(value) as u8)
    }

    /// Converts the value to `f32`, exactly.
    #[inline(always)]
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        expand::<5, 2>(self.0 as u32)
    }

    /// Returns whether the value is NaN.
    #[must_use]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7f > 0x7c
    }
}

macro_rules! common {
    ($($float:ident),*) => {$(
        impl $float {
            /// Returns the value with these bits. Every bit pattern is valid.
            #[inline(always)]
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Returns the value's bits.
            #[inline(always)]
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Returns the value of this type that is nearest to `value`, with ties to even. `value` is rounded once,
            /// without a conversion to `f32` in between.
            #[must_use]
            pub const fn from_f64(value: f64) -> Self {
                Self::from_f32(narrow_to_odd(value))
            }

            /// Converts the value to `f64`, exactly.
            #[must_use]
            pub const fn to_f64(self) -> f64 {
                self.to_f32() as f64
            }
        }

        impl From<$float> for f32 {
            fn from(value: $float) -> f32 {
                value.to_f32()
            }
        }

        impl From<$float> for f64 {
            fn from(value: $float) -> f64 {
                value.to_f64()
            }
        }

        impl From<f32> for $float {
            /// Rounds, as `from_f32` does.
            fn from(value: f32) -> Self {
                Self::from_f32(value)
            }
        }

        impl PartialEq for $float {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $float {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl fmt::Display for $float {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Debug for $float {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }
    )*};
}

common!(F8E4M3, F8E5M2);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may")]

    use super::*;

    /// Returns the value of a pattern by the format's definition. Shares no code with the conversions.
    fn worth(bits: u8, mantissa_bits: u32, bias: i32) -> f64 {
        let magnitude = i32::from(bits & 0x7f);
        let exponent = magnitude >> mantissa_bits;
        let mantissa = f64::from(magnitude & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        // A power of two by its bits, which is exact; `powi` need not be.
        let power = |exponent: i32| f64::from_bits(((1023 + exponent) as u64) << 52);
        let absolute = if exponent == 0 { mantissa * power(1 - bias) } else { (1.0 + mantissa) * power(exponent - bias) };
        if bits >= 0x80 { -absolute } else { absolute }
    }

    /// A format as a table: the finite magnitudes in order, the pattern after the last, and the results of overflow and
    /// NaN.
    struct Format {
        magnitudes: Vec<f64>,
        overflow: u8,
        nan: u8,
    }

    fn e4m3() -> Format {
        Format { magnitudes: (0..0x7f).map(|bits| worth(bits, 3, 7)).collect(), overflow: 0x7f, nan: 0x7f }
    }

    fn e5m2() -> Format {
        Format { magnitudes: (0..0x7c).map(|bits| worth(bits, 2, 15)).collect(), overflow: 0x7c, nan: 0x7e }
    }

    /// Returns the nearest value of the table, ties to the even pattern. Overflow counts as one step above the largest.
    fn nearest(format: &Format, value: f64) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if value.is_nan() {
            return sign | format.nan;
        }
        let mut ladder = format.magnitudes.clone();
        let top = ladder[ladder.len() - 1];
        ladder.push(top + (top - ladder[ladder.len() - 2]));
        let value = value.abs().min(2.0 * top);
        let (best, _) = ladder
            .iter()
            .enumerate()
            .min_by(|a, b| {
                let (near, far) = ((a.1 - value).abs(), (b.1 - value).abs());
                near.total_cmp(&far).then((a.0 & 1).cmp(&(b.0 & 1)))
            })
            .unwrap();
        sign | if best == ladder.len() - 1 { format.overflow } else { best as u8 }
    }

    /// Returns every magnitude and every midpoint, with the `f32` neighbours of each, in both signs, and special
    /// values.
    fn probes(format: &Format) -> Vec<f32> {
        let mut ladder = format.magnitudes.clone();
        let top = ladder[ladder.len() - 1];
        ladder.push(top + (top - ladder[ladder.len() - 2]));
        ladder.push(top * 1.5);
        let mut probes = vec![f32::INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x007f_ffff)];
        for pair in ladder.windows(2).step_by(if cfg!(miri) { 23 } else { 1 }) {
            for point in [pair[0], (pair[0] + pair[1]) / 2.0] {
                let point = point as f32;
                probes.extend([point, point.next_up(), point.next_down()]);
                probes.extend((1..16).map(|part| pair[0] as f32 + (pair[1] - pair[0]) as f32 * part as f32 / 16.0));
            }
        }
        // Arbitrary patterns, evenly over the exponents.
        probes.extend((0..=u32::MAX).step_by(if cfg!(miri) { 399_999_959 } else { 3_999_971 }).map(f32::from_bits));
        let negated: Vec<f32> = probes.iter().map(|probe| -probe).collect();
        probes.extend(negated);
        probes
    }

    #[test]
    fn every_pattern_is_worth_what_the_format_says_and_comes_back() {
        for bits in 0..=255u8 {
            let (small, wide) = (F8E4M3::from_bits(bits), F8E5M2::from_bits(bits));
            assert_eq!((small.to_bits(), wide.to_bits()), (bits, bits));
            if bits & 0x7f == 0x7f {
                assert!(small.is_nan() && small.to_f32().is_nan(), "{bits:#x}");
                assert_eq!(F8E4M3::from_f32(small.to_f32()).to_bits(), bits);
            } else {
                assert_eq!(small.to_f64().to_bits(), worth(bits, 3, 7).to_bits(), "{bits:#x}");
                assert_eq!(F8E4M3::from_f32(small.to_f32()).to_bits(), bits);
            }
            match bits & 0x7f {
                0x7c => assert_eq!(wide.to_f32(), if bits < 128 { f32::INFINITY } else { f32::NEG_INFINITY }),
                0x7d..=0x7f => assert!(wide.is_nan() && wide.to_f32().is_nan(), "{bits:#x}"),
                _ => assert_eq!(wide.to_f64().to_bits(), worth(bits, 2, 15).to_bits(), "{bits:#x}"),
            }
            let back = F8E5M2::from_f32(wide.to_f32()).to_bits();
            assert_eq!(back, if wide.is_nan() { bits & 0x80 | 0x7e } else { bits }, "{bits:#x}");
        }
    }

    #[test]
    fn rounding_agrees_with_the_nearest_of_the_table() {
        for (format, convert) in
            [(e4m3(), (|x| F8E4M3::from_f32(x).to_bits()) as fn(f32) -> u8), (e5m2(), |x| F8E5M2::from_f32(x).to_bits())]
        {
            for probe in probes(&format) {
                // A NaN may lose its sign when it is widened.
                let sign = if probe.is_sign_negative() { -1.0 } else { 1.0 };
                let expected = nearest(&format, f64::from(probe).copysign(sign));
                assert_eq!(convert(probe), expected, "{probe:e} ({:#010x})", probe.to_bits());
            }
        }
    }

    #[test]
    fn a_double_is_rounded_once() {
        // Just above and just below the tie between 1 and the next number, by less than an f32 can represent.
        for step in [1e-12, 1e-16 * 4.0] {
            assert_eq!(F8E4M3::from_f64(1.0625 + step).to_f32(), 1.125);
            assert_eq!(F8E4M3::from_f64(1.0625 - step).to_f32(), 1.0);
            assert_eq!(F8E5M2::from_f64(-1.125 - step).to_f32(), -1.25);
            assert_eq!(F8E5M2::from_f64(-1.125 + step).to_f32(), -1.0);
        }
        assert_eq!(F8E4M3::from_f64(1.0625).to_f32(), 1.0);
        assert_eq!(F8E4M3::from_f64(1e-300).to_bits(), 0);
        assert_eq!(F8E5M2::from_f64(-1e-300).to_bits(), 0x80);
        assert_eq!(F8E5M2::from_f64(1e300), F8E5M2::INFINITY);
        assert!(F8E4M3::from_f64(f64::NEG_INFINITY).is_nan());
        assert!(F8E5M2::from_f64(f64::NAN).is_nan());
        for (format, convert) in
            [(e4m3(), (|x| F8E4M3::from_f64(x).to_bits()) as fn(f64) -> u8), (e5m2(), |x| F8E5M2::from_f64(x).to_bits())]
        {
            for probe in probes(&format).into_iter().map(f64::from).filter(|probe| probe.is_finite()) {
                for probe in [probe, probe.next_up(), probe.next_down()] {
                    assert_eq!(convert(probe), nearest(&format, probe), "{probe:e}");
                }
            }
        }
    }

    #[test]
    fn comparison_and_text_are_those_of_numbers() {
        assert_eq!(F8E4M3::from_bits(0), F8E4M3::from_bits(0x80));
        assert_ne!(F8E4M3::NAN, F8E4M3::NAN);
        assert_ne!(F8E5M2::from_bits(0x7d), F8E5M2::from_bits(0x7d));
        assert!(F8E5M2::MIN < F8E5M2::MAX && F8E5M2::MAX < F8E5M2::INFINITY);
        assert_eq!(F8E4M3::NAN.partial_cmp(&F8E4M3::MAX), None);
        assert_eq!((F8E4M3::MAX.to_f32(), F8E4M3::MIN.to_f32()), (448.0, -448.0));
        assert_eq!((F8E5M2::MAX.to_f32(), F8E5M2::MIN_POSITIVE_SUBNORMAL.to_f32()), (57344.0, 1.0 / 65536.0));
        assert_eq!(format!("{} {:?} {:.1}", F8E4M3::from_f32(1.5), F8E5M2::NAN, F8E4M3::MIN), "1.5 NaN -448.0");
        assert_eq!(f32::from(F8E4M3::from(2.0f32)) + f32::from(F8E5M2::from(0.5f32)), 2.5);
    }

    #[test]
    fn the_same_arithmetic_converts_halves() {
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 61 } else { 1 }) {
            let (ours, theirs) = (expand::<5, 10>(u32::from(bits)), half::f16::from_bits(bits));
            assert!(ours.to_bits() == theirs.to_f32().to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#x}");
        }
        for bits in (0..=u32::MAX).step_by(if cfg!(miri) { 9_999_991 } else { 50_021 }) {
            let value = f32::from_bits(bits);
            let theirs = half::f16::from_f32(value);
            if value.is_nan() {
                assert!(half::f16::from_bits(round::<5, 10>(value) as u16).is_nan(), "{bits:#x}");
            } else {
                assert_eq!(round::<5, 10>(value), u32::from(theirs.to_bits()), "{bits:#x}");
            }
        }
    }
}
