//! Floating-point formats: exact widening to `f64`, and narrowing that rounds once.

use crate::types::Type;

/// The rounding of a result that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Round {
    /// To the nearest, ties to even (`.rn`).
    Nearest,
    /// Towards zero (`.rz`).
    Zero,
    /// Towards negative infinity (`.rm`).
    Down,
    /// Towards positive infinity (`.rp`).
    Up,
    /// To the nearest, ties away from zero (`.rna`).
    Away,
}

impl Round {
    pub(crate) fn named(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "rn" | "rni" => Self::Nearest,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            "rna" => Self::Away,
            _ => return None,
        })
    }

    pub(crate) const fn of(code: u8) -> Self {
        match code {
            0 => Self::Nearest,
            1 => Self::Zero,
            2 => Self::Down,
            3 => Self::Up,
            _ => Self::Away,
        }
    }
}

/// A binary format. Its NaN is the one the hardware writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    /// Bits of the exponent.
    exponent: u32,
    /// Bits of the fraction.
    fraction: u32,
    /// The largest finite value, without sign.
    largest: u64,
    /// The result of an overflow.
    overflow: u64,
    nan: u64,
}

pub(crate) const F16: Format = Format { exponent: 5, fraction: 10, largest: 0x7bff, overflow: 0x7c00, nan: 0x7fff };
pub(crate) const BF16: Format = Format { exponent: 8, fraction: 7, largest: 0x7f7f, overflow: 0x7f80, nan: 0x7fff };
pub(crate) const F32: Format = Format { exponent: 8, fraction: 23, largest: 0x7f7f_ffff, overflow: 0x7f80_0000, nan: 0x7fff_ffff };
pub(crate) const F64: Format =
    Format { exponent: 11, fraction: 52, largest: 0x7fef_ffff_ffff_ffff, overflow: 0x7ff0_0000_0000_0000, nan: 0x7ff8_0000_0000_0000 };
/// The two formats of eight bits, both in the form of conversions with `.satfinite`.
pub(crate) const E4M3: Format = Format { exponent: 4, fraction: 3, largest: 0x7e, overflow: 0x7e, nan: 0x7f };
pub(crate) const E5M2: Format = Format { exponent: 5, fraction: 2, largest: 0x7b, overflow: 0x7b, nan: 0x7f };

impl Format {
    pub(crate) fn of(kind: Type) -> Option<Self> {
        Some(match kind {
            Type::F16 | Type::F16x2 => F16,
            Type::Bf16 | Type::Bf16x2 => BF16,
            Type::F32 => F32,
            Type::F64 => F64,
            Type::E4m3x2 => E4M3,
            Type::E5m2x2 => E5M2,
            _ => return None,
        })
    }

    pub(crate) const fn bits(self) -> u32 {
        1 + self.exponent + self.fraction
    }

    const fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// Returns the value of a bit pattern, exactly.
    #[inline]
    pub(crate) fn widen(self, bits: u64) -> f64 {
        let magnitude = bits & ((1 << (self.bits() - 1)) - 1);
        let sign = (bits >> (self.bits() - 1) & 1) << 63;
        let exponent = magnitude >> self.fraction;
        let fraction = magnitude & ((1 << self.fraction) - 1);
        let top = (1 << self.exponent) - 1;
        if self.fraction == 3 && magnitude == self.nan {
            return f64::NAN;
        }
        let wide = if exponent == top && self.fraction != 3 {
            if fraction == 0 { f64::INFINITY.to_bits() } else { return f64::NAN }
        } else if exponent == 0 && self.fraction != 52 {
            (fraction as f64 * exp2(1 - self.bias() - self.fraction as i32)).to_bits()
        } else if self.fraction == 52 {
            magnitude
        } else {
            ((exponent as i64 - i64::from(self.bias()) + 1023) as u64) << 52 | fraction << (52 - self.fraction)
        };
        f64::from_bits(sign | wide)
    }

    /// Converts a value to this format, rounded once.
    #[inline]
    pub(crate) fn narrow(self, value: f64, round: Round) -> u64 {
        let negative = value.is_sign_negative();
        let bits = value.to_bits() & !(1 << 63);
        match bits >> 52 {
            0x7ff if value.is_nan() => self.nan,
            0x7ff if self.fraction <= 3 => self.signed(self.overflow, negative),
            0x7ff => self.signed(self.overflow, negative),
            0 => self.round(negative, bits, -1074, round),
            exponent => self.round(negative, bits & ((1 << 52) - 1) | 1 << 52, exponent as i32 - 1075, round),
        }
    }

    fn signed(self, magnitude: u64, negative: bool) -> u64 {
        magnitude | u64::from(negative) << (self.bits() - 1)
    }

