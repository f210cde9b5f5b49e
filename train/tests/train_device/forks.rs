//! Processes forked from one with a device: the driver does not support them, so they must not call it.

#![expect(unsafe_code, reason = "fork has no safe form")]

use collectives_train::Flat;

use crate::common::limit::exit_status;
use crate::common::ranks::alone_in_a_process;
use crate::gpu::ranks;

#[test]
fn a_forked_child_is_refused_a_buffer_on_the_device() {
    alone_in_a_process("forks::a_forked_child_is_refused_a_buffer_on_the_device", || {
        ranks(2, |comm, _| {
            if comm.rank() == 0 {
                // SAFETY: the child calls into this crate, allocates only as glibc allows after a fork, and exits.
                match unsafe { libc::fork() } {
                    0 => {
                        let refused = Flat::<f32>::on_device(comm, comm.device().unwrap().stream(), 3);
                        let is_right = refused.is_err_and(|error| error.to_string().contains("forked"));
                        // SAFETY: ends the child at once, without its parent's destructors.
                        unsafe { libc::_exit(i32::from(!is_right)) }
                    }
                    child => assert_eq!(exit_status(child), Some(0), "the child was not refused"),
                }
            }
            comm.barrier().unwrap();
        });
    });
}
