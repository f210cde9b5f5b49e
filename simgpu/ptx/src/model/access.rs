//! Loads, stores, atomics and fences in the memory order of the model.
#![expect(unsafe_code, reason = "device memory is reached by the pointers that its owner gives")]

use crate::access::{self, inside, little};
use crate::fault::FaultKind;
use crate::machine::{Machine, Thread};
use crate::model::stores::Pending;
use crate::model::thread::ThreadModel;
use crate::model::window::Window;
use crate::order::{Order, Scope};
use crate::program::{Access, Slot};
use crate::types::Space;

/// Returns the windows of an access at an address, each with its registers.
fn windows(access: &Access, address: u64) -> impl Iterator<Item = (Window, &[Option<Slot>])> {
    let parts = access.slots.chunks(16 / access.bytes as usize).enumerate();
    parts.map(move |(part, slots)| (Window::new(address + 16 * part as u64, access.bytes * slots.len() as u32), slots))
}

fn words(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

/// Writes a store to shared memory.
fn commit(shared: &mut [u8], pending: &Pending) {
    let (start, bytes) = (pending.window.address() as usize, pending.window.bytes as usize);
    let value = pending.window.take(pending.value).to_le_bytes();
    // The store was inside when it was made, and the block's shared memory has not changed its size since.
    shared[start..start + bytes].copy_from_slice(&value[..bytes]);
}

impl Machine<'_> {
    pub(crate) fn model_load(
        &mut self,
        access: &Access,
        slots: &mut [u64],
        local: &mut [u8],
        thread: &mut ThreadModel,
    ) -> Result<(), FaultKind> {
        let bytes = access.bytes * access.slots.len() as u32;
        let (space, address) = Self::place(access, slots, bytes, false)?;
        let Some(model) = self.model.as_mut().filter(|_| matches!(space, Space::Global | Space::Shared)) else {
            return self.load(access, slots, local);
        };
        if space == Space::Shared {
            inside(&self.shared, space, address, bytes, false)?;
            for (window, targets) in windows(access, address) {
                let (start, bytes) = (window.address() as usize, window.bytes as usize);
                let (low, high) = self.shared[start..start + bytes].split_at(bytes.min(8));
                let line = window.place(u128::from(little(low)) | u128::from(little(high)) << 64);
                access::unpack(access, slots, targets, words(window.take(thread.shared.overlay(window, line).0)));
            }
        } else {
            let at = self.global.reach(access.id, address, bytes, true, false)?.expose_provenance() as u64;
            for (window, targets) in windows(access, at) {
                // SAFETY: `reach` returned a pointer to `bytes` bytes; the address is aligned, and so is the host's.
                let value = unsafe { model.load(thread, window, access.order.volatile) };
                access::unpack(access, slots, targets, words(window.take(value)));
            }
        }
        self.after_access(access, thread);
        Ok(())
    }

    pub(crate) fn model_store(
        &mut self,
        access: &Access,
        slots: &mut [u64],
        local: &mut [u8],
        thread: &mut ThreadModel,
    ) -> Result<(), FaultKind> {
        let bytes = access.bytes * access.slots.len() as u32;
        let (space, address) = Self::place(access, slots, bytes, true)?;
        if !matches!(space, Space::Global | Space::Shared) {
            return self.store(access, slots, local);
        }
        let start = if space == Space::Shared {
            inside(&self.shared, space, address, bytes, true)?;
            address
        } else {
            self.global.reach(access.id, address, bytes, false, true)?.expose_provenance() as u64
        };
        self.before_access(access, thread);
        let Some(model) = &mut self.model else { return Ok(()) };
        for (window, sources) in windows(access, start) {
            let [low, high] = access::pack(access, slots, sources);
            let value = u128::from(low) | u128::from(high) << 64;
            if space == Space::Shared {
                let origin = thread.origin;
                thread.shared.push(Pending { window, value: window.place(value), origin, times: [0; 2] });
            } else {
                model.store(thread, window, value);
            }
        }
        self.drift(thread);
        Ok(())
    }

    pub(crate) fn model_atomic(
        &mut self,
        access: &Access,
        slots: &mut [u64],
        local: &mut [u8],
        thread: &mut ThreadModel,
    ) -> Result<(), FaultKind> {
        let (space, address) = Self::place(access, slots, access.bytes, true)?;
        self.before_access(access, thread);
        if space != Space::Global {
            let window = Window::new(address, access.bytes);
            if space == Space::Shared {
                thread.shared.take_overlapping(window).iter().for_each(|pending| commit(&mut self.shared, pending));
            }
            self.atomic(access, slots, local)?;
        } else if let (Some(model), Some(atomic)) = (&mut self.model, access.atomic) {
            let at = self.global.reach(access.id, address, access.bytes, true, true)?.expose_provenance() as u64;
            let (b, c) = (slots[atomic.b as usize], slots[atomic.c as usize]);
            // SAFETY: `reach` returned a pointer to `bytes` bytes; the address is aligned, and so is the host's.
            let old = unsafe { model.update(thread, Window::new(at, access.bytes), atomic.run, b, c) };
            if let Some(Some(slot)) = access.slots.first() {
                slots[*slot as usize] = old;
            }
        }
        self.after_access(access, thread);
        Ok(())
    }

    pub(crate) fn model_fence(&mut self, order: Order, thread: &mut ThreadModel) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        if order.releases {
            self.release(thread, order.scope);
        }
        if order.acquires {
            self.acquire(thread, order.scope);
        }
    }

    fn before_access(&mut self, access: &Access, thread: &mut ThreadModel) {
        if access.order.releases {
            self.release(thread, access.order.scope);
        }
    }

    fn after_access(&mut self, access: &Access, thread: &mut ThreadModel) {
        if access.order.acquires {
            self.acquire(thread, access.order.scope);
        }
        self.drift(thread);
    }

    pub(crate) fn release(&mut self, thread: &mut ThreadModel, scope: Scope) {
        thread.shared.take_all().iter().for_each(|pending| commit(&mut self.shared, pending));
        if let Some(model) = &mut self.model {
            model.release(thread, scope);
        }
    }

    fn acquire(&mut self, thread: &mut ThreadModel, scope: Scope) {
        if let Some(model) = &mut self.model {
            model.acquire(thread, scope);
        }
    }

    /// Lets stores leave their buffers, by chance.
    pub(crate) fn drift(&mut self, thread: &mut ThreadModel) {
        let Some(model) = &mut self.model else { return };
        if thread.shared.len() > 0 && (model.chance() || thread.shared.len() > 8) {
            model.any_shared(thread).iter().for_each(|pending| commit(&mut self.shared, pending));
        }
        if thread.global.len() > 0 && model.chance() {
            model.any_of_thread(thread);
        }
        model.pass();
    }

    /// Prepares a thread that goes on after a barrier.
    pub(crate) fn go_on(&mut self, thread: &mut ThreadModel) {
        if std::mem::take(&mut thread.met) {
            self.acquire(thread, Scope::Block);
        }
    }

    /// Whether a thread that has come to its end has ended. Its stores may leave its buffer one after another before.
    pub(crate) fn ends(&mut self, thread: &mut ThreadModel) -> bool {
        let Some(model) = &mut self.model else { return true };
        if thread.is_empty() || model.chance() {
            return true;
        }
        model.any_shared(thread).iter().for_each(|pending| commit(&mut self.shared, pending));
        model.any_of_thread(thread);
        thread.is_empty()
    }

    /// Whether a block whose threads have all ended is over: its stores have left its buffer.
    pub(crate) fn block_ends(&mut self, threads: &mut [Thread]) -> bool {
        threads.iter_mut().filter(|thread| !thread.model.is_empty()).for_each(|thread| self.release(&mut thread.model, Scope::Block));
        self.model.as_mut().is_none_or(|model| model.end_block())
    }
}
