//! Several texts as one module: names across texts, calls through pointers, initial values that are addresses, and
//! functions that are decoded at their first call.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Range;
use std::sync::{Arc, Mutex};

use common::{Arguments, Device, bytes, run, size, text, values};
use simgpu_ptx::{FaultKind, Launch, Module, Options, ParseError, Texts, Unset, launch, outline};

const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";
const LATE: Options = Options { unset: simgpu_ptx::Unset::Fault, late: true };

/// Returns a text of declarations only.
fn plain(declarations: &str) -> String {
    format!("{HEAD}{declarations}\n")
}

/// Returns a text with kernel `k`, which takes the address `at`, in `%rd1`.
fn kernel(before: &str, body: &str) -> String {
    text(before, ".param .u64 at", &format!("ld.param.u64 %rd1, [at];\n{body}"))
}

fn link(texts: &[&str]) -> Result<Module, ParseError> {
    let late = Module::link(texts, LATE);
    let module = Module::link(texts, Options::default());
    assert_eq!(late.as_ref().err(), module.as_ref().err(), "what is wrong with names shows before functions are decoded");
    module
}

/// Runs kernel `k` on words, decoded at once and late, and returns the words afterwards.
fn over_words(texts: &[&str], input: &[u32], size: &Launch) -> Vec<u32> {
    let [first, second] = [Options::default(), LATE].map(|options| {
        let module = Module::link(texts, options).unwrap_or_else(|error| panic!("{error}"));
        let mut device = Device::default();
        let at = device.put(&bytes(input));
        run(&module, "k", size, Arguments::default().with(at), &mut device).unwrap_or_else(|fault| panic!("{fault}"));
        values(&device.get(at))
    });
    assert_eq!(first, second, "decoded at once and late");
    first
}

fn fails(texts: &[&str]) -> simgpu_ptx::Fault {
    let module = link(texts).unwrap_or_else(|error| panic!("{error}"));
    let mut device = Device::default();
    let at = device.put(&[0; 64]);
    run(&module, "k", &size(1, 1), Arguments::default().with(at), &mut device).unwrap_err()
}

const DOUBLE_AND_SQUARE: &str = ".func (.param .b32 out) double(.param .b32 in)
    { .reg .b32 %a; ld.param.u32 %a, [in]; add.s32 %a, %a, %a; st.param.b32 [out], %a; }
    .func (.param .b32 out) square(.param .b32 in) { .reg .b32 %a; ld.param.u32 %a, [in]; mul.lo.s32 %a, %a, %a; st.param.b32 [out], %a; }\n";

/// Calls the function that `%rd5` points to with the word at `at`, and stores the result there.
const THROUGH_POINTER: &str = "ld.global.u32 %r1, [%rd1];
    { .param .b32 give; .param .b32 take; st.param.b32 [give], %r1;
      form: .callprototype (.param .b32 _) _ (.param .b32 _);
      call (take), %rd5, (give), form; ld.param.b32 %r2, [take]; }
    st.global.u32 [%rd1], %r2;";

#[test]
fn calls_through_pointers() {
    for (name, result) in [("double", 18), ("square", 81)] {
        let body = format!("mov.u64 %rd5, {name}; {THROUGH_POINTER}");
        assert_eq!(over_words(&[&kernel(DOUBLE_AND_SQUARE, &body)], &[9], &size(1, 1)), [result]);
    }
    // Each thread calls its own function: from a table in memory that another function fills, in registers, and by a
    // list of targets.
    let before = ".func (.reg .b32 out) up(.reg .b32 in) { add.s32 out, in, 1; ret; }
        .func (.reg .b32 out) down(.reg .b32 in) { sub.s32 out, in, 1; ret; }
        .func fill(.reg .b64 table) { .reg .b64 f; mov.u64 f, up; st.u64 [table], f; mov.b64 f, down; st.u64 [table+8], f; }\n";
    let body = ".local .align 8 .b8 table[16]; mov.u64 %rd2, table; cvta.local.u64 %rd3, %rd2; call fill, (%rd3);
        mov.u32 %r1, %tid.x; mad.wide.u32 %rd4, %r1, 4, %rd1; and.b32 %r2, %r1, 1; mad.wide.u32 %rd6, %r2, 8, %rd3; ld.u64 %rd5, [%rd6];
        ld.global.u32 %r3, [%rd4]; list: .calltargets up, down; call (%r4), %rd5, (%r3), list; st.global.u32 [%rd4], %r4;";
    assert_eq!(over_words(&[&kernel(before, body)], &[10, 10, 20, 20], &size(1, 4)), [11, 9, 21, 19]);
}

