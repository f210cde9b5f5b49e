//! The map of all memory the driver knows: device memory, pinned and registered host memory, the globals of modules.
//!
//! An address is the address of the bytes on the host, between two inaccessible pages. Fresh memory is filled with
//! [`FRESH`](crate::mapping::FRESH). Freed memory is filled with [`DEAD`](crate::mapping::DEAD) and stays in the map
//! for a while, so that later uses are found and its address is not reused at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::checker::Record;
use crate::clock::Stamp;
use crate::code::{Code, Outcome};
use crate::mapping::{Identity, Mapping};

/// The limit beyond which freed memory is returned to the system.
const QUARANTINE_BYTES: u64 = 64 << 20;
const QUARANTINE_COUNT: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From `cuMemAlloc`.
    Device,
    /// From `cuMemAllocAsync`.
    Pool,
    /// From `cuMemAllocManaged`.
    Managed,
    /// The globals of a module.
    Globals,
    /// From `cuMemAllocHost` and `cuMemHostAlloc`.
    Pinned,
    /// The caller's own memory, registered by `cuMemHostRegister`.
    Registered,
    /// Device memory of another process, from `cuIpcOpenMemHandle`.
    Opened,
}

impl Kind {
    pub(crate) fn host(self) -> bool {
        matches!(self, Kind::Pinned | Kind::Registered)
    }

    /// Whether every device can reach it.
    fn everywhere(self) -> bool {
        self.host() || self == Kind::Managed
    }

    /// Whether it counts against the memory of its device.
    pub(crate) fn on_device(self) -> bool {
        !self.host() && self != Kind::Opened
    }
}

/// The time at which an allocation was freed, and the call that freed it.
#[derive(Debug)]
pub(crate) struct Freed {
    pub(crate) stamp: Stamp,
    pub(crate) what: Arc<str>,
    /// Jobs with a smaller number were submitted before, and may still use the memory.
    pub(crate) number: u64,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    pub(crate) device: usize,
    pub(crate) context: usize,
    pub(crate) freed: Option<Freed>,
    /// Uses of the memory, as far as they still matter.
    pub(crate) records: Vec<Record>,
    mapping: Option<Mapping>,
    /// Set for memory of another process.
    opened: Option<Opened>,
}

/// How memory of another process was opened here.
#[derive(Debug)]
struct Opened {
    /// The device whose kernels can reach it, wherever it lies.
    by: usize,
    /// The number of opens without a close.
    times: usize,
}

impl Allocation {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// Returns a name for reports.
    pub(crate) fn name(&self) -> String {
        let place = if self.kind.host() { "host memory".to_string() } else { format!("device {}", self.device) };
        format!("buffer {:#x} ({} bytes, {place})", self.start, self.bytes)
    }

    /// Whether a job with this number may use it.
    pub(crate) fn usable(&self, number: u64) -> bool {
        self.freed.as_ref().is_none_or(|freed| number < freed.number)
    }

    /// Whether its bytes were overwritten after it was freed.
    pub(crate) fn released(&self) -> bool {
        self.mapping.as_ref().is_some_and(Mapping::buried)
    }

    /// Whether a kernel on `device`, which may use the memory of `peers`, can reach it.
    pub(crate) fn reachable(&self, device: usize, peers: &[usize]) -> bool {
        let opened_by = self.opened.as_ref().map(|opened| opened.by);
        self.kind.everywhere() || self.device == device || opened_by == Some(device) || peers.contains(&self.device)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    map: BTreeMap<u64, Allocation>,
    quarantine: VecDeque<u64>,
    quarantined: u64,
}

impl Memory {
    /// Allocates fresh memory. The caller checks whether the device has that much left.
    pub(crate) fn allocate(&mut self, bytes: u64, kind: Kind, device: usize, context: usize) -> Outcome<u64> {
        let length = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        // Only the memory of `cuMemAlloc` can be opened by other processes.
        let mapping = if kind == Kind::Device { Mapping::shared(length) } else { Mapping::private(length) }?;
        let start = mapping.start() as u64;
        self.insert(start, bytes, kind, device, context, Some(mapping));
        Ok(start)
    }

    /// Returns the data with which another process finds the memory that holds `address`: its identity, its size, and
    /// its device.
    pub(crate) fn export(&self, address: u64) -> Option<(Identity, u64, usize)> {
        let found = self.live(address).filter(|found| found.kind == Kind::Device)?;
        Some((found.mapping.as_ref()?.identity()?, found.bytes, found.device))
    }

    /// Maps memory of another process, or increments the count of a mapping that the same context already has.
    pub(crate) fn open(&mut self, identity: Identity, bytes: u64, device: usize, by: (usize, usize)) -> Outcome<u64> {
        let same = |found: &&mut Allocation| {
            let mapped = found.mapping.as_ref().and_then(Mapping::identity);
            found.context == by.1 && found.freed.is_none() && found.opened.is_some() && mapped.is_some_and(|mapped| mapped.same(&identity))
        };
        if let Some(found) = self.map.values_mut().find(same) {
            found.opened.iter_mut().for_each(|opened| opened.times += 1);
            return Ok(found.start);
        }
        let mapping = Mapping::open(identity, usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)?)?;
        let start = mapping.start() as u64;
        self.insert(start, bytes, Kind::Opened, device, by.1, Some(mapping));
        self.map.entry(start).and_modify(|found| found.opened = Some(Opened { by: by.0, times: 1 }));
        Ok(start)
    }

