//! The values that stores of kernels of this process have overwritten, from which loads may still read. The history of
//! each line is short, and shared by all devices of the process.
#![expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]

use std::collections::VecDeque;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::memory;
use crate::model::stores::{Origin, Pending};
use crate::model::window::Window;
use crate::program::Alu;
use crate::wide;

/// A store that has reached memory.
#[derive(Debug)]
pub(crate) struct Past {
    window: Window,
    /// The bytes before it.
    old: u128,
    pub(crate) origin: Origin,
    /// The times at which it reached its block, its device and memory.
    pub(crate) times: [u64; 3],
}

/// The last stores to lines with the same hash, the oldest first.
#[derive(Default)]
struct Bucket(Mutex<VecDeque<Past>>);

const BUCKETS: usize = 4096;
/// The stores that are remembered of a line, and of a bucket.
const OF_LINE: usize = 8;
const OF_BUCKET: usize = 16;

static BUCKET: LazyLock<Vec<Bucket>> = LazyLock::new(|| (0..BUCKETS).map(|_| Bucket::default()).collect());

/// The number of times at which a store reached other threads.
static CLOCK: AtomicU64 = AtomicU64::new(1);

pub(crate) fn now() -> u64 {
    CLOCK.load(Ordering::Acquire)
}

pub(crate) fn tick() -> u64 {
    CLOCK.fetch_add(1, Ordering::AcqRel) + 1
}

fn bucket(line: u64) -> &'static Bucket {
    &BUCKET[(line >> 4 ^ line >> 16) as usize % BUCKETS]
}

impl Bucket {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Past>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remember(past: &mut VecDeque<Past>, new: Past) {
    let same = |other: &Past| other.window.line == new.window.line;
    if past.iter().filter(|other| same(other)).count() == OF_LINE {
        let oldest = past.iter().position(same).unwrap_or(0);
        past.remove(oldest);
    } else if past.len() == OF_BUCKET {
        past.pop_front();
    }
    past.push_back(new);
}

/// Reads the bytes of a window.
///
/// # Safety
/// They are memory that may be read, and a pointer to them was exposed.
pub(crate) unsafe fn read(window: Window) -> u128 {
    let at = with_exposed_provenance_mut(window.address() as usize);
    // SAFETY: valid by the caller's promise. A window of 16 bytes begins at a multiple of 16, the others at multiples
    // of their size.
    let value = unsafe {
        match window.bytes {
            16 => wide::read(at).iter().rev().fold(0, |value, &word| value << 64 | u128::from(word)),
            bytes => memory::read(at, bytes).into(),
        }
    };
    window.place(value)
}

/// Writes a store to memory, and remembers the bytes before it.
///
/// # Safety
/// Its bytes are memory that may be written, and a pointer to them was exposed.
pub(crate) unsafe fn commit(pending: &Pending) {
    let window = pending.window;
    let mut past = bucket(window.line).lock();
    // SAFETY: passed on.
    let old = unsafe { read(window) };
    let [block, device] = pending.times;
    remember(&mut past, Past { window, old, origin: pending.origin, times: [block, device, tick()] });
    let (at, value) = (with_exposed_provenance_mut(window.address() as usize), window.take(pending.value));
    // SAFETY: passed on; aligned as in `read`.
    unsafe {
        match window.bytes {
            16 => wide::write(at, [value as u64, (value >> 64) as u64]),
            bytes => memory::write(at, bytes, value as u64),
        }
    }
}

/// Runs an atomic operation on memory, and returns the value before it.
///
/// # Safety
/// As for [`commit`].
pub(crate) unsafe fn update(window: Window, origin: Origin, run: Alu, b: u64, c: u64) -> u64 {
    let mut past = bucket(window.line).lock();
    let at = with_exposed_provenance_mut(window.address() as usize);
    // SAFETY: passed on; aligned as in `read`.
    let old = unsafe { memory::update(at, window.bytes, run, b, c) };
    let time = tick();
    remember(&mut past, Past { window, old: window.place(old.into()), origin, times: [time; 3] });
    old
}

/// Reads the bytes of a window as they were before its newest stores: those for which `misses` is true, up to the first
/// for which it is not. `misses` is asked about all, the newest first.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn read_before(window: Window, mut misses: impl FnMut(&Past) -> bool) -> u128 {
    let past = bucket(window.line).lock();
    // SAFETY: passed on.
    let mut line = unsafe { read(window) };
    for store in past.iter().rev().filter(|store| store.window.overlaps(window)) {
        if misses(store) {
            line = store.window.replace(line, store.old);
        }
    }
    line & window.mask()
}
