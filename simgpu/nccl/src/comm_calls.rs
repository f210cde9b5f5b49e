//! The exported functions that make, query and end communicators.

#![expect(unsafe_code, reason = "exported to C")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are NCCL's own")]
#![allow(missing_docs, reason = "NCCL's manual says what these do")]

use crate::abi::{Code, Config, Handle, UniqueId};
use crate::call::{acting, asking, call, check_pointer, in_group};
use crate::clique::Departure;
use crate::comm::{self, Comm};
use crate::driver::{self, Device};
use crate::fault::{Fault, Outcome};
use crate::group::{self, Task};
use crate::init::{self, Target, check_rank};
use crate::inside::Inside;
use crate::report::{lock, report};
use crate::{config, control, hub};
use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Arc;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    call("ncclGetUniqueId", || {
        check_pointer(id, "GetUniqueId", "out")?;
        // SAFETY: the pointer is not null.
        unsafe { id.write(hub::issue()?) };
        Ok(Code::SUCCESS)
    })
}

/// # Safety
/// `target` is null or valid for writes; the configuration is null or valid for reads.
unsafe fn init(
    target: *mut Handle,
    name: &'static str,
    (rank, size): (c_int, c_int),
    id: &UniqueId,
    config: *const Config,
) -> Outcome<Code> {
    let device = Device::current()?;
    check_pointer(target, "CommInitRank", "newcomm")?;
    // SAFETY: the pointer is not null.
    unsafe { target.write(null_mut()) };
    // SAFETY: promised by the caller.
    let config = unsafe { config::read(config, control::version())? };
    // SAFETY: the pointer is not null.
    let code = unsafe { init::from_id(Target(target), name, id, check_rank(rank, size)?, device, config)? };
    if config.blocking == 0 && group::depth() > 0 { Ok(Code::IN_PROGRESS) } else { Ok(code) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(comm: *mut Handle, nranks: c_int, id: UniqueId, rank: c_int) -> c_int {
    // SAFETY: the caller keeps to NCCL's contract.
    in_group("ncclCommInitRank", || unsafe { init(comm, "ncclCommInitRank", (rank, nranks), &id, null()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(comm: *mut Handle, nranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> c_int {
    // SAFETY: the caller keeps to NCCL's contract.
    in_group("ncclCommInitRankConfig", || unsafe { init(comm, "ncclCommInitRankConfig", (rank, nranks), &id, config) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    comm: *mut Handle,
    nranks: c_int,
    rank: c_int,
    ids: c_int,
    id: *mut UniqueId,
    config: *mut Config,
) -> c_int {
    in_group("ncclCommInitRankScalable", || {
        check_pointer(id, "CommInitRankScalable", "commId")?;
        if ids <= 0 || ids > nranks {
            return Err(Fault::argument(format!("improper usage of ncclCommInitRank: nId = {ids}, nranks={nranks}")));
        }
        // SAFETY: there is at least one id; NCCL's contract covers the rest.
        unsafe { init(comm, "ncclCommInitRankScalable", (rank, nranks), &*id, config) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(comms: *mut Handle, ndev: c_int, devices: *const c_int) -> c_int {
    call("ncclCommInitAll", || {
        check_pointer(comms, "CommInitAll", "comms")?;
        let count = usize::try_from(ndev).map_err(|_| Fault::argument(format!("Invalid device count requested : {ndev}")))?;
        let devices: Vec<c_int> = match devices.is_null() {
            true => (0..ndev).collect(),
            // SAFETY: the caller passes `count` devices.
            false => unsafe { std::slice::from_raw_parts(devices, count) }.to_vec(),
        };
        check_devices(&devices)?;
        let (id, config) = (hub::issue()?, config::unset(control::version() as u32));
        group::start();
        for (rank, &device) in devices.iter().enumerate() {
            // SAFETY: the caller's array holds that many communicators; the configuration is whole.
            let begun = unsafe {
                let config = config::read(&raw const config, control::version())?;
                init::from_id(Target(comms.add(rank)), "ncclCommInitAll", &id, (rank, count), Device::primary(device)?, config)
            };
            let _ = begun.inspect_err(group::note);
        }
        group::end("")
    })
}

fn check_devices(devices: &[c_int]) -> Outcome<()> {
    let total = driver::devices()?;
    if let Some(device) = devices.iter().find(|device| !(0..total).contains(*device)) {
        return Err(Fault::argument(format!("Invalid device {device} (totalnDev={total})")));
    }
    let repeated = devices.iter().enumerate().any(|(at, device)| devices[..at].contains(device));
    // NCCL gives no more detail here.
    if repeated && !init::may_share_device() { Err(Fault::usage("")) } else { Ok(()) }
}

/// Returns the configuration of a child: its own, or its parent's.
///
/// # Safety
/// The configuration is null or valid for reads.
unsafe fn child_config(parent: &Comm, config: *const Config) -> Outcome<Config> {
    if config.is_null() {
        return Ok(parent.config);
    }
    // SAFETY: promised by the caller.
    unsafe { config::read(config, control::version()) }
}

/// Hides progress: as with NCCL, splits of non-blocking communicators return success, and only the parent is in
/// progress.
fn without_progress(code: Code) -> Code {
    if code == Code::IN_PROGRESS { Code::SUCCESS } else { code }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(comm: Handle, color: c_int, key: c_int, child: *mut Handle, config: *mut Config) -> c_int {
    in_group("ncclCommSplit", || {
        let (parent, inside) = acting(comm, "ncclCommSplit")?;
        check_pointer(child, "ncclCommSplit", "newcomm")?;
        if color < -1 {
            return Err(Fault::argument(format!("ncclCommSplit : color {color} is negative and not NCCL_SPLIT_NOCOLOR")));
        }
        // SAFETY: the pointer is not null; the configuration is the caller's contract.
        let config = unsafe {
            child.write(null_mut());
            child_config(&parent, config)?
        };
        drop(inside);
        let shares = parent.config.split_share == 1 && !parent.is_revoked();
        let made = (color >= 0).then(|| parent.child(config, shares));
        init::by_split(&parent, (color, key), Target(child), made).map(without_progress)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: Handle,
    excluded: *mut c_int,
    count: c_int,
    child: *mut Handle,
    config: *mut Config,
    flags: c_int,
) -> c_int {
    in_group("ncclCommShrink", || {
        const ABORT: c_int = 1;
        let parent = comm::find(comm, "ncclCommShrink")?;
        let inside = Inside::acting(&parent, "ncclCommShrink");
        check_pointer(child, "ncclCommShrink", "newcomm")?;
        check_pointer(excluded, "ncclCommShrink", "excludeRanksList")?;
        if flags & !ABORT != 0 {
            return Err(Fault::argument(format!("ncclCommShrink : unknown flags {flags:#x}")));
        }
        // SAFETY: the caller passes `count` ranks. They are sorted in place, as NCCL does.
        let excluded = unsafe { std::slice::from_raw_parts_mut(excluded, usize::try_from(count).unwrap_or(0)) };
        excluded.sort_unstable();
        if flags & ABORT != 0 {
            parent.interrupt();
        }
        parent.ensure_ready()?;
        let member = parent.member()?;
        let ranks: Vec<usize> = excluded.iter().filter_map(|&rank| usize::try_from(rank).ok()).filter(|&rank| rank < member.size).collect();
        if ranks.is_empty() || ranks.len() != excluded.len() || ranks.contains(&member.rank) {
            let (rank, size) = (member.rank, member.size);
            return Err(Fault::argument(format!("ncclCommShrink : rank {rank} of {size} cannot exclude {excluded:?}")));
        }
        // SAFETY: the pointer is not null; the configuration is the caller's contract.
        let config = unsafe {
            child.write(null_mut());
            child_config(&parent, config)?
        };
        drop(inside);
        let shares = flags & ABORT == 0 && parent.config.shrink_share == 1;
        init::by_shrink(&parent, &ranks, Target(child), parent.child(config, shares && !parent.is_revoked())).map(without_progress)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetUniqueId(comm: Handle, id: *mut UniqueId) -> c_int {
    call("ncclCommGetUniqueId", || {
        let (comm, _inside) = acting(comm, "ncclCommGetUniqueId")?;
        check_pointer(id, "CommGetUniqueId", "uniqueId")?;
        if std::mem::replace(&mut lock(&comm.resources).growing, true) {
            return Err(Fault::usage("ncclCommGetUniqueId : the id made before was not used yet"));
        }
        // SAFETY: the pointer is not null.
        unsafe { id.write(hub::issue()?) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGrow(
    comm: Handle,
    nranks: c_int,
    id: *const UniqueId,
    rank: c_int,
    child: *mut Handle,
    config: *mut Config,
) -> c_int {
    in_group("ncclCommGrow", || {
        check_pointer(child, "ncclCommGrow", "newcomm")?;
        // SAFETY: the pointer is not null; an id that is not null is valid.
        let id = unsafe {
            child.write(null_mut());
            id.as_ref()
        };
        if comm.is_null() {
            let id = id.ok_or_else(|| Fault::argument("ncclCommGrow: new ranks must pass non-NULL uniqueId"))?;
            // SAFETY: the pointer is not null; the configuration is the caller's contract.
            return unsafe { init(child, "ncclCommGrow", (rank, nranks), id, config) }.map(without_progress);
        }
        let (parent, inside) = acting(comm, "ncclCommGrow")?;
        let (_, size) = check_rank(0, nranks)?;
        let before = parent.member()?.size;
        if size <= before || rank != -1 {
            let text = format!("ncclCommGrow: existing ranks must pass rank=-1, got {rank}, and more ranks than {before}, got {size}");
            return Err(Fault::argument(text));
        }
        drop(inside);
        // SAFETY: the pointer is not null; the configuration is the caller's contract.
        unsafe { init::by_growth(&parent, size, id.copied(), Target(child), child_config(&parent, config)?) }.map(without_progress)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: Handle) -> c_int {
    in_group("ncclCommFinalize", || {
        if comm.is_null() {
            return Ok(Code::SUCCESS);
        }
        // Nothing is launched, so any device may be current.
        let (comm, inside) = asking(comm, "ncclCommFinalize")?;
        comm.ensure_ready()?;
        // As with NCCL, a communicator that does not block fails if it is finalized twice.
        comm.begin_finalize().inspect_err(|fault| comm.fail_unless_blocking(fault))?;
        drop(inside);
        let draining = comm.clone();
        let work = move || {
            draining.drain();
            Ok(())
        };
        group::add_task(Task { comm, name: "ncclCommFinalize", ends: false, work: Box::new(work) })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: Handle) -> c_int {
    // A failure does not belong to the group around the call.
    call("ncclCommDestroy", || {
        if comm.is_null() {
            return Ok(Code::SUCCESS);
        }
        let comm = comm::find(comm, "ncclCommDestroy")?;
        comm.ensure_ready().inspect_err(|_| group::leave_open())?;
        group::start();
        drop(Inside::asking(&comm, "ncclCommDestroy"));
        end(comm, "ncclCommDestroy", Departure::Destroyed)
    })
}

/// Ends the call's group, which waits for running work and frees the communicator. Never runs in the background.
fn end(comm: Arc<Comm>, name: &'static str, how: Departure) -> Outcome<Code> {
    let ending = comm.clone();
    let work = move || {
        ending.drain();
        ending.end_life(how);
        Ok(())
    };
    group::add_task(Task { comm, name, ends: true, work: Box::new(work) })?;
    group::end("")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: Handle) -> c_int {
    call("ncclCommAbort", || {
        if comm.is_null() {
            return Ok(Code::SUCCESS);
        }
        let comm = comm::find(comm, "ncclCommAbort")?;
        Inside::aborting(&comm);
        group::start();
        comm.raise_flags();
        end(comm, "ncclCommAbort", Departure::Aborted)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRevoke(comm: Handle, flags: c_int) -> c_int {
    in_group("ncclCommRevoke", || {
        if comm.is_null() {
            return Ok(Code::SUCCESS);
        }
        let comm = comm::find(comm, "ncclCommRevoke")?;
        if flags != 0 {
            return Err(Fault::argument(format!("ncclCommRevoke : flags {flags:#x} must be 0")));
        }
        let in_flight = comm.is_in_background();
        comm.begin_revoke()?;
        if in_flight && (22807..=23007).contains(&control::version()) {
            report("ncclCommRevoke while a group of the communicator is in flight: 2.28.7 to 2.30.7 go on to use what they freed of it");
        }
        let stopping = comm.clone();
        let work = move || {
            stopping.end_revoke();
            Ok(())
        };
        group::add_task(Task { comm, name: "ncclCommRevoke", ends: false, work: Box::new(work) })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int {
    call("ncclCommGetAsyncError", || {
        let (comm, _inside) = asking(comm, "ncclCommGetAsyncError")?;
        check_pointer(error, "ncclGetAsyncError", "asyncError")?;
        // SAFETY: the pointer is not null.
        unsafe { error.write(comm.poll(true).0) };
        Ok(Code::SUCCESS)
    })
}

/// Answers a query that needs a communicator that is ready.
fn ask(handle: Handle, name: &'static str, into: *mut c_int, answer: impl FnOnce(&Comm) -> Outcome<usize>) -> c_int {
    call(name, || {
        let (comm, _inside) = asking(handle, name)?;
        check_pointer(into, name, "result")?;
        comm.ensure_ready()?;
        // SAFETY: the pointer is not null.
        unsafe { into.write(answer(&comm)? as c_int) };
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: Handle, count: *mut c_int) -> c_int {
    ask(comm, "ncclCommCount", count, |comm| Ok(comm.member()?.size))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: Handle, device: *mut c_int) -> c_int {
    ask(comm, "ncclCommCuDevice", device, |comm| Ok(comm.device.ordinal as usize))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: Handle, rank: *mut c_int) -> c_int {
    ask(comm, "ncclCommUserRank", rank, |comm| Ok(comm.member()?.rank))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSuspend(comm: Handle, flags: c_int) -> c_int {
    call("ncclCommSuspend", || {
        let (comm, _inside) = acting(comm, "ncclCommSuspend")?;
        if flags != 1 {
            return Err(Fault::argument(format!("ncclCommSuspend : flags {flags:#x} must be NCCL_SUSPEND_MEM")));
        }
        comm.set_suspended(true)?;
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommResume(comm: Handle) -> c_int {
    call("ncclCommResume", || {
        let (comm, _inside) = asking(comm, "ncclCommResume")?;
        comm.set_suspended(false)?;
        Ok(Code::SUCCESS)
    })
}