#[test]
fn calls_through_what_is_no_function_are_faults() {
    let call = |pointer: &str| kernel(DOUBLE_AND_SQUARE, &format!("{pointer}\n{THROUGH_POINTER}"));
    for (pointer, part) in [
        ("mov.u64 %rd5, 0;", "0x0 is the address of no function"),
        ("mov.u64 %rd5, %rd1;", "is the address of no function"),
        ("mov.u64 %rd5, double+1;", "is the address of no function"),
        ("mov.u64 %rd5, double+4096;", "of another module, or of none"),
        ("mov.u64 %rd5, k;", "kernel k, which cannot be called"),
    ] {
        let fault = fails(&[&call(pointer)]);
        assert!(matches!(&fault.kind, FaultKind::Call(message) if message.contains(part)), "{pointer}: {fault}");
        assert_eq!(fault.place.unwrap().line, 14, "{fault}");
    }
    let other = ".func wrong() { ret; } .func (.param .b64 out) wide(.param .b32 in) { st.param.b64 [out], 0; }\n";
    for name in ["wrong", "wide"] {
        let fault = fails(&[&kernel(other, &format!("mov.u64 %rd5, {name}; {THROUGH_POINTER}"))]);
        assert!(matches!(&fault.kind, FaultKind::Call(message) if message.contains(name)), "{fault}");
    }
    let before = ".func one() { ret; } .func two() { ret; } .func three() { ret; }\n";
    let body = "mov.u64 %rd5, three; list: .calltargets one, two; call %rd5, list;";
    let fault = fails(&[&kernel(before, body)]);
    assert!(fault.to_string().contains("leads to three, which is not among its targets"), "{fault}");
    // A pointer that another module made.
    let get = |before: &str| Module::parse(&kernel(before, "mov.u64 %rd5, one; st.global.u64 [%rd1], %rd5;")).unwrap();
    let mut device = Device::default();
    let at = device.put(&[0; 8]);
    run(&get(before), "k", &size(1, 1), Arguments::default().with(at), &mut device).unwrap();
    let module = Module::parse(&kernel(before, "ld.global.u64 %rd5, [%rd1]; form: .callprototype _; call %rd5, form;")).unwrap();
    let fault = run(&module, "k", &size(1, 1), Arguments::default().with(at), &mut device).unwrap_err();
    assert!(fault.to_string().contains("of another module"), "{fault}");
    for (body, part) in [
        ("call %rd5, nowhere;", "neither a prototype nor"),
        ("call %r5;", "64 bits and a prototype"),
        ("form: .callprototype _ (.param .b32 _); call %rd5, form;", "0 arguments and 0 results has a prototype with 1 and 0"),
        ("mov.u64 %rd5, vprintf;", "of the driver"),
    ] {
        let error = Module::parse(&kernel(".extern .func vprintf();\n", body)).unwrap_err();
        assert!(error.message.contains(part), "{body}: {error}");
    }
}

