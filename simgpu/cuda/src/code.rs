//! The driver's error codes, with the names and texts that `cuGetErrorName` and `cuGetErrorString` give.

use std::ffi::{CStr, c_char};

/// An error of the driver, by its number. Success is the absence of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

pub(crate) type Outcome<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[allow(dead_code, reason = "some are only ever planted by tests")]
        impl Code {
            $(pub(crate) const $name: Code = Code($number);)*
        }

        const TEXTS: &[(u32, &str, &str)] =
            &[(0, "CUDA_SUCCESS\0", "no error\0"), $(($number, concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*];
    };
}

codes! {
    INVALID_VALUE = 1, "an argument is outside of what is accepted";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "the driver was not initialised: cuInit comes first";
    DEINITIALIZED = 4, "the driver is shutting down";
    STUB_LIBRARY = 34, "the library is a stub that stands in for the driver when linking";
    DEVICE_UNAVAILABLE = 46, "the device is busy or unavailable";
    NO_DEVICE = 100, "there is no device that can run CUDA";
    INVALID_DEVICE = 101, "there is no device with that number";
    INVALID_IMAGE = 200, "the image of the kernel is not valid";
    INVALID_CONTEXT = 201, "no valid context is current";
    MAP_FAILED = 205, "mapping failed";
    UNMAP_FAILED = 206, "unmapping failed";
    NO_BINARY_FOR_GPU = 209, "the module holds no code that this device can run";
    ECC_UNCORRECTABLE = 214, "an uncorrectable memory error was found";
    UNSUPPORTED_LIMIT = 215, "the device does not support this limit";
    CONTEXT_ALREADY_IN_USE = 216, "the context is in use by another thread";
    PEER_ACCESS_UNSUPPORTED = 217, "these devices cannot reach each other's memory";
    INVALID_PTX = 218, "PTX could not be compiled";
    NVLINK_UNCORRECTABLE = 220, "an uncorrectable NVLink error was found";
    JIT_COMPILER_NOT_FOUND = 221, "the PTX compiler was not found";
    UNSUPPORTED_PTX_VERSION = 222, "the PTX was made by a newer toolkit than this driver knows";
    CONTAINED = 226, "an uncorrectable but contained memory error was found";
    INVALID_SOURCE = 300, "the source of the kernel is not valid";
    FILE_NOT_FOUND = 301, "file not found";
    OPERATING_SYSTEM = 304, "a call to the operating system failed";
    INVALID_HANDLE = 400, "a handle names nothing that exists";
    ILLEGAL_STATE = 401, "the object is not in a state that permits this";
    NOT_FOUND = 500, "a named symbol was not found";
    NOT_READY = 600, "not over yet";
    ILLEGAL_ADDRESS = 700, "an illegal memory address was used";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many resources were asked for a launch";
    LAUNCH_TIMEOUT = 702, "a launch ran out of time";
    PEER_ACCESS_ALREADY_ENABLED = 704, "access to the peer is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "access to the peer was not enabled";
    PRIMARY_CONTEXT_ACTIVE = 708, "the primary context is in use";
    CONTEXT_IS_DESTROYED = 709, "the current context was destroyed";
    ASSERT = 710, "an assertion in a kernel failed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "a part of the host memory is registered already";
    HOST_MEMORY_NOT_REGISTERED = 713, "the host memory was not registered";
    HARDWARE_STACK_ERROR = 714, "the stack of a kernel is broken";
    ILLEGAL_INSTRUCTION = 715, "an illegal instruction was executed";
    MISALIGNED_ADDRESS = 716, "a misaligned address was used";
    INVALID_ADDRESS_SPACE = 717, "an instruction was given an address of the wrong space";
    LAUNCH_FAILED = 719, "a launch failed";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720, "too many blocks for a cooperative launch";
    NOT_PERMITTED = 800, "not permitted here";
    NOT_SUPPORTED = 801, "not supported";
    SYSTEM_NOT_READY = 802, "the system is not ready yet";
    SYSTEM_DRIVER_MISMATCH = 803, "the versions of the driver and of its library differ";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "forward compatibility was tried on a device that does not support it";
    STREAM_CAPTURE_UNSUPPORTED = 900, "not permitted while a stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "an earlier error ended the capture";
    STREAM_CAPTURE_MERGE = 902, "two captures would have been merged";
    STREAM_CAPTURE_UNMATCHED = 903, "the capture was not begun on this stream";
    STREAM_CAPTURE_UNJOINED = 904, "a stream that was drawn into the capture was not joined again";
    STREAM_CAPTURE_ISOLATION = 905, "a dependency would have crossed the border of the capture";
    STREAM_CAPTURE_IMPLICIT = 906, "the default stream would have been drawn into the capture";
    CAPTURED_EVENT = 907, "the event was last recorded in a capture";
    STREAM_CAPTURE_WRONG_THREAD = 908, "the capture was begun by another thread";
    TIMEOUT = 909, "out of time";
    EXTERNAL_DEVICE = 911, "an error outside of the device";
    UNKNOWN = 999, "unknown error";
}

fn text(string: &'static str) -> *const c_char {
    CStr::from_bytes_with_nul(string.as_bytes()).map_or(std::ptr::null(), CStr::as_ptr)
}

/// Name and text of an error, NUL-terminated; `None` for a number that is none.
pub(crate) fn describe(number: u32) -> Option<(*const c_char, *const c_char)> {
    let (_, name, meaning) = TEXTS.iter().find(|(known, _, _)| *known == number)?;
    Some((text(name), text(meaning)))
}

/// The name of an error, for reports.
pub(crate) fn name(code: Code) -> &'static str {
    TEXTS.iter().find(|(known, _, _)| *known == code.0).map_or("an unknown error", |(_, name, _)| name.trim_end_matches('\0'))
}
