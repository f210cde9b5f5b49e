//! Functions that must hold for any input, for every fuzzer: libFuzzer calls them from `fuzz/fuzz_targets`, and the
//! [`runner`] here from an ordinary program and from tests.
//!
//! A target panics if a property does not hold. [`Target::check`] adds two properties of all targets: bounded memory
//! and bounded time.

#![allow(missing_docs, reason = "no library: seen by the runners alone")]

mod memory;
mod mutate;
mod ptx;
pub mod runner;
mod sizes;

use std::time::Duration;

use collectives::internals::fuzz;
use collectives_train::internals::{fuzz as checkpoints, state_transfer};
use rustix::time::{ClockId, clock_gettime};

pub use mutate::Mutator;

/// The longest input that a fuzzer makes.
pub const LONGEST: usize = 4096;
/// The most processor time that an input may take, in any build.
const SLOWEST: Duration = Duration::from_secs(1);

/// A function, and the most memory that it may use: a fixed number of bytes, plus a number for each byte of the input.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    pub base_bytes: usize,
    pub bytes_per_byte: usize,
}

/// All targets. The bounds are two to four times what valid inputs take.
pub const TARGETS: [Target; 29] = [
    target("store_requests", fuzz::store_requests, 64 << 10, 1 << 10),
    target("store_service", fuzz::store_service, 64 << 10, 256),
    target("store_replies", fuzz::store_replies, 64 << 10, 128),
    target("urls", fuzz::urls, 64 << 10, 64),
    target("launchers", fuzz::launchers, 64 << 10, 64),
    target("settings", fuzz::settings, 64 << 10, 64),
    target("algorithms", fuzz::algorithms, 64 << 10, 256),
    target("sizes", sizes::sizes, 32 << 20, 64),
    target("file_log", fuzz::file_log, 64 << 10, 128),
    target("fingerprints", fuzz::fingerprints, 64 << 10, 64),
    target("engine_headers", fuzz::engine_headers, 64 << 10, 64),
    target("engine_peer", fuzz::engine_peer, 256 << 10, 64),
    target("message_frames", fuzz::message_frames, 64 << 10, 64),
    // Incoming data takes 200 kB and outgoing data 100 kB, which the peer's script keeps.
    target("message_peer", fuzz::message_peer, 2 << 20, 256),
    target("greetings", fuzz::greetings, 64 << 10, 64),
    target("acceptor", fuzz::acceptor, 64 << 10, 64),
    target("handshake", fuzz::handshake, 64 << 10, 64),
    target("records", fuzz::records, 64 << 10, 64),
    // The buffer for incoming data holds two records, each of at most 64 KiB.
    target("encrypted_link", fuzz::encrypted_link, 512 << 10, 64),
    target("metrics_requests", fuzz::metrics_requests, 64 << 10, 64),
    target("facts", fuzz::facts, 64 << 10, 64),
    target("shared_memory_file", fuzz::shared_memory_file, 64 << 10, 64),
    target("shared_memory_layout", fuzz::shared_memory_layout, 64 << 10, 64),
    target("shared_memory_ring", fuzz::shared_memory_ring, 64 << 10, 256),
    target("safetensors_headers", checkpoints::safetensors_headers, 64 << 10, 512),
    target("checkpoint_indexes", checkpoints::checkpoint_indexes, 64 << 10, 512),
    target("state_declarations", state_transfer::state_declarations, 64 << 10, 512),
    target("objects", fuzz::objects, 4 << 20, 256),
    // A module may declare as much memory as a small GPU has; the interpreter itself limits this to 256 MiB.
    target("ptx", ptx::ptx, 1 << 30, 1 << 10),
];

const fn target(name: &'static str, run: fn(&[u8]), base_bytes: usize, bytes_per_byte: usize) -> Target {
    Target { name, run, base_bytes, bytes_per_byte }
}

impl Target {
    /// Returns the target with this name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Tries one input. Panics if a property does not hold.
    pub fn check(&self, input: &[u8]) {
        let began = processor_time();
        memory::begin();
        (self.run)(input);
        let (most, bound) = (memory::most(), self.base_bytes + self.bytes_per_byte * input.len());
        assert!(most <= bound, "{most} bytes of memory for {} bytes of input, where {bound} are the bound", input.len());
        let took = processor_time().saturating_sub(began);
        assert!(took <= SLOWEST, "{took:?} of processor time for {} bytes of input", input.len());
    }
}

/// Tries one input, for libFuzzer.
///
/// # Panics
///
/// If a property does not hold, which libFuzzer looks for.
pub fn check(name: &str, input: &[u8]) {
    Target::named(name).unwrap_or_else(|| panic!("there is no target {name}")).check(input);
}

/// Returns the processor time of this thread: on a busy machine, wall-clock time would not be a property of the input.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the initial inputs of all targets: valid messages and texts.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = fuzz::seeds();
    seeds.extend(checkpoints::seeds());
    seeds.extend(state_transfer::seeds());
    seeds.extend(sizes::SEEDS.map(|text| ("sizes", text.as_bytes().to_vec())));
    seeds.extend(ptx::seeds().into_iter().map(|text| ("ptx", text.into_bytes())));
    seeds
}