#[test]
fn initial_values_that_are_addresses() {
    let before = format!(
        "{DOUBLE_AND_SQUARE}
        .global .align 4 .u32 numbers[4] = {{10, 20, 30, 40}};
        .global .align 8 .u64 third = numbers+8;
        .const .align 8 .u64 fourth = generic(numbers)+12;
        .global .align 8 .u64 chain[3] = {{third, 7, generic(fourth)}};
        .visible .global .align 8 .u64 functions[2] = {{double, square}};
        .global .align 1 .b8 pieces[3] = {{0xff(numbers), 0xff00(numbers), 0xff0000(numbers)}};\n"
    );
    let body = format!(
        "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %rd1;
        setp.gt.u32 %p1, %r1, 1; @%p1 bra VARIABLES;
        mov.u64 %rd2, functions; mad.wide.u32 %rd3, %r1, 8, %rd2; ld.global.u64 %rd5, [%rd3]; {THROUGH_POINTER} ret;
        VARIABLES: setp.gt.u32 %p1, %r1, 3; @%p1 bra PIECES; setp.eq.u32 %p2, %r1, 3;
        ld.global.u64 %rd6, [chain]; @%p2 ld.global.u64 %rd6, [chain+16]; ld.u64 %rd7, [%rd6]; ld.u32 %r3, [%rd7]; st.global.u32 [%rd1], %r3; ret;
        PIECES: ld.global.u8 %r4, [pieces]; ld.global.u8 %r5, [pieces+1]; ld.global.u8 %r6, [pieces+2]; mov.u64 %rd8, numbers;
        shl.b32 %r5, %r5, 8; shl.b32 %r6, %r6, 16; or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6; cvt.u32.u64 %r7, %rd8; and.b32 %r7, %r7, 0xffffff;
        sub.s32 %r3, %r7, %r4; st.global.u32 [%rd1], %r3;"
    );
    let text = kernel(&before, &body);
    assert_eq!(over_words(&[&text], &[9, 9, 9, 9, 9], &size(1, 5)), [18, 81, 30, 40, 0]);
    let module = Module::parse(&text).unwrap();
    let [low, high] = [0x1000, 0x9000].map(|start| values::<u64>(&module.globals_image(start)[16..24])[0]);
    assert_eq!((low, high), (0x1008, 0x9008));
    for (variables, part) in [
        (".global .u32 a; .global .u32 b = a;", "8 bytes, and its place 4"),
        (".shared .u32 a; .global .u64 b = a;", "no initial value"),
        (".global .u64 b = nothing;", "nothing cannot be taken: it is not declared"),
        (".extern .func malloc(); .global .u64 b = malloc;", "function of the driver"),
        (".global .u64 b[1] = {b, b};", "more initial values than places"),
        (".global .b8 b = 0(b);", "picks no bits"),
    ] {
        let error = link(&[&plain(variables)]).unwrap_err();
        assert!(error.message.contains(part) && error.line == 4, "{variables}: {error}");
    }
}

#[test]
fn texts_refer_to_each_other() {
    let first = kernel(
        ".extern .func (.param .b32 out) twice(.param .b32 in);\n.extern .global .align 4 .u32 factors[2];\n.extern .const .u32 bias;
        .extern .shared .align 4 .b8 block[8];\n.extern .shared .align 16 .b8 rest[];\n.global .u32 own = 1000;\n",
        "ld.global.u32 %r1, [factors+4]; ld.const.u32 %r2, [bias]; st.shared.u32 [block+4], %r2; mov.u32 %r6, rest; st.shared.u32 [%r6], 1;
        { .param .b32 give; .param .b32 take; st.param.b32 [give], %r1; call.uni (take), twice, (give); ld.param.b32 %r3, [take]; }
        ld.global.u32 %r4, [own]; add.s32 %r3, %r3, %r4; ld.shared.u32 %r5, [block]; add.s32 %r3, %r3, %r5; st.global.u32 [%rd1], %r3;",
    );
    let second = plain(
        ".visible .shared .align 4 .b8 block[8];\n.visible .const .u32 bias = 5;\n.visible .global .align 4 .u32 factors[2] = {3, 4};
        .global .u32 own = 20;
        .visible .func (.param .b32 out) twice(.param .b32 in) { .reg .b32 %a<4>; ld.param.u32 %a0, [in]; ld.shared.u32 %a1, [block+4];
          ld.global.u32 %a2, [own]; add.s32 %a0, %a0, %a0; add.s32 %a0, %a0, %a1; add.s32 %a0, %a0, %a2; st.shared.u32 [block], 100000;
          st.param.b32 [out], %a0; }",
    );
    let size = Launch { dynamic_shared_bytes: 4, ..size(1, 1) };
    for texts in [[&*first, &*second], [&*second, &*first]] {
        assert_eq!(over_words(&texts, &[0], &size), [2 * 4 + 5 + 20 + 1000 + 100_000]);
    }
    let module = link(&[&first, &second]).unwrap();
    assert_eq!((module.kernel("k").unwrap().shared_bytes(), module.kernels().count()), (8, 1));
    // Without its dynamic part there is nothing after the block's own memory.
    let mut device = Device::default();
    let at = device.put(&[0; 4]);
    let fault = run(&module, "k", &common::size(1, 1), Arguments::default().with(at), &mut device).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::OutOfBounds { space: "shared", .. }), "{fault}");
}

