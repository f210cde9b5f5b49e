//! Global memory: host allocations, found by device address and remembered per access.
#![expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::fault::FaultKind;
use crate::model::MemoryModel;
use crate::program::Alu;
use crate::touched::Bytes;

/// One live allocation.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// Its first device address.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// The bytes that may be read, at least its size. Compiled code reads whole words of which it uses a part.
    pub readable: u64,
    /// The host address of its first byte: readable for `readable` bytes and writable for `bytes` until the launch
    /// ends, and as aligned as `start` is, up to 16 bytes.
    pub host: *mut u8,
}

/// Finds allocations by device address.
pub trait Memory: Sync {
    /// Returns the allocation that holds the byte at this address.
    fn find(&self, address: u64) -> Option<Region>;

    /// Returns the memory order of the device on which the kernel runs. By default there is none, and all accesses have
    /// the order of the host.
    fn model(&self) -> Option<&MemoryModel> {
        None
    }
}

/// The global memory that a launch used, as sorted ranges of addresses: exact if an allocation has few ranges,
/// otherwise with small gaps closed. Atomic operations read and write.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Ranges that were read.
    pub reads: Vec<Range<u64>>,
    /// Ranges that were written.
    pub writes: Vec<Range<u64>>,
}

impl Region {
    /// Whether an access at this offset from the start stays inside.
    #[inline(always)]
    fn holds(&self, offset: u64, bytes: u32, writes: bool) -> bool {
        let size = if writes { self.bytes } else { self.readable };
        offset < size && size - offset >= u64::from(bytes)
    }
}

/// An allocation, and the bytes of it that were used.
struct Seen {
    region: Region,
    reads: Bytes,
    writes: Bytes,
}

/// The allocation that an access used last.
#[derive(Debug, Clone, Copy)]
struct Recent {
    /// The number of the access.
    id: usize,
    region: Region,
    /// The number of the allocation among those seen.
    seen: usize,
}

const NOTHING: Recent = Recent { id: usize::MAX, region: Region { start: 0, bytes: 0, readable: 0, host: std::ptr::null_mut() }, seen: 0 };

/// The number of accesses for which a launch remembers the allocation. A function's accesses have consecutive numbers,
/// so few share an entry.
const REMEMBERED: usize = 1024;

/// The global memory during one launch.
pub(crate) struct Global<'m> {
    memory: &'m dyn Memory,
    recent: Vec<Recent>,
    seen: Vec<Seen>,
    /// The allocations seen so far, by their starts.
    starts: BTreeMap<u64, usize>,
}

impl<'m> Global<'m> {
    pub(crate) fn new(memory: &'m dyn Memory, accesses: usize) -> Self {
        Self { memory, recent: vec![NOTHING; accesses.clamp(1, REMEMBERED).next_power_of_two()], seen: Vec::new(), starts: BTreeMap::new() }
    }

    #[inline(always)]
    fn place(&self, id: usize) -> usize {
        // The length is a power of two.
        id & (self.recent.len() - 1)
    }

    /// Returns the host address of the bytes that access `id` reaches, and records them as used.
    #[inline]
    pub(crate) fn reach(&mut self, id: usize, address: u64, bytes: u32, reads: bool, writes: bool) -> Result<*mut u8, FaultKind> {
        let place = self.place(id);
        let recent = &mut self.recent[place];
        let offset = address.wrapping_sub(recent.region.start);
        // Sizes are at most 64 and allocations never end at the end of the address space.
        if recent.id != id || !recent.region.holds(offset, bytes, writes) {
            return self.look_up(id, address, bytes, reads, writes);
        }
        let seen = &mut self.seen[recent.seen];
        if reads {
            seen.reads.add(offset, bytes, recent.region.readable);
        }
        if writes {
            seen.writes.add(offset, bytes, recent.region.bytes);
        }
        // The offset lies inside the region, whose bytes the owner guarantees.
        Ok(recent.region.host.wrapping_add(offset as usize))
    }

