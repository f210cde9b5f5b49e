//! NCCL's functions, with the release that introduced each function. Each function becomes a method of
//! [`Library`](crate::Library).

use crate::Version;

/// Every function of `nccl.h`, with the first public release that declares it in this header.
///
/// The source of releases 2.0 to 2.2 was never public, so the functions that they introduced are listed under 2.3.5,
/// the first public release after them.
pub const FUNCTIONS: &[(&str, Version)] = &[
    ("ncclAllGather", Version::new(1, 2, 1)),
    ("ncclAllReduce", Version::new(1, 2, 1)),
    ("ncclBcast", Version::new(1, 2, 1)),
    ("ncclCommCount", Version::new(1, 2, 1)),
    ("ncclCommCuDevice", Version::new(1, 2, 1)),
    ("ncclCommDestroy", Version::new(1, 2, 1)),
    ("ncclCommInitAll", Version::new(1, 2, 1)),
    ("ncclCommInitRank", Version::new(1, 2, 1)),
    ("ncclCommUserRank", Version::new(1, 2, 1)),
    ("ncclGetErrorString", Version::new(1, 2, 1)),
    ("ncclGetUniqueId", Version::new(1, 2, 1)),
    ("ncclReduce", Version::new(1, 2, 1)),
    ("ncclReduceScatter", Version::new(1, 2, 1)),
    ("ncclBroadcast", Version::new(2, 3, 5)),
    ("ncclGetVersion", Version::new(2, 3, 5)),
    ("ncclGroupEnd", Version::new(2, 3, 5)),
    ("ncclGroupStart", Version::new(2, 3, 5)),
    ("ncclCommAbort", Version::new(2, 4, 2)),
    ("ncclCommGetAsyncError", Version::new(2, 4, 2)),
    ("ncclRecv", Version::new(2, 7, 3)),
    ("ncclSend", Version::new(2, 7, 3)),
    ("ncclRedOpCreatePreMulSum", Version::new(2, 11, 4)),
    ("ncclRedOpDestroy", Version::new(2, 11, 4)),
    ("ncclGetLastError", Version::new(2, 13, 4)),
    ("ncclCommFinalize", Version::new(2, 14, 3)),
    ("ncclCommInitRankConfig", Version::new(2, 14, 3)),
    ("ncclCommSplit", Version::new(2, 18, 1)),
    ("ncclCommDeregister", Version::new(2, 19, 1)),
    ("ncclCommRegister", Version::new(2, 19, 1)),
    ("ncclMemAlloc", Version::new(2, 19, 1)),
    ("ncclMemFree", Version::new(2, 19, 1)),
    ("ncclGroupSimulateEnd", Version::new(2, 22, 3)),
    ("ncclCommInitRankScalable", Version::new(2, 23, 4)),
    ("ncclResetDebugInit", Version::new(2, 24, 3)),
    ("ncclCommShrink", Version::new(2, 27, 3)),
    ("ncclCommWindowDeregister", Version::new(2, 27, 3)),
    ("ncclCommWindowRegister", Version::new(2, 27, 3)),
    ("ncclAlltoAll", Version::new(2, 28, 3)),
    ("ncclGather", Version::new(2, 28, 3)),
    ("ncclScatter", Version::new(2, 28, 3)),
    ("ncclCommRevoke", Version::new(2, 28, 7)),
    ("ncclCommGetUniqueId", Version::new(2, 29, 2)),
    ("ncclCommGrow", Version::new(2, 29, 2)),
    ("ncclPutSignal", Version::new(2, 29, 2)),
    ("ncclSignal", Version::new(2, 29, 2)),
    ("ncclWaitSignal", Version::new(2, 29, 2)),
    ("ncclWinGetUserPtr", Version::new(2, 29, 2)),
    ("ncclCommMemStats", Version::new(2, 29, 7)),
    ("ncclCommResume", Version::new(2, 29, 7)),
    ("ncclCommSuspend", Version::new(2, 29, 7)),
    ("ncclParamBind", Version::new(2, 30, 4)),
    ("ncclParamDumpAll", Version::new(2, 30, 4)),
    ("ncclParamGet", Version::new(2, 30, 4)),
    ("ncclParamGetAllParameterKeys", Version::new(2, 30, 4)),
    ("ncclParamGetI16", Version::new(2, 30, 4)),
    ("ncclParamGetI32", Version::new(2, 30, 4)),
    ("ncclParamGetI64", Version::new(2, 30, 4)),
    ("ncclParamGetI8", Version::new(2, 30, 4)),
    ("ncclParamGetParameter", Version::new(2, 30, 4)),
    ("ncclParamGetStr", Version::new(2, 30, 4)),
    ("ncclParamGetU16", Version::new(2, 30, 4)),
    ("ncclParamGetU32", Version::new(2, 30, 4)),
    ("ncclParamGetU64", Version::new(2, 30, 4)),
    ("ncclParamGetU8", Version::new(2, 30, 4)),
    ("ncclAllGatherConfig", Version::new(2, 31, 2)),
    ("ncclAllReduceConfig", Version::new(2, 31, 2)),
    ("ncclAlltoAllConfig", Version::new(2, 31, 2)),
    ("ncclBroadcastConfig", Version::new(2, 31, 2)),
    ("ncclGatherConfig", Version::new(2, 31, 2)),
    ("ncclReduceConfig", Version::new(2, 31, 2)),
    ("ncclReduceScatterConfig", Version::new(2, 31, 2)),
    ("ncclScatterConfig", Version::new(2, 31, 2)),
    ("ncclSetEncryption", Version::new(2, 32, 3)),
];

