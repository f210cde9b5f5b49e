//! Reductions that the caller supplies: a CUDA C expression if NVRTC is installed, and a PTX image in any case.

use collectives::{CustomOp, bf16};

use super::gpu::ranks;
use crate::common::cases::Memory;

/// Whether NVRTC can be opened. Prints a line if it cannot.
fn has_nvrtc() -> bool {
    #[expect(unsafe_code, reason = "opens a library if there is one")]
    // SAFETY: nothing is called.
    let there = unsafe { cudarc::nvrtc::sys::is_culib_present() };
    if !there {
        println!("skipped: no NVRTC library is found (put its folder on LD_LIBRARY_PATH)");
    }
    there
}

#[test]
fn an_expression_folds_in_rank_order() {
    if !has_nvrtc() {
        return;
    }
    ranks(3, |comm, memory| {
        let me = comm.rank() as f32;
        let largest = CustomOp::on_device("absmax", "fabsf(b) > fabsf(a) ? b : a");
        let mut buffer = memory.put(&[me + 1.0, -me, 5.0 - 4.0 * me]);
        comm.all_reduce(&mut buffer, &largest).unwrap();
        assert_eq!(memory.get(&buffer), [3.0, -2.0, 5.0]);

        let last = CustomOp::on_device("last", "b");
        let mut buffer = memory.put(&vec![comm.rank() as u8; 1001]);
        comm.all_reduce(&mut buffer, &last).unwrap();
        assert_eq!(memory.get(&buffer), vec![2; 1001]);

        let narrow = CustomOp::on_device("sum of squares", "a + b * b");
        let mut buffer = memory.put(&[bf16::from_f32(me)]);
        comm.all_reduce(&mut buffer, &narrow).unwrap();
        assert_eq!(memory.get(&buffer), [bf16::from_f32(5.0)]);
    });
}

#[test]
fn an_expression_that_is_none_is_refused_by_everyone() {
    ranks(2, |comm, memory| {
        let mut buffer = memory.put(&[1_u32]);
        for expression in ["a +", "a; b", "*(int*)0", "__trap()", "asm(\"trap;\")", "(a)[b]", ""] {
            let error = comm.all_reduce(&mut buffer, CustomOp::on_device("wrong", expression)).unwrap_err();
            assert!(
                error.to_string().contains("wrong") || error.to_string().contains("expression") || error.is_unsupported(),
                "{expression:?}: {error}"
            );
        }
        comm.all_reduce(&mut buffer, collectives::ReduceOp::Sum).unwrap();
        assert_eq!(memory.get(&buffer), [2]);
    });
}

#[test]
fn a_host_op_on_device_memory_says_what_it_lacks() {
    ranks(1, |comm, memory| {
        let op = CustomOp::new("first", |_: &mut [u32], _: &[u32]| {});
        let error = comm.all_reduce(&mut memory.put(&[1_u32]), &op).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("with_expression"), "{error}");
        let error = comm.all_reduce(&mut [1_u32], CustomOp::on_device("first", "a")).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("CustomOp::new"), "{error}");
    });
}