#[test]
fn visible_goes_before_weak_and_weak_before_common() {
    let read = kernel(".extern .global .u32 word;\n", "ld.global.u32 %r1, [word]; st.global.u32 [%rd1], %r1;");
    let of = |linkage: &str, value: u32| plain(&format!(".{linkage} .global .u32 word = {value};"));
    let (visible, weak, other, common) = (of("visible", 1), of("weak", 2), of("weak", 3), of("common", 4));
    for (texts, expected) in [
        (vec![&visible], 1),
        (vec![&weak, &other], 2),
        (vec![&weak, &visible, &other], 1),
        (vec![&visible, &weak], 1),
        (vec![&common, &weak], 2),
        (vec![&weak, &common], 2),
        (vec![&common], 4),
    ] {
        let mut texts: Vec<&str> = texts.into_iter().map(String::as_str).collect();
        texts.push(&read);
        assert_eq!(over_words(&texts, &[0], &size(1, 1)), [expected]);
        texts.rotate_right(1);
        assert_eq!(over_words(&texts, &[0], &size(1, 1)), [expected]);
    }
    // The text whose definition is replaced uses the other one, too, and of common variables the larger one applies.
    let function = |linkage: &str, value: u32| format!(".{linkage} .func (.reg .b32 out) word() {{ mov.u32 out, {value}; ret; }}\n");
    let caller = kernel(&function("weak", 5), "call (%r1), word; st.global.u32 [%rd1], %r1;");
    assert_eq!(over_words(&[&caller], &[0], &size(1, 1)), [5]);
    assert_eq!(over_words(&[&caller, &plain(&function("visible", 6))], &[0], &size(1, 1)), [6]);
    let [small, large] = [2, 5].map(|count| plain(&format!(".common .global .u32 many[{count}];")));
    assert_eq!(link(&[&small, &large]).unwrap().globals_bytes(), 20);
    assert_eq!(link(&[&large, &small]).unwrap().globals_bytes(), 20);
}

#[test]
fn names_that_do_not_resolve_are_errors_in_words() {
    let twice = plain(".visible .global .u32 x;");
    for (texts, place, part) in [
        (vec![plain(".extern .func far();")], (0, 4), "function far is declared here and defined in none of the texts"),
        (vec![twice.clone(), plain("\n.extern .global .u32 y;")], (1, 5), "variable y is declared here"),
        (vec![plain(".extern .shared .b8 x[4];")], (0, 4), "variable x is declared here"),
        (vec![twice.clone(), plain("\n\n.visible .global .u32 x;")], (1, 6), "variable x is defined twice, here and in line 4 of text 1"),
        (vec![plain(".func f() { ret; }\n.func f() { ret; }")], (0, 5), "function f is defined twice, here and in line 4"),
        (vec![plain(".global .u32 x;\n.global .u64 x;")], (0, 5), "variable x is defined twice"),
        (vec![twice.clone(), plain(".weak .func x() { ret; }")], (1, 4), "x is something else in line 4 of text 1"),
        (vec![twice.clone(), plain(".extern .shared .b8 x[4];")], (1, 4), "x is something else in line 4 of text 1"),
        (vec![twice, plain(".extern .func x();")], (1, 4), "function x is declared here"),
        (vec![kernel("", "ret;"), kernel("", "ret;")], (1, 4), "function k is defined twice"),
        (vec![plain(""), ".version 8".to_owned()], (1, 1), "version"),
    ] {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let error = link(&texts).unwrap_err();
        assert!(error.message.contains(part), "{part}: {error}");
        assert_eq!((error.text, error.line), place, "{error}");
        assert_eq!(error.to_string().contains("of text 2:"), error.text == 1, "{error}");
    }
    // Internal names of several texts do not conflict.
    let own = plain(".global .u32 x; .func f() { ret; } .shared .u32 s;");
    assert_eq!(link(&[&own, &own]).unwrap().globals_bytes(), 8);
}