/// Returns the first public release that declares `function` in `nccl.h`. Returns `None` if this crate knows no such
/// release.
pub const fn first_version(function: &str) -> Option<Version> {
    let mut index = 0;
    while index < FUNCTIONS.len() {
        if equal(FUNCTIONS[index].0.as_bytes(), function.as_bytes()) {
            return Some(FUNCTIONS[index].1);
        }
        index += 1;
    }
    None
}

/// Whether `a == b`; the operator is not available at compile time yet.
const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut index = 0;
    while index < a.len() && index < b.len() && a[index] == b[index] {
        index += 1;
    }
    index == a.len() && index == b.len()
}

/// Turns each declaration into a slot for its address and a method of [`Library`](crate::Library).
macro_rules! functions {
    ($($(#[$attribute:meta])* pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// The addresses of the functions that have been looked up.
        #[derive(Default)]
        pub(crate) struct Slots {
            $($name: $crate::library::Slot,)*
        }

        impl $crate::Library {
            $(
                #[doc = concat!("`", stringify!($name), "` of NCCL.")]
                ///
                /// # Errors
                /// [`MissingSymbol`](crate::MissingSymbol) if the loaded library does not have the function.
                ///
                /// # Safety
                /// The arguments of the call, and the time at which you make it, must meet the requirements in NCCL's
                /// documentation.
                #[inline]
                pub unsafe fn $name(&self $(, $argument: $type)*) -> Result<returned!($($result)?), $crate::MissingSymbol> {
                    const SINCE: $crate::Version = $crate::first_version(stringify!($name)).expect("FUNCTIONS lacks a function");
                    let address = self.address(&self.slots.$name, stringify!($name), SINCE)?;
                    // SAFETY: NCCL's function of this name has had these arguments in every release of NCCL 2; that the
                    // library is NCCL is trusted.
                    let function = unsafe {
                        ::core::mem::transmute::<*mut ::core::ffi::c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(address)
                    };
                    // SAFETY: the caller vouches for the arguments; the library is never unloaded.
                    Ok(unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

/// The return type of a C function, or `()` if the function has no return type.
macro_rules! returned {
    () => {
        ()
    };
    ($result:ty) => {
        $result
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_listed_once_and_in_the_order_of_releases() {
        assert!(FUNCTIONS.is_sorted_by(|a, b| (a.1, a.0) < (b.1, b.0)));
        let mut names: Vec<_> = FUNCTIONS.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FUNCTIONS.len());
    }

    #[test]
    fn the_first_release_of_a_function_is_found_by_its_whole_name_only() {
        assert_eq!(first_version("ncclCommShrink"), Some(Version::new(2, 27, 3)));
        assert_eq!(first_version("ncclAllReduce"), Some(Version::new(1, 2, 1)));
        assert_eq!(first_version("ncclAllReduceConfig"), Some(Version::new(2, 31, 2)));
        assert_eq!(first_version("ncclAllReduc"), None);
        assert_eq!(first_version(""), None);
    }
}
