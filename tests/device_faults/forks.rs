//! Forked children of a process with a device. The driver does not know them, so they must not call it.

#![expect(unsafe_code, reason = "fork has no safe form")]

use std::time::Duration;

use collectives::{ReduceOp, Result};

use super::common::cases::Memory;
use super::common::limit::exit_status;
use super::common::ranks::alone_in_a_process;
use super::gpu::ranks;

#[test]
fn a_forked_child_is_refused_what_asks_the_driver_and_the_parent_goes_on() {
    alone_in_a_process("forks::a_forked_child_is_refused_what_asks_the_driver_and_the_parent_goes_on", || {
        ranks(2, |comm, memory| {
            let mut sum = memory.put(&[comm.rank() as f32; 10]);
            let started = comm.start_all_reduce(memory.put(&[1_f32; 10]), ReduceOp::Sum).unwrap();
            let mut awaited = comm.start_all_reduce(memory.put(&[2_f32; 10]), ReduceOp::Sum).unwrap();
            if comm.rank() == 0 {
                // SAFETY: the child calls into this crate, allocates at most as glibc allows after a fork, and exits.
                match unsafe { libc::fork() } {
                    0 => {
                        let refused = |outcome: Result<()>| outcome.is_err_and(|error| error.to_string().contains("forked"));
                        let device = comm.device().unwrap();
                        let is_right = refused(comm.all_reduce(&mut sum, ReduceOp::Sum))
                            && refused(device.synchronize())
                            && refused(comm.in_order_of(&**device.stream(), |comm| comm.barrier()))
                            && refused(device.wait_for(device.stream()))
                            && refused(comm.refuse_forked("a call of another crate"))
                            && awaited.is_done()
                            && refused(awaited.wait_timeout(Duration::ZERO).map(drop))
                            // The call's buffer is not freed through the driver either.
                            && refused(started.wait().map(drop));
                        // SAFETY: ends the child at once, without its parent's destructors.
                        unsafe { libc::_exit(i32::from(!is_right)) }
                    }
                    child => assert_eq!(exit_status(child), Some(0), "the child was not refused"),
                }
            }
            assert_eq!(memory.get(&started.wait().unwrap()), [2.0; 10]);
            assert_eq!(memory.get(&awaited.wait().unwrap()), [4.0; 10]);
            comm.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(memory.get(&sum), [1.0; 10]);
        });
    });
}
