//! Every detector, with a kernel that violates its rule, and one that just does not.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{Arguments, Device, module, run, size, text};
use simgpu_ptx::{Fault, FaultKind, FaultPlace, Launch, Limits, Memory, Module, Region, launch, launch_within};

/// Runs a kernel with the address of 64 bytes, plus an offset, as its parameter.
fn on_64_bytes(body: &str, offset: i64, size: &Launch) -> Result<(u64, Vec<u8>), Fault> {
    let module = module("", ".param .u64 at", &format!("ld.param.u64 %rd1, [at];\n{body}"));
    let mut device = Device::default();
    let at = device.put(&[7; 64]);
    run(&module, "k", size, Arguments::default().with(at.wrapping_add_signed(offset)), &mut device)?;
    Ok((at, device.get(at)))
}

fn fails(body: &str, offset: i64, size: &Launch) -> Fault {
    on_64_bytes(body, offset, size).unwrap_err()
}

fn within(instructions: u64) -> Limits {
    Limits { instructions, ..Limits::default() }
}

fn place(line: u32, thread: u32, block: u32) -> Option<FaultPlace> {
    Some(FaultPlace { text: 0, line, thread: [thread, 0, 0], block: [block, 0, 0] })
}

#[test]
fn a_byte_beyond_an_allocation() {
    let last = on_64_bytes("ld.global.u8 %r1, [%rd1];\nst.global.u8 [%rd1], 9;", 63, &size(1, 1)).unwrap().1;
    assert_eq!(last[62..], [7, 9]);
    let fault = fails("\nld.global.u8 %r1, [%rd1];", 64, &size(1, 1));
    assert_eq!(fault.place, place(8, 0, 0));
    let FaultKind::OutOfBounds { address, bytes: 1, write: false, nearest: Some((start, 64)), .. } = fault.kind else { panic!("{fault}") };
    assert_eq!(address, start + 64);
    let text = fault.to_string();
    for part in ["kernel k", "PTX line 8", "thread (0,0,0) of block (0,0,0)", "read of 1 bytes", "64 bytes", "1 bytes past its end"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let fault = fails("st.global.u32 [%rd1-4], %laneid;", 0, &size(1, 1));
    assert!(fault.to_string().contains("write of 4 bytes") && fault.to_string().contains("4 bytes before its start"), "{fault}");
}

#[test]
fn the_thread_and_the_block_that_went_too_far() {
    let body = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 4, %r1;
        mad.wide.u32 %rd2, %r3, 8, %rd1;
        st.global.u64 [%rd2], %rd1;";
    assert!(on_64_bytes(body, 0, &size(2, 4)).is_ok());
    let fault = fails(body, 0, &size(3, 4));
    assert_eq!(fault.place, place(9, 0, 2), "{fault}");
    let fault = fails(body, 0, &size(2, 5));
    assert_eq!(fault.place, place(9, 4, 1), "{fault}");
}

#[test]
fn a_vector_that_begins_inside_and_ends_outside() {
    let module = module("", ".param .u64 at", "ld.param.u64 %rd1, [at];\nld.global.v2.u64 {%rd2, %rd3}, [%rd1];");
    let mut device = Device::default();
    let at = device.put(&[0; 24]);
    assert!(run(&module, "k", &size(1, 1), Arguments::default().with(at), &mut device).is_ok());
    let fault = run(&module, "k", &size(1, 1), Arguments::default().with(at + 16), &mut device).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { bytes: 16, nearest: Some((start, 24)), .. } if start == at), "{fault}");
}

#[test]
fn an_address_far_from_everything_and_null() {
    let fault = fails("mov.u64 %rd2, 0; ld.global.u32 %r1, [%rd2];", 0, &size(1, 1));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { address: 0, .. }), "{fault}");
    let fault = fails("mov.u64 %rd2, -8; ld.u64 %rd3, [%rd2];", 0, &size(1, 1));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { address: 0xffff_ffff_ffff_fff8, .. }), "{fault}");
    assert!(!fault.to_string().is_empty());
}