    #[cold]
    fn look_up(&mut self, id: usize, address: u64, bytes: u32, reads: bool, writes: bool) -> Result<*mut u8, FaultKind> {
        let last = self.starts.range(..=address).next_back().map(|(_, &seen)| self.seen[seen].region);
        let known = last.filter(|region| holds(region, address));
        let found = known.or_else(|| self.memory.find(address));
        let found = found.filter(|region| region.holds(address.wrapping_sub(region.start), bytes, writes));
        let Some(region) = found else {
            return Err(FaultKind::OutOfBounds { space: "global", address, bytes, write: writes, nearest: self.nearest(address) });
        };
        if (region.host as u64).wrapping_sub(region.start) % 16 != 0 {
            return Err(FaultKind::Unsupported(format!(
                "the host memory of the allocation at {:#x} is not aligned as it is",
                region.start
            )));
        }
        let seen = *self.starts.entry(region.start).or_insert(self.seen.len());
        if seen == self.seen.len() {
            self.seen.push(Seen { region, reads: Bytes::default(), writes: Bytes::default() });
        }
        let place = self.place(id);
        self.recent[place] = Recent { id, region, seen };
        self.reach(id, address, bytes, reads, writes)
    }

    /// Returns the allocation whose start or end is nearest, among those seen and those that probes of the
    /// surroundings find.
    fn nearest(&self, address: u64) -> Option<(u64, u64)> {
        let around = (0..48).flat_map(|power| [address.saturating_sub(1 << power), address.saturating_add(1 << power)]);
        let found = around.chain([address]).filter_map(|probe| self.memory.find(probe));
        let seen = self.seen.iter().map(|seen| seen.region);
        let distance = |region: &Region| {
            let end = region.start.saturating_add(region.bytes);
            if holds(region, address) { 0 } else { address.abs_diff(region.start).min(address.abs_diff(end)) }
        };
        found.chain(seen).min_by_key(distance).map(|region| (region.start, region.bytes))
    }

    pub(crate) fn touched(self) -> Touched {
        let ranges = |pick: fn(&Seen) -> &Bytes| {
            let in_order = self.starts.iter().map(|(&start, &seen)| (start, pick(&self.seen[seen]).ranges()));
            in_order.flat_map(|(start, ranges)| ranges.into_iter().map(move |range| start + range.start..start + range.end)).collect()
        };
        Touched { reads: ranges(|seen| &seen.reads), writes: ranges(|seen| &seen.writes) }
    }
}

fn holds(region: &Region, address: u64) -> bool {
    address.wrapping_sub(region.start) < region.bytes
}

/// Reads an element of 1, 2, 4 or 8 bytes.
///
/// # Safety
/// `at` is aligned to `bytes` and valid for as many.
pub(crate) unsafe fn read(at: *mut u8, bytes: u32) -> u64 {
    // SAFETY: aligned and valid by the caller's promise; atomic accesses do not race with one another.
    unsafe {
        match bytes {
            1 => AtomicU8::from_ptr(at).load(Ordering::Acquire).into(),
            2 => AtomicU16::from_ptr(at.cast()).load(Ordering::Acquire).into(),
            4 => AtomicU32::from_ptr(at.cast()).load(Ordering::Acquire).into(),
            _ => AtomicU64::from_ptr(at.cast()).load(Ordering::Acquire),
        }
    }
}

/// Writes the low bytes of a value as an element of 1, 2, 4 or 8 bytes.
///
/// # Safety
/// `at` is aligned to `bytes` and valid for as many.
pub(crate) unsafe fn write(at: *mut u8, bytes: u32, value: u64) {
    // SAFETY: aligned and valid by the caller's promise; atomic accesses do not race with one another.
    unsafe {
        match bytes {
            1 => AtomicU8::from_ptr(at).store(value as u8, Ordering::Release),
            2 => AtomicU16::from_ptr(at.cast()).store(value as u16, Ordering::Release),
            4 => AtomicU32::from_ptr(at.cast()).store(value as u32, Ordering::Release),
            _ => AtomicU64::from_ptr(at.cast()).store(value, Ordering::Release),
        }
    }
}

/// Replaces an element of 2, 4 or 8 bytes in one step, and returns what it was.
///
/// # Safety
/// `at` is aligned to `bytes` and valid for as many.
pub(crate) unsafe fn update(at: *mut u8, bytes: u32, run: Alu, b: u64, c: u64) -> u64 {
    macro_rules! exchange {
        ($atomic:ty, $element:ty) => {{
            // SAFETY: aligned and valid by the caller's promise; atomic accesses do not race with one another.
            let cell = unsafe { <$atomic>::from_ptr(at.cast()) };
            let new = |old: $element| Some(run(old.into(), b, c) as $element);
            cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, new).unwrap_or_else(|old| old).into()
        }};
    }
    match bytes {
        2 => exchange!(AtomicU16, u16),
        4 => exchange!(AtomicU32, u32),
        _ => exchange!(AtomicU64, u64),
    }
}
