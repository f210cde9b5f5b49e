//! Counts calls of the simulated driver.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;

use crate::library;

/// Calls of the driver's functions, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverCalls(BTreeMap<String, [u64; 2]>);

impl DriverCalls {
    /// Returns the number of calls, without those that NCCL makes.
    pub fn beside_nccl(&self) -> u64 {
        self.0.values().map(|[outside, _]| outside).sum()
    }

    /// Returns the number of calls that NCCL makes.
    pub fn inside_nccl(&self) -> u64 {
        self.0.values().map(|[_, inside]| inside).sum()
    }

    /// Returns the calls of one function, without those that NCCL makes.
    pub fn of(&self, function: &str) -> u64 {
        self.0.get(function).map_or(0, |[outside, _]| *outside)
    }

    /// Returns the calls of one function, including those that NCCL makes.
    pub fn with_nccl(&self, function: &str) -> u64 {
        self.0.get(function).map_or(0, |calls| calls.iter().sum())
    }

    fn since(mut self, before: &DriverCalls) -> DriverCalls {
        for (name, counts) in &mut self.0 {
            let before = before.0.get(name).copied().unwrap_or_default();
            *counts = [counts[0] - before[0], counts[1] - before[1]];
        }
        self.0.retain(|_, counts| *counts != [0, 0]);
        self
    }
}

/// Lists the calls not made by NCCL, such as `cuEventRecord 1, cuStreamWaitEvent 2`.
impl fmt::Display for DriverCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outside = self.0.iter().filter(|(_, [outside, _])| *outside > 0);
        let names: Vec<_> = outside.map(|(name, [outside, _])| format!("{name} {outside}")).collect();
        f.write_str(if names.is_empty() { "none" } else { "" })?;
        f.write_str(&names.join(", "))
    }
}

/// Counts the driver calls that this thread makes in `work`.
pub fn driver_calls_of_this_thread(work: impl FnOnce()) -> DriverCalls {
    counted(1, work)
}

/// Counts the driver calls that any thread makes while `work` runs.
pub fn driver_calls(work: impl FnOnce()) -> DriverCalls {
    counted(0, work)
}

fn counted(this_thread: u8, work: impl FnOnce()) -> DriverCalls {
    let before = so_far(this_thread);
    work();
    so_far(this_thread).since(&before)
}

type Sink = unsafe extern "C" fn(*mut c_void, *const u8, usize, u64, u64);

unsafe extern "C" fn sink(calls: *mut c_void, name: *const u8, length: usize, outside: u64, inside: u64) {
    // SAFETY: `calls` points to the value below, and the name has `length` bytes.
    let (calls, name) = unsafe { (&mut *calls.cast::<DriverCalls>(), std::slice::from_raw_parts(name, length)) };
    calls.0.insert(String::from_utf8_lossy(name).into_owned(), [outside, inside]);
}

fn so_far(this_thread: u8) -> DriverCalls {
    let mut calls = DriverCalls::default();
    // SAFETY: the function belongs to this workspace and has this signature; it calls `sink` with the given arguments,
    // before it returns.
    let code = unsafe {
        let function = library::cuda().get::<unsafe extern "C" fn(u8, Sink, *mut c_void) -> u32>(b"simgpu_calls\0");
        function.unwrap_or_else(|error| panic!("the simulated driver has no simgpu_calls: {error}"))(
            this_thread,
            sink,
            (&raw mut calls).cast(),
        )
    };
    assert_eq!(code, 0, "counting driver calls: the simulated driver gave error {code}");
    calls
}
