//! The two 8-bit floats. Values beyond the largest finite one saturate, as in NVIDIA's conversions.

/// The width of the mantissa, the bias of the exponent and the largest value.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    mantissa: u32,
    bias: i32,
    largest: u8,
}

/// 1-4-3: no infinities, one NaN per sign.
pub(crate) const E4M3: Format = Format { mantissa: 3, bias: 7, largest: 0x7e };
/// 1-5-2: like a short `f16`.
pub(crate) const E5M2: Format = Format { mantissa: 2, bias: 15, largest: 0x7b };

/// Decodes eight bits, exactly.
pub(crate) fn decode(format: Format, bits: u8) -> f32 {
    let Format { mantissa, bias, largest } = format;
    let magnitude = bits & 0x7f;
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    if magnitude > largest {
        return if mantissa == 2 && magnitude == 0x7c { sign * f32::INFINITY } else { f32::NAN };
    }
    let (exponent, fraction) = (i32::from(magnitude >> mantissa), f32::from(magnitude & ((1 << mantissa) - 1)));
    let unit = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
    let steps = if exponent == 0 { fraction } else { fraction + f32::from(1u8 << mantissa) };
    sign * steps * unit(exponent.max(1) - bias - mantissa as i32)
}

/// Encodes as the nearest eight bits, ties to even; a value that is too large becomes the largest finite value.
pub(crate) fn encode(format: Format, value: f32) -> u8 {
    let Format { mantissa, bias, largest } = format;
    let bits = value.to_bits();
    let sign = (bits >> 24) as u8 & 0x80;
    if !value.is_finite() {
        return if value.is_nan() { 0x7f } else { sign | largest };
    }
    let exponent = ((bits >> 23) & 0xff) as i32 - 127;
    // The step between two neighbours at this size; values below the normal range all share the smallest one.
    let step = exponent.max(1 - bias) - mantissa as i32;
    let steps = (value.abs() * f32::from_bits(((127 - step) as u32) << 23)).round_ties_even();
    // Carries from the mantissa into the exponent are correct without further steps.
    let encoded = steps as i64 + (i64::from(exponent.max(1 - bias) + bias - 1) << mantissa);
    sign | encoded.min(i64::from(largest)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds the nearest value by searching through all, ties to the even code.
    fn nearest(format: Format, value: f32) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let largest = f64::from(decode(format, format.largest));
        let distance = |code: u8| (f64::from(decode(format, code)) - f64::from(value.abs()).min(largest)).abs();
        let best = (0..=format.largest).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
        sign | best.unwrap_or(0)
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for format in [E4M3, E5M2] {
            for code in (0..=255u8).filter(|code| code & 0x7f <= format.largest) {
                assert_eq!(encode(format, decode(format, code)), code);
            }
        }
        assert_eq!(decode(E4M3, 0x7e), 448.0);
        assert_eq!(decode(E5M2, 0x7b), 57344.0);
        assert_eq!(decode(E5M2, 0xfc), f32::NEG_INFINITY);
        assert!(decode(E4M3, 0xff).is_nan() && decode(E5M2, 0x7d).is_nan());
    }

    #[test]
    fn conversion_takes_the_nearest_value_and_saturates() {
        for format in [E4M3, E5M2] {
            for bits in (0..0x7f80_0000u32).step_by(0x6_1803) {
                for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    assert_eq!(encode(format, value), nearest(format, value), "{value:e}");
                }
            }
            assert_eq!(encode(format, f32::NEG_INFINITY), 0x80 | format.largest);
            assert_eq!(encode(format, f32::NAN) & 0x7f, 0x7f);
        }
    }
}
