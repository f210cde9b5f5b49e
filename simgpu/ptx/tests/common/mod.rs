//! Device memory for tests, and helpers that run a kernel on it.
#![allow(dead_code, reason = "every test file uses its own part")]

#[path = "../../../../src/base/random.rs"]
mod random;

use std::sync::atomic::{AtomicU64, Ordering};

use simgpu_ptx::{Fault, Launch, Memory, MemoryModel, Module, Region, Touched, launch};

pub(crate) use random::Random;

/// Allocations at invented addresses, far from each other. `SIMGPU_MEMORY_MODEL=SEED` gives all of them a memory model.
pub(crate) struct Device {
    allocations: Vec<(u64, u64, Vec<AtomicU64>)>,
    model: Option<MemoryModel>,
}

impl Default for Device {
    fn default() -> Self {
        let seed = std::env::var("SIMGPU_MEMORY_MODEL").map(|seed| seed.parse().expect("SIMGPU_MEMORY_MODEL is a seed"));
        Self { allocations: Vec::new(), model: seed.ok().map(MemoryModel::new) }
    }
}

impl Device {
    /// Copies bytes to the device; the allocation has exactly their size.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> u64 {
        let start = self.next();
        let word = |chunk: &[u8]| {
            let mut word = [0xA5; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU64::new(u64::from_le_bytes(word))
        };
        self.allocations.push((start, bytes.len() as u64, bytes.chunks(8).map(word).collect()));
        start
    }

    /// Writes the high or the low half of a word, while kernels may run.
    pub(crate) fn set(&self, address: u64, value: u32) {
        let (start, _, words) = self.allocations.iter().find(|(start, bytes, _)| address.wrapping_sub(*start) < *bytes).unwrap();
        let shift = 8 * (address % 8);
        let insert = |word: u64| Some(word & !(0xffff_ffff << shift) | u64::from(value) << shift);
        words[(address - start) as usize / 8].fetch_update(Ordering::AcqRel, Ordering::Acquire, insert).unwrap();
    }

    /// Returns the address of the next allocation.
    pub(crate) fn next(&self) -> u64 {
        0x7000_0000_0000 + (self.allocations.len() as u64 + 1) * 0x1_0000_0000
    }

    /// Returns the bytes of an allocation.
    pub(crate) fn get(&self, start: u64) -> Vec<u8> {
        let (_, bytes, words) = self.allocations.iter().find(|(at, ..)| *at == start).unwrap();
        let all: Vec<u8> = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        all[..*bytes as usize].to_vec()
    }
}

impl Memory for Device {
    fn find(&self, address: u64) -> Option<Region> {
        let found = self.allocations.iter().find(|(start, bytes, _)| address >= *start && address - start < *bytes)?;
        Some(Region { start: found.0, bytes: found.1, readable: found.1, host: found.2.as_ptr().cast_mut().cast() })
    }

    fn model(&self) -> Option<&MemoryModel> {
        self.model.as_ref()
    }
}

/// The memory of a device, as another device or the same one sees it, with a memory model.
pub(crate) struct Modelled<'d> {
    device: &'d Device,
    model: MemoryModel,
}

impl<'d> Modelled<'d> {
    pub(crate) fn new(device: &'d Device, seed: u64) -> Self {
        Self { device, model: MemoryModel::new(seed) }
    }
}

impl Memory for Modelled<'_> {
    fn find(&self, address: u64) -> Option<Region> {
        self.device.find(address)
    }

    fn model(&self) -> Option<&MemoryModel> {
        Some(&self.model)
    }
}

