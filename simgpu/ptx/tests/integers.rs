//! Integer instructions, compared with the processor's own arithmetic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{check, triples};

const ODD: [u64; 14] =
    [0, 1, 2, 7, 31, 32, 33, 0x7fff, 0x8000, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x7fff_ffff_ffff_ffff, 0x8000_0000_0000_0000];

fn operands() -> Vec<[u64; 3]> {
    let mut odd = ODD.to_vec();
    odd.push(u64::MAX);
    triples(&odd, &[0, 1, 5, u64::MAX])
}

macro_rules! each_width {
    ($name:expr, |$a:ident, $b:ident, $c:ident: $t:ident| $body:expr) => {{
        each_width!(@one $name, "u16", "rs", u16, u16, |$a, $b, $c, $t| $body);
        each_width!(@one $name, "s16", "rs", i16, u16, |$a, $b, $c, $t| $body);
        each_width!(@one $name, "u32", "r", u32, u32, |$a, $b, $c, $t| $body);
        each_width!(@one $name, "s32", "r", i32, u32, |$a, $b, $c, $t| $body);
        each_width!(@one $name, "u64", "rd", u64, u64, |$a, $b, $c, $t| $body);
        each_width!(@one $name, "s64", "rd", i64, u64, |$a, $b, $c, $t| $body);
    }};
    (@one $name:expr, $suffix:expr, $register:expr, $kind:ty, $unsigned:ty, |$a:ident, $b:ident, $c:ident, $t:ident| $body:expr) => {{
        #[allow(non_camel_case_types, dead_code)]
        type $t = $kind;
        let piece = $name.replace("TYPE", $suffix).replace('%', &format!("%{}", $register));
        check(&piece, $register, &operands(), |a, b, c| {
            let ($a, $b, $c) = (a as $kind, b as $kind, c as $kind);
            let _ = ($a, $b, $c);
            ($body) as $unsigned as u64
        });
    }};
}

#[test]
fn sums_products_and_quotients_wrap_as_the_hardware_does() {
    each_width!("add.TYPE %9, %0, %1;", |a, b, c: T| a.wrapping_add(b));
    each_width!("sub.TYPE %9, %0, %1;", |a, b, c: T| a.wrapping_sub(b));
    each_width!("mul.lo.TYPE %9, %0, %1;", |a, b, c: T| a.wrapping_mul(b));
    each_width!("mad.lo.TYPE %9, %0, %1, %2;", |a, b, c: T| a.wrapping_mul(b).wrapping_add(c));
    each_width!("mul.hi.TYPE %9, %0, %1;", |a, b, c: T| ((a as i128).wrapping_mul(b as i128) as u128 >> T::BITS) as T);
    each_width!("div.TYPE %9, %0, %1;", |a, b, c: T| if b == 0 { (0 as T).wrapping_sub(1) } else { a.wrapping_div(b) });
    each_width!("rem.TYPE %9, %0, %1;", |a, b, c: T| if b == 0 { a } else { a.wrapping_rem(b) });
    each_width!("min.TYPE %9, %0, %1;", |a, b, c: T| a.min(b));
    each_width!("max.TYPE %9, %0, %1;", |a, b, c: T| a.max(b));
    each_width!("sad.TYPE %9, %0, %1, %2;", |a, b, c: T| (a.abs_diff(b) as T).wrapping_add(c));
}

