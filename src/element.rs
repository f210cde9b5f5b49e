//! Element types: what can be moved, and what can be reduced.

#![expect(unsafe_code, reason = "Data and Element are unsafe traits: they promise what bytes mean")]

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::Error;
pub use crate::float8::{F8E4M3, F8E5M2};

mod sealed {
    pub trait Sealed {}
}

/// The element types that reductions know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE float.
    F32 = 0,
    /// 64-bit IEEE float.
    F64 = 1,
    /// 16-bit IEEE float.
    F16 = 2,
    /// The upper half of a 32-bit float.
    Bf16 = 3,
    /// 8-bit float, 4 exponent bits, no infinities (OCP E4M3, "fn").
    F8E4M3 = 4,
    /// 8-bit float, 5 exponent bits (OCP E5M2).
    F8E5M2 = 5,
    /// 8-bit signed integer.
    I8 = 6,
    /// 16-bit signed integer.
    I16 = 7,
    /// 32-bit signed integer.
    I32 = 8,
    /// 64-bit signed integer.
    I64 = 9,
    /// 8-bit unsigned integer.
    U8 = 10,
    /// 16-bit unsigned integer.
    U16 = 11,
    /// 32-bit unsigned integer.
    U32 = 12,
    /// 64-bit unsigned integer.
    U64 = 13,
    /// A truth value, one byte, 0 or 1.
    Bool = 14,
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [DType; 15] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
    ];

    /// The size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Whether it is one of the six float types.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2)
    }

    /// The name used in messages and on command lines: `f32`, `bf16`, `f8e4m3`, `u8`, `bool` …
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::Bool => "bool",
        }
    }

    /// The type with this number, as it travels in a fingerprint.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Understands the crate's names and those of nccl-tests (`float`, `half`, `bfloat16`, `int8`, `uint64` …).
    fn from_str(text: &str) -> Result<Self, Error> {
        let alias = match text {
            "float" | "float32" => "f32",
            "double" | "float64" => "f64",
            "half" | "float16" => "f16",
            "bfloat16" => "bf16",
            "int8" => "i8",
            "int16" => "i16",
            "int32" | "int" => "i32",
            "int64" => "i64",
            "uint8" => "u8",
            "uint16" => "u16",
            "uint32" => "u32",
            "uint64" => "u64",
            other => other,
        };
        DType::ALL.into_iter().find(|dtype| dtype.name() == alias).ok_or_else(|| {
            let known: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
            Error::config(format!("element type {text:?}"), format!("not known; one of {}", known.join(", ")))
        })
    }
}

/// Plain data: what broadcasts, gathers and sends can move.
///
/// Implemented for every [`Element`] and for arrays of plain data. Implement it for your own `#[repr(C)]` structs to move
/// them, and to reduce them with a [`CustomOp`](crate::CustomOp).
///
/// # Safety
///
/// - Every byte of a value is initialised: no padding, no `MaybeUninit`, no references or pointers that mean something in
///   one process only.
/// - Any bytes that were read from a value of this type, in any process of the job, are a value of this type again.
/// - `DTYPE` is left at its default by every implementation outside this crate.
pub unsafe trait Data: Copy + Send + Sync + 'static {
    /// The element type where it is one that reductions know.
    #[doc(hidden)]
    const DTYPE: Option<DType> = None;
}

// SAFETY: an array is its elements side by side, without padding, and each obeys the contract.
unsafe impl<T: Data, const N: usize> Data for [T; N] {}

/// The element types that the built-in reductions work on. Sealed: the set is fixed.
///
/// # Safety
///
/// `DTYPE` (through [`Data`]) names exactly this type, and its size is `DTYPE`'s.
pub unsafe trait Element: Data + sealed::Sealed + PartialEq + fmt::Debug + Default {
    /// The element type's name at run time.
    const ELEMENT_TYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $rust {}
        // SAFETY: a primitive or a transparent wrapper of one: no padding, and any bytes read from one are one.
        unsafe impl Data for $rust {
            const DTYPE: Option<DType> = Some(DType::$dtype);
        }
        // SAFETY: the table below pairs each type with its own name; sizes are checked at compile time.
        unsafe impl Element for $rust {
            const ELEMENT_TYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$rust>() == DType::$dtype.size_bytes());
    )*};
}

elements! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => Bf16,
    F8E4M3 => F8E4M3,
    F8E5M2 => F8E5M2,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
    bool => Bool,
}

/// What the elements of a call are, as its fingerprint says it: a type that reductions know, or plain data of some size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TypeTag {
    /// One of the fifteen.
    Scalar(DType),
    /// Plain data of this many bytes.
    Plain(u32),
}

impl TypeTag {
    /// The tag of `T`.
    pub(crate) const fn of<T: Data>() -> Self {
        match T::DTYPE {
            Some(dtype) => TypeTag::Scalar(dtype),
            None => TypeTag::Plain(size_of::<T>() as u32),
        }
    }

    /// As it travels: the type's number, or the size with the top bit set.
    pub(crate) const fn to_code(self) -> u32 {
        match self {
            TypeTag::Scalar(dtype) => dtype as u32,
            TypeTag::Plain(size) => size | 1 << 31,
        }
    }

    /// The reverse of [`TypeTag::to_code`]; `None` for a number that no version of this crate sends.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        if code >> 31 == 1 {
            return Some(TypeTag::Plain(code & !(1 << 31)));
        }
        DType::from_code(u8::try_from(code).ok()?).map(TypeTag::Scalar)
    }
}

impl fmt::Display for TypeTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TypeTag::Scalar(dtype) => dtype.fmt(f),
            TypeTag::Plain(size) => write!(f, "plain data of {size} B"),
        }
    }
}
