//! The parts of the memory order that blocks and launches have.

use crate::model::MemoryModel;
use crate::model::history;
use crate::model::random::Random;
use crate::model::stores::{Origin, Pending, Stores};
use crate::model::thread::{Missing, ThreadModel};
use crate::model::window::Window;
use crate::order::Scope;
use crate::program::Alu;

use std::sync::atomic::{AtomicU64, Ordering};

/// The most stores in the buffers of a thread and of a block.
const MOST_OF_THREAD: usize = 8;
const MOST_OF_BLOCK: usize = 64;

/// Of 256 chances, those in which the next store of a block or a launch that has ended goes alone.
const LINGERS: u64 = 224;

/// The most stores to the bytes of a load that it may miss.
const MOST_MISSED: usize = 3;

/// The stores of a block that no other block sees yet, and what its threads have acquired from further away.
#[derive(Debug, Default)]
pub(crate) struct BlockModel {
    pub(crate) id: u64,
    stores: Stores,
    acquired: [u64; 3],
}

impl BlockModel {
    pub(crate) fn new() -> Self {
        static BLOCKS: AtomicU64 = AtomicU64::new(1);
        Self { id: BLOCKS.fetch_add(1, Ordering::Relaxed), stores: Stores::large(), acquired: [0; 3] }
    }
}

/// The memory order during one launch.
pub(crate) struct LaunchModel<'m> {
    device: &'m MemoryModel,
    random: Random,
    /// The running block.
    pub(crate) block: BlockModel,
    begun: u64,
    /// Of 256 chances that a store gets to leave a buffer, those that it has; the loads that return an older value if
    /// they can; the longest turn of a thread.
    pace: u64,
    stale: u64,
    turn: u64,
}

impl Drop for LaunchModel<'_> {
    fn drop(&mut self) {
        self.device.lock().commit_all();
    }
}

impl<'m> LaunchModel<'m> {
    pub(crate) fn new(device: &'m MemoryModel) -> Self {
        let mut random = device.random();
        let [pace, stale, turn] = [[2, 16, 96], [16, 64, 160], [10, 60, 400]].map(|choices| choices[random.below(3)]);
        Self { device, random, block: BlockModel::default(), begun: history::now(), pace, stale, turn }
    }

    /// Prepares a thread for its start in a block.
    pub(crate) fn begin(&self, thread: &mut ThreadModel, block: &BlockModel, number: u32) {
        thread.begin(Origin { device: self.device.id, block: block.id, thread: number }, self.begun);
    }

    /// Returns the steps of a thread's next turn.
    pub(crate) fn turn(&mut self) -> u64 {
        1 + self.random.next() % self.turn
    }

    /// Whether the launch yields to other threads of the host now. Turns are short, and to yield after each would take
    /// most of the time on a busy machine.
    pub(crate) fn yields(&mut self) -> bool {
        self.random.chance(4)
    }

    /// Whether something that is likely in this launch happens.
    pub(crate) fn chance(&mut self) -> bool {
        self.random.chance(self.pace)
    }

    /// Takes any store to shared memory that may be the next.
    pub(crate) fn any_shared(&mut self, thread: &mut ThreadModel) -> Option<Pending> {
        thread.shared.take_any(&mut self.random)
    }

    fn pass_to_block(&mut self, mut pending: Pending) {
        pending.times[0] = history::tick();
        self.block.stores.push(pending);
        if self.block.stores.len() > MOST_OF_BLOCK {
            self.any_of_block();
        }
    }

    /// Lets any store leave the thread's buffer.
    pub(crate) fn any_of_thread(&mut self, thread: &mut ThreadModel) {
        if let Some(pending) = thread.global.take_any(&mut self.random) {
            self.pass_to_block(pending);
        }
    }

    /// Lets any store leave the block's buffer.
    pub(crate) fn any_of_block(&mut self) {
        if let Some(pending) = self.block.stores.take_any(&mut self.random) {
            self.device.lock().push(pending, &mut self.random);
        }
    }

    fn any_of_device(&mut self) {
        if let Some(mut buffer) = self.device.lock_if_any() {
            buffer.commit_any(&mut self.random);
        }
    }

    /// Lets stores leave the buffers of the block and of the device, by chance.
    pub(crate) fn pass(&mut self) {
        if self.chance() {
            self.any_of_block();
        }
        if self.chance() {
            self.any_of_device();
        }
    }

    /// Ends a block: whether its buffer is empty now. It becomes empty sooner or later.
    pub(crate) fn end_block(&mut self) -> bool {
        if self.random.chance(LINGERS) {
            self.any_of_block();
            return self.block.stores.len() == 0;
        }
        let all = self.block.stores.take_all();
        let mut buffer = self.device.lock();
        all.into_iter().for_each(|pending| buffer.push(pending, &mut self.random));
        true
    }