#[test]
fn faults_name_the_text_they_stand_in() {
    let first = kernel(".extern .func far();\n", "call far;");
    let second = plain("\n\n.visible .func far() {\n trap; }");
    for options in [Options::default(), LATE] {
        let module = Module::link(&[&first, &second], options).unwrap();
        let fault = run(&module, "k", &size(1, 1), Arguments::default().with(0_u64), &mut Device::default()).unwrap_err();
        assert_eq!((fault.place.unwrap().text, fault.place.unwrap().line), (1, 7), "{fault}");
        assert!(fault.to_string().contains("PTX line 7 of text 2"), "{fault}");
    }
}

#[test]
fn what_is_not_supported_is_late_a_fault_of_those_who_come_to_it() {
    let before = ".func odd() { .reg .pred %p; mov.pred %p, 0; @%p tex.2d.frob; @!%p bra END; tex.1d.frob; END: ret; }
        .func worse() { tex.3d.frob; }\n.func torn() { add }\n";
    let call = |name: &str| kernel(before, &format!("call {name};\nst.global.u32 [%rd1], 77;"));
    assert!(Module::parse(&call("odd")).unwrap_err().message.contains("tex.2d.frob"));
    let attempt = |name: &str| {
        let module = Module::link(&[&call(name)], LATE).unwrap();
        let mut device = Device::default();
        let at = device.put(&[0; 4]);
        run(&module, "k", &size(1, 1), Arguments::default().with(at), &mut device).map(|_| values::<u32>(&device.get(at))[0])
    };
    assert_eq!(attempt("odd").unwrap(), 77);
    let left = Module::link(&[&call("odd")], LATE).unwrap().unsupported();
    let lines: Vec<_> = left.iter().map(|error| (error.line, error.message.split(' ').nth(1).unwrap())).collect();
    assert_eq!(lines, [(4, "tex.2d.frob"), (4, "tex.1d.frob"), (5, "tex.3d.frob"), (6, "operand")]);
    let fault = attempt("worse").unwrap_err();
    assert!(matches!(&fault.kind, FaultKind::Unsupported(message) if message.contains("tex.3d.frob")), "{fault}");
    assert_eq!(fault.place.unwrap().line, 5);
    let fault = attempt("torn").unwrap_err();
    assert!(fault.to_string().contains("function torn cannot be decoded: PTX line 6"), "{fault}");
    // A kernel that cannot be decoded does not start.
    let module = Module::link(&[&kernel("", "add }}")], LATE).unwrap_err();
    assert!(module.message.contains("directive"), "{module}");
    let module = Module::link(&[&kernel("", "add.s32 %r1 %r2;")], LATE).unwrap();
    let fault = run(&module, "k", &size(1, 1), Arguments::default().with(0_u64), &mut Device::default()).unwrap_err();
    assert!(fault.place.is_none() && fault.to_string().contains("function k cannot be decoded"), "{fault}");
}

#[test]
fn shared_memory_of_functions_that_only_pointers_reach() {
    let before =
        ".func (.reg .b32 out) keep(.reg .b32 in) { .shared .b32 word; .reg .b32 %a; st.shared.u32 [word], in; ld.shared.u32 %a, [word];
          add.s32 out, %a, 1; ret; }
        .func other() { .shared .b8 never[64]; ret; }
        .global .u64 pointer = keep;\n";
    let body = "ld.global.u64 %rd5, [pointer]; ld.global.u32 %r1, [%rd1]; form: .callprototype (.reg .b32 _) _ (.reg .b32 _);
        call (%r2), %rd5, (%r1), form; st.global.u32 [%rd1], %r2;";
    let text = kernel(before, body);
    assert_eq!(over_words(&[&text], &[41], &size(1, 1)), [42]);
    assert_eq!(Module::parse(&text).unwrap().kernel("k").unwrap().shared_bytes(), 4);
    // With late decoding the callees are unknown, so everything is included.
    assert_eq!(Module::link(&[&text], LATE).unwrap().kernel("k").unwrap().shared_bytes(), 68);
}

