//! Small kernels that are right only with their fences: without, the memory model makes them fail within ten seeds.
//! With their fences, they never fail.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{Device, Modelled, bytes, module, size, values};
use simgpu_ptx::{Launch, Limits, Module, launch_within};

/// The seeds within which a kernel without a fence has to fail.
const FEW: u64 = 10;
/// The seeds with which a correct kernel must not fail. `SIMGPU_SEEDS` sets another number.
const MANY: u64 = 100;

fn many() -> u64 {
    std::env::var("SIMGPU_SEEDS").map_or(MANY, |seeds| seeds.parse().expect("SIMGPU_SEEDS is a number of seeds"))
}

/// Makes a kernel that finds its memory at `%rd1`, that of the other device at `%rd2`, its thread in `%r1` and its block
/// in `%r2`. `%r5` and `%r9` are 0.
fn kernel(body: &str) -> Module {
    let start = "ld.param.u64 %rd1, [own]; ld.param.u64 %rd2, [other]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
        mov.u32 %r5, 0; mov.u32 %r9, 0;";
    module("", ".param .u64 own, .param .u64 other", &format!("{start}\n{body}"))
}

const WORDS: usize = 512;

/// Runs a kernel on one device, and returns its memory.
fn one(module: &Module, shape: &Launch, seed: u64) -> Vec<u32> {
    let mut device = Device::default();
    let at = device.put(&bytes(&[0_u32; WORDS]));
    let limits = Limits { instructions: 3_000_000, ..Limits::default() };
    let memory = Modelled::new(&device, seed);
    launch_within(&limits, module.kernel("k").unwrap(), shape, &bytes(&[at, at]), 0, &memory)
        .unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
    values(&device.get(at))
}

/// Runs a kernel on two devices at the same time, and returns the memory of both.
fn two(module: &Module, shape: &Launch, seed: u64) -> [Vec<u32>; 2] {
    let mut device = Device::default();
    let at = [(); 2].map(|()| device.put(&bytes(&[0_u32; WORDS])));
    let limits = Limits { patience: Duration::from_secs(60), instructions: 3_000_000, ..Limits::default() };
    std::thread::scope(|scope| {
        for own in [0, 1] {
            let memory = Modelled::new(&device, 2 * seed + own as u64);
            scope.spawn(move || {
                let parameters = bytes(&[at[own], at[1 - own]]);
                launch_within(&limits, module.kernel("k").unwrap(), shape, &parameters, 0, &memory)
                    .unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
            });
        }
    });
    at.map(|at| values(&device.get(at)))
}

/// Checks that a kernel goes wrong within a few seeds, or with none of many.
fn expect(what: &str, right: bool, wrong: impl FnMut(u64) -> bool) {
    expect_within(FEW, what, right, wrong);
}

fn expect_within(few: u64, what: &str, right: bool, mut wrong: impl FnMut(u64) -> bool) {
    let seeds = if right { many() } else { few };
    match (0..seeds).find(|&seed| wrong(seed)) {
        Some(seed) if right => panic!("{what}: wrong with seed {seed}"),
        None if !right => panic!("{what}: not wrong with any of {few} seeds"),
        _ => {}
    }
}

/// A message from one block to another, many times: data, then a flag. Counts the reader's wrong data.
fn message(writes: [&str; 3], reads: [&str; 3]) -> Module {
    let ([store, release, raise], [poll, acquire, load]) = (writes, reads);
    kernel(&format!(
        "setp.ne.u32 %p1, %r2, 0; @%p1 bra READ;
        WRITE: add.s32 %r5, %r5, 1; {store}.global.u32 [%rd1], %r5; {release} {raise}.global.u32 [%rd1+64], %r5;
        TAKEN: ld.acquire.sys.global.u32 %r3, [%rd1+128]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra TAKEN;
        setp.lt.u32 %p3, %r5, 30; @%p3 bra WRITE; bra END;
        READ: add.s32 %r5, %r5, 1;
        POLL: {poll}.global.u32 %r3, [%rd1+64]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra POLL; {acquire}
        {load}.global.u32 %r4, [%rd1]; setp.ne.u32 %p4, %r4, %r5; @%p4 add.s32 %r9, %r9, 1;
        st.release.sys.global.u32 [%rd1+128], %r5; setp.lt.u32 %p3, %r5, 30; @%p3 bra READ;
        st.global.u32 [%rd1+256], %r9; END:"
    ))
}

