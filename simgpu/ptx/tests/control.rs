//! Branch tables, calls, atomics, address spaces, barriers and warps, in small pieces of PTX.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Arguments, Device, bytes, check, evaluate, module, run, size, values};
use simgpu_ptx::{Launch, Module};

/// Runs a kernel on words. Each thread finds its word at `%rd2` and its number in `%r1`.
fn over_words(before: &str, body: &str, input: &[u32], size: &Launch) -> Vec<u32> {
    let start = "ld.param.u64 %rd1, [at]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 4, %rd1;";
    let module = module(before, ".param .u64 at", &format!("{start}\n{body}"));
    let mut device = Device::default();
    let at = device.put(&bytes(input));
    run(&module, "k", size, Arguments::default().with(at), &mut device).unwrap_or_else(|fault| panic!("{body}: {fault}"));
    values(&device.get(at))
}

#[test]
fn tables_of_branches() {
    let body = "ld.global.u32 %r2, [%rd2];
        TABLE: .branchtargets ZERO, ONE, TWO, ONE;
        brx.idx %r2, TABLE;
        ZERO: mov.u32 %r3, 10; bra.uni END;
        TWO: mov.u32 %r3, 30; bra.uni END;
        ONE: mov.u32 %r3, 20;
        END: st.global.u32 [%rd2], %r3;";
    assert_eq!(over_words("", body, &[2, 1, 0, 3], &size(1, 4)), [30, 20, 10, 20]);
}

#[test]
fn names_and_labels_live_in_their_scope() {
    let body = "mov.u32 %r3, 0;
        { .reg .b32 x; mov.u32 x, 1; setp.ne.s32 %p1, %r1, 0; @%p1 bra SKIP; add.s32 %r3, %r3, x; SKIP: }
        { .reg .b32 x; mov.u32 x, 20; setp.ne.s32 %p1, %r1, 1; @%p1 bra SKIP; add.s32 %r3, %r3, x; bra OUT; SKIP: }
        add.s32 %r3, %r3, 100;
        OUT: st.global.u32 [%rd2], %r3;";
    assert_eq!(over_words("", body, &[0; 3], &size(1, 3)), [101, 20, 100]);
}

#[test]
fn calls_carry_registers_and_memory() {
    let before = ".func (.reg .b32 out) twice(.reg .b32 in) { add.s32 out, in, in; ret; }
        .func (.param .b64 out) sum(.param .align 8 .b8 pair[16], .param .b32 more);
        .func (.param .b64 out) sum(.param .align 8 .b8 pair[16], .param .b32 more)
        { .reg .b64 %a<4>; .reg .b32 %b; ld.param.u64 %a0, [pair]; ld.param.u64 %a1, [pair+8]; ld.param.u32 %b, [more];
          cvt.u64.u32 %a2, %b; add.s64 %a3, %a0, %a1; add.s64 %a3, %a3, %a2; st.param.b64 [out], %a3; }
        .func stop(.reg .b32 in) { .reg .pred p; setp.eq.s32 p, in, 2; @p exit; ret; }\n";
    let body = "call (%r2), twice, (%r1); call (%r2), twice, (%r2); call stop, (%r1);
        { .param .align 8 .b8 pair[16]; .param .b32 more; .param .b64 back;
          cvt.u64.u32 %rd3, %r2; st.param.b64 [pair], %rd3; st.param.b64 [pair+8], 1000; st.param.b32 [more], 7;
          call.uni (back), sum, (pair, more); ld.param.b64 %rd4, [back]; }
        cvt.u32.u64 %r3, %rd4; st.global.u32 [%rd2], %r3;";
    assert_eq!(over_words(before, body, &[5; 4], &size(1, 4)), [1007, 1011, 5, 1019]);
}

#[test]
fn calls_with_other_arguments_or_results_are_faults() {
    let before = ".func (.reg .b32 out) twice(.reg .b32 in) { add.s32 out, in, in; ret; }\n";
    for body in ["call (%r1), twice;", "call (%r1), twice, (%r1, %r1);", "call twice, (%r1);", "call (%r1, %r2), twice, (%r1);"] {
        let module = module(before, "", &format!("mov.u32 %r1, 0; {body}"));
        let fault = run(&module, "k", &size(1, 1), Arguments::default(), &mut Device::default()).unwrap_err();
        assert!(fault.to_string().contains("twice, whose parameters or results"), "{body}: {fault}");
    }
}

