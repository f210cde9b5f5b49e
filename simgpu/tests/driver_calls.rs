//! The simulated driver counts calls by caller.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use cudarc::driver::CudaContext;
use simgpu::{DriverCalls, driver_calls, driver_calls_of_this_thread};

#[test]
fn calls_are_counted_by_name_and_thread() {
    let _alone = simgpu::alone();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let event = stream.record_event(None).unwrap();
    let work = || {
        event.record(&stream).unwrap();
        stream.wait(&event).unwrap();
        event.record(&stream).unwrap();
    };
    let mine = driver_calls_of_this_thread(work);
    assert_eq!(mine.to_string(), "cuCtxGetCurrent 3, cuEventRecord 2, cuStreamWaitEvent 1");
    assert_eq!((mine.beside_nccl(), mine.inside_nccl(), mine.of("cuEventRecord"), mine.of("cuMemAlloc_v2")), (6, 0, 2, 0));
    assert_eq!(driver_calls_of_this_thread(|| {}), DriverCalls::default());
    // Another thread needs the context first.
    let elsewhere = || std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    assert_eq!(driver_calls_of_this_thread(elsewhere), DriverCalls::default());
    assert_eq!(driver_calls(elsewhere).to_string(), "cuCtxGetCurrent 3, cuCtxSetCurrent 1, cuEventRecord 2, cuStreamWaitEvent 1");
    assert_eq!(DriverCalls::default().to_string(), "none");
    assert_eq!(simgpu::reports(), [""; 0]);
}
