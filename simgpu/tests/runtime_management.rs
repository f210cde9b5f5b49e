//! The simulated management library.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "the library is C")]

#[path = "runtime_common/mod.rs"]
mod runtime_common;

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_uint, c_void};

use runtime_common::cudaDeviceGetPCIBusId;

runtime_common::functions! {
    simgpu::management();
    fn nvmlInit_v2() -> u32;
    fn nvmlShutdown() -> u32;
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> u32;
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, place: *mut usize) -> u32;
    fn nvmlDeviceGetHandleByPciBusId_v2(text: *const c_char, place: *mut usize) -> u32;
    fn nvmlDeviceGetIndex(device: usize, place: *mut c_uint) -> u32;
    fn nvmlDeviceGetPciInfo_v3(device: usize, place: *mut [c_uint; 17]) -> u32;
    fn nvmlDeviceGetCurrPcieLinkGeneration(device: usize, place: *mut c_uint) -> u32;
    fn nvmlErrorString(code: u32) -> *const c_char;
    fn nvmlDeviceGetNvLinkState(device: usize, link: c_uint, active: *mut c_uint) -> u32;
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: usize, link: c_uint, place: *mut c_void) -> u32;
    fn nvmlDeviceGetNvLinkCapability(device: usize, link: c_uint, capability: c_uint, place: *mut c_uint) -> u32;
    fn nvmlDeviceGetCudaComputeCapability(device: usize, major: *mut c_int, minor: *mut c_int) -> u32;
    fn nvmlDeviceGetP2PStatus(device: usize, peer: usize, index: c_uint, place: *mut c_uint) -> u32;
    fn nvmlDeviceGetFieldValues(device: usize, count: c_int, values: *mut [u32; 10]) -> u32;
    fn nvmlDeviceGetGpuFabricInfoV(device: usize, place: *mut c_void) -> u32;
    fn nvmlDeviceGetPlatformInfo(device: usize, place: *mut c_void) -> u32;
    fn nvmlSystemGetConfComputeState(place: *mut [c_uint; 3]) -> u32;
}

const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const NOT_FOUND: u32 = 6;

fn handle(index: u32) -> usize {
    runtime_common::got(|place| nvmlDeviceGetHandleByIndex_v2(index, place))
}

#[test]
fn devices_are_those_of_the_driver_and_have_no_links() {
    let _alone = simgpu::alone();
    let mut count = 0;
    assert_eq!(nvmlDeviceGetCount_v2(&raw mut count), UNINITIALIZED);
    assert_eq!((nvmlInit_v2(), nvmlDeviceGetCount_v2(&raw mut count), count), (0, 0, 8));
    let mut handles = HashSet::new();
    for index in 0..8 {
        let mut text = [0; 32];
        assert_eq!(cudaDeviceGetPCIBusId(text.as_mut_ptr(), 32, index as c_int), 0);
        let device: usize = runtime_common::got(|place| nvmlDeviceGetHandleByPciBusId_v2(text.as_ptr(), place));
        assert_eq!((device, runtime_common::got::<u32>(|place| nvmlDeviceGetIndex(device, place))), (handle(index), index));
        assert!(handles.insert(device));
        let (mut major, mut minor) = (0, 9);
        assert_eq!((nvmlDeviceGetCudaComputeCapability(device, &raw mut major, &raw mut minor), major, minor), (0, 9, 0));
    }
    let mut place = 0;
    assert_eq!(nvmlDeviceGetHandleByPciBusId_v2(c"0000:77:00.0".as_ptr(), &raw mut place), NOT_FOUND);
    assert_eq!(nvmlDeviceGetHandleByPciBusId_v2(c"00000000:03:00.0".as_ptr(), &raw mut place), 0);
    assert_eq!((place, nvmlDeviceGetHandleByIndex_v2(8, &raw mut place)), (handle(2), INVALID_ARGUMENT));
    without_links(handle(0), handle(1));
    on_the_bus(handle(2));
    assert_eq!((nvmlShutdown(), nvmlShutdown()), (0, UNINITIALIZED));
    // SAFETY: the texts are constants.
    assert!((0..20).all(|code| !unsafe { std::ffi::CStr::from_ptr(nvmlErrorString(code)) }.is_empty()));
}

/// Checks two texts of 16 and 32 bytes, with five numbers between: the domain, the bus, the device, the vendor, and a
/// number of the board.
fn on_the_bus(device: usize) {
    let info: [c_uint; 17] = runtime_common::got(|place| nvmlDeviceGetPciInfo_v3(device, place));
    let bytes: Vec<u8> = info.iter().flat_map(|word| word.to_le_bytes()).collect();
    let text = |bytes: &[u8]| String::from_utf8(bytes.iter().copied().take_while(|&byte| byte != 0).collect()).unwrap();
    assert_eq!((text(&bytes[..16]), text(&bytes[36..])), ("0000:03:00.0".to_string(), "00000000:03:00.0".to_string()));
    assert_eq!(info[4..9], [0, 3, 0, 0x10de, 0]);
    let mut number = 0;
    assert_eq!(nvmlDeviceGetPciInfo_v3(99, std::ptr::null_mut()), INVALID_ARGUMENT);
    assert_eq!(nvmlDeviceGetCurrPcieLinkGeneration(device, &raw mut number), NOT_SUPPORTED);
}

fn without_links(a: usize, b: usize) {
    let mut number = 7;
    let place = &raw mut number;
    assert_eq!(nvmlDeviceGetNvLinkState(a, 0, place), NOT_SUPPORTED);
    assert_eq!(nvmlDeviceGetNvLinkRemotePciInfo_v2(a, 0, place.cast()), NOT_SUPPORTED);
    assert_eq!(nvmlDeviceGetNvLinkCapability(a, 0, 0, place), NOT_SUPPORTED);
    assert_eq!((nvmlDeviceGetGpuFabricInfoV(a, place.cast()), nvmlDeviceGetPlatformInfo(a, place.cast())), (NOT_SUPPORTED, NOT_SUPPORTED));
    // Reads, writes, NVLink, atomics, PCI.
    let status: Vec<u32> = (0..5).map(|index| runtime_common::got(|place| nvmlDeviceGetP2PStatus(a, b, index, place))).collect();
    assert_eq!(status, [0, 0, 5, 5, 0]);
    assert_eq!(nvmlDeviceGetP2PStatus(a, b, 5, place), INVALID_ARGUMENT);
    assert_eq!((0..2).map(|index| runtime_common::got(|place| nvmlDeviceGetP2PStatus(a, a, index, place))).collect::<Vec<_>>(), [0, 0]);
    let mut fields = [[0; 10]; 2];
    assert_eq!(nvmlDeviceGetFieldValues(a, 2, fields.as_mut_ptr()), 0);
    assert_eq!([fields[0][7], fields[1][7]], [NOT_SUPPORTED; 2]);
    let mut state = [9; 3];
    assert_eq!((nvmlSystemGetConfComputeState(&raw mut state), state), (0, [0; 3]));
    assert_eq!(nvmlDeviceGetIndex(0, place), INVALID_ARGUMENT);
}