#[test]
fn wide_products_keep_every_bit() {
    let operands = operands();
    check("mul.wide.u16 %r9, %rs0, %rs1;", "r", &operands, |a, b, _| u64::from(u32::from(a as u16) * u32::from(b as u16)));
    check("mul.wide.s16 %r9, %rs0, %rs1;", "r", &operands, |a, b, _| u64::from((i32::from(a as i16) * i32::from(b as i16)) as u32));
    check("mul.wide.u32 %rd9, %r0, %r1;", "rd", &operands, |a, b, _| (a & 0xffff_ffff) * (b & 0xffff_ffff));
    check("mul.wide.s32 %rd9, %r0, %r1;", "rd", &operands, |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64);
    check("mad.wide.s32 %rd9, %r0, %r1, %rd2;", "rd", &operands, |a, b, c| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(c as i64) as u64
    });
    check("mad.wide.u32 %rd9, %r0, -1, %rd2;", "rd", &operands, |a, _, c| (a & 0xffff_ffff).wrapping_mul(0xffff_ffff).wrapping_add(c));
    check("mul24.lo.u32 %r9, %r0, %r1;", "r", &operands, |a, b, _| ((a & 0xff_ffff) * (b & 0xff_ffff)) & 0xffff_ffff);
    check("mad.hi.s32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| {
        let high = (i64::from(a as i32) * i64::from(b as i32)) >> 32;
        u64::from((high as u32).wrapping_add(c as u32))
    });
}

#[test]
fn saturating_sums_stop_at_the_ends() {
    let operands = operands();
    check("add.sat.s32 %r9, %r0, %r1;", "r", &operands, |a, b, _| u64::from((a as i32).saturating_add(b as i32) as u32));
    check("sub.sat.s32 %r9, %r0, %r1;", "r", &operands, |a, b, _| u64::from((a as i32).saturating_sub(b as i32) as u32));
}