#[test]
fn an_address_that_is_no_multiple_of_the_size() {
    assert!(on_64_bytes("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16];", 0, &size(1, 1)).is_ok());
    for (piece, offset, size_of) in [
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];", 8, 16),
        ("st.global.u64 [%rd1], %rd1;", 4, 8),
        ("ld.global.u16 %rs1, [%rd1];", 1, 2),
        ("atom.global.add.u32 %r1, [%rd1], 1;", 2, 4),
    ] {
        let fault = fails(piece, offset, &size(1, 1));
        assert!(matches!(fault.kind, FaultKind::Misaligned { bytes, .. } if bytes == size_of), "{piece}: {fault}");
        assert!(fault.to_string().contains(&format!("not a multiple of {size_of}")), "{fault}");
    }
}

#[test]
fn shared_local_and_parameter_memory_have_ends() {
    let shared = ".shared .align 4 .b8 buffer[32]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, buffer; add.s32 %r4, %r3, %r2;
        st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4];";
    assert!(on_64_bytes(shared, 0, &size(1, 8)).is_ok());
    let fault = fails(shared, 0, &size(1, 9));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: "shared", address: 32, bytes: 4, write: true, .. }), "{fault}");
    // The rest of the block's memory belongs to another block or to none.
    let dynamic = Launch { dynamic_shared_bytes: 4, ..size(1, 9) };
    assert!(on_64_bytes(shared, 0, &dynamic).is_ok());
    let fault =
        fails(".local .align 4 .b8 frame[16]; mov.u64 %rd2, frame; cvta.local.u64 %rd3, %rd2; ld.u32 %r1, [%rd3+16];", 0, &size(1, 1));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: "local", address: 16, .. }), "{fault}");
    let fault = fails("ld.param.u64 %rd2, [at+8];", 0, &size(1, 1));
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: "param", address: 8, .. }), "{fault}");
}

#[test]
fn a_register_that_was_never_written() {
    for (piece, register) in [
        ("add.s32 %r1, %r2, 1;", "%r2"),
        ("st.global.u32 [%rd1], %r3;", "%r3"),
        ("ld.global.u32 %r1, [%rd5];", "%rd5"),
        ("@%p4 add.s32 %r1, 1, 1;", "%p4"),
        ("mov.u32 %r4, %r5; add.s32 %r6, %r4, 1;", "%r4"),
        ("setp.eq.u64 %p1, %rd1, 0; @%p1 mov.u32 %r7, 1; not.b32 %r8, %r7;", "%r7"),
        ("addc.u32 %r1, 0, 0;", "the carry flag"),
    ] {
        let fault = fails(piece, 0, &size(1, 1));
        assert_eq!(fault.kind, FaultKind::Unset(register.to_owned()), "{piece}");
        assert!(fault.to_string().contains(register), "{fault}");
    }
}

#[test]
fn a_register_that_is_written_on_the_way_taken() {
    for piece in [
        "setp.ne.u64 %p1, %rd1, 0; @%p1 mov.u32 %r7, 1; not.b32 %r8, %r7;",
        "mov.u32 %r4, %r5; mov.u32 %r4, 3; add.s32 %r6, %r4, 1;",
        // Compilers copy values they never use.
        "mov.u32 %r4, %r5; mov.u32 %r6, %r4;",
        // The first round copies a value that only the second one reads.
        "mov.u32 %r1, 0;\nAGAIN: mov.u32 %r2, %r3; mov.u32 %r3, 5; setp.eq.s32 %p1, %r1, 0; @%p1 bra NEXT; add.s32 %r4, %r2, 1;
         NEXT: add.s32 %r1, %r1, 1; setp.lt.s32 %p2, %r1, 3; @%p2 bra AGAIN;",
    ] {
        on_64_bytes(piece, 0, &size(2, 2)).unwrap_or_else(|fault| panic!("{piece}: {fault}"));
    }
    // Registers do not keep their values of the previous block.
    let piece = "mov.u32 %r1, %ctaid.x; setp.eq.s32 %p1, %r1, 0; @%p1 mov.u32 %r2, 1; add.s32 %r3, %r2, 1;";
    assert_eq!(fails(piece, 0, &size(2, 1)).place, place(7, 0, 1));
}

