//! Properties of every real NCCL, tested on the release that a test names. No GPU is needed.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nccl_sys::*;

use super::Release;

impl Release {
    /// Opens the real library, for one test at a time: its last error is shared by all threads. Returns `None` if its
    /// wheel was not fetched.
    pub(crate) fn open(self) -> Option<(&'static Library, MutexGuard<'static, ()>)> {
        static ALONE: Mutex<()> = Mutex::new(());
        let path = self.library()?;
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: this is an NCCL release from its wheel.
        Some((unsafe { Library::open_file(&path) }.unwrap(), alone))
    }
}

pub(crate) fn it_says_its_version_and_file(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    assert_eq!(nccl.version(), release.version);
    assert_eq!(nccl.path(), release.library().unwrap().canonicalize().unwrap().to_str().unwrap());
    let mut code = 0;
    // SAFETY: the pointer is to an integer.
    assert_eq!(unsafe { nccl.ncclGetVersion(&mut code) }, Ok(ncclResult_t::ncclSuccess));
    assert_eq!(Version::from_code(code), release.version);
    // SAFETY: this file is already open.
    assert!(std::ptr::eq(nccl, unsafe { Library::open_file(&release.library().unwrap()) }.unwrap()), "opened twice");
    // It counts as present for callers that name no library.
    assert!(std::ptr::eq(nccl, Library::open().unwrap()));
}

pub(crate) fn it_has_the_functions_of_its_release_and_no_later_ones(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    for &(name, since) in FUNCTIONS {
        assert_eq!(nccl.has(name), since <= release.version, "{name}, of {since}");
    }
    assert!(nccl.has("pncclAllReduce"), "a function that the crate does not know");
    assert!(!nccl.has("ncclAllReduceAndMore") && !nccl.has("") && !nccl.has("nccl\0AllReduce"));
}

pub(crate) fn what_it_lacks_is_an_error_that_names_the_release(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    let check = |symbol, call: &dyn Fn() -> Result<ncclResult_t, MissingSymbol>| {
        let since = first_version(symbol).unwrap();
        if since <= release.version {
            return 0;
        }
        let missing = MissingSymbol { symbol, since, loaded: release.version };
        assert_eq!([call(), call()], [Err(missing), Err(missing)], "the first call and a later one");
        assert_eq!(missing.to_string(), format!("{symbol} needs NCCL {since} or later, but the loaded library is {}", release.version));
        1
    };
    // SAFETY: no function that exists is called.
    let missing = unsafe {
        check("ncclCommShrink", &|| nccl.ncclCommShrink(NCCL_COMM_NULL, null_mut(), 0, null_mut(), null_mut(), 0))
            + check("ncclCommRevoke", &|| nccl.ncclCommRevoke(NCCL_COMM_NULL, 0))
            + check("ncclAlltoAll", &|| nccl.ncclAlltoAll(null(), null_mut(), 1, ncclDataType_t::ncclInt8, NCCL_COMM_NULL, null_mut()))
            + check("ncclCommGrow", &|| nccl.ncclCommGrow(NCCL_COMM_NULL, 0, null(), 0, null_mut(), null_mut()))
            + check("ncclSetEncryption", &|| nccl.ncclSetEncryption(null()))
    };
    assert_eq!(missing, if release.version < Version::new(2, 27, 3) { 5 } else { 2 * u8::from(release.version < Version::new(2, 29, 2)) });
}

pub(crate) fn its_codes_have_their_texts(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    let text = |code| {
        // SAFETY: every code has a text, which is a constant of the library.
        unsafe { CStr::from_ptr(nccl.ncclGetErrorString(ncclResult_t(code)).unwrap()) }.to_str().unwrap()
    };
    let timeout = if release.version < Version::new(2, 30, 3) { "unknown result code" } else { "timeout" };
    let beginnings = [
        "no error",
        "unhandled cuda error",
        "unhandled system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
        timeout,
        "unknown result code",
    ];
    for (code, beginning) in (0..).zip(beginnings) {
        assert!(text(code).starts_with(beginning), "{code}: {}", text(code));
    }
    assert_eq!(text(u32::MAX), "unknown result code");
}

pub(crate) fn its_ids_are_unique(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    let ids = [(); 3].map(|()| {
        let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        // SAFETY: the pointer is to an id.
        assert_eq!(unsafe { nccl.ncclGetUniqueId(&mut id) }, Ok(ncclResult_t::ncclSuccess));
        assert_ne!(id.internal, [0; NCCL_UNIQUE_ID_BYTES]);
        id
    });
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[2] != ids[0]);
}