#[test]
fn recursion_without_end_is_a_fault() {
    let before = ".func down() { .local .b64 frame[100]; call down; }\n";
    let module = module(before, "", "call down;");
    let fault = run(&module, "k", &size(1, 1), Arguments::default(), &mut Device::default()).unwrap_err();
    assert!(fault.to_string().contains("calls nest"), "{fault}");
}

#[test]
fn generic_addresses_lead_to_every_space() {
    let body = ".shared .b32 word; .shared .align 4 .b8 more[8]; .local .b32 own;
        mov.u64 %rd3, word; cvta.shared.u64 %rd4, %rd3; st.u32 [%rd4], 5; ld.shared.u32 %r2, [word];
        mov.u32 %r9, more; st.shared.u32 [%r9+4], 6; mov.u64 %rd5, more; cvta.shared.u64 %rd5, %rd5; ld.u32 %r3, [%rd5+4];
        mov.u64 %rd6, own; cvta.local.u64 %rd7, %rd6; st.u32 [%rd7], 70; ld.local.u32 %r4, [own];
        ld.u32 %r5, [%rd2]; cvta.to.shared.u64 %rd8, %rd4; sub.s64 %rd9, %rd8, %rd3; cvt.u32.u64 %r6, %rd9;
        mov.u64 %rd11, at; cvta.param.u64 %rd12, %rd11; ld.u64 %rd13, [%rd12]; sub.s64 %rd13, %rd13, %rd1; cvt.u32.u64 %r7, %rd13;
        isspacep.shared %p1, %rd4; isspacep.local %p2, %rd4; isspacep.local %p3, %rd7; isspacep.global %p4, %rd2;
        selp.u32 %r10, 1, 0, %p1; selp.u32 %r11, 2, 0, %p2; selp.u32 %r12, 4, 0, %p3; selp.u32 %r13, 8, 0, %p4;
        add.s32 %r14, %r2, %r3; add.s32 %r14, %r14, %r4; add.s32 %r14, %r14, %r5; add.s32 %r14, %r14, %r6; add.s32 %r14, %r14, %r7;
        mad.lo.s32 %r14, %r14, 100, %r10; add.s32 %r14, %r14, %r11; add.s32 %r14, %r14, %r12; add.s32 %r14, %r14, %r13;
        st.global.u32 [%rd2], %r14;";
    assert_eq!(over_words("", body, &[900], &size(1, 1)), [98_113]);
}

#[test]
fn fresh_shared_and_local_memory_holds_a_pattern() {
    let body = ".shared .b32 word; .local .b32 own; ld.shared.u32 %r2, [word]; ld.local.u32 %r3, [own]; st.shared.u32 [word], 1;
        st.local.u32 [own], 1; and.b32 %r4, %r2, %r3; mov.u32 %r5, %ctaid.x; mad.wide.u32 %rd2, %r5, 4, %rd1; st.global.u32 [%rd2], %r4;";
    assert_eq!(over_words("", body, &[0; 2], &size(2, 1)), [0xa5a5_a5a5; 2]);
}

#[test]
fn elements_are_extended_to_the_register() {
    let operands = [[0x80ff_8081_fe7f_ff80, 3, 0], [0x7f01, 0, 0]];
    let stored = |piece: &str| format!(".local .align 16 .b8 m[16]; st.local.u64 [m], %rd0; st.local.u64 [m+8], %rd1; {piece}");
    check(&stored("ld.local.s8 %r9, [m];"), "r", &operands, |a, _, _| u64::from(i32::from(a as i8) as u32));
    check(&stored("ld.local.u8 %r9, [m];"), "r", &operands, |a, _, _| a & 0xff);
    check(&stored("ld.local.s8 %rs9, [m+1];"), "rs", &operands, |a, _, _| u64::from(i16::from((a >> 8) as i8) as u16));
    check(&stored("ld.local.s32 %rd9, [m];"), "rd", &operands, |a, _, _| i64::from(a as i32) as u64);
    check(&stored("ld.local.v2.u64 {%rd8, %rd9}, [m];"), "rd", &operands, |_, b, _| b);
    check(&stored("ld.local.v4.u8 {_, _, %rs8, %rs9}, [m];"), "rs", &operands, |a, _, _| a >> 24 & 0xff);
    check(&stored("st.local.v4.u8 [m], {%rs0, %rs1, %rs0, %rs1}; ld.local.u64 %rd9, [m];"), "rd", &operands, |a, b, _| {
        (a >> 32 << 32) | ((a & 0xff) * 0x1_0001) | ((b & 0xff) * 0x0100_0100)
    });
    check(&stored("st.local.b16 [m+2], %r1; ld.local.f32 %f9, [m];"), "f", &operands, |a, b, _| a & 0xffff | (b & 0xffff) << 16);
}