#[test]
fn blocks_and_grids_that_are_too_large_or_empty() {
    let plain = module("", "", "ret;");
    let of = |grid: [u32; 3], block: [u32; 3], dynamic_shared_bytes| Launch { grid, block, dynamic_shared_bytes };
    let attempt = |module: &Module, size: Launch| launch(module.kernel("k").unwrap(), &size, &[], 0, &Device::default());
    assert!(attempt(&plain, of([1, 1, 1], [32, 32, 1], 227 << 10)).is_ok());
    for (size, part) in [
        (of([1, 1, 1], [1025, 1, 1], 0), "1024"),
        (of([1, 1, 1], [32, 32, 2], 0), "1024"),
        (of([1, 1, 1], [1, 1, 65], 0), "64"),
        (of([1, 1, 1], [u32::MAX; 3], 0), "1024"),
        (of([1, 0, 1], [1, 1, 1], 0), "empty"),
        (of([1, 1, 1], [0, 1, 1], 0), "empty"),
        (of([1, 65536, 1], [1, 1, 1], 0), "65535"),
        (of([1, 1, 1], [1, 1, 1], (227 << 10) + 1), "shared memory"),
    ] {
        let fault = attempt(&plain, size).unwrap_err();
        assert!(matches!(&fault.kind, FaultKind::Launch(message) if message.contains(part)), "{fault}");
        assert_eq!(fault.place, None);
    }
    let bounded = Module::parse(&text("", "", "ret;").replace(") {", ") .maxntid 128, 2, 1 .minnctapersm 2 {")).unwrap();
    assert!(attempt(&bounded, of([1, 1, 1], [256, 1, 1], 0)).is_ok());
    let fault = attempt(&bounded, of([1, 1, 1], [257, 1, 1], 0)).unwrap_err();
    assert!(fault.to_string().contains(".maxntid"), "{fault}");
    let exact = Module::parse(&text("", "", "ret;").replace(") {", ") .reqntid 64 {")).unwrap();
    assert!(attempt(&exact, of([1, 1, 1], [64, 1, 1], 0)).is_ok());
    assert!(attempt(&exact, of([1, 1, 1], [32, 1, 1], 0)).unwrap_err().to_string().contains(".reqntid"));
}

#[test]
fn parameters_that_are_missing_or_short() {
    let module = module("", ".param .u8 a, .param .u64 b, .param .u32 c", "ld.param.u32 %r1, [c];");
    let kernel = module.kernel("k").unwrap();
    assert_eq!(kernel.parameter_bytes(), 20);
    assert!(launch(kernel, &size(1, 1), &[0; 20], 0, &Device::default()).is_ok());
    for given in [0, 19] {
        let fault = launch(kernel, &size(1, 1), &vec![0; given], 0, &Device::default()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Parameters { needed: 20, given });
        assert!(fault.to_string().contains("20 are needed"), "{fault}");
    }
}

#[test]
fn a_module_whose_variables_have_no_place() {
    let module = module(".global .u32 counter;", "", "ret;");
    let fault = launch(module.kernel("k").unwrap(), &size(1, 1), &[], 0, &Device::default()).unwrap_err();
    assert!(fault.to_string().contains("4 bytes of variables"), "{fault}");
}

#[test]
fn a_thread_that_never_ends() {
    let module = module("", "", "AGAIN: bra.uni AGAIN;");
    let fault = launch_within(&within(1_000_000), module.kernel("k").unwrap(), &size(1, 40), &[], 0, &Device::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless(1_000_000));
    assert_eq!(fault.place.unwrap().line, 6);
    // A block of many is found as fast: running all of them to their limit would take minutes.
    let budget = simgpu_ptx::INSTRUCTIONS_PER_THREAD / 8;
    let fault = launch_within(&within(budget), module.kernel("k").unwrap(), &size(1, 512), &[], 0, &Device::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Endless(budget));
    let counting = common::module("", "", "mov.u32 %r1, 0;\nAGAIN: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 200000; @%p1 bra AGAIN;");
    assert!(launch_within(&within(1_000_000), counting.kernel("k").unwrap(), &size(2, 2), &[], 0, &Device::default()).is_ok());
}