#[test]
fn messages_need_a_release_and_an_acquire() {
    let fence = "fence.acq_rel.gpu;";
    let (weak, relaxed, volatile) = (["st", fence, "st"], ["st", fence, "st.relaxed.gpu"], ["st.volatile", fence, "st.volatile"]);
    let released = ["st", "", "st.release.gpu"];
    let acquired = ["ld.acquire.gpu", "", "ld"];
    let bare = ["ld.relaxed.gpu", "", "ld"];
    let fenced = ["ld.relaxed.gpu", fence, "ld"];
    for (right, writes, reads) in [
        (true, weak, ["ld", fence, "ld"]),
        (true, relaxed, fenced),
        (true, volatile, ["ld.volatile", fence, "ld.volatile"]),
        (true, released, acquired),
        (true, released, fenced),
        (true, ["st", "membar.gl;", "st"], ["ld", "membar.gl;", "ld"]),
        (true, ["st", "membar.sys;", "st.relaxed.sys"], ["ld.relaxed.sys", "fence.sc.sys;", "ld"]),
        (true, ["st", "fence.release.gpu;", "st.relaxed.gpu"], ["ld.relaxed.gpu", "fence.acquire.gpu;", "ld"]),
        // No fence, or one on one side only.
        (false, ["st", "", "st"], ["ld", "", "ld"]),
        (false, ["st.volatile", "", "st.volatile"], ["ld.volatile", fence, "ld.volatile"]),
        (false, relaxed, bare),
        (false, ["st", "", "st.relaxed.gpu"], acquired),
        (false, ["st", "", "st.relaxed.gpu"], fenced),
        (false, released, bare),
        // A fence of the other kind, or of too small a scope.
        (false, ["st", "fence.acquire.gpu;", "st.relaxed.gpu"], fenced),
        (false, relaxed, ["ld.relaxed.gpu", "fence.release.gpu;", "ld"]),
        (false, ["st", "membar.cta;", "st"], fenced),
        (false, ["st", "", "st.release.cta"], acquired),
        (false, released, ["ld.acquire.cta", "", "ld"]),
        (false, ["st", "fence.proxy.alias;", "st"], fenced),
    ] {
        let module = message(writes, reads);
        expect(&format!("{writes:?} {reads:?}"), right, |seed| one(&module, &size(2, 1), seed)[64] != 0);
    }
}

#[test]
fn a_chain_of_messages_carries_all_of_them() {
    // Block 0 tells block 1, which tells block 2.
    let chain = |poll: &str, raise: &str| {
        kernel(&format!(
            "setp.eq.u32 %p1, %r2, 1; @%p1 bra PASS; setp.eq.u32 %p1, %r2, 2; @%p1 bra READ;
            WRITE: add.s32 %r5, %r5, 1; st.global.u32 [%rd1], %r5; st.release.gpu.global.u32 [%rd1+64], %r5;
            TAKEN: ld.acquire.gpu.global.u32 %r3, [%rd1+128]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra TAKEN;
            setp.lt.u32 %p3, %r5, 30; @%p3 bra WRITE; bra END;
            PASS: add.s32 %r5, %r5, 1;
            HEAR: {poll}.global.u32 %r3, [%rd1+64]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra HEAR;
            {raise}.global.u32 [%rd1+192], %r5; setp.lt.u32 %p3, %r5, 30; @%p3 bra PASS; bra END;
            READ: add.s32 %r5, %r5, 1;
            POLL: ld.acquire.gpu.global.u32 %r3, [%rd1+192]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra POLL;
            ld.global.u32 %r4, [%rd1]; setp.ne.u32 %p4, %r4, %r5; @%p4 add.s32 %r9, %r9, 1;
            st.release.gpu.global.u32 [%rd1+128], %r5; setp.lt.u32 %p3, %r5, 30; @%p3 bra READ;
            st.global.u32 [%rd1+256], %r9; END:"
        ))
    };
    let module = chain("ld.acquire.gpu", "st.release.gpu");
    expect("a chain", true, |seed| one(&module, &size(3, 1), seed)[64] != 0);
}