#[test]
fn atomics_return_the_old_value_and_leave_the_new_one() {
    let operands = [[5, 7, 5], [0xffff_ffff_ffff_fffe, 3, 9], [0, 0, 1], [0x8000_0000_8000_0000, 1, 2], [7, 7, 100]];
    type New = fn(u32, u32, u32) -> u32;
    let cases: [(&str, New); 12] = [
        ("add.u32", |a, b, _| a.wrapping_add(b)),
        ("add.s32", |a, b, _| a.wrapping_add(b)),
        ("min.s32", |a, b, _| (a as i32).min(b as i32) as u32),
        ("max.s32", |a, b, _| (a as i32).max(b as i32) as u32),
        ("max.u32", |a, b, _| a.max(b)),
        ("and.b32", |a, b, _| a & b),
        ("or.b32", |a, b, _| a | b),
        ("xor.b32", |a, b, _| a ^ b),
        ("exch.b32", |_, b, _| b),
        ("inc.u32", |a, b, _| if a >= b { 0 } else { a + 1 }),
        ("dec.u32", |a, b, _| if a == 0 || a > b { b } else { a - 1 }),
        ("cas.b32", |a, b, c| if a == b { c } else { a }),
    ];
    for (name, oracle) in cases {
        let more = if name.starts_with("cas") { ", %r2" } else { "" };
        for space in ["shared", "global"] {
            let place = if space == "shared" {
                ".shared .align 8 .b8 m[2048]; mov.u32 %r15, %tid.x; shl.b32 %r15, %r15, 3; mov.u32 %r16, m; add.s32 %r15, %r15, %r16;"
            } else {
                ""
            };
            let at = if space == "shared" { "[%r15]" } else { "[%rd20]" };
            let piece = format!(
                "{place} st.{space}.u32 {at}, %r0; atom.{space}.{name} %r10, {at}, %r1{more}; ld.{space}.u32 %r11, {at}; mov.b64 %rd9, {{%r10, %r11}};"
            );
            check(&piece, "rd", &operands, |a, b, c| a & 0xffff_ffff | u64::from(oracle(a as u32, b as u32, c as u32)) << 32);
        }
    }
    check("red.global.add.u64 [%rd20], %rd1; ld.global.u64 %rd9, [%rd20];", "rd", &operands, |a, b, _| a.wrapping_add(b));
    check("red.relaxed.gpu.global.max.s64 [%rd20], %rd1; ld.global.u64 %rd9, [%rd20];", "rd", &operands, |a, b, _| {
        (a as i64).max(b as i64) as u64
    });
    check("atom.acq_rel.sys.global.cas.b64 %rd9, [%rd20], %rd1, %rd2; ld.global.u64 %rd9, [%rd20];", "rd", &operands, |a, b, c| {
        if a == b { c } else { a }
    });
    check("atom.global.cas.b16 %rs9, [%rd20], %rs1, %rs2; ld.global.u64 %rd9, [%rd20];", "rd", &operands, |a, b, c| {
        if a as u16 == b as u16 { a >> 16 << 16 | c & 0xffff } else { a }
    });
}

#[test]
fn float_atomics_flush_subnormal_numbers_in_global_memory_only() {
    let row = [[1.5_f32.to_bits().into(), 2.25_f32.to_bits().into(), 0], [1, 2, 0], [0x7f80_0000, 0xff80_0000, 0]];
    let global = evaluate("red.global.add.f32 [%rd20], %f1; ld.global.u32 %r9, [%rd20];", "r", &row);
    assert_eq!(global, [3.75_f32.to_bits().into(), 0, 0x7fff_ffff]);
    let place = ".shared .b32 m; setp.eq.u32 %p5, %tid.x, 1; @!%p5 mov.u32 %r9, 0; @!%p5 bra END;";
    let shared =
        evaluate(&format!("{place} st.shared.f32 [m], %f0; atom.shared.add.f32 %f9, [m], %f1; ld.shared.u32 %r9, [m]; END:"), "r", &row);
    assert_eq!(shared, [0, 3, 0]);
    let doubles = [[1.5_f64.to_bits(), 2.25_f64.to_bits(), 0]];
    assert_eq!(evaluate("atom.global.add.f64 %fd9, [%rd20], %fd1; ld.global.f64 %fd9, [%rd20];", "fd", &doubles), [3.75_f64.to_bits()]);
    let halves = [[0x3c00_4000, 0x3c00_4000, 0]];
    assert_eq!(evaluate("atom.global.add.noftz.f16x2 %r9, [%rd20], %r1; ld.global.u32 %r9, [%rd20];", "r", &halves), [0x4000_4400]);
}

