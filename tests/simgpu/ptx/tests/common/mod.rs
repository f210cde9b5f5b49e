//! Device memory for tests, and short ways to run a kernel on it.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::sync::atomic::{AtomicU64, Ordering};

use simgpu_ptx::{Fault, Launch, Memory, Module, Region, Touched, launch};

/// Allocations at made-up addresses, far from each other.
#[derive(Default)]
pub struct Device {
    allocations: Vec<(u64, u64, Vec<AtomicU64>)>,
}

impl Device {
    /// Copies bytes to the device; the allocation has exactly their size.
    pub fn put(&mut self, bytes: &[u8]) -> u64 {
        let start = 0x7000_0000_0000 + (self.allocations.len() as u64 + 1) * 0x1_0000_0000;
        let word = |chunk: &[u8]| {
            let mut word = [0xA5; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            AtomicU64::new(u64::from_le_bytes(word))
        };
        self.allocations.push((start, bytes.len() as u64, bytes.chunks(8).map(word).collect()));
        start
    }

    /// The bytes of an allocation.
    pub fn get(&self, start: u64) -> Vec<u8> {
        let (_, bytes, words) = self.allocations.iter().find(|(at, ..)| *at == start).unwrap();
        let all: Vec<u8> = words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        all[..*bytes as usize].to_vec()
    }
}

impl Memory for Device {
    fn find(&self, address: u64) -> Option<Region> {
        let found = self.allocations.iter().find(|(start, bytes, _)| address >= *start && address - start < *bytes)?;
        Some(Region { start: found.0, bytes: found.1, host: found.2.as_ptr().cast_mut().cast() })
    }
}

/// A value as the bytes of an argument or an element.
pub trait Plain: Copy {
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

pub fn bytes<T: Plain>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|value| value.bytes()).collect()
}

pub fn values<T: Plain>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(T::of).collect()
}

/// Arguments, each at a multiple of its size.
#[derive(Default)]
pub struct Arguments(pub Vec<u8>);

impl Arguments {
    pub fn with<T: Plain>(mut self, value: T) -> Self {
        self.0.resize(self.0.len().next_multiple_of(size_of::<T>()), 0);
        self.0.extend(value.bytes());
        self
    }
}

pub fn size(grid: u32, block: u32) -> Launch {
    Launch { grid: [grid, 1, 1], block: [block, 1, 1], dynamic_shared_bytes: 0 }
}

/// Launches a kernel of a module, with the module's variables on the device where it has some.
pub fn run(module: &Module, kernel: &str, size: &Launch, arguments: Arguments, device: &mut Device) -> Result<Touched, Fault> {
    let globals = if module.globals_bytes() == 0 { 0 } else { device.put(&module.globals_image()) };
    launch(module.kernel(kernel).unwrap(), size, &arguments.0, globals, device)
}

/// Numbers that look random; the seed is fixed, so that a failure comes again.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}
