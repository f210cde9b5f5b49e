//! Loads, stores and atomics of a thread, in every state space.
#![expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]

use crate::fault::FaultKind;
use crate::machine::Machine;
use crate::memory;
use crate::program::{Access, Slot};
use crate::types::Space;
use crate::wide;

impl Machine<'_> {
    /// Returns the space and the address of an access, after checking its alignment.
    #[inline(always)]
    pub(crate) fn place(access: &Access, slots: &[u64], bytes: u32, write: bool) -> Result<(Space, u64), FaultKind> {
        let address = slots[access.base as usize].wrapping_add_signed(access.offset);
        if address & u64::from(bytes - 1) != 0 {
            return Err(FaultKind::Misaligned { address, bytes, write });
        }
        Ok(if access.space == Space::Generic { Space::of_generic(address) } else { (access.space, address) })
    }

    #[inline(always)]
    pub(crate) fn load(&mut self, access: &Access, slots: &mut [u64], local: &mut [u8]) -> Result<(), FaultKind> {
        let bytes = access.bytes * access.slots.len() as u32;
        let (space, address) = Self::place(access, slots, bytes, false)?;
        if matches!(space, Space::Global | Space::Const) {
            let at = self.global.reach(access.id, address, bytes, true, false)?;
            let &[slot] = &access.slots[..] else {
                // SAFETY: `reach` returned a pointer to `bytes` bytes; the address is aligned, and so is the host's.
                unsafe { load_vector(access, slots, at) };
                return Ok(());
            };
            // SAFETY: as for a vector, of one element.
            let value = unsafe { memory::read(at, bytes) };
            if let Some(slot) = slot {
                slots[slot as usize] = extended(access, value);
            }
            return Ok(());
        }
        let memory = match space {
            Space::Shared => &self.shared[..],
            Space::Local => local,
            _ => self.parameters,
        };
        let from = inside(memory, space, address, bytes, false)?;
        for (slot, element) in access.slots.iter().zip(from.chunks_exact(access.bytes as usize)) {
            if let Some(slot) = *slot {
                slots[slot as usize] = extended(access, little(element));
            }
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, access: &Access, slots: &mut [u64], local: &mut [u8]) -> Result<(), FaultKind> {
        let bytes = access.bytes * access.slots.len() as u32;
        let (space, address) = Self::place(access, slots, bytes, true)?;
        if space == Space::Global {
            let at = self.global.reach(access.id, address, bytes, false, true)?;
            let &[slot] = &access.slots[..] else {
                // SAFETY: `reach` returned a pointer to `bytes` bytes; the address is aligned, and so is the host's.
                unsafe { store_vector(access, slots, at) };
                return Ok(());
            };
            let value = slot.map_or(0, |slot| slots[slot as usize]);
            // SAFETY: as for a vector, of one element.
            unsafe { memory::write(at, bytes, value) };
            return Ok(());
        }
        let values = access.slots.iter().map(|slot| slot.map_or(0, |slot| slots[slot as usize]));
        let to = inside_mut(&mut self.shared, local, space, address, bytes)?;
        for (value, element) in values.zip(to.chunks_exact_mut(access.bytes as usize)) {
            element.copy_from_slice(&value.to_le_bytes()[..access.bytes as usize]);
        }
        Ok(())
    }

    pub(crate) fn atomic(&mut self, access: &Access, slots: &mut [u64], local: &mut [u8]) -> Result<(), FaultKind> {
        let (space, address) = Self::place(access, slots, access.bytes, true)?;
        let Some(atomic) = access.atomic else { return Ok(()) };
        let (b, c) = (slots[atomic.b as usize], slots[atomic.c as usize]);
        let old = if space == Space::Global {
            let at = self.global.reach(access.id, address, access.bytes, true, true)?;
            // SAFETY: `reach` returned a pointer to `bytes` bytes; the address is aligned, and so is the host's.
            unsafe { memory::update(at, access.bytes, atomic.run, b, c) }
        } else {
            let element = inside_mut(&mut self.shared, local, space, address, access.bytes)?;
            let old = little(element);
            element.copy_from_slice(&(atomic.run)(old, b, c).to_le_bytes()[..access.bytes as usize]);
            old
        };
        if let Some(Some(slot)) = access.slots.first() {
            slots[*slot as usize] = old;
        }
        Ok(())
    }
}

/// Reads several elements at once, 32 bytes in two halves.
///
/// # Safety
/// `at` is valid for all of them, and aligned to their total size, up to 16.
#[inline(never)]
unsafe fn load_vector(access: &Access, slots: &mut [u64], at: *mut u8) {
    let bytes = access.bytes as usize * access.slots.len();
    if bytes <= 8 {
        // SAFETY: passed on.
        let word = unsafe { memory::read(at, bytes as u32) };
        return unpack(access, slots, &access.slots, [word, 0]);
    }
    for (part, targets) in access.slots.chunks(16 / access.bytes as usize).enumerate() {
        // SAFETY: passed on; the part lies inside.
        let words = unsafe { wide::read(at.add(16 * part)) };
        unpack(access, slots, targets, words);
    }
}

