//! The edges of the public face: odd types and sizes, panics, limits, and communicators that part ways.

mod common;

use common::ranks::{Wiring, threads};

use collectives::{CustomOp, Data, Error, Result};

/// Plain data with an alignment of its own, and a sum of it.
macro_rules! aligned {
    ($name:ident, $align:literal) => {
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[repr(C, align($align))]
        struct $name([u64; $align / 8]);

        #[expect(unsafe_code, reason = "plain data of the test's own")]
        // SAFETY: integers, which fill the alignment: no padding, and any bytes are a value.
        unsafe impl Data for $name {}

        impl $name {
            fn sum() -> CustomOp<Self> {
                CustomOp::new(stringify!($name), |into: &mut [Self], from: &[Self]| {
                    assert!(into.as_ptr().is_aligned() && from.as_ptr().is_aligned());
                    for (into, from) in into.iter_mut().zip(from) {
                        into.0.iter_mut().zip(from.0).for_each(|(into, from)| *into += from);
                    }
                })
            }

            fn check(wiring: Wiring, ranks: usize, count: usize) {
                threads(wiring, ranks, |comm| {
                    let expected = $name([(0..ranks as u64).sum(); $align / 8]);
                    let mut x = vec![$name([comm.rank() as u64; $align / 8]); count];
                    comm.all_reduce(&mut x, Self::sum()).unwrap();
                    assert!(x.iter().all(|x| *x == expected), "{count} of {} on {ranks} ranks, {wiring:?}", stringify!($name));
                });
            }
        }
    };
}

aligned!(Aligned128, 128);
aligned!(Aligned8192, 8192);

#[test]
fn elements_of_any_alignment_are_reduced() {
    for wiring in Wiring::ALL {
        for (ranks, count) in [(2, 1), (3, 3), (5, 20)] {
            Aligned128::check(wiring, ranks, count);
            Aligned8192::check(wiring, ranks, count);
        }
    }
}

#[test]
fn elements_larger_than_a_slot_of_shared_memory_are_reduced() {
    const N: usize = 10_000;
    let add = |into: &mut [[f64; N]], from: &[[f64; N]]| {
        into.iter_mut().flatten().zip(from.iter().flatten()).for_each(|(into, from)| *into += from);
    };
    for wiring in Wiring::ALL {
        for op in [CustomOp::new("add", add), CustomOp::ordered("add in order", add)] {
            threads(wiring, 3, |comm| {
                let mut x = vec![[comm.rank() as f64; N]; 2];
                comm.all_reduce(&mut x, &op).unwrap();
                assert!(x.iter().flatten().all(|x| *x == 3.0), "{wiring:?} {op:?}");
                comm.reduce(&mut x, 2, &op).unwrap();
                assert_eq!(x[1][N - 1], if comm.rank() == 2 { 9.0 } else { 3.0 });
                let mut blocks = vec![[1.0; N]; 3];
                comm.reduce_scatter(&mut blocks, &op).unwrap();
                assert_eq!(blocks[comm.rank()][N - 1], 3.0);
            });
        }
    }
}

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

#[test]
fn an_op_in_rank_order_meets_none_of_the_same_name_that_is_not() {
    for wiring in Wiring::ALL {
        let seen = threads(wiring, 3, |comm| {
            let add = |into: &mut [u32], from: &[u32]| into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
            let op = if comm.rank() == 1 { CustomOp::ordered("add", add) } else { CustomOp::new("add", add) };
            comm.all_reduce(&mut [1_u32; 100], &op).unwrap_err()
        });
        assert!(seen.iter().all(|error| error.is_mismatch() && error.to_string().contains("in rank order")), "{seen:?}");
    }
}
