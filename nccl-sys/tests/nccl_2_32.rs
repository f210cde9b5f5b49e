//! Tests of NCCL 2.32 itself, in a separate process, because a library is never unloaded.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "functions are C's")]

mod common;

tests_of!(common::RELEASES[2]);

#[test]
fn its_parameters_can_be_listed_and_read() {
    use nccl_sys::ncclResult_t;
    use std::ffi::{CStr, c_char};
    use std::ptr::null_mut;

    let Some((nccl, _alone)) = common::RELEASES[2].open() else { return };
    let (mut keys, mut count): (*mut *const c_char, _) = (null_mut(), 0);
    // SAFETY: the table belongs to the library and is permanent; each of its keys is a string.
    unsafe {
        assert_eq!(nccl.ncclParamGetAllParameterKeys(&mut keys, &mut count), Ok(ncclResult_t::ncclSuccess));
        let keys: Vec<&CStr> = (0..count as usize).map(|index| CStr::from_ptr(*keys.add(index))).collect();
        assert!(keys.contains(&c"NCCL_DEBUG"), "{keys:?}");
        let mut handle = null_mut();
        assert_eq!(nccl.ncclParamBind(&mut handle, c"NCCL_NO_SUCH_PARAMETER".as_ptr()), Ok(ncclResult_t::ncclInvalidArgument));
    }
}

#[test]
fn an_encryption_that_is_none_is_taken_and_a_struct_of_zeros_is_not() {
    use nccl_sys::{ncclEncryptionConfig_t, ncclResult_t};

    let Some((nccl, _alone)) = common::RELEASES[2].open() else { return };
    // SAFETY: both structs outlive their calls.
    unsafe {
        assert_eq!(nccl.ncclSetEncryption(&ncclEncryptionConfig_t::new()), Ok(ncclResult_t::ncclSuccess));
        assert_eq!(nccl.ncclSetEncryption(&std::mem::zeroed()), Ok(ncclResult_t::ncclInvalidArgument));
    }
}
