//! The exported functions for everything else: versions, errors, memory, registrations, windows and operators.

#![expect(unsafe_code, reason = "exported to C")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are NCCL's own")]
#![allow(missing_docs, reason = "NCCL's manual says what these do")]

use crate::abi::{CONFIG_MAGIC, Code, EncryptionConfig, Handle, Kind};
use crate::call::{acting, asking, call, check_pointer, in_group};
use crate::comm::{self, Comm, Scalar};
use crate::control;
use crate::driver::{self, Device};
use crate::fault::{Fault, Outcome};
use crate::group::{self, Task};
use crate::inside::Inside;
use crate::job::scalar_bits;
use crate::operation::Region;
use crate::report::{self, lock};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    call("ncclGetVersion", || {
        check_pointer(version, "ncclGetVersion", "version")?;
        // SAFETY: the pointer is not null.
        unsafe { version.write(control::version()) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match Code(code) {
        Code::SUCCESS => c"no error",
        Code::UNHANDLED_CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        Code::SYSTEM_ERROR => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        Code::INTERNAL_ERROR => c"internal error - please report this issue to the NCCL developers",
        Code::INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        Code::INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        Code::REMOTE_ERROR => c"remote process exited or there was a network error",
        Code::IN_PROGRESS => c"NCCL operation in progress",
        Code::TIMEOUT if control::version() >= 23000 => c"timeout",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: Handle) -> *const c_char {
    report::last().as_ptr()
}

/// The key of this process, if one was set.
static ENCRYPTION_KEY: Mutex<String> = Mutex::new(String::new());
/// The smallest number of bytes of a key; NCCL has such a bound, too.
const LEAST_KEY: usize = 32;

/// Returns the key that this process encrypts with, or an empty text if there is none.
pub(crate) fn encryption_key() -> String {
    lock(&ENCRYPTION_KEY).clone()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSetEncryption(config: *const EncryptionConfig) -> c_int {
    call("ncclSetEncryption", || {
        check_pointer(config, "ncclSetEncryption", "config")?;
        // SAFETY: the pointer is not null, and points to what the header declares.
        let config = unsafe { config.read() };
        if config.magic != CONFIG_MAGIC || config.size != size_of::<EncryptionConfig>() {
            return Err(Fault::argument("ncclSetEncryption: config not initialized via NCCL_ENCRYPTION_CONFIG_INITIALIZER"));
        }
        let key = match config.mode {
            0 => String::new(),
            1 if config.psk.is_null() => return Err(Fault::argument("ncclSetEncryption: NCCL_ENCRYPTION_MODE_PSK requires config->psk")),
            // SAFETY: the pointer is not null, and the header declares it a string.
            1 => unsafe { CStr::from_ptr(config.psk) }.to_string_lossy().into_owned(),
            mode => return Err(Fault::argument(format!("ncclSetEncryption: config->mode={mode} is not a supported encryption mode"))),
        };
        if config.mode == 1 && key.len() < LEAST_KEY {
            return Err(Fault::argument(format!("ncclSetEncryption: config->psk must be at least {LEAST_KEY} bytes")));
        }
        *lock(&ENCRYPTION_KEY) = key;
        Ok(Code::SUCCESS)
    })
}

/// The addresses handed out, each with the real allocation: the address is rounded up to a page, as windows require.
static MEMORY: Mutex<BTreeMap<usize, (u64, usize)>> = Mutex::new(BTreeMap::new());
const PAGE: usize = 4096;

/// Returns the number of live allocations of `ncclMemAlloc`.
pub(crate) fn allocations() -> usize {
    lock(&MEMORY).len()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(pointer: *mut *mut c_void, size: usize) -> c_int {
    call("ncclMemAlloc", || {
        check_pointer(pointer, "ncclMemAlloc", "ptr")?;
        let device = Device::current()?;
        let _there = device.enter()?;
        let whole = size.checked_next_multiple_of(PAGE).and_then(|size| size.checked_add(PAGE));
        let base =
            driver::allocate(whole.ok_or_else(|| Fault::argument(format!("ncclMemAlloc : {size} bytes are more than there is memory")))?)?;
        let address = (base as usize).next_multiple_of(PAGE);
        lock(&MEMORY).insert(address, (base, size));
        // SAFETY: the pointer is not null.
        unsafe { pointer.write(address as *mut c_void) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(pointer: *mut c_void) -> c_int {
    call("ncclMemFree", || {
        let memory = lock(&MEMORY).remove(&(pointer as usize));
        let (base, _) = memory.ok_or_else(|| Fault::argument(format!("ncclMemFree : {pointer:p} is no memory of ncclMemAlloc")))?;
        driver::free(base)?;
        Ok(Code::SUCCESS)
    })
}

/// Whether a region lies in one allocation of `ncclMemAlloc`.
fn is_ours(region: Region) -> bool {
    let memory = lock(&MEMORY);
    let before = memory.range(..=region.address).next_back();
    before.is_some_and(|(&start, &(_, size))| region.address + region.bytes <= start + size.next_multiple_of(PAGE))
}

fn new_token() -> usize {
    static ISSUED: AtomicUsize = AtomicUsize::new(0x20_0000_0000_0000);
    ISSUED.fetch_add(16, Ordering::SeqCst)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(comm: Handle, buffer: *mut c_void, size: usize, handle: *mut *mut c_void) -> c_int {
    call("ncclCommRegister", || {
        let (comm, _inside) = acting(comm, "ncclCommRegister")?;
        check_pointer(buffer, "ncclCommRegister", "buff")?;
        check_pointer(handle, "ncclCommRegister", "handle")?;
        if size == 0 {
            return Err(Fault::argument("ncclCommRegister : nothing to register: the size is 0"));
        }
        let _there = comm.device.enter()?;
        comm.device.check_region(Region { address: buffer as usize, bytes: size }, "ncclCommRegister", "buff")?;
        let token = new_token();
        lock(&comm.resources).registrations.insert(token, (buffer as usize, size));
        // SAFETY: the pointer is not null.
        unsafe { handle.write(token as *mut c_void) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(comm: Handle, handle: *mut c_void) -> c_int {
    call("ncclCommDeregister", || {
        let (comm, _inside) = asking(comm, "ncclCommDeregister")?;
        let known = lock(&comm.resources).registrations.remove(&(handle as usize));
        known.map(|_| Code::SUCCESS).ok_or_else(|| Fault::argument("ncclCommDeregister : nothing is registered under this handle"))
    })
}

/// The variable that receives the handle of a window.
struct WindowTarget(*mut *mut c_void);
// SAFETY: NCCL has the same rule: the variable has to live until the call is complete, and only the group's thread
// writes to it, which an abort waits for.
unsafe impl Send for WindowTarget {}

impl WindowTarget {
    /// # Safety
    /// The caller's variable must still exist.
    unsafe fn set(self, token: usize) -> Outcome<()> {
        // SAFETY: promised by the caller.
        unsafe { self.0.write(token as *mut c_void) };
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    comm: Handle,
    buffer: *mut c_void,
    size: usize,
    window: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    in_group("ncclCommWindowRegister", || {
        let comm = comm::find(comm, "ncclCommWindowRegister")?;
        let region = Region { address: buffer as usize, bytes: size };
        if region.address == 0 || region.bytes == 0 {
            return Ok(Code::SUCCESS);
        }
        let inside = Inside::acting(&comm, "ncclCommWindowRegister");
        comm.ensure_ready()?;
        check_pointer(window, "ncclCommWindowRegister", "win")?;
        check_flags(flags)?;
        drop(inside);
        let target = WindowTarget(window);
        let registering = comm.clone();
        // SAFETY: the call is complete only when this ends, so the caller still keeps the variable.
        let work = move || unsafe { target.set(register_window(&registering, region)?) };
        let code = group::add_task(Task { comm, name: "ncclCommWindowRegister", ends: false, work: Box::new(work) })?;
        // As with splits, the call itself does not report that it is in progress.
        Ok(if code == Code::IN_PROGRESS { Code::SUCCESS } else { code })
    })
}

/// Registers a window with all ranks. A rank that cannot register it fails; the others then wait for it until they
/// abort.
fn register_window(comm: &Comm, region: Region) -> Outcome<usize> {
    let _there = comm.device.enter()?;
    let member = comm.member()?;
    if control::has_symmetric_memory() {
        check_window(region)?;
        let meeting = {
            let mut resources = lock(&comm.resources);
            resources.registered += 1;
            format!("window {}", resources.registered)
        };
        let everyone: Vec<usize> = (0..member.size).collect();
        member.link.confer(&everyone, &meeting, Vec::new())?;
    }
    let token = new_token();
    lock(&comm.resources).windows.insert(token, (region.address, region.bytes));
    Ok(token)
}

fn check_flags(flags: c_int) -> Outcome<()> {
    let known = if control::version() >= 22907 { 0x03 } else { 0x01 };
    if flags & !known != 0 {
        return Err(Fault::argument(format!("ncclCommWindowRegister : unknown flags {flags:#x}")));
    }
    Ok(())
}

fn check_window(region: Region) -> Outcome<()> {
    if !region.address.is_multiple_of(PAGE) {
        return Err(Fault::argument("Window address must be suitably aligned."));
    }
    if !is_ours(region) && !driver::has_allocation_handle(region) {
        return Err(Fault::cuda("cuMemRetainAllocationHandle", 1));
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowDeregister(comm: Handle, window: *mut c_void) -> c_int {
    call("ncclCommWindowDeregister", || {
        let (comm, _inside) = asking(comm, "ncclCommWindowDeregister")?;
        if window.is_null() {
            return Ok(Code::SUCCESS);
        }
        let known = lock(&comm.resources).windows.remove(&(window as usize));
        known.map(|_| Code::SUCCESS).ok_or_else(|| Fault::argument("ncclCommWindowDeregister : this window is not registered"))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWinGetUserPtr(comm: Handle, window: *mut c_void, pointer: *mut *mut c_void) -> c_int {
    call("ncclWinGetUserPtr", || {
        let (comm, _inside) = asking(comm, "ncclWinGetUserPtr")?;
        check_pointer(pointer, "ncclWinGetUserPtr", "outUserPtr")?;
        let known = lock(&comm.resources).windows.get(&(window as usize)).copied();
        let (address, _) = known.ok_or_else(|| Fault::argument("ncclWinGetUserPtr : this window is not registered"))?;
        // SAFETY: the pointer is not null.
        unsafe { pointer.write(address as *mut c_void) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *mut c_void,
    datatype: c_int,
    residence: c_int,
    comm: Handle,
) -> c_int {
    call("ncclRedOpCreatePreMulSum", || {
        // The numbers of one communicator are unknown to another.
        static ISSUED: AtomicI32 = AtomicI32::new(5);
        let (comm, _inside) = acting(comm, "ncclRedOpCreatePreMulSum")?;
        check_pointer(op, "ncclRedOpCreatePreMulSum", "op")?;
        check_pointer(scalar, "ncclRedOpCreatePreMulSum", "scalar")?;
        let kind = Kind::of(datatype).ok_or_else(|| Fault::argument(format!("ncclRedOpCreatePreMulSum : invalid type {datatype}")))?;
        let region = Region { address: scalar as usize, bytes: kind.size() };
        let value = match residence {
            0 => {
                let _there = comm.device.enter()?;
                comm.device.check_region(region, "ncclRedOpCreatePreMulSum", "scalar")?;
                Err(region.address)
            }
            // SAFETY: the caller passes a scalar of this type.
            1 => Ok(scalar_bits(kind, unsafe { crate::exchange::bytes(region) })),
            _ => return Err(Fault::argument(format!("ncclRedOpCreatePreMulSum : unknown residence {residence}"))),
        };
        let number = ISSUED.fetch_add(1, Ordering::SeqCst);
        lock(&comm.resources).scalars.insert(number, Scalar { kind, value });
        // SAFETY: the pointer is not null.
        unsafe { op.write(number) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(op: c_int, comm: Handle) -> c_int {
    call("ncclRedOpDestroy", || {
        if (0..5).contains(&op) {
            return Err(Fault::argument("ncclRedOpDestroy : operator is a NCCL builtin."));
        }
        let (comm, _inside) = asking(comm, "ncclRedOpDestroy")?;
        let known = lock(&comm.resources).scalars.remove(&op);
        known.map(|_| Code::SUCCESS).ok_or_else(|| Fault::argument("ncclRedOpDestroy : operator unknown to this communicator."))
    })
}
