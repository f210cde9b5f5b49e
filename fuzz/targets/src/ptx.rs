//! PTX of user kernels in the interpreter of the simulated GPU.

use std::sync::atomic::{AtomicU64, Ordering};

use simgpu_ptx::{Launch, Limits, Memory, Module, Region, launch_within};

/// The most instructions that a thread may run here.
const INSTRUCTIONS: u64 = 2000;
/// The address of the only allocation.
const START: u64 = 0x7000_0000_0000;
/// The length of the allocation, and of the guard on each side.
const BYTES: usize = 512;
/// The contents of the guards.
const GUARD: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// The largest variables of a module that is launched: they are zeroed for every launch.
const MOST_GLOBALS: usize = 1 << 16;

/// One allocation between guard words, which must not change.
struct Device(Vec<AtomicU64>);

impl Memory for Device {
    fn find(&self, address: u64) -> Option<Region> {
        let host = self.0[BYTES / 8..].as_ptr().cast_mut().cast();
        (START..START + BYTES as u64).contains(&address).then_some(Region {
            start: START,
            bytes: BYTES as u64,
            readable: BYTES as u64,
            host,
        })
    }
}

/// Interprets any text as a module. The result must be an error that names a line, or kernels that run to their end or
/// to a fault. A second run must have the same result, and no kernel may access memory outside the allocation.
pub(crate) fn ptx(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let module = match Module::parse(&text) {
        Ok(module) => module,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert_eq!(module.globals_image(START).len(), module.globals_bytes());
    if module.globals_bytes() > MOST_GLOBALS {
        return;
    }
    for kernel in module.kernels().take(4) {
        assert_eq!(module.kernel(kernel.name()).map(|found| found.name()), Some(kernel.name()));
        assert_eq!(run(kernel), run(kernel), "{} run again", kernel.name());
    }
}

/// Launches three threads in two blocks. Returns the contents of the memory and the fault, if any.
fn run(kernel: &simgpu_ptx::Kernel) -> (Vec<u64>, Option<String>) {
    let words = |count: usize, value: u64| (0..count).map(move |_| AtomicU64::new(value));
    let device = Device(words(BYTES / 8, GUARD).chain(words(BYTES / 8, 0x3ff0_0000_3f80_0000)).chain(words(BYTES / 8, GUARD)).collect());
    // Every parameter is the address of the memory, or a number if it is truncated.
    let parameters: Vec<u8> = START.to_le_bytes().into_iter().cycle().take(256).collect();
    let size = Launch { grid: [2, 1, 1], block: [3, 1, 1], dynamic_shared_bytes: 64 };
    let limits = Limits { instructions: INSTRUCTIONS, ..Limits::default() };
    let fault = launch_within(&limits, kernel, &size, &parameters, START, &device).err();
    let words: Vec<u64> = device.0.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    let (before, rest) = words.split_at(BYTES / 8);
    let (memory, behind) = rest.split_at(BYTES / 8);
    assert!(before.iter().chain(behind).all(|word| *word == GUARD), "written beside the allocation");
    (memory.to_vec(), fault.map(|fault| fault.to_string()))
}

/// Returns the initial inputs.
pub(crate) fn seeds() -> Vec<String> {
    let bodies = [
        "ld.param.u64 %rd0, [a]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd0, %rd0, %rd1; ld.global.f32 %f0, [%rd0];\n\
         fma.rn.f32 %f1, %f0, %f0, 0f3F800000; st.global.f32 [%rd0], %f1;",
        "mov.u32 %r0, %tid.x;\nL1: add.s32 %r0, %r0, 1; setp.lt.s32 %p0, %r0, 9; @%p0 bra L1; bar.sync 0; st.shared.u32 [s], %r0;\n\
         atom.shared.add.u32 %r1, [s+4], %r0; @!%p0 ret; shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;",
        "ld.param.u64 %rd0, [a]; ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%rd0]; cvt.rn.f64.s32 %fd0, %r0; cvt.rzi.s32.f64 %r1, %fd0;\n\
         div.u32 %r2, %r1, %r3; prmt.b32 %r2, %r1, %r0, 0x5410; st.global.v2.u32 [%rd0], {%r1, %r2}; mov.b64 %rd1, {%r0, %r1};\n\
         shl.b64 %rd1, %rd1, 70; ld.const.u32 %r0, [c+4]; call (%r1), f, (%r0);",
    ];
    let before = ".shared .align 16 .b8 s[64]; .const .align 4 .u32 c[3] = {1, 2, 3}; .global .align 8 .b8 g[16];\n\
                  .func (.reg .b32 %out) f(.reg .b32 %in) { add.s32 %out, %in, 1; ret; }";
    let registers = ".reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<4>; .reg .f64 %fd<4>;";
    let module = |body: &str| {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n{before}\n.visible .entry k(.param .u64 a, .param .u32 b)\n{{\n{registers}\n{body}\nret;\n}}\n"
        )
    };
    bodies.map(module).into()
}