/// Texts that may be removed.
#[derive(Clone)]
struct Shelf(Arc<Mutex<Vec<String>>>);

impl Texts for Shelf {
    fn part(&self, text: usize, place: Range<usize>) -> Result<String, String> {
        self.0.lock().unwrap().part(text, place)
    }
}

#[test]
fn outlines_are_enough_to_link_and_bodies_are_read_when_they_are_called() {
    let first = kernel(
        "// a comment }\n.extern .func (.reg .b32 out) add(.reg .b32 in);\n.visible .global .u32 much[2] = {40,\n 2};
        .func never() { .reg .b32 %a; /* } */ add.s32 %a, 1, 2; ret; }\n",
        "ld.global.u32 %r1, [%rd1]; call (%r2), add, (%r1); st.global.u32 [%rd1], %r2;",
    );
    let second = plain(
        ".extern .global .u32 much[2];\n.visible .func (.reg .b32 out) add(.reg .b32 in)\n{ .shared .align 8 .b32 word;\n .reg .b32 %a, %b;
        st.shared.u32 [word], in; ld.shared.u32 %a, [word]; ld.global.u32 %b, [much+4]; add.s32 out, %a, %b; ret; }
        .visible .func broken()\n{\n\n frobnicate; }\n.global .u64 pointer = broken;\n",
    );
    let texts = [&first[..], &second[..]];
    let whole = Module::link(&texts, Options { late: true, ..Options::default() }).unwrap();
    let outlines: Vec<String> = texts.iter().map(|text| outline(text).unwrap()).collect();
    assert!(!outlines.concat().contains("add.s32") && outlines[1].contains(".visible .func (.reg .b32 out) add(.reg .b32 in)\n{#"));
    let outlines: Vec<&str> = outlines.iter().map(String::as_str).collect();
    let shelf = Shelf(Arc::new(Mutex::new(texts.iter().map(|&text| text.to_owned()).collect())));
    let module = Module::link_outlines(&outlines, Unset::Fault, Box::new(shelf.clone())).unwrap();
    assert_eq!((module.target(), module.version()), (whole.target(), whole.version()));
    assert_eq!(module.kernel("k").unwrap().shared_bytes(), whole.kernel("k").unwrap().shared_bytes());
    assert_eq!(module.globals_bytes(), whole.globals_bytes());
    let mut device = Device::default();
    let (globals, at) = (device.put(&module.globals_image(0)), device.put(&5_u32.to_le_bytes()));
    launch(module.kernel("k").unwrap(), &size(1, 1), &at.to_le_bytes(), globals, &device).unwrap();
    assert_eq!(values::<u32>(&device.get(at)), [7]);
    assert_eq!(module.unsupported(), whole.unsupported());
    // A function that was not called yet is read from its text at the call, if the text still exists.
    let module = Module::link_outlines(&outlines, Unset::Fault, Box::new(shelf.clone())).unwrap();
    shelf.0.lock().unwrap().clear();
    let fault = launch(module.kernel("k").unwrap(), &size(1, 1), &at.to_le_bytes(), globals, &device).unwrap_err();
    assert!(fault.to_string().contains("its text cannot be read: the text has no such part"), "{fault}");
    let missing = Module::link_outlines(&outlines, Unset::Fault, Box::new(shelf)).unwrap_err();
    assert_eq!((missing.text, missing.message.as_str()), (1, "the text has no such part"), "a body with shared memory is read at once");
    let torn = outlines[0].replace("{#", "{");
    assert!(Module::link_outlines(&[&torn], Unset::Fault, Box::new(Vec::new())).unwrap_err().message.contains("an outline says"));
}