/// Two blocks store to one word each, and then read the other's. They meet before each round, and write down what they
/// saw.
fn store_buffering(store: &str, fence: &str, load: &str) -> Module {
    kernel(&format!(
        "shl.b32 %r6, %r2, 6; cvt.u64.u32 %rd3, %r6; add.s64 %rd3, %rd1, %rd3; xor.b32 %r6, %r6, 64; cvt.u64.u32 %rd4, %r6; add.s64 %rd4, %rd1, %rd4;
        mad.wide.u32 %rd5, %r2, 128, %rd1;
        AGAIN: add.s32 %r5, %r5, 1; atom.acq_rel.gpu.global.add.u32 %r3, [%rd1+192], 1; shl.b32 %r7, %r5, 1;
        MEET: ld.acquire.gpu.global.u32 %r3, [%rd1+192]; setp.lt.u32 %p2, %r3, %r7; @%p2 bra MEET;
        {store}.global.u32 [%rd3], %r5; {fence} {load}.global.u32 %r4, [%rd4];
        st.global.u32 [%rd5+1024], %r4; add.s64 %rd5, %rd5, 4; setp.lt.u32 %p3, %r5, 30; @%p3 bra AGAIN;"
    ))
}

#[test]
fn buffered_stores_need_a_fence_before_the_load() {
    for (right, store, fence, load) in [
        (true, "st.relaxed.gpu", "fence.sc.gpu;", "ld.relaxed.gpu"),
        (true, "st.volatile", "membar.gl;", "ld.volatile"),
        (true, "st", "membar.sys;", "ld"),
        (false, "st.relaxed.gpu", "", "ld.relaxed.gpu"),
        (false, "st.volatile", "", "ld.volatile"),
        (false, "st.release.gpu", "", "ld.acquire.gpu"),
        (false, "st", "membar.cta;", "ld"),
    ] {
        let module = store_buffering(store, fence, load);
        expect(&format!("{store} {fence} {load}"), right, |seed| {
            let words = one(&module, &size(2, 1), seed);
            (0..30).any(|round| words[256 + round] <= round as u32 && words[288 + round] <= round as u32)
        });
    }
}

/// Threads of several blocks add to a word that a lock guards.
fn lock(take: &str, acquire: &str, release: &str, free: &str) -> Module {
    kernel(&format!(
        "AGAIN: atom{take}.global.cas.b32 %r3, [%rd1], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra AGAIN; {acquire}
        ld.global.u32 %r4, [%rd1+64]; add.s32 %r4, %r4, 1; st.global.u32 [%rd1+64], %r4;
        {release} {free} add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 10; @%p2 bra AGAIN;"
    ))
}

