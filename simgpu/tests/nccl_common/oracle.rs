//! The results of reductions, computed in another way: every float is split into exponent and fraction and rounded in
//! 64 bits.

/// Sizes of the types by number.
pub const SIZES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

pub const SUM: i32 = 0;
pub const PROD: i32 = 1;
pub const MAX: i32 = 2;
pub const MIN: i32 = 3;
pub const AVG: i32 = 4;

/// A float format: bits of exponent and fraction.
#[derive(Clone, Copy)]
struct Format {
    exponent: u32,
    fraction: u32,
    /// 8-bit floats stay finite.
    saturates: bool,
}

fn format(kind: usize) -> Option<Format> {
    let (exponent, fraction) = match kind {
        6 => (5, 10),
        7 => (8, 23),
        9 => (8, 7),
        10 => (4, 3),
        11 => (5, 2),
        _ => return None,
    };
    Some(Format { exponent, fraction, saturates: kind >= 10 })
}

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn decode(self, bits: u64) -> f64 {
        let magnitude = bits & ((1 << (self.exponent + self.fraction)) - 1);
        let sign = if bits >> (self.exponent + self.fraction) & 1 == 1 { -1.0 } else { 1.0 };
        let (exponent, fraction) = (magnitude >> self.fraction, magnitude & ((1 << self.fraction) - 1));
        let all_ones = exponent == (1 << self.exponent) - 1;
        if self.exponent == 4 && magnitude == 0x7f || self.exponent != 4 && all_ones && fraction != 0 {
            return f64::NAN;
        }
        if self.exponent != 4 && all_ones {
            return sign * f64::INFINITY;
        }
        let steps = if exponent == 0 { fraction } else { fraction + (1 << self.fraction) };
        sign * steps as f64 * 2f64.powi((exponent.max(1) as i32) - self.bias() - self.fraction as i32)
    }

    fn largest(self) -> f64 {
        match self.exponent {
            4 => 448.0,
            exponent => (2.0 - 0.5f64.powi(self.fraction as i32)) * 2f64.powi((1 << (exponent - 1)) - 1),
        }
    }

    /// Returns the nearest value of the format, ties to even.
    fn round(self, value: f64) -> f64 {
        if !value.is_finite() || value == 0.0 {
            return if self.saturates && value.is_infinite() { self.largest().copysign(value) } else { value };
        }
        let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(1 - self.bias());
        let step = 2f64.powi(exponent - self.fraction as i32);
        let rounded = (value / step).round_ties_even() * step;
        if rounded.abs() <= self.largest() {
            rounded
        } else if self.saturates {
            self.largest().copysign(value)
        } else {
            f64::INFINITY.copysign(value)
        }
    }

    /// Returns the bits of a value of the format.
    fn encode(self, value: f64) -> u64 {
        (0..1u64 << (1 + self.exponent + self.fraction).min(16))
            .find(|&bits| self.decode(bits).to_bits() == value.to_bits())
            .unwrap_or_else(|| panic!("{value} is no value of the format"))
    }
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// An element in a form suitable for arithmetic.
#[derive(Clone, Copy)]
enum Element {
    Whole(i128),
    Real(f64),
}

fn element(kind: usize, bytes: &[u8]) -> Element {
    let bits = word(bytes);
    match kind {
        0 => Element::Whole((bits as i8).into()),
        2 => Element::Whole((bits as i32).into()),
        4 => Element::Whole((bits as i64).into()),
        1 | 3 | 5 => Element::Whole(bits.into()),
        8 => Element::Real(f64::from_bits(bits)),
        _ => Element::Real(format(kind).unwrap().decode(bits)),
    }
}

/// Truncates a whole number to its type, with its sign.
fn cut(kind: usize, value: i128) -> i128 {
    let bits = SIZES[kind] as u32 * 8;
    let low = value & ((1i128 << bits) - 1);
    if kind.is_multiple_of(2) && low >> (bits - 1) == 1 { low - (1i128 << bits) } else { low }
}

fn round(kind: usize, value: f64) -> f64 {
    match format(kind) {
        // 8-bit floats are computed in 16 bits first.
        Some(short) if short.saturates => short.round(format(6).unwrap().round(value)),
        Some(format) => format.round(value),
        None => value,
    }
}