/// A value as the bytes of an argument or an element.
pub(crate) trait Plain: Copy {
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! plain {
    ($($t:ty)*) => {$(
        impl Plain for $t {
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn of(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
plain! { u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 }

pub(crate) fn bytes<T: Plain>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|value| value.bytes()).collect()
}

pub(crate) fn values<T: Plain>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::of).collect()
}

/// Arguments, each at a multiple of its size.
#[derive(Default)]
pub(crate) struct Arguments(pub(crate) Vec<u8>);

impl Arguments {
    pub(crate) fn with<T: Plain>(mut self, value: T) -> Self {
        self.0.resize(self.0.len().next_multiple_of(size_of::<T>()), 0);
        self.0.extend(value.bytes());
        self
    }
}

pub(crate) fn size(grid: u32, block: u32) -> Launch {
    Launch { grid: [grid, 1, 1], block: [block, 1, 1], dynamic_shared_bytes: 0 }
}

/// Launches a kernel of a module, with the module's variables on the device if it has any.
pub(crate) fn run(module: &Module, kernel: &str, size: &Launch, arguments: Arguments, device: &mut Device) -> Result<Touched, Fault> {
    let globals = if module.globals_bytes() == 0 { 0 } else { device.put(&module.globals_image(device.next())) };
    launch(module.kernel(kernel).unwrap(), size, &arguments.0, globals, device)
}

/// Runs one piece of PTX on many operands at a time, one thread for each.
///
/// The piece finds its operands in `%rd0`..`%rd2`, and their low bits in `%r`, `%rs`, `%f`, `%fd` and, as predicates,
/// `%p`. It leaves its result in register 9 of the kind that `result` names.
pub(crate) fn evaluate(piece: &str, result: &str, operands: &[[u64; 3]]) -> Vec<u64> {
    let unpack: String = (0..3)
        .map(|i| {
            format!(
                "ld.global.u64 %rd{i}, [%rd20+{}];\ncvt.u32.u64 %r{i}, %rd{i};\ncvt.u16.u64 %rs{i}, %rd{i};\nmov.b32 %f{i}, %r{i};
                mov.b64 %fd{i}, %rd{i};\nand.b16 %rs19, %rs{i}, 1;\nsetp.ne.u16 %p{i}, %rs19, 0;\n",
                8 * i
            )
        })
        .collect();
    let pack = match result {
        "rd" => "",
        "r" => "cvt.u64.u32 %rd9, %r9;",
        "rs" => "cvt.u64.u16 %rd9, %rs9;",
        "f" => "mov.b32 %r9, %f9; cvt.u64.u32 %rd9, %r9;",
        "fd" => "mov.b64 %rd9, %fd9;",
        "p" => "selp.u64 %rd9, 1, 0, %p9;",
        other => panic!("{other} is no kind of register"),
    };
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry piece(.param .u64 from, .param .u64 to, .param .u32 count)\n{{
        .reg .pred %p<20>; .reg .b16 %rs<20>; .reg .b32 %r<30>; .reg .b64 %rd<30>; .reg .f32 %f<20>; .reg .f64 %fd<20>;
        ld.param.u64 %rd20, [from]; ld.param.u64 %rd21, [to]; ld.param.u32 %r20, [count];
        mov.u32 %r21, %ctaid.x; mov.u32 %r22, %ntid.x; mov.u32 %r23, %tid.x; mad.lo.s32 %r24, %r21, %r22, %r23;
        setp.ge.u32 %p19, %r24, %r20; @%p19 ret;
        mad.wide.u32 %rd20, %r24, 24, %rd20; mad.wide.u32 %rd21, %r24, 8, %rd21;
        {unpack}{piece}\n{pack}\nst.global.u64 [%rd21], %rd9;\nret;\n}}\n"
    );
    let module = Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut device = Device::default();
    let from = device.put(&bytes(operands.as_flattened()));
    let to = device.put(&vec![0xEE; 8 * operands.len()]);
    let count = operands.len() as u32;
    let arguments = Arguments::default().with(from).with(to).with(count);
    run(&module, "piece", &size(count.div_ceil(256), 256), arguments, &mut device).unwrap_or_else(|fault| panic!("{piece}: {fault}"));
    values(&device.get(to))
}

/// Compares a piece of PTX with a function, operand by operand.
pub(crate) fn check(piece: &str, result: &str, operands: &[[u64; 3]], oracle: impl Fn(u64, u64, u64) -> u64) {
    for (&[a, b, c], got) in operands.iter().zip(evaluate(piece, result, operands)) {
        let expected = oracle(a, b, c);
        assert_eq!(got, expected, "{piece} with {a:#x}, {b:#x}, {c:#x}: {got:#x}, not {expected:#x}");
    }
}

/// Returns all triples of some values, and as many pseudo-random ones.
pub(crate) fn triples(of: &[u64], third: &[u64]) -> Vec<[u64; 3]> {
    let mut found: Vec<[u64; 3]> = of.iter().flat_map(|&a| of.iter().flat_map(move |&b| third.iter().map(move |&c| [a, b, c]))).collect();
    let mut random = Random(7);
    found.extend((0..2000).map(|_| [random.next(), random.next(), random.next()]));
    found
}

/// Makes a module with one kernel `k` of these parameters and this body, after the text `before`.
pub(crate) fn module(before: &str, parameters: &str, body: &str) -> Module {
    let text = text(before, parameters, body);
    Module::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Returns the text of such a module; the first line of the body is line 6 if `before` adds no line.
pub(crate) fn text(before: &str, parameters: &str, body: &str) -> String {
    let registers = ".reg .pred %p<10>; .reg .b16 %rs<10>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<10>;";
    format!(".version 8.0\n.target sm_80\n.address_size 64\n{before} .visible .entry k({parameters}) {{\n{registers}\n{body}\n}}\n")
}
