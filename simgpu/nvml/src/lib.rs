//! A management library for the simulated devices, with the functions that NCCL uses.
//!
//! It returns what the simulated driver knows of its devices. There is no NVLink, no fabric and no confidential
//! computing.

#![allow(unsafe_code, reason = "a library of C functions")]
#![allow(non_snake_case, reason = "the names are NVML's")]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use simgpu_driver as driver;

/// A `nvmlReturn_t` that is not success.
#[derive(Clone, Copy)]
struct Code(u32);

impl Code {
    const UNINITIALIZED: Code = Code(1);
    const INVALID_ARGUMENT: Code = Code(2);
    const NOT_SUPPORTED: Code = Code(3);
    const NOT_FOUND: Code = Code(6);
    const DRIVER_NOT_LOADED: Code = Code(9);
}

type Outcome<T = ()> = Result<T, Code>;

/// The number of a device plus one: a handle is not null.
type Device = usize;

/// The number of initialisations without a shutdown.
static USERS: AtomicUsize = AtomicUsize::new(0);

fn code(outcome: Outcome) -> u32 {
    outcome.err().map_or(0, |code| code.0)
}

fn initialise() -> Outcome {
    // SAFETY: it may be called at any time.
    unsafe { driver::cuInit(0) }.map_err(|_| Code::DRIVER_NOT_LOADED)?;
    USERS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Returns the number of devices, or an error before the initialisation.
fn count() -> Outcome<c_int> {
    if USERS.load(Ordering::Relaxed) == 0 {
        return Err(Code::UNINITIALIZED);
    }
    let mut count = 0;
    // SAFETY: the variable is on the stack here.
    unsafe { driver::cuDeviceGetCount(&raw mut count) }.map_err(|_| Code::DRIVER_NOT_LOADED)?;
    Ok(count)
}

/// Returns the number of a device from its handle.
fn ordinal(device: Device) -> Outcome<c_int> {
    let ordinal = device.checked_sub(1).and_then(|ordinal| c_int::try_from(ordinal).ok());
    ordinal.filter(|&ordinal| count().is_ok_and(|count| ordinal < count)).ok_or(count().err().unwrap_or(Code::INVALID_ARGUMENT))
}

/// Writes a result to the caller's pointer.
///
/// # Safety
///
/// `place` is null or valid for writes.
unsafe fn put<T>(place: *mut T, value: T) -> Outcome {
    if place.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: it is not null, so the caller guarantees that it is valid for writes.
    unsafe { place.write(value) };
    Ok(())
}

/// Returns a device's bus id, such as `0000:01:00.0`.
fn bus_id(ordinal: c_int) -> Outcome<CString> {
    let mut known = [0u8; 32];
    // SAFETY: the buffer holds 32 bytes.
    unsafe { driver::cuDeviceGetPCIBusId(known.as_mut_ptr().cast(), 32, ordinal) }.map_err(|_| Code::DRIVER_NOT_LOADED)?;
    Ok(CStr::from_bytes_until_nul(&known).unwrap_or_default().to_owned())
}

/// A `nvmlPciInfo_t`.
#[repr(C)]
struct PciInfo {
    short: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    /// NVIDIA's vendor id in the lower half, with no device id above it.
    identity: c_uint,
    subsystem: c_uint,
    long: [u8; 32],
}

impl PciInfo {
    /// Returns the information of the device with this bus id.
    fn of(text: &CStr) -> Outcome<PciInfo> {
        let text = text.to_str().map_err(|_| Code::NOT_FOUND)?;
        let mut parts = text.split([':', '.']).map(|part| c_uint::from_str_radix(part, 16));
        let mut next = || parts.next().and_then(Result::ok).ok_or(Code::NOT_FOUND);
        let (domain, bus, device) = (next()?, next()?, next()?);
        let mut info = PciInfo { short: [0; 16], domain, bus, device, identity: 0x10de, subsystem: 0, long: [0; 32] };
        for (place, byte) in info.short[..15].iter_mut().zip(text.bytes()) {
            *place = byte;
        }
        for (place, byte) in info.long[..31].iter_mut().zip(format!("0000{text}").bytes()) {
            *place = byte;
        }
        Ok(info)
    }
}

/// Returns the device with this bus id. The real library takes a domain of eight digits as well as one of four.
fn by_bus_id(text: &CStr) -> Outcome<Device> {
    let text = text.to_bytes();
    let short = if text.len() == 16 && text.starts_with(b"0000") { &text[4..] } else { text };
    for ordinal in 0..count()? {
        if bus_id(ordinal)?.to_bytes().eq_ignore_ascii_case(short) {
            return Ok(ordinal as Device + 1);
        }
    }
    Err(Code::NOT_FOUND)
}

/// A `nvmlFieldValue_t`.
#[repr(C)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    time: i64,
    latency: i64,
    kind: c_uint,
    outcome: u32,
    value: u64,
}

