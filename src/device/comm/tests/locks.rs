//! Calls that the driver holds up, because another call keeps the context's lock until the device has come to rest, or
//! because a stream's queue is full. While a kernel waits for a rank that never comes, such calls would wait forever. A
//! deadline releases them, since the timekeeper does not call the driver.

use std::thread;

use cudarc::driver::result;
use simgpu::{waits_for_context, waits_for_room};

use super::*;

const SHORT: Duration = Duration::from_millis(500);

/// Makes calls of rank 0 that rank 1 never makes, until one fails, and returns its error.
fn call_until_it_fails(rank: &Rank, limit: Duration) -> Error {
    let mut vector = rank.vector(10);
    let deadline = Deadline::after(LONG);
    loop {
        if let Err(error) = rank.all_reduce(&mut vector, limit) {
            return error;
        }
        assert!(!deadline.has_passed(), "no call has failed");
    }
}

/// A driver call of another thread that keeps the context's lock until the device has come to rest.
type Keeper = fn(&Gpu);

const KEEPERS: [(&str, Keeper); 4] = [
    ("a free", |gpu| {
        driver::bind(&gpu.context).unwrap();
        // SAFETY: the memory is not used; it is freed once.
        unsafe { result::free_sync(result::malloc_sync(1 << 10).unwrap()) }.unwrap();
    }),
    ("the load of a module", |gpu| {
        let ptx = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry idle() { ret; }\n";
        drop(gpu.context.load_module(cudarc::nvrtc::Ptx::from_src(ptx)).unwrap());
    }),
    ("a synchronisation", |gpu| {
        let _ = gpu.context.synchronize();
    }),
    ("a free of pinned memory", |gpu| {
        // SAFETY: it is dropped without being read.
        drop(unsafe { gpu.context.alloc_pinned::<u8>(1 << 10) }.unwrap());
    }),
];

#[test]
fn a_deadline_frees_calls_that_wait_behind_what_waits_for_the_device() {
    for (what, keep) in KEEPERS {
        let sim = Sim::new();
        ranks(2, |rank| {
            if rank.comm.rank() == 1 {
                return leave_late(&rank.comm);
            }
            let mut vector = rank.vector(10);
            rank.all_reduce(&mut vector, SHORT).unwrap();
            let (gpu, before) = (&rank.gpu, waits_for_context());
            let error = thread::scope(|scope| {
                scope.spawn(move || keep(gpu));
                call_until_it_fails(&rank, SHORT)
            });
            assert!(error.is_timeout(), "{what}: {error}");
            assert!(waits_for_context() > before, "{what} held nobody up");
            let _ = rank.stream.synchronize();
            assert!(rank.comm.failure().is_some_and(|failure| failure.is_timeout()), "{what}: {:?}", rank.comm.failure());
        });
        sim.finish();
    }
}

#[test]
fn a_deadline_frees_a_call_for_which_its_stream_has_no_room() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let before = waits_for_room();
        // Long enough for more of them than fit in the queue, on a busy machine too.
        let error = call_until_it_fails(&rank, 6 * SHORT);
        assert!(error.is_timeout(), "{error}");
        assert!(waits_for_room() > before, "the queue was never full");
        let _ = rank.stream.synchronize();
        assert!(rank.all_reduce(&mut rank.vector(10), SHORT).unwrap_err().is_poisoned());
    });
    sim.finish();
}

#[test]
fn an_abort_reaches_a_call_for_which_its_stream_has_no_room() {
    let sim = Sim::new();
    ranks(2, |rank| {
        if rank.comm.rank() == 1 {
            return leave_late(&rank.comm);
        }
        let before = waits_for_room();
        let mut vector = rank.vector(10);
        let error = thread::scope(|scope| {
            let calling = scope.spawn(|| {
                loop {
                    if let Err(error) = rank.all_reduce(&mut vector, LONG) {
                        return error;
                    }
                }
            });
            wait_until("a call waits for room", || waits_for_room() != before);
            rank.comm.abort();
            calling.join().unwrap()
        });
        assert!(matches!(&error, Error::Poisoned { cause, .. } if matches!(**cause, Error::Aborted { .. })), "{error}");
        let _ = rank.stream.synchronize();
    });
    sim.finish();
}

#[test]
fn a_full_queue_is_no_error_where_the_device_goes_on() {
    let sim = Sim::new();
    let before = waits_for_room();
    ranks(2, |rank| {
        let mut vector = rank.vector(10);
        let call = |vector: &mut CudaSlice<f32>| (0..2000).for_each(|_| rank.all_reduce(vector, LONG).unwrap());
        if rank.comm.rank() == 1 {
            // Once the other one has come as far as it can.
            wait_until("the other rank finds its queue full", || waits_for_room() != before);
        }
        call(&mut vector);
        rank.stream.synchronize().unwrap();
        assert!(rank.comm.failure().is_none());
    });
    sim.finish();
}
