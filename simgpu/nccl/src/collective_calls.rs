//! The exported collectives, sends and receives.

#![expect(unsafe_code, reason = "exported to C")]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, reason = "the contracts are NCCL's own")]
#![allow(missing_docs, reason = "NCCL's manual says what these do")]

use crate::abi::{CONFIG_MAGIC, Code, CollConfig, Handle, Kind, Stream};
use crate::call::{check_pointer, in_group};
use crate::comm::{self, Comm, Member};
use crate::config::Environment;
use crate::fault::{Fault, Outcome};
use crate::group;
use crate::inside::Inside;
use crate::job::{Call, with_lost_tail};
use crate::operation::{Fold, Operation, Region, Signature, Verb};
use crate::report::{lock, report};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The caller's arguments, not checked yet.
struct Arguments {
    name: &'static str,
    verb: Verb,
    input: *const c_void,
    output: *mut c_void,
    count: usize,
    kind: c_int,
    fold: c_int,
    root: c_int,
    comm: Handle,
    stream: Stream,
}

fn run(arguments: &Arguments) -> c_int {
    in_group(arguments.name, || {
        let comm = comm::find(arguments.comm, arguments.name)?;
        let inside = Inside::acting(&comm, arguments.name);
        comm.check_open(arguments.name)?;
        comm.ensure_ready()?;
        // As with NCCL, a non-blocking communicator does not survive a wrong argument.
        let call = check(&comm, arguments).inspect_err(|fault| comm.fail_unless_blocking(fault))?;
        drop(inside);
        group::add_call(&comm, arguments.stream as usize, arguments.name, call)
    })
}

fn check(comm: &Arc<Comm>, arguments: &Arguments) -> Outcome<Call> {
    let Arguments { name, verb, count, root, .. } = *arguments;
    let member = comm.member()?;
    let peer = usize::try_from(root).ok().filter(|&root| root < member.size);
    let invalid_root = || Fault::argument(format!("{name} : invalid root {root} (root should be in the 0..{} range)", member.size));
    let root = peer.ok_or_else(invalid_root)?;
    let kind = Kind::of(arguments.kind).ok_or_else(|| Fault::argument(format!("{name} : invalid type {}", arguments.kind)))?;
    let (fold, scalar, scalar_at) = fold_of(comm, arguments, kind, member)?;
    let elements = |elements: usize| elements.checked_mul(kind.size()).filter(|&bytes| bytes <= isize::MAX as usize);
    let too_many = || Fault::argument(format!("{name} : {count} elements are more than there is memory"));
    elements(count).and_then(|bytes| bytes.checked_mul(member.size)).ok_or_else(too_many)?;
    let rank = if verb.is_point_to_point() { usize::MAX } else { member.rank };
    let region = |pointer: usize, count: usize| Region { address: pointer, bytes: count * kind.size() };
    let input = region(arguments.input as usize, verb.reads(rank, root, member.size, count));
    let output = region(arguments.output as usize, verb.writes(rank, root, member.size, count));
    let faults = check_buffers(comm, arguments, input, output)?;
    check_overlap(name, verb, member, input, output);
    let signature = Signature { verb, count, kind, fold, root };
    Ok(Call { operation: with_lost_tail(Operation { signature, input, output, scalar }, member.size), scalar_at, faults })
}

/// Returns the fold, with the bits of its scalar or the address where they will be.
fn fold_of(comm: &Comm, arguments: &Arguments, kind: Kind, member: &Member) -> Outcome<(Fold, u64, Option<usize>)> {
    let Arguments { name, verb, fold: number, .. } = *arguments;
    if !verb.reduces() {
        return Ok((Fold::Sum, 0, None));
    }
    let built_in = usize::try_from(number).ok().filter(|&number| number < 5).map(|number| (Fold::ALL[number], 0, None));
    let fold = match (built_in, lock(&comm.resources).scalars.get(&number)) {
        (Some(fold), _) => fold,
        (None, Some(scalar)) if scalar.kind != kind => {
            let text = format!("{name} : the type of the operator, {:?}, is not that of the call, {kind:?}", scalar.kind);
            return Err(Fault::argument(text));
        }
        (None, Some(scalar)) => (Fold::PreMulSum, scalar.value.unwrap_or(0), scalar.value.err()),
        (None, None) if number < 0 => return Err(Fault::argument(format!("{name} : invalid reduction operation {number}"))),
        (None, None) => return Err(Fault::argument(format!("{name} : reduction operation {number} unknown to this communicator"))),
    };
    if kind.is_float8() && comm.device.generation < 9 {
        return Err(Fault::argument("FP8 reduction support begins with sm90 capable devices."));
    }
    if kind.is_float8() && member.size == 1 && matches!(fold.0, Fold::Avg | Fold::PreMulSum) {
        return Err(Fault::argument(format!("{name} : one rank alone cannot scale 8-bit floats")));
    }
    Ok(fold)
}