/// `NVML_P2P_CAPS_INDEX_READ`, `…_WRITE` and `…_PCI`, which devices support for each other; NVLink is 2 and atomics 3,
/// which they do not.
const PEERS_CAN: [c_uint; 3] = [0, 1, 4];
const PEERS_CAN_MOST: c_uint = 4;
/// `NVML_P2P_STATUS_NOT_SUPPORTED`.
const PEERS_CANNOT: c_uint = 5;

/// Makes C functions from bodies that return an [`Outcome`], each under all the names that programs look for.
macro_rules! management {
    ($(fn [$($name:ident)+] $arguments:tt $body:block)*) => {
        $(management!(@each [$($name)+] $arguments $body);)*
    };
    (@each [$($name:ident)+] $arguments:tt $body:block) => {
        $(management!(@one $name $arguments $body);)+
    };
    (@one $name:ident ($($argument:ident: $kind:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            // SAFETY: as for the real library, the caller guarantees its pointers; each is checked for null.
            #[allow(unused_unsafe, reason = "some take no pointers")]
            let body = || -> Outcome { unsafe { $body } };
            code(body())
        }
    };
}

management! {
    fn [nvmlInit nvmlInit_v2]() {
        initialise()
    }

    fn [nvmlShutdown]() {
        let fewer = |users: usize| users.checked_sub(1);
        USERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).map(drop).map_err(|_| Code::UNINITIALIZED)
    }

    fn [nvmlDeviceGetCount nvmlDeviceGetCount_v2](place: *mut c_uint) {
        put(place, count()? as c_uint)
    }

    fn [nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2](index: c_uint, place: *mut Device) {
        let device = index as Device + 1;
        ordinal(device)?;
        put(place, device)
    }

    fn [nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByPciBusId_v2](text: *const c_char, place: *mut Device) {
        if text.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        put(place, by_bus_id(CStr::from_ptr(text))?)
    }

    fn [nvmlDeviceGetIndex](device: Device, place: *mut c_uint) {
        put(place, ordinal(device)? as c_uint)
    }

    fn [nvmlDeviceGetPciInfo_v3](device: Device, place: *mut PciInfo) {
        let text = bus_id(ordinal(device)?)?;
        put(place, PciInfo::of(&text)?)
    }

    fn [nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth](device: Device, _place: *mut c_uint) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn [nvmlDeviceGetCudaComputeCapability](device: Device, major: *mut c_int, minor: *mut c_int) {
        let device = ordinal(device)?;
        for (place, attribute) in [(major, 75), (minor, 76)] {
            let mut value = 0;
            driver::cuDeviceGetAttribute(&raw mut value, attribute, device).map_err(|_| Code::DRIVER_NOT_LOADED)?;
            put(place, value)?;
        }
        Ok(())
    }

    fn [nvmlDeviceGetNvLinkState](device: Device, _link: c_uint, _active: *mut c_uint) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn [nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2](device: Device, _link: c_uint, _place: *mut c_void) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn [nvmlDeviceGetNvLinkCapability](device: Device, _link: c_uint, _capability: c_uint, _place: *mut c_uint) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn [nvmlDeviceGetP2PStatus](device: Device, peer: Device, index: c_uint, place: *mut c_uint) {
        let (device, peer) = (ordinal(device)?, ordinal(peer)?);
        if index > PEERS_CAN_MOST {
            return Err(Code::INVALID_ARGUMENT);
        }
        // A device supports everything for itself; NCCL queries every pair, this one too.
        let mut can = c_int::from(device == peer);
        if device != peer {
            driver::cuDeviceCanAccessPeer(&raw mut can, device, peer).map_err(|_| Code::DRIVER_NOT_LOADED)?;
        }
        put(place, if can != 0 && PEERS_CAN.contains(&index) { 0 } else { PEERS_CANNOT })
    }

    // No field is known; each entry reports that.
    fn [nvmlDeviceGetFieldValues](device: Device, count: c_int, values: *mut FieldValue) {
        ordinal(device)?;
        if values.is_null() || count < 0 {
            return Err(Code::INVALID_ARGUMENT);
        }
        for at in 0..count as usize {
            (*values.add(at)).outcome = Code::NOT_SUPPORTED.0;
        }
        Ok(())
    }

    fn [nvmlDeviceGetGpuFabricInfoV](device: Device, _place: *mut c_void) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    fn [nvmlDeviceGetPlatformInfo](device: Device, _place: *mut c_void) {
        ordinal(device)?;
        Err(Code::NOT_SUPPORTED)
    }

    // Environment, feature and mode: all are off.
    fn [nvmlSystemGetConfComputeState](place: *mut [c_uint; 3]) {
        count()?;
        put(place, [0; 3])
    }
}

/// Returns the description of a code.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    let text = match code {
        0 => c"success",
        1 => c"nvmlInit was not called",
        2 => c"an argument is not valid",
        3 => c"the simulated devices do not have this",
        6 => c"there is no such device",
        9 => c"there is no simulated driver in this process",
        _ => c"unknown error",
    };
    text.as_ptr()
}
