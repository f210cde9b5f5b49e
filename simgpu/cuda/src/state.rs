//! The state of the driver, behind one lock. No thread waits or runs jobs while it holds the lock.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::capture::Capture;
use crate::checker::{self, Record};
use crate::clock::{Clock, Components, HOST, Stamp};
use crate::code::{Code, Outcome};
use crate::companions::Companions;
use crate::context::{Context, Primary};
use crate::device::Device;
use crate::event::Event;
use crate::fault::Faults;
use crate::graph::{Body, Executable};
use crate::interface::{Configuration, Counts};
use crate::memory::{Freed, Kind, Memory};
use crate::module::{Function, Module};
use crate::pool::Pool;
use crate::report::Reports;
use crate::stream::Stream;
use crate::user_object::UserObject;

/// The caller's handle of an object. It is no pointer, so a wrong handle causes an error, not a crash.
pub(crate) type Handle = usize;

pub(crate) type Guard<'a> = MutexGuard<'a, State>;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) configuration: Configuration,
    pub(crate) initialised: bool,
    pub(crate) devices: Vec<Device>,
    pub(crate) primaries: Vec<Primary>,
    pub(crate) contexts: HashMap<Handle, Context>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) captures: HashMap<Handle, Capture>,
    pub(crate) graphs: HashMap<Handle, Body>,
    pub(crate) executables: HashMap<Handle, Executable>,
    pub(crate) user_objects: HashMap<Handle, UserObject>,
    pub(crate) pools: HashMap<Handle, Pool>,
    pub(crate) memory: Memory,
    pub(crate) reports: Reports,
    pub(crate) faults: Faults,
    pub(crate) components: Components,
    pub(crate) companions: Companions,
    /// The jobs that the host has waited for.
    pub(crate) host: Clock,
    /// Jobs that were submitted and are not over, by their numbers.
    pub(crate) pending: BTreeSet<u64>,
    numbers: u64,
    handles: usize,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

pub(crate) fn lock() -> Guard<'static> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Returns a handle that no object had before. Handles begin high, so that none equals one of the three special
    /// streams.
    pub(crate) fn handle(&mut self) -> Handle {
        self.handles += 1;
        0x5100_0000_0000 + self.handles * 16
    }

    /// Returns the number of the next submission, on any stream.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn initialise(&mut self) -> Outcome {
        if self.initialised {
            return Ok(());
        }
        if self.configuration.devices == 0 {
            return Err(Code::NO_DEVICE);
        }
        self.devices.resize_with(self.configuration.devices as usize, Device::default);
        self.primaries.resize_with(self.configuration.devices as usize, Primary::default);
        self.initialised = true;
        Ok(())
    }

    pub(crate) fn device(&self, ordinal: i32) -> Outcome<usize> {
        usize::try_from(ordinal).ok().filter(|&ordinal| ordinal < self.devices.len()).ok_or(Code::INVALID_DEVICE)
    }

    /// Returns the memory of a device, within the limit that a test has set.
    pub(crate) fn total(&self, device: usize) -> u64 {
        self.devices[device].limit.map_or(self.configuration.bytes, |limit| limit.min(self.configuration.bytes))
    }

    pub(crate) fn allocate(&mut self, bytes: usize, kind: Kind, context: Handle) -> Outcome<u64> {
        let bytes = bytes as u64;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let device = self.contexts.get(&context).ok_or(Code::INVALID_CONTEXT)?.device;
        if kind.on_device() && self.total(device).saturating_sub(self.devices[device].used) < bytes {
            return Err(Code::OUT_OF_MEMORY);
        }
        let start = self.memory.allocate(bytes, kind, device, context)?;
        if kind.on_device() {
            self.devices[device].used += bytes;
        }
        Ok(start)
    }

    /// Returns the stamp of an action of the host that happens now.
    pub(crate) fn host_stamp(&mut self) -> Stamp {
        self.components.tick(HOST, &mut self.host)
    }

    /// Records that memory is freed; [`State::release`] follows later, when no earlier job needs it.
    pub(crate) fn free(&mut self, start: u64, freed: Freed) {
        checker::free(&mut self.memory, &mut self.reports, start, freed);
    }

    /// Removes freed memory.
    pub(crate) fn release(&mut self, start: u64) {
        let Some(allocation) = self.memory.at(start) else { return };
        let (bytes, kind, device, name) = (allocation.bytes, allocation.kind, allocation.device, allocation.name());
        if kind.on_device() {
            self.devices[device].used -= bytes;
        }
        if !self.memory.release(start) {
            self.reports.add(format!("{name}: a program wrote behind its end"));
        }
        // Kernels of libraries can access what other devices have freed until it is released, in any order of
        // submission.
        if !self.companions.running() {
            let oldest = self.pending.first().copied().unwrap_or(u64::MAX);
            self.memory.tidy(oldest);
        }
    }

    pub(crate) fn record(&mut self, record: Record) {
        checker::access(&mut self.memory, &mut self.reports, record);
    }

    pub(crate) fn counts(&self) -> Counts {
        let live = || self.memory.all().filter(|found| found.freed.is_none());
        let on_device = || live().filter(|found| matches!(found.kind, Kind::Device | Kind::Pool | Kind::Managed));
        Counts {
            contexts: self.contexts.len() as u64,
            streams: self.streams.values().filter(|stream| !stream.implicit && !stream.destroyed).count() as u64,
            events: self.events.len() as u64,
            modules: self.modules.len() as u64,
            graphs: (self.graphs.len() + self.executables.len()) as u64,
            device_allocations: on_device().count() as u64,
            device_bytes: on_device().map(|found| found.bytes).sum(),
            host_allocations: live().filter(|found| found.kind.host()).count() as u64,
            jobs: self.pending.len() as u64,
        }
    }

    /// Returns the name of a stream, for reports.
    pub(crate) fn stream_name(&self, stream: Handle) -> Arc<str> {
        self.streams.get(&stream).map_or_else(|| "a stream that is gone".into(), |stream| stream.name.clone())
    }
}
