//! The element types of gradients.

use half::{bf16, f16};

use crate::element::Element;

/// The float types that gradients come in: `f32`, `f64`, `f16`, `bf16`. No others can implement it, since none are an [`Element`].
pub trait Float: Element {
    /// Its value, exact but for an `f64`, which is rounded to nearest.
    fn to_f32(self) -> f32;

    /// Its value.
    fn to_f64(self) -> f64;

    /// The nearest of this type.
    fn from_f32(value: f32) -> Self;

    /// The nearest of this type.
    fn from_f64(value: f64) -> Self;

    /// The sum of two, rounded once.
    #[must_use]
    fn plus(self, other: Self) -> Self;
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
                Self::from_f64(value)
            }
            fn plus(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }
        }
    )*};
}

sixteen_bits!(f16, bf16);
