//! The edges of the public face: odd types and sizes, panics, limits, and communicators that part ways.

mod common;

use common::ranks::{Wiring, threads};

use collectives::{Error, Result};

#[test]
fn arrays_of_truth_values_meet_no_other_arrays() {
    for wiring in Wiring::ALL {
        let seen = threads(wiring, 2, |comm| match comm.rank() {
            0 => comm.broadcast(&mut vec![[7_u8; 4]], 0),
            _ => comm.broadcast(&mut vec![[false; 4]], 0),
        });
        for result in seen {
            let error = result.unwrap_err();
            let text = error.to_string();
            assert!(error.is_mismatch() && text.contains("[u8; 4]") && text.contains("[bool; 4]"), "{error}");
        }
        threads(wiring, 2, |comm| {
            let mut x = vec![[false; 4]];
            let result: Result<()> = match comm.rank() {
                0 => comm.send(&vec![[7_u8; 4]], 1),
                _ => Err(comm.recv(&mut x, 0).unwrap_err()),
            };
            // The sender of a short message is done before anyone has looked at it.
            assert!(comm.rank() == 0 || matches!(result, Err(Error::Message { .. })), "{result:?}");
            comm.barrier().unwrap();
        });
    }
}