fn bytes_of(kind: usize, element: Element) -> Vec<u8> {
    let bits = match element {
        Element::Whole(value) => value as u64,
        Element::Real(value) if kind == 8 => value.to_bits(),
        Element::Real(value) if kind == 7 => (value as f32).to_bits().into(),
        Element::Real(value) if value.is_nan() => return vec![0xff; SIZES[kind]],
        Element::Real(value) => format(kind).unwrap().encode(value),
    };
    bits.to_le_bytes()[..SIZES[kind]].to_vec()
}

fn combine(kind: usize, op: i32, a: Element, b: Element) -> Element {
    match (a, b) {
        (Element::Whole(a), Element::Whole(b)) => Element::Whole(match op {
            PROD => cut(kind, ((a as u64 as u128).wrapping_mul(b as u64 as u128)) as i128),
            MAX => a.max(b),
            MIN => a.min(b),
            _ => cut(kind, a + b),
        }),
        (Element::Real(a), Element::Real(b)) => Element::Real(match op {
            PROD => round(kind, a * b),
            MAX | MIN if a.is_nan() => b,
            MAX | MIN if b.is_nan() => a,
            MAX => {
                if a.total_cmp(&b).is_lt() {
                    b
                } else {
                    a
                }
            }
            MIN => {
                if a.total_cmp(&b).is_gt() {
                    b
                } else {
                    a
                }
            }
            _ => round(kind, a + b),
        }),
        _ => unreachable!("both are of one type"),
    }
}

/// Returns the result for ranks with these `inputs`; `scalars` are those of each rank if the operator multiplies
/// first.
pub fn reduce(kind: usize, op: i32, inputs: &[Vec<u8>], scalars: Option<&[Vec<u8>]>) -> Vec<u8> {
    let size = SIZES[kind];
    let ranks = inputs.len();
    let mut result = Vec::new();
    for at in (0..inputs[0].len()).step_by(size) {
        let mut sum = None;
        for (rank, input) in inputs.iter().enumerate() {
            let mut value = element(kind, &input[at..at + size]);
            if let Some(scalars) = scalars {
                value = combine(kind, PROD, value, element(kind, &scalars[rank]));
            } else if let (AVG, Element::Real(x)) = (op, value) {
                value = Element::Real(round(kind, x * round(kind, 1.0 / ranks as f64)));
            }
            sum = Some(sum.map_or(value, |sum| combine(kind, op, sum, value)));
        }
        let sum = match sum {
            Some(Element::Whole(sum)) if op == AVG && scalars.is_none() => Element::Whole(sum / ranks as i128),
            sum => sum.unwrap(),
        };
        result.extend(bytes_of(kind, sum));
    }
    result
}

/// Turns random bytes into elements with meaningful sums and products: NaN and infinite floats become small ones.
pub fn tame(kind: usize, bytes: &mut [u8]) {
    let size = SIZES[kind];
    for at in (0..bytes.len()).step_by(size) {
        if let Element::Real(value) = element(kind, &bytes[at..at + size])
            && !(value.is_finite() && (1e-3..1e3).contains(&value.abs()))
        {
            // A float that keeps its sign and fraction, with the exponent of one.
            let one: Vec<u8> = match kind {
                6 => 0x3c00u16.to_le_bytes().to_vec(),
                7 => 1f32.to_le_bytes().to_vec(),
                8 => 1f64.to_le_bytes().to_vec(),
                9 => 0x3f80u16.to_le_bytes().to_vec(),
                10 => vec![0x38],
                _ => vec![0x3c],
            };
            let low = bytes[at];
            bytes[at..at + size].copy_from_slice(&one);
            bytes[at] |= low & 3;
        }
    }
}

/// Whether two results are the same; any two NaNs count as equal.
pub fn same(kind: usize, a: &[u8], b: &[u8]) -> bool {
    let size = SIZES[kind];
    a.len() == b.len()
        && a.chunks(size).zip(b.chunks(size)).all(|(a, b)| {
            a == b || matches!((element(kind, a), element(kind, b)), (Element::Real(a), Element::Real(b)) if a.is_nan() && b.is_nan())
        })
}
