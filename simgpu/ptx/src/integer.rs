//! Integer instructions: pure functions of up to three raw operands.
//!
//! A value of N bits lies in the low bits of a slot; the higher bits are zero in results and ignored in operands.

use crate::program::Alu;
use crate::types::Type;

/// A machine integer that lives in a slot.
pub(crate) trait Int: Copy + Ord {
    const BITS: u32;
    const SIGNED: bool;
    fn get(slot: u64) -> Self;
    fn put(self) -> u64;
    fn wide(self) -> i128;
    /// Returns the low bits of a wide value.
    fn cut(value: i128) -> Self;
    fn clamped(value: i128) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
}

macro_rules! int {
    ($($t:ty, $unsigned:ty, $signed:expr;)*) => {$(
        impl Int for $t {
            const BITS: u32 = <$t>::BITS;
            const SIGNED: bool = $signed;
            #[inline(always)]
            fn get(slot: u64) -> Self { slot as $t }
            #[inline(always)]
            fn put(self) -> u64 { self as $unsigned as u64 }
            #[inline(always)]
            fn wide(self) -> i128 { self as i128 }
            #[inline(always)]
            fn cut(value: i128) -> Self { value as $t }
            #[inline(always)]
            fn clamped(value: i128) -> Self { value.clamp(<$t>::MIN as i128, <$t>::MAX as i128) as $t }
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn sub(self, other: Self) -> Self { self.wrapping_sub(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
        }
    )*};
}
int! { u8, u8, false; u16, u16, false; u32, u32, false; u64, u64, false; i8, u8, true; i16, u16, true; i32, u32, true; i64, u64, true; }

/// Returns the instance of a generic function for a type, `None` for floats and predicates.
macro_rules! instance {
    ($kind:expr, $($function:ident)::+) => {
        match $kind {
            Type::B(8) | Type::U(8) => Some($($function)::+::<u8> as crate::program::Alu),
            Type::B(16) | Type::U(16) => Some($($function)::+::<u16> as crate::program::Alu),
            Type::B(32) | Type::U(32) => Some($($function)::+::<u32> as crate::program::Alu),
            Type::B(64) | Type::U(64) => Some($($function)::+::<u64> as crate::program::Alu),
            Type::S(8) => Some($($function)::+::<i8> as crate::program::Alu),
            Type::S(16) => Some($($function)::+::<i16> as crate::program::Alu),
            Type::S(32) => Some($($function)::+::<i32> as crate::program::Alu),
            Type::S(64) => Some($($function)::+::<i64> as crate::program::Alu),
            _ => None,
        }
    };
}
pub(crate) use instance;

pub(crate) fn add<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a).add(T::get(b)).put()
}
pub(crate) fn sub<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a).sub(T::get(b)).put()
}
pub(crate) fn mul_low<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a).mul(T::get(b)).put()
}
pub(crate) fn mad_low<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::get(a).mul(T::get(b)).add(T::get(c)).put()
}
pub(crate) fn add_sat<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::clamped(T::get(a).wide() + T::get(b).wide()).put()
}
pub(crate) fn sub_sat<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::clamped(T::get(a).wide() - T::get(b).wide()).put()
}

/// Returns the full product; that of two `u64` does not fit an `i128`, but its bits do.
fn product<T: Int>(a: u64, b: u64) -> i128 {
    T::get(a).wide().wrapping_mul(T::get(b).wide())
}
pub(crate) fn mul_high<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    if T::SIGNED { T::cut(product::<T>(a, b) >> T::BITS).put() } else { T::cut((product::<T>(a, b) as u128 >> T::BITS) as i128).put() }
}
pub(crate) fn mad_high<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::get(mul_high::<T>(a, b, 0)).add(T::get(c)).put()
}
pub(crate) fn mad_high_sat<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::clamped(T::get(mul_high::<T>(a, b, 0)).wide() + T::get(c).wide()).put()
}
fn twice<T: Int>(value: i128) -> u64 {
    if T::BITS >= 32 { value as u64 } else { value as u64 & ((1 << (2 * T::BITS)) - 1) }
}
pub(crate) fn mul_wide<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    twice::<T>(product::<T>(a, b))
}
pub(crate) fn mad_wide<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    twice::<T>(product::<T>(a, b).wrapping_add(c as i128))
}

/// Returns the low 24 bits, sign-extended if the type is signed.
fn low24<T: Int>(a: u64) -> i128 {
    if T::SIGNED { i128::from((a as i32) << 8 >> 8) } else { i128::from(a as u32 & 0xff_ffff) }
}
pub(crate) fn mul24_low<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut(low24::<T>(a) * low24::<T>(b)).put()
}
pub(crate) fn mul24_high<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut((low24::<T>(a) * low24::<T>(b)) >> 16).put()
}