pub(crate) fn no_communicator_is_refused_and_its_end_is_nothing(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    let (byte, sum, none, stream) = (ncclDataType_t::ncclInt8, ncclRedOp_t::ncclSum, NCCL_COMM_NULL, null_mut());
    let mut buffer = [0u8; 8];
    let memory: *mut c_void = buffer.as_mut_ptr().cast();
    let (mut number, mut state): (c_int, _) = (-1, ncclResult_t::ncclSuccess);
    // SAFETY: without a communicator these functions only check their arguments, which are all valid.
    unsafe {
        let refused = [
            nccl.ncclAllReduce(memory, memory, 8, byte, sum, none, stream),
            nccl.ncclReduce(memory, memory, 8, byte, sum, 0, none, stream),
            nccl.ncclReduceScatter(memory, memory, 8, byte, sum, none, stream),
            nccl.ncclAllGather(memory, memory, 8, byte, none, stream),
            nccl.ncclBroadcast(memory, memory, 8, byte, 0, none, stream),
            nccl.ncclBcast(memory, 8, byte, 0, none, stream),
            nccl.ncclSend(memory, 8, byte, 0, none, stream),
            nccl.ncclRecv(memory, 8, byte, 0, none, stream),
            nccl.ncclCommCount(none, &mut number),
            nccl.ncclCommCuDevice(none, &mut number),
            nccl.ncclCommUserRank(none, &mut number),
            nccl.ncclCommGetAsyncError(none, &mut state),
        ];
        assert_eq!(refused, [Ok(ncclResult_t::ncclInvalidArgument); 12]);
        assert_eq!(nccl.ncclCommDestroy(none), Ok(ncclResult_t::ncclSuccess));
        assert_eq!(nccl.ncclCommAbort(none), Ok(ncclResult_t::ncclSuccess));
        let last = CStr::from_ptr(nccl.ncclGetLastError(none).unwrap()).to_str().unwrap();
        assert!(last.contains("NULL"), "{last:?}");
    }
    assert_eq!((number, buffer), (-1, [0; 8]));
}

pub(crate) fn groups_are_counted(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    // SAFETY: groups belong to the thread, and this thread has not used any before.
    unsafe {
        assert_eq!(nccl.ncclGroupEnd(), Ok(ncclResult_t::ncclInvalidUsage), "an end without a start");
        for depth in 1..=3 {
            (0..depth).for_each(|_| assert_eq!(nccl.ncclGroupStart(), Ok(ncclResult_t::ncclSuccess)));
            (0..depth).for_each(|_| assert_eq!(nccl.ncclGroupEnd(), Ok(ncclResult_t::ncclSuccess)));
            assert_eq!(nccl.ncclGroupEnd(), Ok(ncclResult_t::ncclInvalidUsage), "one end too many");
        }
        let mut info = ncclSimInfo_t::new();
        if nccl.has("ncclGroupSimulateEnd") {
            assert_eq!(nccl.ncclGroupStart(), Ok(ncclResult_t::ncclSuccess));
            assert_eq!(nccl.ncclGroupSimulateEnd(&mut info), Ok(ncclResult_t::ncclSuccess));
        }
        assert_eq!(info, ncclSimInfo_t::new(), "there is nothing to estimate");
    }
}

pub(crate) fn without_a_driver_a_communicator_is_refused_at_once(release: Release) {
    let Some((nccl, _alone)) = release.open() else { return };
    // SAFETY: the driver's initialisers have no requirements.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        return eprintln!("skipped: this machine has a driver");
    }
    let (mut id, mut comm) = (ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] }, NCCL_COMM_NULL);
    let mut config = ncclConfig_t { blocking: 0, ..ncclConfig_t::new() };
    // SAFETY: all pointers are to local variables.
    unsafe {
        assert_eq!(nccl.ncclGetUniqueId(&mut id), Ok(ncclResult_t::ncclSuccess));
        let refused = [
            nccl.ncclCommInitRank(&mut comm, 1, id, 0),
            nccl.ncclCommInitRankConfig(&mut comm, 1, id, 0, &mut config),
            nccl.ncclCommInitAll(&mut comm, 1, null()),
        ];
        assert_eq!(refused, [Ok(ncclResult_t::ncclUnhandledCudaError); 3]);
        let last = CStr::from_ptr(nccl.ncclGetLastError(NCCL_COMM_NULL).unwrap()).to_str().unwrap();
        assert!(last.contains("driver"), "{last:?}");
    }
    assert!(comm.is_null());
}

/// Defines one test for each of the functions above.
#[macro_export]
macro_rules! tests_of {
    ($release:expr) => {
        $crate::tests_of! { $release =>
            it_says_its_version_and_file it_has_the_functions_of_its_release_and_no_later_ones what_it_lacks_is_an_error_that_names_the_release
            its_codes_have_their_texts its_ids_are_unique no_communicator_is_refused_and_its_end_is_nothing groups_are_counted
            without_a_driver_a_communicator_is_refused_at_once
        }
    };
    ($release:expr => $($test:ident)*) => {
        $(#[test] fn $test() { common::release::$test($release); })*
    };
}