#[test]
fn locks_need_a_release_and_an_acquire() {
    let fence = "fence.acq_rel.gpu;";
    let (exchange, store) = ("atom.global.exch.b32 %r3, [%rd1], 0;", "st.relaxed.gpu.global.u32 [%rd1], 0;");
    for (right, take, acquire, release, free) in [
        (true, "", fence, fence, exchange),
        (true, ".acquire.gpu", "", "", "atom.release.gpu.global.exch.b32 %r3, [%rd1], 0;"),
        (true, ".acq_rel.sys", "", "", "st.release.gpu.global.u32 [%rd1], 0;"),
        (false, "", "", "", exchange),
        (false, "", fence, "", exchange),
        (false, "", fence, "", store),
        (false, "", "", fence, exchange),
        (false, ".acquire.gpu", "", "", exchange),
        (false, ".acquire.cta", "", "fence.acq_rel.cta;", exchange),
    ] {
        let module = lock(take, acquire, release, free);
        expect(&format!("{take} {acquire} {release} {free}"), right, |seed| one(&module, &size(4, 1), seed)[16] != 40);
    }
}

#[test]
fn threads_of_a_block_need_the_barrier() {
    // Each thread stores a word, and reads that of the opposite thread.
    let exchange = |space: &str, barrier: &str| {
        kernel(&format!(
            ".shared .b8 area[1024]; mov.u64 %rd6, area; setp.eq.u32 %p5, 1, 1; mov.u64 %rd3, %rd1; {}
            mad.wide.u32 %rd4, %r1, 4, %rd3; sub.s32 %r6, 63, %r1; mad.wide.u32 %rd5, %r6, 4, %rd3;
            AGAIN: add.s32 %r5, %r5, 1; st{space}.u32 [%rd4], %r5; {barrier} ld{space}.u32 %r4, [%rd5];
            setp.ne.u32 %p4, %r4, %r5; @%p4 add.s32 %r9, %r9, 1; bar.sync 0; setp.lt.u32 %p3, %r5, 8; @%p3 bra AGAIN;
            red.global.add.u32 [%rd1+1024], %r9;",
            if space == ".shared" { "mov.u64 %rd3, %rd6;" } else { "" }
        ))
    };
    for (right, space, barrier) in [
        (true, ".global", "bar.sync 0;"),
        (true, ".shared", "bar.sync 0;"),
        (true, ".global", "barrier.sync.aligned 1, 64;"),
        (true, ".shared", "bar.red.popc.u32 %r7, 0, %p5;"),
        (false, ".global", ""),
        (false, ".shared", ""),
        // A barrier of the warp only.
        (false, ".global", "bar.warp.sync -1;"),
        (false, ".shared", "bar.warp.sync -1;"),
    ] {
        let module = exchange(space, barrier);
        expect(&format!("{space} {barrier}"), right, |seed| one(&module, &size(1, 64), seed)[256] != 0);
    }
}

#[test]
fn threads_of_a_warp_need_its_barrier() {
    let exchange = |meet: &str| {
        kernel(&format!(
            ".shared .b8 area[128]; mov.u64 %rd3, area; setp.eq.u32 %p5, 1, 1;
            mad.wide.u32 %rd4, %r1, 4, %rd3; sub.s32 %r6, 31, %r1; mad.wide.u32 %rd5, %r6, 4, %rd3;
            AGAIN: add.s32 %r5, %r5, 1; st.shared.u32 [%rd4], %r5; {meet} ld.shared.u32 %r4, [%rd5];
            setp.ne.u32 %p4, %r4, %r5; @%p4 add.s32 %r9, %r9, 1; bar.warp.sync -1; setp.lt.u32 %p3, %r5, 8; @%p3 bra AGAIN;
            red.global.add.u32 [%rd1+1024], %r9;"
        ))
    };
    // The vote waits, but orders nothing.
    for (right, meet) in [(true, "bar.warp.sync -1;"), (true, "bar.sync 0;"), (false, "vote.sync.any.pred %p1, %p5, -1;")] {
        let module = exchange(meet);
        expect(meet, right, |seed| one(&module, &size(1, 32), seed)[256] != 0);
    }
}