/// Divides. Division by zero returns all ones, as the hardware does; the one signed overflow wraps.
pub(crate) fn div<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (T::get(a).wide(), T::get(b).wide());
    T::cut(if b == 0 { -1 } else { a / b }).put()
}
/// Returns the remainder; modulo zero it is the dividend.
pub(crate) fn rem<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (T::get(a).wide(), T::get(b).wide());
    T::cut(if b == 0 { a } else { a % b }).put()
}
pub(crate) fn abs<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    T::cut(T::get(a).wide().abs()).put()
}
pub(crate) fn neg<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    T::cut(-T::get(a).wide()).put()
}
pub(crate) fn min<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a).min(T::get(b)).put()
}
pub(crate) fn max<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a).max(T::get(b)).put()
}
pub(crate) fn sad<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::cut((T::get(a).wide() - T::get(b).wide()).abs() + T::get(c).wide()).put()
}

pub(crate) fn and<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a & b).put()
}
pub(crate) fn or<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a | b).put()
}
pub(crate) fn xor<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a ^ b).put()
}
pub(crate) fn not<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    T::get(!a).put()
}
pub(crate) fn cnot<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(T::get(a).put() == 0)
}
/// Shifts. The amount is a `u32`; an amount beyond the width shifts all bits out and is not reduced modulo the width.
pub(crate) fn shl<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let amount = b as u32;
    if amount >= T::BITS { 0 } else { T::get(a << amount).put() }
}
pub(crate) fn shr<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut(T::get(a).wide() >> (b as u32).min(T::BITS)).put()
}
/// Joins `b:a` for a funnel shift; the amount is `c`, clamped at 32 or taken modulo 32.
fn funnel(a: u64, b: u64) -> u64 {
    (b & 0xffff_ffff) << 32 | a & 0xffff_ffff
}
pub(crate) fn shf_left_clamp(a: u64, b: u64, c: u64) -> u64 {
    (funnel(a, b) << (c as u32).min(32)) >> 32
}
pub(crate) fn shf_left_wrap(a: u64, b: u64, c: u64) -> u64 {
    (funnel(a, b) << (c & 31)) >> 32
}
pub(crate) fn shf_right_clamp(a: u64, b: u64, c: u64) -> u64 {
    (funnel(a, b) >> (c as u32).min(32)) & 0xffff_ffff
}
pub(crate) fn shf_right_wrap(a: u64, b: u64, c: u64) -> u64 {
    (funnel(a, b) >> (c & 31)) & 0xffff_ffff
}

pub(crate) fn popc<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(T::get(a).put().count_ones())
}
pub(crate) fn clz<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    u64::from(T::get(a).put().leading_zeros() - (64 - T::BITS))
}
pub(crate) fn brev<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    a.reverse_bits() >> (64 - T::BITS)
}
/// Returns the position of the highest bit that differs from the sign, or all ones if there is none.
pub(crate) fn bfind<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    let a = T::get(a);
    let bits = if a.wide() < 0 { T::cut(!a.wide()) } else { a }.put();
    if bits == 0 { 0xffff_ffff } else { u64::from(63 - bits.leading_zeros()) }
}
pub(crate) fn bfind_shift<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    match bfind::<T>(a, 0, 0) {
        0xffff_ffff => 0xffff_ffff,
        place => u64::from(T::BITS - 1) - place,
    }
}
/// Returns the field of `c` bits from bit `b` on; signed fields are sign-extended.
pub(crate) fn bfe<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    let (position, length) = ((b & 0xff) as u32, (c & 0xff) as u32);
    if length == 0 {
        return 0;
    }
    let bits = T::get(a).put();
    let top = (position + length - 1).min(T::BITS - 1);
    let sign = T::SIGNED && bits >> top & 1 == 1;
    let field = if position < T::BITS { bits >> position } else { 0 };
    let kept = if position < T::BITS { length.min(T::BITS - position) } else { 0 };
    let mask = if kept >= 64 { u64::MAX } else { (1 << kept) - 1 };
    T::get(if sign { field & mask | !mask } else { field & mask }).put()
}
/// Inserts `a` into `b` at the bits that `c` names: position in its low byte, length in the next one.
pub(crate) fn bfi<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    let (position, length) = ((c & 0xff) as u32, (c >> 8 & 0xff) as u32);
    if position >= T::BITS || length == 0 {
        return T::get(b).put();
    }
    let mask = if length >= 64 { u64::MAX } else { (1 << length) - 1 } << position;
    T::get(b & !mask | a << position & mask).put()
}
/// Packs position and length of `bfi` into one operand.
pub(crate) fn bfi_field(a: u64, b: u64, _: u64) -> u64 {
    a & 0xff | (b & 0xff) << 8
}