#[test]
fn every_thread_adds_to_one_counter() {
    let body = ".shared .u32 all; setp.ne.s32 %p1, %r1, 0; @%p1 bra GO; st.shared.u32 [all], 0; GO: bar.sync 0;
        atom.shared.add.u32 %r2, [all], %r1; red.global.add.u32 [%rd1], 1; bar.sync 0; ld.shared.u32 %r3, [all];
        setp.ne.s32 %p1, %r1, 0; @%p1 ret; red.global.add.u32 [%rd1+4], %r3;";
    assert_eq!(over_words("", body, &[100, 0], &size(7, 96)), [100 + 7 * 96, 7 * 95 * 96 / 2]);
}

#[test]
fn barriers_with_counts_and_arrivals() {
    // The second warp arrives and goes on; the first waits for it.
    let body = ".shared .u32 word; setp.lt.u32 %p1, %r1, 32; @%p1 bra FIRST;
        st.shared.u32 [word], 77; bar.arrive 3, 64; mov.u32 %r2, 5; bra END;
        FIRST: bar.sync 3, 64; ld.shared.u32 %r2, [word];
        END: bar.sync 0; barrier.sync 1; bar.sync 2, 64; st.global.u32 [%rd2], %r2;";
    let got = over_words("", body, &[0; 64], &size(1, 64));
    assert_eq!((&got[..32], &got[32..]), (&[77; 32][..], &[5; 32][..]));
    let body = "setp.lt.u32 %p1, %r1, 5; bar.red.popc.u32 %r2, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 1, !%p1;
        selp.u32 %r3, 100, 0, %p2; selp.u32 %r4, 10, 0, %p3; add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r4; st.global.u32 [%rd2], %r2;";
    assert_eq!(over_words("", body, &[0; 40], &size(1, 40)), [15; 40]);
}

#[test]
fn shuffles_keep_to_their_segments() {
    for (mode, amount, bounds, source) in [
        ("up", 1, 0, (|lane: u32| lane.checked_sub(1)) as fn(u32) -> Option<u32>),
        ("up", 3, 0x1800, |lane| (lane % 8 >= 3).then(|| lane - 3)),
        ("down", 2, 31, |lane| (lane + 2 < 32).then(|| lane + 2)),
        ("down", 2, 0x1803, |lane| (lane % 8 + 2 <= 3).then(|| lane + 2)),
        ("bfly", 5, 31, |lane| Some(lane ^ 5)),
        ("bfly", 8, 0x1807, |lane| (lane ^ 8 < lane).then_some(lane ^ 8)),
        ("idx", 6, 31, |_| Some(6)),
        ("idx", 13, 0x1807, |lane| Some(lane & 24 | 13 & 7)),
    ] {
        let body = format!(
            "mul.lo.s32 %r2, %r1, 10; mov.u32 %r3, {amount}; mov.u32 %r4, {bounds}; shfl.sync.{mode}.b32 %r5|%p1, %r2, %r3, %r4, -1;
            selp.u32 %r6, 1, 0, %p1; add.s32 %r5, %r5, %r6; st.global.u32 [%rd2], %r5;"
        );
        let expected: Vec<u32> = (0..32).map(|lane| source(lane).map_or(lane * 10, |from| from * 10 + 1)).collect();
        assert_eq!(over_words("", &body, &[0; 32], &size(1, 32)), expected, "{mode} by {amount} in {bounds:#x}");
    }
}

