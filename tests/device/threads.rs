//! Calls start no thread of NCCL, simulated or real, and none of this crate.
//!
//! Threads that are started and joined leave nothing behind, so it is not enough to count the existing ones. The kernel
//! gives each new thread the next number and reports the last one given. While it stays the same, no thread was
//! started.
//!
//! Without a pid namespace, other processes use up numbers too. The host backend also starts a thread when it asks for
//! late ranks. So calls are made until a thousand of them fell into stretches in which no thread was started.

use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use collectives::{Communicator, Config, ReduceOp};

use super::gpu::{DeviceMemory, can_steer_nccl, compared_before, ranks_with};
use crate::common::cases::Memory;
use crate::common::hosts::skip;
use crate::common::ranks::{Meeting, alone_with_numbers};

/// Calls that must be seen to start no thread.
const CALLS: usize = 1000;
/// Calls in one stretch.
const STRETCH: usize = 4;
/// The time limit, on a machine on which other processes start threads all the time.
const LONG: Duration = Duration::from_secs(120);

/// Returns the number of the last thread or process that was started, or `None` if the kernel does not report it.
fn last_number() -> Option<u64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Whether starting and joining a thread is visible here.
fn starts_are_seen() -> bool {
    let before = last_number();
    std::thread::spawn(|| ()).join().unwrap();
    before.is_some() && last_number() != before
}

/// The state that both ranks share: their meeting, the number that rank 0 read before a stretch, and the calls in quiet
/// stretches.
struct Pace {
    meeting: Meeting,
    before: AtomicU64,
    quiet: AtomicUsize,
}

impl Pace {
    /// Makes all ranks wait while rank 0 reads the last number and passes it to `act`.
    fn read(&self, comm: &Communicator, act: impl FnOnce(u64)) {
        self.meeting.meet();
        if comm.rank() == 0 {
            act(last_number().unwrap());
        }
        self.meeting.meet();
    }
}

/// Makes calls on both ranks until [`CALLS`] of them fell into stretches in which no thread was started.
fn make_calls(comm: &Communicator, memory: &DeviceMemory, pace: &Pace) {
    let mut buffer = memory.put(&[comm.rank() as f32 + 1.0; 64]);
    let mut stretch = || {
        pace.read(comm, |now| pace.before.store(now, Ordering::SeqCst));
        for _ in 0..STRETCH {
            comm.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
        }
        comm.device().unwrap().synchronize().unwrap();
        let is_quiet = |now: u64| now == pace.before.load(Ordering::SeqCst);
        pace.read(comm, |now| {
            pace.quiet.fetch_add(if is_quiet(now) { STRETCH } else { 0 }, Ordering::SeqCst);
        });
    };
    // The first calls may start threads that remain.
    (0..3).for_each(|_| stretch());
    pace.read(comm, |_| pace.quiet.store(0, Ordering::SeqCst));
    let began = Instant::now();
    while pace.quiet.load(Ordering::SeqCst) < CALLS {
        stretch();
        let quiet = pace.quiet.load(Ordering::SeqCst);
        assert!(began.elapsed() < LONG, "threads were started in all but {quiet} calls");
    }
    assert_eq!(memory.get(&buffer), [2.0; 64]);
    pace.meeting.meet();
}

#[test]
fn a_thousand_all_reduces_start_no_thread() {
    if !starts_are_seen() {
        skip!("/proc/loadavg does not tell of threads that are started");
    }
    alone_with_numbers("threads::a_thousand_all_reduces_start_no_thread", || {
        super::gpu::prepare();
        let of_nccl = || can_steer_nccl().then(simgpu::nccl::threads_started);
        for config in [compared_before(0), Config::default()] {
            let pace = Pace { meeting: Meeting::new(2), before: AtomicU64::new(0), quiet: AtomicUsize::new(0) };
            ranks_with(2, config, |comm, memory| {
                comm.barrier().unwrap();
                let before = of_nccl();
                pace.meeting.meet();
                make_calls(comm, memory, &pace);
                assert_eq!(of_nccl(), before, "threads of NCCL's");
                pace.meeting.meet();
            });
        }
    });
}
