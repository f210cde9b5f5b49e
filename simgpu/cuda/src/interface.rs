//! Arguments and results of the functions whose names begin with `simgpu_`.

/// A range of bytes that a host function reads or writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Its address.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// Whether the function writes there; otherwise it only reads.
    pub write: u8,
}

/// The machine to simulate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The number of devices.
    pub devices: u32,
    /// Compute capability of each: 90 is 9.0.
    pub capability: u32,
    /// Memory of each, in bytes.
    pub bytes: u64,
    /// The number of multiprocessors of each.
    pub multiprocessors: u32,
    /// The result of `cuDriverGetVersion`: 13000 is 13.0.
    pub driver_version: u32,
    /// Whether `cuMemAllocAsync` works; without it, as on old or virtual GPUs, cudarc allocates and frees synchronously.
    pub memory_pools: u8,
}

impl Default for Configuration {
    fn default() -> Self {
        Configuration { devices: 8, capability: 90, bytes: 1 << 30, multiprocessors: 4, driver_version: 13000, memory_pools: 1 }
    }
}

/// The number of objects that are alive at a moment, for tests that look for leaks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Contexts, including retained primary ones.
    pub contexts: u64,
    /// Streams that were created; the default streams of contexts are not counted.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Graphs and executable graphs.
    pub graphs: u64,
    /// Allocations of device and managed memory.
    pub device_allocations: u64,
    /// Their bytes.
    pub device_bytes: u64,
    /// Allocations of pinned memory and registered ranges.
    pub host_allocations: u64,
    /// Jobs that are queued or running.
    pub jobs: u64,
}
