//! A memory order as weak as PTX permits, for one device. The documentation of the crate describes it.

mod access;
mod block;
mod history;
mod random;
mod stores;
mod thread;
mod window;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use block::{BlockModel, LaunchModel};
pub(crate) use thread::ThreadModel;

use random::Random;
use stores::{Pending, Stores};

/// The most stores in a device's buffer.
const MOST: usize = 128;

/// The memory order of one device: what its launches have in common. It makes the order as weak as the [crate's
/// documentation](crate) describes.
#[derive(Debug)]
pub struct MemoryModel {
    seed: u64,
    /// The number of the device, which no other has in this process.
    id: u64,
    launches: AtomicU64,
    /// Stores of launches that run: each launch empties the buffer at its end.
    stores: Mutex<Stores>,
    waiting: AtomicUsize,
    /// The time up to which a thread of this device has acquired the stores of others.
    acquired: AtomicU64,
}

impl MemoryModel {
    /// Makes the memory order of a device. The order in its `n`th launch depends on the seed and on `n`. If launches
    /// run at the same time, the order also depends on their speed.
    pub fn new(seed: u64) -> Self {
        static DEVICES: AtomicU64 = AtomicU64::new(1);
        Self {
            seed,
            id: DEVICES.fetch_add(1, Ordering::Relaxed),
            launches: AtomicU64::new(0),
            stores: Mutex::new(Stores::large()),
            waiting: AtomicUsize::new(0),
            acquired: AtomicU64::new(0),
        }
    }

    /// Returns the random numbers of the next launch.
    fn random(&self) -> Random {
        let launch = self.launches.fetch_add(1, Ordering::Relaxed);
        Random::new(Random::new(self.seed).next() ^ launch.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    fn lock(&self) -> Buffer<'_> {
        Buffer { model: self, stores: self.stores.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Returns the buffer, or `None` if it is empty.
    fn lock_if_any(&self) -> Option<Buffer<'_>> {
        (self.waiting.load(Ordering::Acquire) > 0).then(|| self.lock())
    }
}

/// The buffer of a device, locked. Its length is published when the lock is released.
struct Buffer<'m> {
    model: &'m MemoryModel,
    stores: MutexGuard<'m, Stores>,
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        self.model.waiting.store(self.stores.len(), Ordering::Release);
    }
}

#[expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]
impl Buffer<'_> {
    fn push(&mut self, mut pending: Pending, random: &mut Random) {
        pending.times[1] = history::tick();
        self.stores.push(pending);
        if self.stores.len() > MOST {
            self.commit_any(random);
        }
    }

    /// Writes any store to memory that may be the next.
    fn commit_any(&mut self, random: &mut Random) {
        if let Some(pending) = self.stores.take_any(random) {
            Self::commit(&pending);
        }
    }

    fn commit_all(&mut self) {
        self.stores.take_all().iter().for_each(Self::commit);
    }

    fn commit(pending: &Pending) {
        // SAFETY: `reach` returned the bytes for writing, in a launch that has not ended: `LaunchModel` empties the
        // buffer before the launch ends. `model_store` exposed the pointer.
        unsafe { history::commit(pending) };
    }
}