#[test]
fn signs_and_logic() {
    let operands = operands();
    check("abs.s32 %r9, %r0;", "r", &operands, |a, _, _| u64::from((a as i32).unsigned_abs()));
    check("abs.s64 %rd9, %rd0;", "rd", &operands, |a, _, _| (a as i64).unsigned_abs());
    check("neg.s16 %rs9, %rs0;", "rs", &operands, |a, _, _| u64::from((a as u16).wrapping_neg()));
    check("neg.s64 %rd9, %rd0;", "rd", &operands, |a, _, _| a.wrapping_neg());
    check("and.b64 %rd9, %rd0, %rd1;", "rd", &operands, |a, b, _| a & b);
    check("or.b16 %rs9, %rs0, %rs1;", "rs", &operands, |a, b, _| (a | b) & 0xffff);
    check("xor.b32 %r9, %r0, %r1;", "r", &operands, |a, b, _| (a ^ b) & 0xffff_ffff);
    check("not.b16 %rs9, %rs0;", "rs", &operands, |a, _, _| !a & 0xffff);
    check("cnot.b32 %r9, %r0;", "r", &operands, |a, _, _| u64::from(a as u32 == 0));
    check("and.pred %p9, %p0, !%p1;", "p", &operands, |a, b, _| a & !b & 1);
    check("xor.pred %p9, %p0, %p1;", "p", &operands, |a, b, _| (a ^ b) & 1);
    check("not.pred %p9, %p0;", "p", &operands, |a, _, _| !a & 1);
    for table in [0x00, 0x01, 0x1e, 0x80, 0x96, 0xca, 0xe8, 0xfe, 0xff_u64] {
        check(&format!("lop3.b32 %r9, %r0, %r1, %r2, {table};"), "r", &operands, |a, b, c| {
            (0..32).map(|bit| (table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit).sum()
        });
    }
}

#[test]
fn shifts_beyond_the_width_lose_everything() {
    let operands = operands();
    check("shl.b32 %r9, %r0, %r1;", "r", &operands, |a, b, _| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0)));
    check("shl.b16 %rs9, %rs0, %r1;", "rs", &operands, |a, b, _| u64::from((a as u16).checked_shl(b as u32).unwrap_or(0)));
    check("shl.b64 %rd9, %rd0, %r1;", "rd", &operands, |a, b, _| a.checked_shl(b as u32).unwrap_or(0));
    check("shr.u32 %r9, %r0, %r1;", "r", &operands, |a, b, _| u64::from((a as u32).checked_shr(b as u32).unwrap_or(0)));
    check("shr.u64 %rd9, %rd0, %r1;", "rd", &operands, |a, b, _| a.checked_shr(b as u32).unwrap_or(0));
    check("shr.s32 %r9, %r0, %r1;", "r", &operands, |a, b, _| u64::from((a as i32 >> (b as u32).min(31)) as u32));
    check("shr.s16 %rs9, %rs0, %r1;", "rs", &operands, |a, b, _| u64::from((a as i16 >> (b as u32).min(15)) as u16));
    check("shr.s64 %rd9, %rd0, %r1;", "rd", &operands, |a, b, _| (a as i64 >> (b as u32).min(63)) as u64);
    let funnel = |a: u64, b: u64| (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    check("shf.l.wrap.b32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| funnel(a, b) << (c & 31) >> 32);
    check("shf.r.wrap.b32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| funnel(a, b) >> (c & 31) & 0xffff_ffff);
    check("shf.l.clamp.b32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| {
        let shift = (c as u32).min(32);
        if shift == 32 { a & 0xffff_ffff } else { funnel(a, b) << shift >> 32 }
    });
    check("shf.r.clamp.b32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| funnel(a, b) >> (c as u32).min(32) & 0xffff_ffff);
}

#[test]
fn bits_are_counted_found_and_moved() {
    let operands = operands();
    check("popc.b32 %r9, %r0;", "r", &operands, |a, _, _| u64::from((a as u32).count_ones()));
    check("popc.b64 %r9, %rd0;", "r", &operands, |a, _, _| u64::from(a.count_ones()));
    check("clz.b32 %r9, %r0;", "r", &operands, |a, _, _| u64::from((a as u32).leading_zeros()));
    check("clz.b64 %r9, %rd0;", "r", &operands, |a, _, _| u64::from(a.leading_zeros()));
    check("brev.b32 %r9, %r0;", "r", &operands, |a, _, _| u64::from((a as u32).reverse_bits()));
    check("brev.b64 %rd9, %rd0;", "rd", &operands, |a, _, _| a.reverse_bits());
    let highest = |a: u64| if a == 0 { 0xffff_ffff } else { u64::from(a.ilog2()) };
    check("bfind.u32 %r9, %r0;", "r", &operands, |a, _, _| highest(a & 0xffff_ffff));
    check("bfind.s32 %r9, %r0;", "r", &operands, |a, _, _| highest(u64::from((a as i32 ^ (a as i32 >> 31)) as u32)));
    check("bfind.u64 %r9, %rd0;", "r", &operands, |a, _, _| highest(a));
    check("bfind.shiftamt.u32 %r9, %r0;", "r", &operands, |a, _, _| match highest(a & 0xffff_ffff) {
        0xffff_ffff => 0xffff_ffff,
        place => 31 - place,
    });
}

/// Implements the pseudocode of the PTX manual, bit by bit.
fn extract(a: u64, position: u64, length: u64, bits: u64, signed: bool) -> u64 {
    let (position, length, top) = (position & 0xff, length & 0xff, bits - 1);
    let sign = if !signed || length == 0 { 0 } else { a >> (position + length - 1).min(top) & 1 };
    (0..bits).map(|i| if i < length && position + i <= top { a >> (position + i) & 1 } else { sign } << i).sum()
}

fn insert(a: u64, b: u64, position: u64, length: u64, bits: u64) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let mut result = b & if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    for i in (0..length).take_while(|i| position + i < bits) {
        result = result & !(1 << (position + i)) | (a >> i & 1) << (position + i);
    }
    result
}

#[test]
fn fields_are_extracted_and_inserted() {
    let mut operands = Vec::new();
    for &[a, b, _] in operands_small().iter() {
        for (position, length) in
            [(0, 0), (0, 1), (0, 32), (31, 1), (31, 5), (4, 8), (32, 1), (40, 4), (0, 64), (63, 1), (3, 255), (255, 255), (7, 33)]
        {
            operands.push([a, b, position | length << 32]);
        }
    }
    let split = "cvt.u32.u64 %r10, %rd2; shr.u64 %rd10, %rd2, 32; cvt.u32.u64 %r11, %rd10;";
    let check = |piece: &str, result: &str, oracle: &dyn Fn(u64, u64, u64, u64) -> u64| {
        check(&format!("{split} {piece}"), result, &operands, |a, b, c| oracle(a, b, c & 0xffff_ffff, c >> 32));
    };
    check("bfe.u32 %r9, %r0, %r10, %r11;", "r", &|a, _, position, length| extract(a, position, length, 32, false));
    check("bfe.s32 %r9, %r0, %r10, %r11;", "r", &|a, _, position, length| extract(a, position, length, 32, true));
    check("bfe.u64 %rd9, %rd0, %r10, %r11;", "rd", &|a, _, position, length| extract(a, position, length, 64, false));
    check("bfe.s64 %rd9, %rd0, %r10, %r11;", "rd", &|a, _, position, length| extract(a, position, length, 64, true));
    check("bfi.b32 %r9, %r0, %r1, %r10, %r11;", "r", &|a, b, position, length| insert(a, b, position, length, 32));
    check("bfi.b64 %rd9, %rd0, %rd1, %r10, %r11;", "rd", &|a, b, position, length| insert(a, b, position, length, 64));
}

fn operands_small() -> Vec<[u64; 3]> {
    let mut random = common::Random(3);
    let mut found = vec![[0, u64::MAX, 0], [u64::MAX, 0, 0], [0x8000_0000_8000_0000, 0x0123_4567_89ab_cdef, 0]];
    found.extend((0..20).map(|_| [random.next(), random.next(), 0]));
    found
}

#[test]
fn bytes_are_permuted() {
    let operands = operands();
    let byte = |a: u64, b: u64, place: u64| ((b & 0xffff_ffff) << 32 | a & 0xffff_ffff) >> (8 * (place & 7)) & 0xff;
    check("prmt.b32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| {
        let picked = |nibble: u64| {
            let value = byte(a, b, nibble);
            if nibble & 8 == 0 {
                value
            } else if value & 0x80 != 0 {
                0xff
            } else {
                0
            }
        };
        (0..4).map(|i| picked(c >> (4 * i) & 15) << (8 * i)).sum()
    });
    let tables: [(&str, [[u64; 4]; 4]); 6] = [
        ("f4e", [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        ("b4e", [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        ("rc8", [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecl", [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecr", [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        ("rc16", [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ];
    for (mode, table) in tables {
        check(&format!("prmt.b32.{mode} %r9, %r0, %r1, %r2;"), "r", &operands, |a, b, c| {
            let row = table[c as usize & 3];
            (0..4).map(|i| byte(a, b, row[3 - i]) << (8 * i)).sum()
        });
    }
    check("dp4a.s32.u32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| {
        let sum: i32 = (0..4).map(|i| i32::from((a >> (8 * i)) as i8) * i32::from((b >> (8 * i)) as u8)).sum();
        u64::from((c as u32).wrapping_add(sum as u32))
    });
}

#[test]
fn carries_run_through_long_sums() {
    let operands = operands();
    let halves = "mov.b64 {%r10, %r11}, %rd0; mov.b64 {%r12, %r13}, %rd1;";
    check(
        &format!("{halves} add.cc.u32 %r14, %r10, %r12; addc.u32 %r15, %r11, %r13; mov.b64 %rd9, {{%r14, %r15}};"),
        "rd",
        &operands,
        |a, b, _| a.wrapping_add(b),
    );
    check(
        &format!("{halves} sub.cc.u32 %r14, %r10, %r12; subc.u32 %r15, %r11, %r13; mov.b64 %rd9, {{%r14, %r15}};"),
        "rd",
        &operands,
        |a, b, _| a.wrapping_sub(b),
    );
    check("add.cc.u64 %rd10, %rd0, %rd1; addc.u32 %r9, 0, 0;", "r", &operands, |a, b, _| u64::from(a.checked_add(b).is_none()));
    check("add.cc.u64 %rd10, %rd0, %rd1; addc.cc.u64 %rd11, %rd2, -1; addc.u32 %r9, 0, 0;", "r", &operands, |a, b, c| {
        u64::from(u128::from(c) + u128::from(u64::MAX) + u128::from(a.checked_add(b).is_none()) > u128::from(u64::MAX))
    });
    let product = "mul.lo.u32 %r14, %r0, %r1; mad.lo.cc.u32 %r15, %r0, %r1, %r2; madc.hi.u32 %r9, %r0, %r1, 0;";
    check(product, "r", &operands, |a, b, c| {
        let wide = (a & 0xffff_ffff) * (b & 0xffff_ffff);
        ((wide >> 32) + u64::from((wide as u32).checked_add(c as u32).is_none())) & 0xffff_ffff
    });
}

#[test]
fn comparisons_and_selections() {
    let operands = operands();
    check("setp.lt.s32 %p9, %r0, %r1;", "p", &operands, |a, b, _| u64::from((a as i32) < b as i32));
    check("setp.lt.u32 %p9, %r0, %r1;", "p", &operands, |a, b, _| u64::from((a as u32) < b as u32));
    check("setp.hs.u64 %p9, %rd0, %rd1;", "p", &operands, |a, b, _| u64::from(a >= b));
    check("setp.ge.s64 %p9, %rd0, %rd1;", "p", &operands, |a, b, _| u64::from(a as i64 >= b as i64));
    check("setp.ne.s16 %p9, %rs0, %rs1;", "p", &operands, |a, b, _| u64::from(a as u16 != b as u16));
    check("setp.eq.and.s32 %p9, %r0, %r1, !%p2;", "p", &operands, |a, b, c| u64::from(a as u32 == b as u32 && c & 1 == 0));
    check("setp.gt.xor.u32 %p2|%p9, %r0, %r1, %p2;", "p", &operands, |a, b, c| u64::from(a as u32 <= b as u32) ^ c & 1);
    check("setp.gt.xor.u32 %p9|%p2, %r0, %r1, %p2;", "p", &operands, |a, b, c| u64::from(a as u32 > b as u32) ^ c & 1);
    check("set.le.u32.s32 %r9, %r0, %r1;", "r", &operands, |a, b, _| if a as i32 <= b as i32 { 0xffff_ffff } else { 0 });
    check("set.lt.f32.u32 %f9, %r0, %r1;", "f", &operands, |a, b, _| if (a as u32) < b as u32 { 0x3f80_0000 } else { 0 });
    check("selp.b64 %rd9, %rd0, %rd1, %p2;", "rd", &operands, |a, b, c| if c & 1 == 1 { a } else { b });
    check("selp.b16 %rs9, %rs0, 5, %p2;", "rs", &operands, |a, _, c| if c & 1 == 1 { a & 0xffff } else { 5 });
    check("slct.u32.s32 %r9, %r0, %r1, %r2;", "r", &operands, |a, b, c| (if c as i32 >= 0 { a } else { b }) & 0xffff_ffff);
    check("mov.u32 %r9, 1; @%p0 mov.u32 %r9, 2; @!%p1 add.u32 %r9, %r9, 10;", "r", &operands, |a, b, _| {
        1 + (a & 1) + if b & 1 == 0 { 10 } else { 0 }
    });
}

#[test]
fn registers_are_packed_and_unpacked() {
    let operands = operands();
    check("mov.b32 %r9, {%rs0, %rs1};", "r", &operands, |a, b, _| a & 0xffff | (b & 0xffff) << 16);
    check("mov.b64 %rd9, {%rs0, %rs1, %rs2, %rs0};", "rd", &operands, |a, b, c| {
        a & 0xffff | (b & 0xffff) << 16 | (c & 0xffff) << 32 | a << 48
    });
    check("mov.b64 {_, %r9}, %rd0;", "r", &operands, |a, _, _| a >> 32);
    check("mov.b64 {%rs10, %rs11, %rs12, %rs13}, %rd0; mov.u16 %rs9, %rs12;", "rs", &operands, |a, _, _| a >> 32 & 0xffff);
    check("mov.b32 {%rs10, %rs9}, %r1;", "rs", &operands, |_, b, _| b >> 16 & 0xffff);
    check("mov.b64 %rd9, {%r1, %r0};", "rd", &operands, |a, b, _| b & 0xffff_ffff | a << 32);
}
