//! Machines without CUDA: everything works in host memory, and errors name what is missing.

use collectives::{Communicator, DeviceChoice, Error, ReduceOp};

/// Whether a driver is installed. Prints a line if so.
fn has_driver() -> bool {
    #[expect(unsafe_code, reason = "opens a library if there is one")]
    // SAFETY: nothing is called.
    let there = unsafe { cudarc::driver::sys::is_culib_present() };
    if there {
        println!("skipped: this machine has a CUDA driver");
    }
    there
}

#[test]
fn a_device_that_cannot_be_had_is_explained_and_the_host_backend_works() {
    if has_driver() {
        return;
    }
    for choice in [DeviceChoice::Local, DeviceChoice::Ordinal(99)] {
        let sums = Communicator::builder().device(choice).run_local(3, |comm| {
            assert!(comm.device().is_none());
            let why = comm.why_no_device().unwrap();
            assert!(why.starts_with("rank 0") && why.contains("libcuda.so"), "{why}");
            let mut x = [comm.rank() as f32];
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            let half = comm.split(Some(0), 0)?.unwrap();
            assert_eq!(half.why_no_device(), comm.why_no_device());
            Ok(x[0])
        });
        assert_eq!(sums.unwrap(), [3.0; 3]);
    }
}

#[test]
fn a_device_that_is_required_is_an_error_on_every_rank() {
    if has_driver() {
        return;
    }
    let error = Communicator::builder().require_device(DeviceChoice::Local).local(2).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains("libcuda.so"), "{error}");
}

#[test]
fn without_asking_there_is_no_device_and_that_is_said_too() {
    let comm = Communicator::local(1).unwrap().remove(0);
    assert!(comm.device().is_none());
    assert!(comm.why_no_device().unwrap().contains("builder().device"));
}