/// Packs `b` and `c` of `lop3` into one operand.
pub(crate) fn join32(a: u64, b: u64, _: u64) -> u64 {
    a & 0xffff_ffff | b << 32
}
/// Computes any function of three bits; `b` holds two operands, `c` the table.
pub(crate) fn lop3(a: u64, b: u64, c: u64) -> u64 {
    let (x, y, z) = (a as u32, b as u32, (b >> 32) as u32);
    let mut result = 0;
    for row in 0..8 {
        if c >> row & 1 == 1 {
            let pick = |value: u32, bit: u32| if row >> bit & 1 == 1 { value } else { !value };
            result |= pick(x, 2) & pick(y, 1) & pick(z, 0);
        }
    }
    u64::from(result)
}

fn byte(a: u64, b: u64, selector: u64) -> u64 {
    let value = funnel(a, b) >> (8 * (selector & 7)) & 0xff;
    if selector & 8 == 0 { value } else { (value >> 7) * 0xff }
}
/// Picks four bytes from `b:a` by the nibbles of `c`; the high bit of a nibble replicates the sign.
pub(crate) fn prmt(a: u64, b: u64, c: u64) -> u64 {
    (0..4).map(|place| byte(a, b, c >> (4 * place) & 15) << (8 * place)).sum()
}
/// Returns the modes of `prmt` that take their four positions from the low two bits of `c`.
pub(crate) fn prmt_mode(mode: &str) -> Option<Alu> {
    fn picked(a: u64, b: u64, places: [u64; 4]) -> u64 {
        places.iter().enumerate().map(|(to, &from)| byte(a, b, from & 7) << (8 * to)).sum()
    }
    Some(match mode {
        "f4e" => |a, b, c| picked(a, b, [0, 1, 2, 3].map(|i| (c & 3) + i)),
        "b4e" => |a, b, c| picked(a, b, [0, 7, 6, 5].map(|i| (c & 3) + i)),
        "rc8" => |a, b, c| picked(a, b, [c & 3; 4]),
        "ecl" => |a, b, c| picked(a, b, [0, 1, 2, 3].map(|i: u64| i.max(c & 3))),
        "ecr" => |a, b, c| picked(a, b, [0, 1, 2, 3].map(|i: u64| i.min(c & 3))),
        "rc16" => |a, b, c| picked(a, b, [0, 1, 0, 1].map(|i| 2 * (c & 1) + i)),
        _ => return None,
    })
}

/// Returns the dot product of four bytes each, added to `c`.
pub(crate) fn dp4a<const A: bool, const B: bool>(a: u64, b: u64, c: u64) -> u64 {
    let byte = |value: u64, place: u32, signed: bool| {
        let byte = (value >> (8 * place)) as u8;
        if signed { i64::from(byte as i8) } else { i64::from(byte) }
    };
    let sum: i64 = (0..4).map(|place| byte(a, place, A) * byte(b, place, B)).sum();
    u64::from((c as u32).wrapping_add(sum as u32))
}

/// Returns the carry out of `a + b + c`.
pub(crate) fn carry<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    let sum = u128::from(T::get(a).put()) + u128::from(T::get(b).put()) + u128::from(c & 1);
    (sum >> T::BITS) as u64 & 1
}
pub(crate) fn add_carry<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::get(a.wrapping_add(b).wrapping_add(c & 1)).put()
}
/// Returns the borrow out of `a - b - c`.
pub(crate) fn borrow<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    u64::from(u128::from(T::get(a).put()) < u128::from(T::get(b).put()) + u128::from(c & 1))
}
pub(crate) fn sub_borrow<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::get(a.wrapping_sub(b).wrapping_sub(c & 1)).put()
}

/// Returns `c ? a : b`.
pub(crate) fn select(a: u64, b: u64, c: u64) -> u64 {
    if c & 1 == 1 { a } else { b }
}
/// Selects by the sign of the integer `c`: `c >= 0 ? a : b`.
pub(crate) fn select_sign(a: u64, b: u64, c: u64) -> u64 {
    if c as i32 >= 0 { a } else { b }
}
/// Returns the bits of `a` from bit `b` on, as many as `T` has: one element of a packed register.
pub(crate) fn field<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::get(a >> b).put()
}
/// Returns `a` with `b` above its low `c` bits.
pub(crate) fn pack(a: u64, b: u64, c: u64) -> u64 {
    a & ((1 << c) - 1) | b << c
}
/// Returns the comparison of two integers that a suffix names.
pub(crate) fn compare(kind: Type, name: &str) -> Option<Alu> {
    fn eq<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) == T::get(b))
    }
    fn ne<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) != T::get(b))
    }
    fn lt<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) < T::get(b))
    }
    fn le<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) <= T::get(b))
    }
    fn gt<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) > T::get(b))
    }
    fn ge<T: Int>(a: u64, b: u64, _: u64) -> u64 {
        u64::from(T::get(a) >= T::get(b))
    }
    match name {
        "eq" => instance!(kind, eq),
        "ne" => instance!(kind, ne),
        "lt" | "lo" => instance!(kind, lt),
        "le" | "ls" => instance!(kind, le),
        "gt" | "hi" => instance!(kind, gt),
        "ge" | "hs" => instance!(kind, ge),
        _ => None,
    }
}