/// Checks whether a kernel would fault on the buffers. As with NCCL, the call itself checks them only if configured
/// to.
fn check_buffers(comm: &Comm, arguments: &Arguments, input: Region, output: Region) -> Outcome<bool> {
    let Arguments { name, verb, stream, .. } = *arguments;
    let _there = comm.device.enter()?;
    let (read, written) = if verb.is_point_to_point() { ("buff", "buff") } else { ("sendbuff", "recvbuff") };
    let checked = comm.device.check_region(input, name, read).and_then(|()| comm.device.check_region(output, name, written));
    comm.device.check_stream(stream, name)?;
    match checked {
        Ok(()) => Ok(false),
        Err(fault) if Environment::get().check_pointers => Err(fault),
        Err(fault) => {
            report(format!("{}: the call takes it, and the kernel faults", fault.text));
            Ok(true)
        }
    }
}

/// Reports buffers that overlap in any way other than NCCL's in-place layout.
fn check_overlap(name: &str, verb: Verb, member: &Member, input: Region, output: Region) {
    let apart = input.address + input.bytes <= output.address || output.address + output.bytes <= input.address;
    if apart || input.bytes == 0 || output.bytes == 0 {
        return;
    }
    let part = input.bytes.min(output.bytes);
    let in_place = match verb {
        Verb::AllGather | Verb::Gather => input.address == output.address + member.rank * part,
        Verb::ReduceScatter | Verb::Scatter => output.address == input.address + member.rank * part,
        Verb::AlltoAll => false,
        _ => input.address == output.address,
    };
    if !in_place {
        report(format!("{name}: the buffers of rank {} overlap, and not as in-place calls may", member.rank));
    }
}

macro_rules! collectives {
    ($($name:ident, $with_config:ident, $verb:ident, ($($argument:ident: $type:ty),*), $fold:expr, $root:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, $($argument: $type,)* comm: Handle, stream: Stream,
        ) -> c_int {
            run(&Arguments {
                name: stringify!($name), verb: Verb::$verb, input: sendbuff, output: recvbuff, count, kind: datatype,
                fold: $fold, root: $root, comm, stream,
            })
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $with_config(
            sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, $($argument: $type,)* comm: Handle, stream: Stream,
            config: *const CollConfig,
        ) -> c_int {
            let name = stringify!($with_config);
            // SAFETY: a configuration that is not null is valid.
            if let Err(fault) = unsafe { check_config(config, name) } {
                return in_group(name, || Err(fault));
            }
            run(&Arguments {
                name, verb: Verb::$verb, input: sendbuff, output: recvbuff, count, kind: datatype, fold: $fold, root: $root, comm, stream,
            })
        }
    )*};
}

collectives! {
    ncclAllReduce, ncclAllReduceConfig, AllReduce, (op: c_int), op, 0;
    ncclReduce, ncclReduceConfig, Reduce, (op: c_int, root: c_int), op, root;
    ncclReduceScatter, ncclReduceScatterConfig, ReduceScatter, (op: c_int), op, 0;
    ncclAllGather, ncclAllGatherConfig, AllGather, (), 0, 0;
    ncclBroadcast, ncclBroadcastConfig, Broadcast, (root: c_int), 0, root;
    ncclAlltoAll, ncclAlltoAllConfig, AlltoAll, (), 0, 0;
    ncclGather, ncclGatherConfig, Gather, (root: c_int), 0, root;
    ncclScatter, ncclScatterConfig, Scatter, (root: c_int), 0, root;
}

/// # Safety
/// A configuration that is not null can be read.
unsafe fn check_config(config: *const CollConfig, name: &str) -> Outcome<()> {
    // SAFETY: promised by the caller.
    match unsafe { config.as_ref() } {
        Some(config) if config.magic != CONFIG_MAGIC => {
            Err(Fault::argument(format!("{name} : ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER")))
        }
        _ => Ok(()),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBcast(buff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: Stream) -> c_int {
    let (name, verb) = ("ncclBcast", Verb::Broadcast);
    run(&Arguments { name, verb, input: buff, output: buff, count, kind: datatype, fold: 0, root, comm, stream })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    sendbuff: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Stream,
) -> c_int {
    let (name, verb, output) = ("ncclSend", Verb::Send, std::ptr::null_mut());
    run(&Arguments { name, verb, input: sendbuff, output, count, kind: datatype, fold: 0, root: peer, comm, stream })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    recvbuff: *mut c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Stream,
) -> c_int {
    let (name, verb, input) = ("ncclRecv", Verb::Recv, std::ptr::null());
    run(&Arguments { name, verb, input, output: recvbuff, count, kind: datatype, fold: 0, root: peer, comm, stream })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    crate::call::call("ncclGroupStart", || {
        group::start();
        Ok(Code::SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    crate::call::call("ncclGroupEnd", || group::end("ncclGroupEnd"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(info: *mut crate::abi::SimInfo) -> c_int {
    crate::call::call("ncclGroupSimulateEnd", || {
        let time = group::simulate_end()?;
        check_pointer(info, "ncclGroupSimulateEnd", "simInfo")?;
        // SAFETY: a record that is not null is valid, at least as far as its first field states.
        let info = unsafe { &mut *info };
        if info.magic != crate::abi::SIM_INFO_MAGIC {
            return Err(Fault::argument("ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER"));
        }
        info.estimated_time = time;
        Ok(Code::SUCCESS)
    })
}
