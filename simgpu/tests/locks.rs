//! Waits in the simulated driver: for the lock of a context, and for a place in the queue of a stream.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "half of cudarc is unsafe")]

#[path = "../../tests/common/meeting.rs"]
#[allow(dead_code, unreachable_pub, reason = "tests of other packages share it")]
mod meeting;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaContext, result};
use cudarc::nvrtc::Ptx;
use meeting::wait_until;
use simgpu::{Gate, waits_for_context, waits_for_room};

const PTX: &str = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry idle() { ret; }\n";

/// The length of a stream's queue.
const ROOM: usize = 1024;

/// A call that holds the lock of a context until the device is idle.
type Keeper = fn(&Arc<CudaContext>);

const KEEPERS: [Keeper; 3] = [
    |context| {
        context.bind_to_thread().unwrap();
        // SAFETY: unused memory, freed once.
        unsafe { result::free_sync(result::malloc_sync(64).unwrap()) }.unwrap();
    },
    |context| drop(context.load_module(Ptx::from_src(PTX)).unwrap()),
    |context| context.synchronize().unwrap(),
];

#[test]
fn what_waits_for_the_device_holds_up_its_context_and_no_other() {
    let _alone = simgpu::alone();
    for keep in KEEPERS {
        let (context, other) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        let streams = [context.new_stream().unwrap(), other.new_stream().unwrap()];
        let gate = Gate::close(streams[0].cu_stream().cast());
        // Work that the device has not done.
        let event = streams[0].record_event(None).unwrap();
        let (before, has_asked) = (waits_for_context(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| keep(&context));
            scope.spawn(|| {
                context.bind_to_thread().unwrap();
                wait_until("one waits behind the other thread", || {
                    waits_for_context() != before || {
                        event.is_complete();
                        false
                    }
                });
                has_asked.store(true, Ordering::SeqCst);
            });
            wait_until("a query waits", || {
                // The other context is never blocked.
                streams[1].record_event(None).unwrap().synchronize().unwrap();
                waits_for_context() != before
            });
            assert!(!has_asked.load(Ordering::SeqCst));
            gate.open();
        });
        assert!(event.is_complete() && has_asked.load(Ordering::SeqCst));
    }
    assert_eq!(simgpu::reports(), [""; 0]);
}

#[test]
fn a_full_queue_holds_up_whoever_brings_more() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let (stream, free) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let event = context.new_event(None).unwrap();
    let (gate, before) = (Gate::close(stream.cu_stream().cast()), waits_for_room());
    (0..ROOM).for_each(|_| event.record(&stream).unwrap());
    assert_eq!(waits_for_room(), before);
    let (waits, has_asked) = (waits_for_context(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| event.record(&stream).unwrap());
        wait_until("a call waits for room", || waits_for_room() != before);
        // Another stream of the context waits as well, since a call that waits for a place holds the lock.
        scope.spawn(|| {
            free.record_event(None).unwrap();
            has_asked.store(true, Ordering::SeqCst);
        });
        wait_until("a call waits for the context", || waits_for_context() != waits);
        assert!(!has_asked.load(Ordering::SeqCst));
        gate.open();
    });
    assert!(has_asked.load(Ordering::SeqCst));
    stream.synchronize().unwrap();
    assert_eq!((waits_for_room(), simgpu::reports()), (before + 1, Vec::<String>::new()));
}
