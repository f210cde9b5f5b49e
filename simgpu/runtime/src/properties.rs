//! The properties of a device, in the structure of each release.

use std::ffi::{c_int, c_uint};

use simgpu_driver::{self as driver, Error, Outcome};

use crate::device::initialise;

/// The layout of the structure: CUDA 13 removed some members, so the later ones moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are releases")]
pub enum Release {
    Cuda12,
    Cuda13,
}

impl Release {
    fn bytes(self) -> usize {
        match self {
            Release::Cuda12 => 1032,
            Release::Cuda13 => 1008,
        }
    }
}

const UUID: usize = 256;
const TOTAL_MEMORY: usize = 288;

/// A member: its offset in CUDA 12 and in CUDA 13, its attribute, and whether it has 8 bytes.
const MEMBERS: [(usize, usize, c_uint, bool); 49] = [
    (296, 296, 8, true),
    (304, 304, 12, false),
    (308, 308, 10, false),
    (312, 312, 11, true),
    (320, 320, 1, false),
    (324, 324, 2, false),
    (328, 328, 3, false),
    (332, 332, 4, false),
    (336, 336, 5, false),
    (340, 340, 6, false),
    (344, 344, 7, false),
    (352, 352, 9, true),
    (360, 360, 75, false),
    (364, 364, 76, false),
    (388, 384, 16, false),
    (396, 388, 18, false),
    (400, 392, 19, false),
    (576, 560, 31, false),
    (580, 564, 32, false),
    (584, 568, 33, false),
    (588, 572, 34, false),
    (592, 576, 50, false),
    (600, 584, 40, false),
    (604, 588, 41, false),
    (612, 592, 37, false),
    (616, 596, 38, false),
    (620, 600, 108, false),
    (624, 604, 39, false),
    (628, 608, 78, false),
    (632, 612, 79, false),
    (636, 616, 80, false),
    (640, 624, 81, true),
    (648, 632, 82, false),
    (652, 636, 83, false),
    (656, 640, 84, false),
    (664, 648, 86, false),
    (672, 652, 88, false),
    (676, 656, 89, false),
    (680, 660, 90, false),
    (684, 664, 91, false),
    (688, 668, 95, false),
    (696, 672, 97, true),
    (712, 688, 106, false),
    (720, 696, 111, true),
    (728, 704, 99, false),
    (744, 720, 115, false),
    (772, 748, 120, false),
    (776, 752, 129, false),
    // The group of a board is the device itself, which is 0 for every device.
    (660, 644, 85, false),
];

/// Writes the properties of a device.
///
/// # Errors
///
/// If there is no such device, or `place` is null.
///
/// # Safety
///
/// `place` is null or valid for writes of the release's structure.
pub unsafe fn device_properties(place: *mut u8, device: c_int, release: Release) -> Outcome {
    initialise()?;
    if place.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let mut all = vec![0u8; release.bytes()];
    let (mut uuid, mut total) = ([0; 16], 0usize);
    // SAFETY: the name has 256 bytes; the other variables are on the stack here.
    unsafe {
        driver::cuDeviceGetName(all.as_mut_ptr().cast(), UUID as c_int, device)?;
        driver::cuDeviceGetUuid_v2(&raw mut uuid, device)?;
        driver::cuDeviceTotalMem_v2(&raw mut total, device)?;
    }
    all[UUID..UUID + 16].copy_from_slice(&uuid);
    all[TOTAL_MEMORY..TOTAL_MEMORY + 8].copy_from_slice(&total.to_ne_bytes());
    for (in_12, in_13, attribute, wide) in MEMBERS {
        let at = if release == Release::Cuda12 { in_12 } else { in_13 };
        let mut value = 0;
        // SAFETY: the variable is on the stack here.
        unsafe { driver::cuDeviceGetAttribute(&raw mut value, attribute, device)? };
        match wide {
            true => all[at..at + 8].copy_from_slice(&(value as u64).to_ne_bytes()),
            false => all[at..at + 4].copy_from_slice(&value.to_ne_bytes()),
        }
    }
    // SAFETY: the caller guarantees the size.
    unsafe { std::ptr::copy_nonoverlapping(all.as_ptr(), place, all.len()) };
    Ok(())
}