/// Two devices exchange data many times through two halves: all threads store into the other device's half, one of them
/// raises a flag there, and waits for its own.
fn halves(before: &str, release: &str, raise: &str, poll: &str, after: &str) -> Module {
    kernel(&format!(
        "setp.ne.u32 %p1, %r1, 0;
        AGAIN: add.s32 %r5, %r5, 1; and.b32 %r6, %r5, 1; shl.b32 %r6, %r6, 8; mad.lo.u32 %r6, %r1, 4, %r6; cvt.u64.u32 %rd3, %r6;
        add.s64 %rd4, %rd2, %rd3; add.s64 %rd3, %rd1, %rd3; add.s32 %r7, %r5, %r1; st.global.u32 [%rd4+256], %r7;
        {before} @%p1 bra WAIT; {release} {raise}.global.u32 [%rd2], %r5;
        POLL: {poll}.global.u32 %r3, [%rd1]; setp.lt.u32 %p2, %r3, %r5; @%p2 bra POLL;
        WAIT: {after} ld.global.u32 %r4, [%rd3+256]; setp.ne.u32 %p4, %r4, %r7; @%p4 add.s32 %r9, %r9, 1;
        bar.sync 0; setp.lt.u32 %p3, %r5, 40; @%p3 bra AGAIN; red.global.add.u32 [%rd1+64], %r9;"
    ))
}

#[test]
fn devices_need_fences_of_the_system() {
    let (bar, fence, relaxed, poll) = ("bar.sync 0;", "fence.acq_rel.sys;", "st.relaxed.sys", "ld.acquire.sys");
    for (right, before, release, raise, poll, after) in [
        (true, bar, fence, relaxed, poll, bar),
        (true, bar, "", "st.release.sys", poll, bar),
        (true, bar, "membar.sys;", "st.volatile", "ld.acquire.sys", bar),
        // The release left out or made relaxed, for the device only; the barrier before it left out.
        (false, bar, "", relaxed, poll, bar),
        (false, bar, "", "st.volatile", poll, bar),
        (false, bar, "fence.acq_rel.gpu;", relaxed, poll, bar),
        (false, bar, "membar.gl;", "st.volatile", poll, bar),
        (false, "", fence, relaxed, poll, bar),
        // The acquire made relaxed, or for the device only; the barrier after it left out.
        (false, bar, fence, relaxed, "ld.relaxed.sys", bar),
        (false, bar, fence, relaxed, "ld.acquire.gpu", bar),
        (false, bar, fence, relaxed, poll, ""),
    ] {
        let module = halves(before, release, raise, poll, after);
        let what = format!("{before} {release} {raise} {poll} {after}");
        // 10 seeds suffice on an idle machine. A busy one may run one device long after the other.
        expect_within(10 * FEW, &what, right, |seed| two(&module, &size(1, 32), seed).iter().any(|words| words[16] != 0));
    }
}

#[test]
fn a_word_never_goes_back() {
    // One thread counts up in plain stores, of a part or of the whole of a word; the others read, by any kind of load.
    let body = "or.b32 %r6, %r1, %r2; setp.ne.u32 %p1, %r6, 0; @%p1 bra READ;
        WRITE: add.s32 %r5, %r5, 1; st.global.u32 [%rd1], %r5; cvt.u16.u32 %rs1, %r5; st.global.u16 [%rd1], %rs1;
        ld.global.u32 %r4, [%rd1]; setp.ne.u32 %p4, %r4, %r5; @%p4 bra BAD; setp.lt.u32 %p3, %r5, 60; @%p3 bra WRITE; bra END;
        READ: mov.u32 %r6, 0;
        POLL: ld.relaxed.gpu.global.u32 %r3, [%rd1]; setp.lt.u32 %p4, %r3, %r6; @%p4 bra BAD;
        ld.volatile.global.u32 %r6, [%rd1]; setp.lt.u32 %p4, %r6, %r3; @%p4 bra BAD;
        ld.global.v2.u32 {%r3, %r7}, [%rd1]; setp.lt.u32 %p4, %r3, %r6; @%p4 bra BAD; mov.u32 %r6, %r3;
        setp.lt.u32 %p3, %r6, 60; @%p3 bra POLL; bra END;
        BAD: red.global.add.u32 [%rd1+64], 1; END:";
    let module = kernel(body);
    expect("a word", true, |seed| one(&module, &size(3, 2), seed)[16] != 0);
}