    /// Returns `±significand · 2^exponent`, rounded once.
    pub(crate) fn round(self, negative: bool, significand: u64, exponent: i32, round: Round) -> u64 {
        if significand == 0 {
            return self.signed(0, negative);
        }
        let shift = significand.leading_zeros();
        let significand = significand << shift;
        let exponent = exponent + 63 - shift as i32;
        let smallest = 1 - self.bias();
        let dropped = 63 - self.fraction + (smallest - exponent).max(0) as u32;
        let (kept, rest, half) = match dropped {
            ..64 => (significand >> dropped, significand << (64 - dropped), 1 << 63),
            64 => (0, significand, 1 << 63),
            _ => (0, 1, 2),
        };
        let up = match round {
            Round::Nearest => rest > half || rest == half && kept & 1 == 1,
            Round::Away => rest >= half,
            Round::Zero => false,
            Round::Down => negative && rest > 0,
            Round::Up => !negative && rest > 0,
        };
        let magnitude = (((exponent - smallest).max(0) as u64) << self.fraction) + kept + u64::from(up);
        self.signed(if magnitude > self.largest { self.beyond(negative, round) } else { magnitude }, negative)
    }

    fn beyond(self, negative: bool, round: Round) -> u64 {
        let away = match round {
            Round::Nearest | Round::Away => true,
            Round::Zero => false,
            Round::Down => negative,
            Round::Up => !negative,
        };
        if away { self.overflow } else { self.largest }
    }

    /// Turns subnormal numbers into zeros with their sign.
    pub(crate) fn flush(self, bits: u64) -> u64 {
        let exponent = bits >> self.fraction & ((1 << self.exponent) - 1);
        if exponent == 0 { bits & 1 << (self.bits() - 1) } else { bits }
    }
}

/// Returns a power of two that an `f64` holds as a normal number.
fn exp2(power: i32) -> f64 {
    f64::from_bits(((power + 1023) as u64) << 52)
}

/// Returns a sum that is to be rounded again: if it is inexact, the neighbour whose last bit is odd.
///
/// Rounding it to a format with at least two bits less equals rounding the exact sum.
pub(crate) fn sum_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let virtual_b = sum - a;
    to_odd(sum, (a - (sum - virtual_b)) + (b - virtual_b))
}

/// Returns the odd one of the two neighbours of `value + error`, where `value` is the rounded result.
pub(crate) fn to_odd(value: f64, error: f64) -> f64 {
    let bits = value.to_bits();
    if !value.is_finite() || error == 0.0 || error.is_nan() || bits & 1 == 1 {
        return value;
    }
    f64::from_bits(if (error > 0.0) == (value > 0.0) { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
#[path = "../../../src/base/random.rs"]
mod random;

#[cfg(test)]
mod tests {
    use super::random::Random;
    use super::*;

    #[test]
    fn every_pattern_survives_widening_and_narrowing() {
        for format in [F16, BF16] {
            for bits in 0..=0xffff_u64 {
                let value = format.widen(bits);
                if !value.is_nan() {
                    assert_eq!(format.narrow(value, Round::Nearest), bits, "{format:?}");
                }
            }
        }
    }

    #[test]
    fn narrowing_to_f32_agrees_with_the_processor() {
        let mut random = Random(1);
        for step in 0..1_000_000_u64 {
            let exponent = random.next() % 310 + 1023 - 160;
            let value = f64::from_bits(random.next() & 0x800f_ffff_ffff_ffff | exponent << 52);
            assert_eq!(F32.narrow(value, Round::Nearest), u64::from((value as f32).to_bits()), "step {step}: {value:e}");
            assert_eq!(F32.widen(u64::from((value as f32).to_bits())), f64::from(value as f32), "step {step}: {value:e}");
        }
    }

    #[test]
    fn directed_rounding_brackets_the_value() {
        for value in [1.0 + 1e-9, 3.3e38, 1e-40, 1e-50, 65519.9, 65520.0001, 5.9e-8, 2.9e-8] {
            for format in [F32, F16, BF16] {
                for sign in [1.0, -1.0] {
                    let value = value * sign;
                    let low = format.widen(format.narrow(value, Round::Down));
                    let high = format.widen(format.narrow(value, Round::Up));
                    assert!(low <= value && value <= high && low < high, "{format:?} {value:e}: {low:e} {high:e}");
                    let cut = format.widen(format.narrow(value, Round::Zero));
                    assert_eq!(cut, if sign > 0.0 { low } else { high }, "{format:?} {value:e}");
                }
            }
        }
    }

    #[test]
    fn eight_bit_formats_saturate() {
        assert_eq!(E4M3.narrow(448.0, Round::Nearest), 0x7e);
        assert_eq!(E4M3.narrow(-1e9, Round::Nearest), 0xfe);
        assert_eq!(E4M3.widen(0x7e), 448.0);
        assert_eq!(E4M3.widen(1), 1.0 / 512.0);
        assert!(E4M3.widen(0xff).is_nan());
        assert_eq!(E5M2.narrow(f64::INFINITY, Round::Nearest), 0x7b);
        assert_eq!(E5M2.narrow(f64::NAN, Round::Nearest), 0x7f);
        assert_eq!(E5M2.widen(0x7c), f64::INFINITY);
    }
}
