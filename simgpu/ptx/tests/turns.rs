//! Threads, blocks and launches that wait for each other, and accesses of which no thread sees half.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "../../../tests/common/meeting.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests of other packages share it")]
mod meeting;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Arguments, Device, bytes, module, run, size, values};
use meeting::wait_until;
use simgpu_ptx::{FaultKind, Launch, Limits, Module, Options, Unset, launch_within};

const LONG: Duration = Duration::from_secs(60);

/// Makes a kernel that finds its memory at `%rd1`, its thread in `%r1` and its block in `%r2`.
fn waiting(body: &str) -> Module {
    module("", ".param .u64 at", &format!("ld.param.u64 %rd1, [at]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n{body}"))
}

/// Runs a kernel on words and returns the words afterwards.
fn over_words(body: &str, input: &[u32], size: &Launch, limits: &Limits) -> Result<Vec<u32>, simgpu_ptx::Fault> {
    let module = waiting(body);
    let mut device = Device::default();
    let at = device.put(&bytes(input));
    launch_within(limits, module.kernel("k").unwrap(), size, &at.to_le_bytes(), 0, &device)?;
    Ok(values(&device.get(at)))
}

#[test]
fn threads_wait_for_others_of_their_block() {
    // All but one spin until that one has written.
    for writer in [0, 1, 31, 32, 95] {
        let body = format!(
            "setp.eq.u32 %p1, %r1, {writer}; @%p1 bra WRITE;
            SPIN: ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; bra END;
            WRITE: st.volatile.global.u32 [%rd1], 1; END: red.global.add.u32 [%rd1+4], 1;"
        );
        assert_eq!(over_words(&body, &[0, 0], &size(1, 96), &Limits::default()).unwrap(), [1, 96], "{writer}");
    }
}

#[test]
fn a_warp_that_meets_in_a_loop_lets_others_go() {
    for meeting in ["bar.warp.sync -1;", "vote.sync.any.pred %p4, %p1, -1;", "bar.sync 1, 32;"] {
        let body = format!(
            "setp.ge.u32 %p1, %r1, 32; @%p1 bra WRITE;
            SPIN: {meeting} ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; bra END;
            WRITE: st.volatile.global.u32 [%rd1], 1; END: red.global.add.u32 [%rd1+4], 1;"
        );
        assert_eq!(over_words(&body, &[0, 0], &size(1, 64), &Limits::default()).unwrap(), [1, 64], "{meeting}");
    }
}

/// Blocks add to a counter, and wait until all have done so.
const MEET: &str = "bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAIT; mov.u32 %r4, %nctaid.x; red.global.add.u32 [%rd1], 1;
    SPIN: ld.acquire.gpu.global.u32 %r3, [%rd1]; setp.lt.u32 %p2, %r3, %r4; @%p2 bra SPIN;
    WAIT: bar.sync 0; red.global.add.u32 [%rd1+4], 1;";

#[test]
fn blocks_wait_for_each_other() {
    assert_eq!(over_words(MEET, &[0, 0], &size(8, 33), &Limits::default()).unwrap(), [8, 8 * 33]);
    // Meanwhile each block keeps its own shared memory, barriers and position.
    let body = format!(
        ".shared .u32 own; st.shared.u32 [own], %r2; {MEET} ld.shared.u32 %r5, [own]; mad.wide.u32 %rd3, %r2, 4, %rd1;
        mov.u32 %r6, %ctaid.x; sub.s32 %r5, %r5, %r6; st.global.u32 [%rd3+8], %r5;"
    );
    assert_eq!(over_words(&body, &[0, 0, 9, 9, 9, 9], &size(4, 1), &Limits::default()).unwrap(), [4, 4, 0, 0, 0, 0]);
}

#[test]
fn blocks_that_do_not_find_room_beside_each_other_are_a_fault() {
    let limits = |blocks| Limits { blocks, instructions: 4_000_000, ..Limits::default() };
    assert!(over_words(MEET, &[0, 0], &size(3, 1), &limits(3)).is_ok());
    let fault = over_words(MEET, &[0, 0], &size(3, 1), &limits(2)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless(4_000_000), "{fault}");
    // Blocks that end occupy no place.
    assert!(over_words("red.global.add.u32 [%rd1], 1;", &[0], &size(100, 1), &limits(1)).is_ok());
}

