//! Element types: types that can be moved, and types that can be reduced.

#![expect(unsafe_code, reason = "Data and Element are unsafe traits: they promise what bytes mean")]

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::call::float8::narrow_to_odd;
pub use crate::call::float8::{F8E4M3, F8E5M2};
use crate::error::Error;

/// The element types that reductions support.
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
    /// bfloat16: the upper half of a 32-bit IEEE float.
    Bf16 = 3,
    /// 8-bit float with 4 exponent bits and without infinities (OCP E4M3, "fn").
    F8E4M3 = 4,
    /// 8-bit float with 5 exponent bits (OCP E5M2).
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
    /// A truth value: one byte, which is 0 or 1.
    Bool = 14,
}

impl DType {
    /// All element types, in the order of their numbers.
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

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::Bool => 1,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Returns whether this type is one of the six float types.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16 | DType::F8E4M3 | DType::F8E5M2)
    }

    /// Returns the number of this float type that is nearest to a value, with ties to even: rounded once, not via
    /// `f32`. For other types, returns the value itself.
    pub(crate) fn nearest(self, value: f64) -> f64 {
        match self {
            DType::F32 => f64::from(value as f32),
            DType::F16 => f16::from_f32(narrow_to_odd(value)).to_f64(),
            DType::Bf16 => bf16::from_f32(narrow_to_odd(value)).to_f64(),
            DType::F8E4M3 => F8E4M3::from_f64(value).to_f64(),
            DType::F8E5M2 => F8E5M2::from_f64(value).to_f64(),
            _ => value,
        }
    }

    /// Returns the name used in error texts, in reports and on command lines: `f32`, `bf16`, `f8e4m3`, `u8`, `bool` …
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

    /// Returns the type with this number in a fingerprint.
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

    /// Parses a name of this crate, or a name of nccl-tests (`float`, `half`, `bfloat16`, `int8`, `uint64` …).
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

/// Plain data: collectives and messages can transfer it.
///
/// This trait is implemented for every [`Element`] and for arrays of plain data. Implement this trait for your own
/// `#[repr(C)]` structs to transfer them, and to reduce them with a [`CustomOp`](crate::CustomOp).
///
/// # Safety
///
/// - Every byte of a value must be initialised, so the type must have no padding and no `MaybeUninit`.
/// - The type must have no references or pointers, because they have a meaning in one process only.
/// - Bytes of any content must be a valid value, so the type must not contain `bool`, `char`, an enum or `NonZero`.
///   Ranks compare only the sizes of your own types, so the bytes of a different type of the same size may arrive.
/// - An implementation outside this crate must leave the constants at their defaults. Only
///   [`element!`](macro@crate::element) may set the constants.
pub unsafe trait Data: Copy + Send + Sync + 'static {
    /// The element type, if reductions support it.
    const DTYPE: Option<DType> = None;
    /// The innermost element type of an array, which may be nested; for an element type, the type itself.
    #[doc(hidden)]
    const INNERMOST: Option<DType> = Self::DTYPE;
    /// Whether memory of this type also says which type its elements have.
    #[doc(hidden)]
    const KNOWN_AT_RUN_TIME: bool = false;
}

// SAFETY: an array is its elements side by side, without padding, and each obeys the contract. Arrays of `bool` do not:
// `INNERMOST` tells them apart from everything else, and code that writes foreign bytes to them turns each into 0 or 1
// (`host::bools`).
unsafe impl<T: Data, const N: usize> Data for [T; N] {
    const INNERMOST: Option<DType> = T::INNERMOST;
}

/// A marker of one byte: the element of buffers whose element type is known only at run time. See
/// [`TypedBytes`](crate::TypedBytes).
///
/// Any [`ReduceOp`](crate::ReduceOp) can reduce such buffers, and so can a [`CustomOp`](crate::CustomOp) of any
/// [`Element`]. The call checks that the op matches the element type. If a buffer of `AnyElement`s does not say which
/// type it has, each `AnyElement` counts as plain data of one byte.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct AnyElement(u8);

