//! Functions that must hold for any input, for every fuzzer: libFuzzer calls them from `fuzz/fuzz_targets`, and the [`runner`] here
//! from an ordinary program and from tests.
//!
//! A target panics where something does not hold. [`Target::check`] adds what holds for all of them: bounded memory, and an end.

#![allow(missing_docs, reason = "no library: seen by the runners alone")]

mod memory;
mod mutate;
mod ptx;
pub mod runner;
mod sizes;

use std::time::Duration;

use collectives::internals::fuzz;
use collectives_train::internals::fuzz as checkpoints;
use rustix::time::{ClockId, clock_gettime};

pub use mutate::Mutator;

/// The longest input that a fuzzer makes.
pub const LONGEST: usize = 4096;
/// The processor time that an input may take at most, however the program is built.
const SLOWEST: Duration = Duration::from_secs(1);

/// One function, and how much memory it may take at a time: so many bytes, and so many more for each byte of the input.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    pub base_bytes: usize,
    pub bytes_per_byte: usize,
}

/// Every target. The bounds are twice to four times what valid inputs take.
pub const TARGETS: [Target; 27] = [
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
    // What is received lies in 200 kB, what is sent in 100 kB, which the peer's script keeps.
    target("message_peer", fuzz::message_peer, 2 << 20, 256),
    target("greetings", fuzz::greetings, 64 << 10, 64),
    target("acceptor", fuzz::acceptor, 64 << 10, 64),
    target("handshake", fuzz::handshake, 64 << 10, 64),
    target("records", fuzz::records, 64 << 10, 64),
    // What comes in has room for two records, each of at most 64 KiB.
    target("encrypted_link", fuzz::encrypted_link, 512 << 10, 64),
    target("facts", fuzz::facts, 64 << 10, 64),
    target("shared_memory_file", fuzz::shared_memory_file, 64 << 10, 64),
    target("shared_memory_layout", fuzz::shared_memory_layout, 64 << 10, 64),
    target("shared_memory_ring", fuzz::shared_memory_ring, 64 << 10, 256),
    target("safetensors_headers", checkpoints::safetensors_headers, 64 << 10, 512),
    target("checkpoint_indexes", checkpoints::checkpoint_indexes, 64 << 10, 512),
    target("objects", fuzz::objects, 4 << 20, 256),
    // A module may declare as much memory as a small GPU has; the interpreter's own limit is 256 MiB of it.
    target("ptx", ptx::ptx, 1 << 30, 1 << 10),
];

const fn target(name: &'static str, run: fn(&[u8]), base_bytes: usize, bytes_per_byte: usize) -> Target {
    Target { name, run, base_bytes, bytes_per_byte }
}

impl Target {
    /// The target of this name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Tries one input. Panics where something does not hold.
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

/// What libFuzzer calls.
///
/// # Panics
///
/// Where something does not hold, which is what it looks for.
pub fn check(name: &str, input: &[u8]) {
    Target::named(name).unwrap_or_else(|| panic!("there is no target {name}")).check(input);
}

/// The processor time of this thread: on a busy machine, the clock on the wall says nothing of an input.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Inputs to begin with, for all targets: what is sent and said where all is in order.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = fuzz::seeds();
    seeds.extend(checkpoints::seeds());
    seeds.extend(sizes::SEEDS.map(|text| ("sizes", text.as_bytes().to_vec())));
    seeds.extend(ptx::seeds().into_iter().map(|text| ("ptx", text.into_bytes())));
    seeds
}