#[test]
fn launches_of_two_threads_wait_for_each_other() {
    const ROUNDS: u32 = 20;
    let body = format!(
        "setp.ne.u32 %p1, %r1, 0; mov.u32 %r5, 0;
        NEXT: ld.param.u32 %r6, [parity]; and.b32 %r7, %r5, 1; setp.ne.u32 %p2, %r6, %r7; @%p2 bra WAIT;
        st.release.sys.global.u32 [%rd1], %r5;
        WAIT: ld.acquire.sys.global.u32 %r3, [%rd1]; setp.ne.u32 %p3, %r3, %r5; @%p3 bra WAIT;
        add.s32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, {ROUNDS}; @%p4 bra NEXT;"
    );
    let start = "ld.param.u64 %rd1, [at]; mov.u32 %r1, %tid.x; ";
    let module = module("", ".param .u64 at, .param .u32 parity", &format!("{start}{body}"));
    let mut device = Device::default();
    let at = device.put(&bytes(&[u32::MAX]));
    let limits = Limits { patience: LONG, instructions: 10_000, ..Limits::default() };
    std::thread::scope(|scope| {
        for parity in [0_u32, 1] {
            let arguments = Arguments::default().with(at).with(parity);
            let (kernel, device) = (module.kernel("k").unwrap(), &device);
            scope.spawn(move || launch_within(&limits, kernel, &size(1, 1), &arguments.0, 0, device).unwrap());
        }
    });
    assert_eq!(values::<u32>(&device.get(at)), [ROUNDS - 1]);
}

#[test]
fn a_patient_launch_waits_longer_than_its_instructions_last() {
    let body = "WAIT: red.global.add.u32 [%rd1], 1; ld.volatile.global.u32 %r3, [%rd1+4]; setp.eq.u32 %p1, %r3, 0; @%p1 bra WAIT;";
    let module = waiting(body);
    let mut device = Device::default();
    let at = device.put(&bytes(&[0_u32, 0]));
    let fault = |patience| {
        let limits = Limits { patience, instructions: 50_000, ..Limits::default() };
        launch_within(&limits, module.kernel("k").unwrap(), &size(1, 2), &at.to_le_bytes(), 0, &device).err()
    };
    assert_eq!(fault(Duration::ZERO).unwrap().kind, FaultKind::Endless(50_000));
    assert_eq!(fault(Duration::from_millis(1)).unwrap().kind, FaultKind::Endless(50_000));
    let word = |number: usize| values::<u32>(&device.get(at))[number];
    let before = word(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Far more rounds than the limit of instructions allows.
            wait_until("the launch goes on", || word(0) - before >= 100_000);
            device.set(at + 4, 1);
        });
        assert_eq!(fault(LONG), None);
    });
}

/// Runs a launch that writes vectors of equal elements, and another one that counts vectors with unequal ones.
fn torn(store: &str, load: &str) -> u32 {
    const ROUNDS: u32 = 100_000;
    let write = format!(
        "mov.u32 %r5, 0; A: add.s32 %r5, %r5, 1; cvt.u64.u32 %rd5, %r5; {store}
        setp.lt.u32 %p1, %r5, {ROUNDS}; @%p1 bra A; st.volatile.global.u32 [%rd1+32], 1;"
    );
    let read = format!(
        "mov.u32 %r9, 0; A: {load} selp.u32 %r10, 1, 0, %p1; add.s32 %r9, %r9, %r10;
        ld.volatile.global.u32 %r11, [%rd1+32]; setp.eq.u32 %p2, %r11, 0; @%p2 bra A; st.global.u32 [%rd1+36], %r9;"
    );
    let mut device = Device::default();
    let at = device.put(&[0; 48]);
    let begun = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (body, last) in [(write, true), (read, false)] {
            let (device, begun) = (&device, &begun);
            scope.spawn(move || {
                let module = waiting(&body);
                // The second one to arrive releases the first one.
                wait_until("the other one comes", || begun.load(Ordering::Acquire) == last);
                begun.store(true, Ordering::Release);
                launch_within(&Limits::default(), module.kernel("k").unwrap(), &size(1, 1), &at.to_le_bytes(), 0, device).unwrap();
            });
        }
    });
    values::<u32>(&device.get(at))[9]
}