#[test]
fn barriers_that_not_all_threads_reach() {
    let tid = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16;";
    // One warp, by two instructions.
    let fault = fails(&format!("{tid}\n@%p1 bra A;\nbar.sync 0;\nbra B;\nA: bar.sync 0;\nB: ret;"), 0, &size(1, 32));
    assert!(matches!(&fault.kind, FaultKind::Divergence(message) if message.contains("different instructions")), "{fault}");
    // The same for whole warps is allowed.
    let whole = tid.replace("16", "32");
    assert!(on_64_bytes(&format!("{whole}\n@%p1 bra A;\nbar.sync 0;\nbra B;\nA: bar.sync 0;\nB: ret;"), 0, &size(1, 64)).is_ok());
    // Two barriers.
    let fault = fails(&format!("{tid}\nselp.u32 %r2, 1, 2, %p1;\nbar.sync %r2;"), 0, &size(1, 32));
    assert!(matches!(&fault.kind, FaultKind::Divergence(message) if message.contains("32 in line 9; 0 have ended")), "{fault}");
    // A count that is not reached.
    let fault = fails("bar.sync 1, 96;", 0, &size(1, 64));
    assert!(matches!(&fault.kind, FaultKind::Divergence(message) if message.contains("never come")), "{fault}");
    let fault = fails("bar.sync 1, 33;", 0, &size(1, 64));
    assert!(fault.to_string().contains("no multiple of 32"), "{fault}");
    let fault = fails("bar.sync 16;", 0, &size(1, 64));
    assert!(fault.to_string().contains("no barrier 16"), "{fault}");
    // Threads that have ended are not waited for.
    assert!(on_64_bytes(&format!("{tid}\n@%p1 ret;\nbar.sync 0;"), 0, &size(1, 32)).is_ok());
}

#[test]
fn warps_that_do_not_meet() {
    let tid = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16;";
    let fault = fails(&format!("{tid}\n@%p1 bar.warp.sync -1;\n@!%p1 bar.sync 0;"), 0, &size(1, 32));
    assert!(
        matches!(&fault.kind, FaultKind::Divergence(message) if message.contains("16 in line 8") && message.contains("16 in line 9")),
        "{fault}"
    );
    let fault = fails(&format!("{tid}\nmov.u32 %r2, 65535;\nshfl.sync.idx.b32 %r3, %r1, 0, 31, %r2;"), 0, &size(1, 32));
    assert!(fault.to_string().contains("leaves it out"), "{fault}");
    assert_eq!(fault.place.unwrap().thread, [16, 0, 0]);
    let fault = fails(&format!("{tid}\nmov.u32 %r2, 65535;\n@%p1 shfl.sync.idx.b32 %r3, %r1, 20, 31, %r2;"), 0, &size(1, 32));
    assert!(fault.to_string().contains("from lane 20, which does not take part"), "{fault}");
    let fault = fails(
        &format!(
            "{tid}\nselp.b32 %r2, -1, -2, %p1;\nor.b32 %r2, %r2, 2;\n@!%p1 xor.b32 %r2, %r2, 1;\nadd.s32 %r4, %r2, %r1;\nvote.sync.any.pred %p2, %p1, %r4;"
        ),
        0,
        &size(1, 32),
    );
    assert!(matches!(fault.kind, FaultKind::Divergence(_)), "{fault}");
}

#[test]
fn a_trap_and_a_failed_assertion() {
    let fault = fails("trap;", 0, &size(1, 1));
    assert_eq!((fault.kind, fault.place), (FaultKind::Trap, place(7, 0, 0)));
    let before = ".extern .func __assertfail(.param .b64 a);\n.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);\n";
    let call = "{ .param .b64 a; st.param.b64 [a], %rd1; call.uni __assertfail, (a); }";
    let module = module(before, "", &format!("mov.u64 %rd1, 0; {call}"));
    let fault = run(&module, "k", &size(1, 1), Arguments::default(), &mut Device::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Trap);
    let call = "{ .param .b64 a; .param .b64 b; .param .b32 r; call.uni (r), vprintf, (a, b); }";
    let module = common::module(before, "", call);
    let fault = run(&module, "k", &size(1, 1), Arguments::default(), &mut Device::default()).unwrap_err();
    assert!(matches!(&fault.kind, FaultKind::Unsupported(message) if message.contains("vprintf")), "{fault}");
}