    /// Ends a launch: whether the device's buffer is empty now.
    pub(crate) fn end(&mut self) -> bool {
        let Some(mut buffer) = self.device.lock_if_any() else { return true };
        if self.random.chance(LINGERS) {
            buffer.commit_any(&mut self.random)
        } else {
            buffer.commit_all()
        }
        buffer.stores.len() == 0
    }

    pub(crate) fn store(&mut self, thread: &mut ThreadModel, window: Window, value: u128) {
        let (value, origin) = (window.place(value), thread.origin);
        thread.global.push(Pending { window, value, origin, times: [0; 2] });
        if thread.global.len() > MOST_OF_THREAD {
            self.any_of_thread(thread);
        }
    }

    /// Makes everything that the thread knows of visible as far as the scope reaches.
    pub(crate) fn release(&mut self, thread: &mut ThreadModel, scope: Scope) {
        for pending in thread.global.take_all() {
            self.pass_to_block(pending);
        }
        if scope == Scope::Block {
            return;
        }
        let all = self.block.stores.take_all();
        let mut buffer = self.device.lock();
        all.into_iter().for_each(|pending| buffer.push(pending, &mut self.random));
        if scope == Scope::System {
            buffer.commit_all();
        }
    }

    /// Makes the thread see everything that was released within the scope, and everything that the threads that
    /// released it had to see.
    pub(crate) fn acquire(&mut self, thread: &mut ThreadModel, scope: Scope) {
        let (now, block) = (history::now(), &mut self.block.acquired);
        let system = &self.device.acquired;
        let from = match scope {
            Scope::Block => [now, block[1], block[2]],
            Scope::Device => [now, now, system.load(Ordering::Acquire)],
            Scope::System => [now; 3],
        };
        for (known, from) in thread.acquired.iter_mut().zip(from) {
            *known = from.max(*known);
        }
        for (known, own) in block.iter_mut().zip(thread.acquired) {
            *known = own.max(*known);
        }
        system.fetch_max(thread.acquired[2], Ordering::AcqRel);
    }

    /// Runs an atomic operation, which reads the newest value.
    ///
    /// # Safety
    /// The bytes are memory that may be written, and a pointer to them was exposed.
    #[expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]
    pub(crate) unsafe fn update(&mut self, thread: &mut ThreadModel, window: Window, run: Alu, b: u64, c: u64) -> u64 {
        let mut buffer = self.device.lock();
        let earlier =
            [buffer.stores.take_overlapping(window), self.block.stores.take_overlapping(window), thread.global.take_overlapping(window)];
        for mut pending in earlier.into_iter().flatten() {
            let now = history::tick();
            pending.times = pending.times.map(|time| if time == 0 { now } else { time });
            // SAFETY: as for all stores in these buffers.
            unsafe { history::commit(&pending) };
        }
        // SAFETY: passed on.
        let old = unsafe { history::update(window, thread.origin, run, b, c) };
        thread.see(window.line, history::now());
        old
    }

    /// Returns the bytes of a window as the thread sees them.
    ///
    /// # Safety
    /// The bytes are memory that may be read, and a pointer to them was exposed.
    #[expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]
    pub(crate) unsafe fn load(&mut self, thread: &mut ThreadModel, window: Window, newest: bool) -> u128 {
        let (own, mask) = thread.global.overlay(window, 0);
        if window.mask() & !mask == 0 {
            return own & window.mask();
        }
        let most = if !newest && self.random.chance(self.stale) { 1 + self.random.below(MOST_MISSED) } else { 0 };
        let buffer = self.device.lock_if_any();
        let of_device = buffer.iter().flat_map(|buffer| buffer.stores.newest_first(window));
        let mut layers: Vec<&Pending> = self.block.stores.newest_first(window).chain(of_device).collect();
        let mut missing = Missing::new(thread, window.line, most);
        let memory = if most == 0 {
            // SAFETY: passed on.
            unsafe { history::read(window) }
        } else {
            layers.retain(|pending| !missing.misses(pending.origin, [pending.times[0], pending.times[1], 0]));
            // SAFETY: passed on.
            unsafe { history::read_before(window, |past| missing.misses(past.origin, past.times)) }
        };
        let line = layers.iter().rev().fold(memory, |line, pending| pending.window.replace(line, pending.value));
        let time = missing.time().unwrap_or_else(history::now);
        thread.see(window.line, time);
        (line & !mask | own & mask) & window.mask()
    }
}
