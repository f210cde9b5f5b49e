//! The parameters of a model, and the element types of their gradients.

use std::fmt;

use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use collectives::{DType, Data, Element};
use collectives::{Error, Result};

/// The description of one parameter of a model, and of the parameter's gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The parameter's name, for errors and checkpoints. If you save no checkpoints, the name need not be unique.
    pub name: String,
    /// The lengths of the parameter's dimensions. The list is empty for a single number.
    pub shape: Vec<usize>,
    /// The type of the gradient's elements: `f32`, `f64`, `f16` or `bf16`.
    pub dtype: DType,
}

impl Parameter {
    /// Creates a parameter whose gradient has elements of type `T`.
    #[must_use]
    pub fn new<T: Float>(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), dtype: T::ELEMENT_TYPE }
    }

    /// Returns the number of its elements; `None` if they do not fit into the address space.
    pub(super) fn len(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let len = self.shape.iter().try_fold(1_usize, |len, side| len.checked_mul(*side))?;
        len.checked_mul(self.dtype.size_bytes()).filter(|bytes| *bytes <= isize::MAX as usize).map(|_| len)
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({}{:?})", self.name, self.dtype, self.shape)
    }
}

/// Checks that a buffer of `len` `T`s has the expected type and length.
pub(super) fn check_fit<T: Data>(
    call: &'static str,
    whose: fmt::Arguments<'_>,
    (dtype, wanted): (DType, Option<usize>),
    len: usize,
) -> Result<()> {
    if T::DTYPE != Some(dtype) {
        let got = T::DTYPE.map_or("other data", DType::name);
        return Err(Error::argument(call, format!("{whose}: elements of {got} were passed")));
    }
    if Some(len) != wanted {
        return Err(Error::argument(call, format!("{whose}: {len} elements were passed")));
    }
    Ok(())
}

/// The float types of gradients: `f32`, `f64`, `f16`, `bf16`. No other type can implement this trait, because no other
/// float is an [`Element`].
pub trait Float: Element {
    /// Returns this number as an `f32`. An `f64` is rounded to the nearest `f32`. All other conversions are exact.
    fn to_f32(self) -> f32;

    /// Returns this number as an `f64`.
    fn to_f64(self) -> f64;

    /// Returns the value of this type that is nearest to `value`.
    fn from_f32(value: f32) -> Self;

    /// Returns the value of this type that is nearest to `value`.
    fn from_f64(value: f64) -> Self;

    /// Returns the sum of this number and `other`, rounded once.
    #[must_use]
    fn plus(self, other: Self) -> Self;

    /// Applies [`to_f32`](Float::to_f32) to each element. If the slices' lengths differ, converts as many elements as
    /// the shorter slice has.
    fn widen(from: &[Self], into: &mut [f32]) {
        into.iter_mut().zip(from).for_each(|(wide, narrow)| *wide = narrow.to_f32());
    }

    /// Applies [`from_f32`](Float::from_f32) to each element. If the slices' lengths differ, converts as many elements
    /// as the shorter slice has.
    fn narrow(from: &[f32], into: &mut [Self]) {
        into.iter_mut().zip(from).for_each(|(narrow, wide)| *narrow = Self::from_f32(*wide));
    }
}

impl Float for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn from_f32(value: f32) -> Self {
        value
    }
    fn from_f64(value: f64) -> Self {
        value as f32
    }
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl Float for f64 {
    fn to_f32(self) -> f32 {
        self as f32
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f32(value: f32) -> Self {
        value.into()
    }
    fn from_f64(value: f64) -> Self {
        value
    }
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

/// Rounds `value` to odd as an `f32`: truncates it, and sets the last bit if bits were lost. So if you round the result
/// to a narrower format, you get the same number as if you rounded `value` itself to this format.
#[inline]
fn narrow_to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let back = nearest as f64;
    if back == value || value.is_nan() {
        return nearest;
    }
    // One of the two neighbours of `value` is odd: the nearest `f32`, or the one on the other side of `value`.
    let bits = nearest.to_bits();
    if bits & 1 == 1 {
        nearest
    } else if (back > value) == (value > 0.0) {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

macro_rules! sixteen_bits {
    ($($half:ty),*) => {$(
        impl Float for $half {
            fn to_f32(self) -> f32 {
                self.to_f32()
            }
            fn to_f64(self) -> f64 {
                self.to_f64()
            }
            fn from_f32(value: f32) -> Self {
                Self::from_f32(value)
            }
            fn from_f64(value: f64) -> Self {
                // The conversion of the crate `half` rounds twice, or drops the bits that decide a tie.
                Self::from_f32(narrow_to_odd(value))
            }
            fn plus(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }
            fn widen(from: &[Self], into: &mut [f32]) {
                let len = from.len().min(into.len());
                from[..len].convert_to_f32_slice(&mut into[..len]);
            }
            fn narrow(from: &[f32], into: &mut [Self]) {
                let len = from.len().min(into.len());
                into[..len].convert_from_f32_slice(&from[..len]);
            }
        }
    )*};
}

sixteen_bits!(f16, bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_next_to_a_tie_go_to_their_own_side() {
        // The tie is halfway between 1 and the next number. An f32 cannot distinguish the numbers below from the tie.
        for (tie, next) in [(1.0 + 2_f64.powi(-11), 1.0 + 2_f64.powi(-10)), (-1.0 - 2_f64.powi(-11), -1.0 - 2_f64.powi(-10))] {
            assert_eq!(<f16 as Float>::from_f64(tie * (1.0 + 1e-14)).to_f64(), next);
            assert_eq!(<f16 as Float>::from_f64(tie * (1.0 - 1e-14)).to_f64(), tie.signum());
        }
        for (tie, next) in [(1.0 + 2_f64.powi(-8), 1.0 + 2_f64.powi(-7)), (-1.0 - 2_f64.powi(-8), -1.0 - 2_f64.powi(-7))] {
            assert_eq!(<bf16 as Float>::from_f64(tie * (1.0 + 1e-14)).to_f64(), next);
            assert_eq!(<bf16 as Float>::from_f64(tie * (1.0 - 1e-14)).to_f64(), tie.signum());
        }
    }
}