#[test]
fn what_is_not_supported_is_named_when_it_is_decoded() {
    for (body, part) in [
        ("tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [a, {%f5, %f6}];", "tex.2d.v4.f32.f32"),
        ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned"),
        ("add.frob.s32 %r1, %r2, %r3;", "add.frob.s32"),
        ("add.rz.f64 %rd1, %rd2, %rd3;", "add.rz.f64"),
        ("cvt.rna.tf32.f32 %r1, %f1;", "cvt.rna.tf32.f32"),
        ("mov.u32 %r99, 1;", "%r99 is not declared"),
        ("add.s32 %r1, %rd1, 1;", "64 bits"),
        ("add.s32 %r1, %r2;", "operands"),
        ("add.f32 %f1, %f2, 1;", "integer 1"),
        ("bra NOWHERE;", "NOWHERE"),
        ("A: A: ret;", "twice"),
        ("call f, ();", "f is not declared"),
        ("ld.global.u32 %rs1, [%rd1];", "32 bits"),
        ("st.const.u32 [%rd1], %r1;", "cannot be stored"),
        ("mov.u32 %r1, %warpsize;", "%warpsize"),
        (".weird .b32 x;", ".weird"),
        (".local .b8 large[600000];", "600000 bytes of local memory"),
        (".reg .b32 %x<4000000000>;", "too many registers"),
        (".local .b64 large[100000000000];", "too large"),
        ("add.s32 %r1, %r2, %r3", "'}'"),
    ] {
        let error = Module::parse(&text("", "", body)).unwrap_err();
        assert!(error.message.contains(part), "{body}: {error}");
        assert!(error.line == if body.contains("[600000]") { 4 } else { 6 } || body.ends_with("%r3"), "{body}: {error}");
    }
    for (text, part) in [
        ("", "not a PTX module"),
        (".version 8.0\n.target sm_80\n.alias a, b;", ".alias"),
        (".version x", "version"),
        ("\u{7f}ELF", "token"),
    ] {
        let error = Module::parse(text).unwrap_err();
        assert!(error.to_string().contains(part), "{text:?}: {error}");
    }
    for (open, close) in [("[", ""), ("{", "}"), ("(", ""), ("!", "")] {
        let nested = open.repeat(100_000) + &close.repeat(100_000);
        let error = Module::parse(&text("", "", &format!("mov.u32 %r1, {nested};"))).unwrap_err();
        assert!(error.message.contains("too deep"), "{open}: {error}");
    }
}

/// Checks that texts that were cut, or had a token changed, give errors or modules, never a panic.
#[test]
fn damaged_texts_do_no_harm() {
    let whole = include_str!("ptx/kernels_nvrtc12.0_sm80.ptx");
    let mut random = common::Random(29);
    for _ in 0..150 {
        let cut = random.next() as usize % whole.len();
        let _ = Module::parse(&whole[..cut]);
        let mut damaged = whole.as_bytes().to_vec();
        for _ in 0..3 {
            let at = random.next() as usize % damaged.len();
            damaged[at] = b" ,;%{}[]().0159abxr@!:-"[random.next() as usize % 23];
        }
        let _ = Module::parse(&String::from_utf8(damaged).unwrap());
    }
}

/// Ten bytes, of which sixteen may be read.
struct Padded<'d>(&'d Device, u64);

impl Memory for Padded<'_> {
    fn find(&self, address: u64) -> Option<Region> {
        let found = self.0.find(address)?;
        Some(if found.start == self.1 { Region { bytes: 10, ..found } } else { found })
    }
}

#[test]
fn reads_may_go_further_than_writes_where_the_memory_says_so() {
    let mut device = Device::default();
    let at = device.put(&[1; 16]);
    let attempt = |body: &str| {
        let module = module("", ".param .u64 at", &format!("ld.param.u64 %rd1, [at]; mov.u32 %r1, 1; mov.u16 %rs1, 1;\n{body}"));
        launch(module.kernel("k").unwrap(), &size(1, 1), &at.to_le_bytes(), 0, &Padded(&device, at))
    };
    let touched = attempt("ld.global.u32 %r1, [%rd1+8]; st.global.u16 [%rd1+8], %rs1;").unwrap();
    assert_eq!(touched.reads, std::slice::from_ref(&(at + 8..at + 12)));
    assert_eq!(touched.writes, std::slice::from_ref(&(at + 8..at + 10)));
    for body in [
        "st.global.u32 [%rd1+8], %r1;",
        "red.global.add.u32 [%rd1+8], 1;",
        "st.global.u8 [%rd1+10], %rs1;",
        "ld.global.u8 %rs1, [%rd1+16];",
    ] {
        assert!(matches!(attempt(body).unwrap_err().kind, FaultKind::OutOfBounds { .. }), "{body}");
    }
}