/// Splits up to 16 bytes into elements.
#[inline(always)]
pub(crate) fn unpack(access: &Access, slots: &mut [u64], targets: &[Option<Slot>], words: [u64; 2]) {
    let mut put = |target: Option<Slot>, value: u64| {
        if let Some(target) = target {
            slots[target as usize] = extended(access, value);
        }
    };
    match *targets {
        [a, b] if access.bytes == 8 => [(a, words[0]), (b, words[1])].into_iter().for_each(|(to, value)| put(to, value)),
        [a, b, c, d] if access.bytes == 4 => {
            let [low, high] = words.map(|word| word & 0xffff_ffff);
            [(a, low), (b, words[0] >> 32), (c, high), (d, words[1] >> 32)].into_iter().for_each(|(to, value)| put(to, value));
        }
        _ => targets.iter().enumerate().for_each(|(number, &target)| {
            let (word, shift) = bits(access, number);
            put(target, words[word] >> shift & ones(access));
        }),
    }
}

/// Writes several elements at once, 32 bytes in two halves.
///
/// # Safety
/// As for [`load_vector`].
#[inline(never)]
unsafe fn store_vector(access: &Access, slots: &[u64], at: *mut u8) {
    let bytes = access.bytes as usize * access.slots.len();
    if bytes <= 8 {
        let [word, _] = pack(access, slots, &access.slots);
        // SAFETY: passed on.
        return unsafe { memory::write(at, bytes as u32, word) };
    }
    for (part, sources) in access.slots.chunks(16 / access.bytes as usize).enumerate() {
        // SAFETY: passed on; the part lies inside.
        unsafe { wide::write(at.add(16 * part), pack(access, slots, sources)) };
    }
}

/// Combines elements into up to 16 bytes.
#[inline(always)]
pub(crate) fn pack(access: &Access, slots: &[u64], sources: &[Option<Slot>]) -> [u64; 2] {
    let get = |source: Option<Slot>| source.map_or(0, |source| slots[source as usize] & ones(access));
    match *sources {
        [a, b] if access.bytes == 8 => [get(a), get(b)],
        [a, b, c, d] if access.bytes == 4 => [get(a) | get(b) << 32, get(c) | get(d) << 32],
        _ => sources.iter().enumerate().fold([0; 2], |mut words, (number, &source)| {
            let (word, shift) = bits(access, number);
            words[word] |= get(source) << shift;
            words
        }),
    }
}

/// Returns the position of an element of a vector in two words of 64 bits: the word, and the bit in it.
#[inline(always)]
fn bits(access: &Access, number: usize) -> (usize, usize) {
    let bit = 8 * access.bytes as usize * number;
    ((bit / 64) & 1, bit % 64)
}

/// Returns a mask of the bits of an element.
#[inline(always)]
fn ones(access: &Access) -> u64 {
    u64::MAX >> (64 - 8 * access.bytes)
}

#[inline(always)]
fn extended(access: &Access, value: u64) -> u64 {
    if !access.sign {
        return value;
    }
    let unused = 64 - 8 * access.bytes;
    let wide = ((value << unused) as i64 >> unused) as u64;
    if access.width >= 64 { wide } else { wide & ((1 << access.width) - 1) }
}

pub(crate) fn little(element: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..element.len()].copy_from_slice(element);
    u64::from_le_bytes(bytes)
}

fn name(space: Space) -> &'static str {
    match space {
        Space::Shared => "shared",
        Space::Local => "local",
        Space::Param => "param",
        _ => "global",
    }
}

fn range(size: usize, space: Space, address: u64, bytes: u32, write: bool) -> Result<std::ops::Range<usize>, FaultKind> {
    match usize::try_from(address).ok().and_then(|start| Some(start..start.checked_add(bytes as usize)?)) {
        Some(range) if range.end <= size => Ok(range),
        _ => Err(FaultKind::OutOfBounds { space: name(space), address, bytes, write, nearest: Some((0, size as u64)) }),
    }
}

pub(crate) fn inside(memory: &[u8], space: Space, address: u64, bytes: u32, write: bool) -> Result<&[u8], FaultKind> {
    Ok(&memory[range(memory.len(), space, address, bytes, write)?])
}

fn inside_mut<'b>(shared: &'b mut [u8], local: &'b mut [u8], space: Space, address: u64, bytes: u32) -> Result<&'b mut [u8], FaultKind> {
    let memory = match space {
        Space::Shared => shared,
        Space::Local => local,
        _ => return Err(FaultKind::Unsupported(format!("{} memory cannot be written", name(space)))),
    };
    let range = range(memory.len(), space, address, bytes, true)?;
    Ok(&mut memory[range])
}