#[test]
fn atomic_operations_lose_nothing() {
    let body = "AGAIN: st.global.u32 [%rd1+512], %r5; red.global.add.u32 [%rd1], 1; atom.global.add.u32 %r3, [%rd2+64], 2;
        .shared .u32 sum; setp.ne.u32 %p1, %r1, 0; @%p1 bra NEXT; st.shared.u32 [sum], 0;
        NEXT: bar.sync 0; atom.shared.add.u32 %r3, [sum], 1; bar.sync 0; ld.shared.u32 %r4, [sum]; mov.u32 %r6, %ntid.x;
        setp.ne.u32 %p2, %r4, %r6; @%p2 red.global.add.u32 [%rd1+128], 1; bar.sync 0;
        add.s32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 4; @%p3 bra AGAIN;";
    let module = kernel(body);
    expect("atomics", true, |seed| {
        let all = two(&module, &size(3, 33), seed);
        all.iter().any(|words| (words[0], words[16], words[32]) != (4 * 99, 2 * 4 * 99, 0))
    });
}

#[test]
fn the_end_of_a_launch_makes_all_stores_visible() {
    let body = "mov.u32 %r6, %ntid.x; mad.lo.u32 %r6, %r6, %r2, %r1; mad.wide.u32 %rd3, %r6, 4, %rd1;
        NEXT: ld.global.u32 %r7, [%rd3]; add.s32 %r7, %r7, 1; st.global.u32 [%rd3], %r7; add.s32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 3; @%p1 bra NEXT;
        ld.global.v4.u64 {%rd4, %rd5, %rd6, %rd7}, [%rd1+1024]; st.global.v4.u64 [%rd1+1056], {%rd4, %rd5, %rd6, %rd7};";
    let module = kernel(body);
    let mut device = Device::default();
    let at = device.put(&bytes(&(0..WORDS as u32).collect::<Vec<_>>()));
    let memory = Modelled::new(&device, 5);
    for launch in 1..=many().min(100) as u32 {
        launch_within(&Limits::default(), module.kernel("k").unwrap(), &size(7, 30), &bytes(&[at, at]), 0, &memory).unwrap();
        let words: Vec<u32> = values(&device.get(at));
        assert!((0..210).all(|word| words[word] == word as u32 + 3 * launch), "launch {launch}");
        assert_eq!(words[264..272], words[256..264]);
    }
}

#[test]
fn a_seed_repeats_what_happened() {
    let module = message(["st", "", "st"], ["ld", "", "ld"]);
    let run = |seed| (0..3).map(|_| one(&module, &size(2, 1), seed)[64]).collect::<Vec<_>>();
    let all: Vec<_> = (0..20).map(run).collect();
    assert!(all.iter().all(|same| same.iter().all(|count| *count == same[0])), "{all:?}");
    assert!(all.iter().any(|same| same[0] != all[0][0]), "{all:?}");
}

#[test]
fn a_fault_leaves_nothing_behind() {
    // A thread stores, and later leaves its memory; the device is used again.
    let module = kernel("st.global.u32 [%rd1], 7; setp.eq.u32 %p1, %r1, 20; @%p1 st.global.u32 [%rd1+4096], 1; bar.sync 0;");
    for seed in 0..50 {
        let mut device = Device::default();
        let at = device.put(&bytes(&[0_u32; WORDS]));
        let memory = Modelled::new(&device, seed);
        let run =
            |threads| launch_within(&Limits::default(), module.kernel("k").unwrap(), &size(5, threads), &bytes(&[at, at]), 0, &memory);
        assert!(run(32).is_err());
        assert!(run(20).is_ok());
        assert_eq!(values::<u32>(&device.get(at))[0], 7);
    }
}