#[test]
fn parts_of_a_warp_meet_by_themselves() {
    let body = "and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 0; @%p1 bra EVEN;
        vote.sync.ballot.b32 %r3, %p1, 0xaaaaaaaa; activemask.b32 %r4; bra END;
        EVEN: vote.sync.ballot.b32 %r3, %p1, 0x55555555; activemask.b32 %r4;
        END: xor.b32 %r3, %r3, %r4; st.global.u32 [%rd2], %r3;";
    let expected: Vec<u32> = (0..32).map(|lane| if lane % 2 == 1 { 0xaaaa_aaaa } else { 0 }).collect();
    assert_eq!(over_words("", body, &[0; 32], &size(1, 32)), expected);
    // Lanes that have ended, or that a small block does not have, are excluded.
    let body = "setp.ge.u32 %p1, %r1, 10; @%p1 ret; setp.ne.s32 %p2, %r1, 3; vote.sync.all.pred %p3, %p2, -1; bar.warp.sync -1;
        redux.sync.max.s32 %r3, %r1, -1; selp.u32 %r4, 100, 200, %p3; add.s32 %r3, %r3, %r4; match.all.sync.b32 %r5|%p4, %r3, -1;
        selp.u32 %r6, 1000, 0, %p4; add.s32 %r3, %r3, %r6; st.global.u32 [%rd2], %r3;";
    assert_eq!(over_words("", body, &[0; 20], &size(1, 20)), [[1209; 10], [0; 10]].concat());
}

#[test]
fn places_in_grid_block_and_warp() {
    let body = "mov.u32 %r2, %ntid.x; mov.u32 %r3, %nctaid.x; mov.u32 %r4, %laneid; mov.u32 %r5, %warpid; mov.u32 %r6, %nwarpid;
        mov.u32 %r7, %lanemask_lt; mov.u32 %r8, %lanemask_ge; popc.b32 %r7, %r7; popc.b32 %r8, %r8; add.s32 %r9, %r7, %r8;
        mad.lo.s32 %r9, %r5, 100, %r9; mad.lo.s32 %r9, %r4, 1000, %r9; mad.lo.s32 %r9, %r6, 100000, %r9;
        mad.lo.s32 %r9, %r2, 1000000, %r9; mad.lo.s32 %r9, %r3, 100000000, %r9; mov.u32 %r10, %clock; mov.u64 %rd5, %clock64; st.global.u32 [%rd2], %r9;";
    let got = over_words("", body, &[0; 40], &size(3, 40));
    for (i, &word) in got.iter().enumerate() {
        assert_eq!(word, (340_200_032 + i / 32 * 100 + i % 32 * 1000) as u32, "thread {i}");
    }
    let body = "mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ntid.y; mov.u32 %r6, %ntid.x;
        mad.lo.s32 %r7, %r3, %r5, %r2; mad.lo.s32 %r7, %r7, %r6, %r1; mad.lo.s32 %r8, %r4, 24, %r7; mad.wide.u32 %rd2, %r8, 4, %rd1;
        mad.lo.s32 %r9, %r2, 10, %r1; mad.lo.s32 %r9, %r3, 100, %r9; mad.lo.s32 %r9, %r4, 1000, %r9; st.global.u32 [%rd2], %r9;";
    let got = over_words("", body, &[0; 48], &Launch { grid: [1, 2, 1], block: [2, 3, 4], dynamic_shared_bytes: 0 });
    let expected: Vec<u32> = (0..48).map(|i| i / 24 * 1000 + i % 24 / 6 * 100 + i % 6 / 2 * 10 + i % 2).collect();
    assert_eq!(got, expected);
}

#[test]
fn what_only_tells_of_debugging_or_tuning_is_skipped() {
    let text = ".version 8.0
        .target sm_80, debug
        .address_size 64
        .file 1 \"a file.cu\", 1, 2
        .global .align 1 .b8 unused[3] = {1, 2};
        .visible .entry k(.param .u64 .ptr .global .align 16 at)
        .maxnreg 40
        .minnctapersm 2
        {
        .loc 1 5 0
        .pragma \"nounroll\";
        .reg .b64 %rd<2>; // the end of a line
        ld.param.u64 %rd1, [at]; /* several
        lines */
        .loc 1 6 3, function_name $L__info_string0, inlined_at 1 5 0
        prefetch.global.L2 [%rd1];
        nanosleep.u32 100;
        membar.gl; fence.acq_rel.gpu;
        st.global.L1::no_allocate.u32 [%rd1], 9;
        $L__end:
        ret;
        }
        .section .debug_abbrev { .b8 1 .b8 17 $L__here: .b64 $L__end }
        .section .debug_info
        { .b32 12 .b32 .debug_abbrev }";
    let module = Module::parse(text).unwrap();
    let mut device = Device::default();
    let at = device.put(&[0; 4]);
    run(&module, "k", &size(1, 1), Arguments::default().with(at), &mut device).unwrap();
    assert_eq!(device.get(at), [9, 0, 0, 0]);
    assert_eq!(module.globals_image(0x1000), [1, 2, 0]);
    assert_eq!(module.kernel("k").unwrap().parameters()[0].align, 8);
}
