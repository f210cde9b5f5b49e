//! The driver holds up its callers, as it does while a kernel waits for other ranks and another thread frees memory.

use std::sync::atomic::Ordering;
use std::time::Instant;

use simgpu::HeldUp;

use super::*;

const SHORT: Duration = Duration::from_millis(100);

/// The driver's queries about streams and contexts.
const ASKED: [&str; 8] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuMemFree_v2",
];

/// Waits for the end of a call that the other rank does not make, in a driver that answers only this thread.
fn freed_by_the_timekeeper(rank: &Rank, held: &HeldUp) -> Error {
    // Returns because the communicator is aborted.
    let _ = rank.stream.synchronize();
    let failure = failure_of(&rank.comm);
    assert!(held.callers() > 0, "nobody was held up");
    failure
}

#[test]
fn a_deadline_passes_though_the_prober_is_held_up_before_its_first_look() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let mut vector = rank.vector(100);
        let held = HeldUp::others(&ASKED);
        rank.all_reduce(&mut vector, SHORT).unwrap();
        let failure = freed_by_the_timekeeper(&rank, &held);
        assert!(matches!(&failure, Error::Timeout { elapsed, .. } if (SHORT..LONG).contains(elapsed)), "{failure}");
        assert!(failure.to_string().contains("the driver has not answered for"), "{failure}");
        drop(held);
    });
    sim.finish();
}

#[test]
fn a_deadline_passes_though_the_prober_is_held_up_after_it() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let mut vector = rank.vector(100);
        rank.all_reduce(&mut vector, 5 * SHORT).unwrap();
        wait_until("something is marked", || rank.comm.inner.watched.unfinished().is_some());
        let held = HeldUp::others(&ASKED);
        let failure = freed_by_the_timekeeper(&rank, &held);
        assert!(matches!(&failure, Error::Timeout { elapsed, .. } if (5 * SHORT..LONG).contains(elapsed)), "{failure}");
        drop(held);
    });
    sim.finish();
}

#[test]
fn calls_that_nobody_looked_at_are_given_their_time_and_a_moment_for_the_look() {
    let sim = Sim::new();
    ranks(1, |rank| {
        let mut vector = rank.vector(100);
        let held = HeldUp::others(&ASKED);
        rank.all_reduce(&mut vector, LONG).unwrap();
        let now = Instant::now();
        // Seen first now, at the latest.
        rank.comm.inner.keep_time(now);
        rank.comm.inner.keep_time(now + LONG / 2);
        assert!(rank.comm.failure().is_none(), "{:?}", rank.comm.failure());
        drop(held);
        // The next query finds that they are done.
        let is_idle = || rank.comm.inner.trackers().iter().all(|tracker| tracker.is_idle());
        wait_until("somebody has looked", || is_idle() && rank.comm.inner.watched.unfinished().is_none());
        rank.comm.inner.keep_time(Instant::now() + 10 * LONG);
        assert!(rank.comm.failure().is_none(), "{:?}", rank.comm.failure());
    });
    sim.finish();
}

#[test]
fn each_device_has_a_prober_and_all_have_one_timekeeper() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap()];
    ranks(2, |rank| {
        let device = rank.comm.inner.device.number;
        let (config, deadline) = (NcclConfig::default(), Deadline::after(LONG));
        let another = NcclComm::create(setup(&rank.gpu, &ids, rank.comm.rank(), 2, &config, &deadline)).unwrap();
        // One each, however many communicators there are: a device that is held up holds up no other.
        assert_eq!(super::super::watchdog::threads(device), (1, 1));
        drop((another, rank));
        wait_until("the prober goes, since there is nothing to look at", || super::super::watchdog::threads(device).1 == 0);
    });
    sim.finish();
}

#[test]
fn an_abort_that_found_no_thread_is_started_by_the_timekeeper() {
    let sim = Sim::new();
    let ids = [unique_id(library()).unwrap()];
    ranks(1, |rank| {
        let (config, deadline) = (NcclConfig::default(), Deadline::after(LONG));
        let another = NcclComm::create(setup(&rank.gpu, &ids, 0, 1, &config, &deadline)).unwrap();
        // The state that an end without a thread for the abort leaves. The timekeeper remains for the other
        // communicator.
        another.inner.ended.store(true, Ordering::SeqCst);
        another.inner.aborting.store(true, Ordering::SeqCst);
        assert!(super::super::watchdog::abort_later(&another.inner));
        wait_until("somebody has aborted it", || another.inner.is_gone());
        assert!(rank.comm.failure().is_none());
    });
    sim.finish();
}