#[test]
fn nobody_sees_half_of_a_vector() {
    let words = "setp.ne.u32 %p3, %r1, %r2; setp.ne.or.u32 %p3, %r1, %r3, %p3; setp.ne.or.u32 %p1, %r1, %r4, %p3;";
    let doubles = "setp.ne.u64 %p1, %rd6, %rd7;";
    for space in [".global", ""] {
        for (store, load) in [
            (
                format!("st.volatile{space}.v4.u32 [%rd1], {{%r5, %r5, %r5, %r5}};"),
                format!("ld.volatile{space}.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1]; {words}"),
            ),
            (format!("st{space}.v2.u64 [%rd1], {{%rd5, %rd5}};"), format!("ld{space}.v2.u64 {{%rd6, %rd7}}, [%rd1]; {doubles}")),
            (
                format!("st.relaxed.sys{space}.v2.b64 [%rd1+16], {{%rd5, %rd5}};"),
                format!("ld.acquire.sys{space}.v2.b64 {{%rd6, %rd7}}, [%rd1+16]; {doubles}"),
            ),
            (
                format!("st{space}.v2.u32 [%rd1+8], {{%r5, %r5}};"),
                format!("ld{space}.v2.u32 {{%r1, %r2}}, [%rd1+8]; setp.ne.u32 %p1, %r1, %r2;"),
            ),
        ] {
            assert_eq!(torn(&store, &load), 0, "{store} {load}");
        }
    }
}

#[test]
fn vectors_keep_the_order_of_their_elements() {
    let body = "ld.global.v2.u64 {%rd2, %rd3}, [%rd1]; st.global.v2.u64 [%rd1+16], {%rd3, %rd2}; ld.global.v4.u8 {%rs1, %rs2, _, %rs4}, [%rd1];
        st.global.v4.u8 [%rd1+32], {%rs4, %rs4, %rs2, %rs1}; ld.global.v4.s16 {%r3, %r4, %r5, %r6}, [%rd1+8];
        st.global.v4.u32 [%rd1+48], {%r6, %r5, %r4, %r3}; ld.global.v4.u64 {%rd4, %rd5, %rd6, %rd7}, [%rd1]; st.global.v4.u64 [%rd1+64], {%rd7, %rd6, %rd5, %rd4};";
    let input: Vec<u8> = (0..96_u8).map(|i| i.wrapping_mul(7) ^ 0x80).collect();
    let mut device = Device::default();
    let at = device.put(&input);
    run(&waiting(body), "k", &size(1, 1), Arguments::default().with(at), &mut device).unwrap();
    let mut expected = input.clone();
    expected.copy_within(0..8, 24);
    expected.copy_within(8..16, 16);
    [3, 3, 1, 0].iter().enumerate().for_each(|(to, &from)| expected[32 + to] = input[from]);
    for (to, from) in [7, 6, 5, 4].into_iter().enumerate() {
        let wide = i32::from(i16::from_le_bytes([input[2 * from], input[2 * from + 1]]));
        expected[48 + 4 * to..][..4].copy_from_slice(&wide.to_le_bytes());
    }
    (0..4).for_each(|part| expected.copy_within(8 * part..8 * part + 8, 64 + 8 * (3 - part)));
    assert_eq!(device.get(at), expected);
}

#[test]
fn registers_that_are_read_before_they_are_set() {
    let body = "setp.ne.u32 %p1, %r1, 0; @%p1 mov.u32 %r5, 7; mov.u32 %r6, %r7; add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r8;
        mad.wide.u32 %rd2, %r1, 4, %rd1; mad.wide.u32 %rd2, %r2, 8, %rd2; st.global.u32 [%rd2], %r5; mov.u32 %r8, 1000; mov.u32 %r7, 1000;
        call twice, (%rd2);";
    // A function whose registers use the slots of earlier ones.
    let before = ".func other(.reg .b64 at) { .reg .b32 %a<9>; mov.u32 %a3, 500; add.s32 %a4, %a3, %a3; ret; }
        .func add(.reg .b64 at) { .reg .b32 %a<9>; ld.global.u32 %a1, [at]; add.s32 %a1, %a1, %a3; add.s32 %a1, %a1, %a4; st.global.u32 [at], %a1; ret; }
        .func twice(.reg .b64 at) { call other, (at); call add, (at); ret; }\n";
    let start = "ld.param.u64 %rd1, [at]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;";
    let text = common::text(before, ".param .u64 at", &format!("{start}\n{body}"));
    let attempt = |options| {
        let module = Module::link(&[&text], options).unwrap();
        let mut device = Device::default();
        let at = device.put(&[0; 16]);
        run(&module, "k", &size(2, 2), Arguments::default().with(at), &mut device).map(|_| values::<u32>(&device.get(at)))
    };
    for late in [false, true] {
        assert!(matches!(attempt(Options { late, ..Options::default() }).unwrap_err().kind, FaultKind::Unset(_)));
        assert_eq!(attempt(Options { late, unset: Unset::Holds(0) }).unwrap(), [0, 7, 0, 7]);
        assert_eq!(attempt(Options { late, unset: Unset::Holds(10) }).unwrap(), [50, 47, 50, 47]);
    }
}