// SAFETY: a transparent wrapper of a byte; any byte is a value. This crate may set the constant.
unsafe impl Data for AnyElement {
    const KNOWN_AT_RUN_TIME: bool = true;
}

impl AnyElement {
    /// Views bytes as elements.
    pub(crate) fn of(bytes: &[u8]) -> &[Self] {
        // SAFETY: a transparent wrapper of a byte: same layout, and any byte is a value of both.
        unsafe { &*(std::ptr::from_ref(bytes) as *const [Self]) }
    }

    /// Views bytes as elements, to be written.
    pub(crate) fn of_mut(bytes: &mut [u8]) -> &mut [Self] {
        // SAFETY: a transparent wrapper of a byte: same layout, and any byte is a value of both; the borrow is the
        // same.
        unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [Self]) }
    }
}

/// An element type that the built-in reductions support, or a wrapper of such a type.
/// [`element!`](macro@crate::element) implements this trait for your own struct without unsafe code in your crate. With
/// the feature `float8`, the types of the crate `float8` implement this trait too.
///
/// # Safety
///
/// `ELEMENT_TYPE` and `DTYPE` (of [`Data`]) must name the same type. Your type must have the size, alignment and layout
/// of the named type. Any bytes that are a value of the named type must also be a value of your type.
pub unsafe trait Element: Data + PartialEq + fmt::Debug + Default {
    /// The element type at run time.
    const ELEMENT_TYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {$(
        // SAFETY: a primitive or a transparent wrapper of one: no padding, and any bytes are a value. `bool` is the
        // exception: `DTYPE` tells it apart from everything else, and code that writes foreign bytes to a destination
        // of it turns each into 0 or 1 (`host::bools`; on devices, the kernels and the code that checks tensors).
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

// These types have the same bytes as ours: OCP's E4M3 without infinities, and E5M2 (`tests/host/elements.rs` compares
// all).
#[cfg(feature = "float8")]
elements! {
    ::float8::F8E4M3 => F8E4M3,
    ::float8::F8E5M2 => F8E5M2,
}

/// The type of a call's elements, as in its fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TypeTag {
    /// One of the fifteen element types.
    Scalar(DType),
    /// An array, possibly nested, of an element type. The whole array has this many bytes.
    Array(DType, u32),
    /// Other plain data of this many bytes.
    Plain(u32),
    /// A serialised object. This tag differs from that of every element type.
    Object,
}

impl TypeTag {
    /// The largest element that has a tag.
    pub(crate) const MAX_BYTES: usize = Self::SIZE_MASK as usize;

    /// The bit that is set in a code that carries a size.
    const SIZED: u32 = 1 << 31;
    /// The position of the number of an array's element type. The number is 31 for other plain data.
    const KIND_AT: u32 = 26;
    const PLAIN: u32 = 31;
    const OBJECT: u32 = 30;
    const SIZE_MASK: u32 = (1 << Self::KIND_AT) - 1;

    /// Returns the tag of `T`, which is no larger than [`TypeTag::MAX_BYTES`].
    pub(crate) const fn of<T: Data>() -> Self {
        match (T::DTYPE, T::INNERMOST) {
            (Some(dtype), _) => TypeTag::Scalar(dtype),
            (None, Some(dtype)) => TypeTag::Array(dtype, size_of::<T>() as u32),
            (None, None) => TypeTag::Plain(size_of::<T>() as u32),
        }
    }

    /// Returns the tag of elements in memory of `T`. `dtype` gives their type if it is only known at run time.
    #[inline]
    pub(crate) const fn held<T: Data>(dtype: Option<DType>) -> Self {
        match dtype {
            Some(dtype) if T::KNOWN_AT_RUN_TIME => TypeTag::Scalar(dtype),
            _ => Self::of::<T>(),
        }
    }

    /// Returns the size of one such element.
    #[inline]
    pub(crate) const fn held_bytes<T: Data>(dtype: Option<DType>) -> usize {
        match dtype {
            Some(dtype) if T::KNOWN_AT_RUN_TIME => dtype.size_bytes(),
            _ => size_of::<T>(),
        }
    }

    /// Returns the error text for a buffer that is misaligned for such elements.
    pub(crate) fn misplaced(self, what: &str, address: u64) -> String {
        format!("{what} is at {address:#x}, but elements of {self} must be at multiples of {} B", self.size_bytes())
    }

    /// Returns whether elements are `bool` or arrays of it. For all other elements, every byte is a value.
    #[inline]
    pub(crate) const fn is_bool(self) -> bool {
        matches!(self, TypeTag::Scalar(DType::Bool) | TypeTag::Array(DType::Bool, _))
    }

    /// Returns the size of one element.
    pub(crate) const fn size_bytes(self) -> usize {
        match self {
            TypeTag::Scalar(dtype) => dtype.size_bytes(),
            TypeTag::Array(_, size) | TypeTag::Plain(size) => size as usize,
            TypeTag::Object => 1,
        }
    }

    /// Encodes the tag as the type's number, or as the size, with the type's number above it and the top bit set.
    pub(crate) const fn to_code(self) -> u32 {
        match self {
            TypeTag::Scalar(dtype) => dtype as u32,
            TypeTag::Array(dtype, size) => size & Self::SIZE_MASK | (dtype as u32) << Self::KIND_AT | Self::SIZED,
            TypeTag::Plain(size) => size & Self::SIZE_MASK | Self::PLAIN << Self::KIND_AT | Self::SIZED,
            TypeTag::Object => 1 | Self::OBJECT << Self::KIND_AT | Self::SIZED,
        }
    }

    /// Reverses [`TypeTag::to_code`]. Returns `None` for a number that no version of this crate sends.
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        if code & Self::SIZED == 0 {
            return DType::from_code(u8::try_from(code).ok()?).map(TypeTag::Scalar);
        }
        let size = code & Self::SIZE_MASK;
        match (code & !Self::SIZED) >> Self::KIND_AT {
            Self::PLAIN => Some(TypeTag::Plain(size)),
            Self::OBJECT => (size == 1).then_some(TypeTag::Object),
            kind => Some(TypeTag::Array(DType::from_code(kind as u8)?, size)),
        }
    }
}

impl fmt::Display for TypeTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TypeTag::Scalar(dtype) => dtype.fmt(f),
            TypeTag::Array(dtype, size) => write!(f, "[{dtype}; {}]", *size as usize / dtype.size_bytes()),
            TypeTag::Plain(size) => write!(f, "plain data of {size} B"),
            TypeTag::Object => f.write_str("an object"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_tell_types_apart_and_survive_the_wire() {
        let tags = [
            TypeTag::of::<bool>(),
            TypeTag::of::<u8>(),
            TypeTag::of::<[bool; 4]>(),
            TypeTag::of::<[[bool; 2]; 4]>(),
            TypeTag::of::<[u8; 4]>(),
            TypeTag::of::<[f32; 1]>(),
            TypeTag::Plain(4),
            TypeTag::Plain(TypeTag::MAX_BYTES as u32),
            TypeTag::Object,
            TypeTag::Array(DType::Bool, TypeTag::MAX_BYTES as u32),
        ];
        for (index, tag) in tags.iter().enumerate() {
            assert_eq!(TypeTag::from_code(tag.to_code()), Some(*tag));
            assert!(!tags[..index].contains(tag), "{tag}");
        }
        assert_eq!(tags.iter().filter(|tag| tag.is_bool()).count(), 4);
        assert_eq!(TypeTag::of::<[[f16; 2]; 3]>().to_string(), "[f16; 6]");
        assert_eq!(TypeTag::of::<[[f16; 2]; 3]>().size_bytes(), 12);
    }

    #[test]
    fn nonsense_is_no_tag() {
        for code in [15, 256, 1 << 30, 1 << 31 | 20 << 26, 1 << 31 | 30 << 26, 1 << 31 | 30 << 26 | 2] {
            assert_eq!(TypeTag::from_code(code), None, "{code:#x}");
        }
    }
}
