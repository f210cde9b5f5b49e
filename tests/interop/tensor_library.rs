//! A library with a C interface that a program in another language can load. It takes and returns tensors through
//! DLPack.

#![expect(unsafe_code, reason = "a C interface")]

use std::sync::Mutex;

use collectives::interop::dlpack::{DLManagedTensor, DLManagedTensorVersioned, Tensor, export, export_legacy};
use collectives::{Communicator, ReduceOp, Result};

/// Adds 1 to each element, by a sum over two ranks of which the other holds ones.
fn add_one(mut tensor: Tensor) -> Result<()> {
    let elements = Mutex::new(Some(tensor.as_mut_slice::<f32>()?));
    Communicator::run_local(2, |comm| {
        let theirs = if comm.rank() == 0 { elements.lock().ok().and_then(|mut elements| elements.take()) } else { None };
        match theirs {
            Some(elements) => {
                comm.broadcast(&mut [elements.len() as u64], 0)?;
                comm.all_reduce(elements, ReduceOp::Sum)
            }
            None => {
                let mut count = [0_u64];
                comm.broadcast(&mut count, 0)?;
                comm.all_reduce(&mut vec![1.0_f32; count[0] as usize], ReduceOp::Sum)
            }
        }
    })?;
    Ok(())
}

/// Returns 0, or prints the error and returns 1.
fn answer(result: Result<()>) -> i32 {
    result.inspect_err(|error| println!("refused: {error}")).is_err().into()
}

/// Returns 0 on success, 1 if the tensor is not writable and was released, and -1 if it was not taken.
///
/// # Safety
///
/// As for [`Tensor::from_versioned`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn add_one_versioned(managed: *mut DLManagedTensorVersioned) -> i32 {
    // SAFETY: the caller guarantees it.
    match unsafe { Tensor::from_versioned(managed) } {
        Ok(tensor) => answer(add_one(tensor)),
        Err(error) => -answer(Err(error)),
    }
}

/// Does the same as [`add_one_versioned`].
///
/// # Safety
///
/// As for [`Tensor::from_legacy`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn add_one_legacy(managed: *mut DLManagedTensor) -> i32 {
    // SAFETY: the caller guarantees it.
    match unsafe { Tensor::from_legacy(managed) } {
        Ok(tensor) => answer(add_one(tensor)),
        Err(error) => -answer(Err(error)),
    }
}

/// Returns the numbers 0 to 5 in two rows, or null on failure.
#[unsafe(no_mangle)]
pub extern "C" fn counting_versioned() -> *mut DLManagedTensorVersioned {
    export((0..6).collect::<Vec<i32>>(), &[2, 3]).unwrap_or(std::ptr::null_mut())
}

/// Returns the same as [`counting_versioned`].
#[unsafe(no_mangle)]
pub extern "C" fn counting_legacy() -> *mut DLManagedTensor {
    export_legacy((0..6).collect::<Vec<i32>>(), &[2, 3]).unwrap_or(std::ptr::null_mut())
}
