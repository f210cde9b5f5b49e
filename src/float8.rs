//! The two 8-bit float formats of OCP (OFP8, revision 1.0): bits in, bits out, exact conversions.

/// 8-bit float: sign, 4 exponent bits, 3 mantissa bits; no infinities, one NaN pattern per sign; largest 448.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// 8-bit float: sign, 5 exponent bits, 2 mantissa bits; infinities and NaN as in IEEE; largest finite 57344.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(transparent)]
pub struct F8E5M2(u8);