    /// Decrements the count of opens of another process's memory at `start`. Returns true if that was the last.
    pub(crate) fn close(&mut self, start: u64) -> Option<bool> {
        let found = self.map.get_mut(&start).filter(|found| found.freed.is_none())?;
        let opened = found.opened.as_mut()?;
        opened.times -= 1;
        Some(opened.times == 0)
    }

    /// Registers the caller's own memory.
    pub(crate) fn register(&mut self, start: u64, bytes: u64, device: usize, context: usize) -> Outcome {
        let end = start.checked_add(bytes).ok_or(Code::INVALID_VALUE)?;
        if self.map.range(..end).next_back().is_some_and(|(_, last)| last.end() > start) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.insert(start, bytes, Kind::Registered, device, context, None);
        Ok(())
    }

    fn insert(&mut self, start: u64, bytes: u64, kind: Kind, device: usize, context: usize, mapping: Option<Mapping>) {
        let allocation = Allocation { start, bytes, kind, device, context, freed: None, records: Vec::new(), mapping, opened: None };
        self.map.insert(start, allocation);
    }

    /// Returns the allocation that holds `address`, freed or not.
    pub(crate) fn at(&self, address: u64) -> Option<&Allocation> {
        self.map.range(..=address).next_back().map(|(_, found)| found).filter(|found| address < found.end())
    }

    pub(crate) fn at_mut(&mut self, address: u64) -> Option<&mut Allocation> {
        self.map.range_mut(..=address).next_back().map(|(_, found)| found).filter(|found| address < found.end())
    }

    /// Returns the allocation that holds `address` and was not freed.
    pub(crate) fn live(&self, address: u64) -> Option<&Allocation> {
        self.at(address).filter(|found| found.freed.is_none())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Allocation> {
        self.map.values()
    }

    /// Overwrites freed memory and keeps it in quarantine; registered memory, which belongs to the caller, is
    /// forgotten. Returns false if bytes after its end were overwritten.
    pub(crate) fn release(&mut self, start: u64) -> bool {
        let Some(allocation) = self.map.get_mut(&start) else { return true };
        let Some(mapping) = &mut allocation.mapping else {
            self.map.remove(&start);
            return true;
        };
        let whole = mapping.tail_is_whole();
        mapping.bury();
        self.quarantined += allocation.bytes;
        self.quarantine.push_back(start);
        whole
    }

    /// Returns the oldest freed memory to the system if there is much of it. `oldest` is the number of the first job
    /// that is not over: memory freed after that job was submitted may still be in use.
    pub(crate) fn tidy(&mut self, oldest: u64) {
        while self.quarantined > QUARANTINE_BYTES || self.quarantine.len() > QUARANTINE_COUNT {
            let Some(&start) = self.quarantine.front() else { return };
            if self.map.get(&start).and_then(|found| found.freed.as_ref()).is_some_and(|freed| freed.number > oldest) {
                return;
            }
            self.quarantine.pop_front();
            self.quarantined -= self.map.remove(&start).map_or(0, |gone| gone.bytes);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::mapping::{DEAD, FRESH};

    fn bytes(start: u64, count: usize) -> Vec<u8> {
        // SAFETY: the tests request memory that is mapped.
        unsafe { std::slice::from_raw_parts(start as *const u8, count) }.to_vec()
    }

    #[test]
    fn memory_is_filled_when_fresh_and_when_freed() {
        let mut memory = Memory::default();
        let start = memory.allocate(5000, Kind::Device, 0, 1).unwrap();
        assert_eq!(bytes(start, 5000), vec![FRESH; 5000]);
        assert!(memory.at(start + 4999).is_some() && memory.at(start + 5000).is_none());
        assert!(memory.release(start));
        assert_eq!(bytes(start, 5000), vec![DEAD; 5000]);
    }

    #[test]
    fn a_write_behind_the_end_is_noticed() {
        let mut memory = Memory::default();
        let start = memory.allocate(100, Kind::Device, 0, 1).unwrap();
        // SAFETY: the page extends beyond the 100 bytes.
        unsafe { ((start + 100) as *mut u8).write(0) };
        assert!(!memory.release(start));
    }

    #[test]
    fn ranges_are_registered_once() {
        let mut memory = Memory::default();
        memory.register(0x10000, 100, 0, 1).unwrap();
        assert_eq!(memory.register(0x10063, 1, 0, 1), Err(Code::HOST_MEMORY_ALREADY_REGISTERED));
        assert_eq!(memory.register(0xfff0, 17, 0, 1), Err(Code::HOST_MEMORY_ALREADY_REGISTERED));
        memory.register(0x10064, 1, 0, 1).unwrap();
        memory.release(0x10000);
        memory.register(0x10000, 100, 0, 1).unwrap();
    }

    #[test]
    fn freed_memory_comes_back_only_when_no_job_from_before_is_left() {
        let mut memory = Memory::default();
        let start = memory.allocate(QUARANTINE_BYTES + 1, Kind::Device, 0, 1).unwrap();
        let stamp = Stamp { component: 0, epoch: 1, clock: Arc::default() };
        memory.at_mut(start).unwrap().freed = Some(Freed { stamp, what: "test".into(), number: 7 });
        memory.release(start);
        memory.tidy(6);
        assert!(memory.at(start).is_some());
        memory.tidy(7);
        assert!(memory.at(start).is_none());
    }
}
