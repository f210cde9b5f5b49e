//! The only caller of nccl-sys: one function a call, errors with names.

#![expect(unsafe_code, reason = "NCCL is C")]

mod raw;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_int};

use cudarc::driver::DriverError;
use nccl_sys::{Library, MissingSymbol, Version, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclResult_t, ncclUniqueId};

use crate::device::driver;
use crate::element::DType;
use crate::error::Error;
use crate::nccl_config::{CtaPolicy, GraphUsage, NcclConfig, NcclLibrary};

pub(crate) use self::raw::Raw;

/// The oldest NCCL that is used: the first with splits.
const OLDEST: Version = Version::new(2, 18, 0);

/// NCCL: the file named, or one that is already in the process or where the system's loader finds it.
pub(crate) fn library(explicit: Option<&NcclLibrary>) -> Result<&'static Library, String> {
    let library = match explicit {
        None => Library::open(),
        // SAFETY: whoever made the value vouches for the file: it is an NCCL.
        Some(file) => unsafe { Library::open_file(file.path()) },
    };
    let library = library.map_err(|error| error.to_string())?;
    judge(library.version(), &library.path())?;
    Ok(library)
}

fn judge(found: Version, path: &str) -> Result<(), String> {
    let refusal =
        || format!("NCCL {found} ({path}) is older than 2.18, the oldest that can be used: install a newer one, or name its file");
    if found < OLDEST { Err(refusal()) } else { Ok(()) }
}

/// Why a call was not made: which one, and whose refusal it is.
#[derive(Debug)]
pub(crate) struct Refusal {
    call: &'static str,
    reason: Reason,
    /// Whether it was one of a group, of which other calls may have been made.
    grouped: bool,
}

#[derive(Debug)]
enum Reason {
    /// NCCL's code, with the last text that it wrote, which may be about something older.
    Code(ncclResult_t, String),
    Missing(MissingSymbol),
    Driver(DriverError),
}

impl Refusal {
    /// The driver refused a call, as `cuLaunchKernel`.
    pub(crate) fn driver(call: &'static str, error: DriverError) -> Self {
        Self { call, reason: Reason::Driver(error), grouped: false }
    }

    /// The same, of a call that was one of a group.
    pub(in crate::device) fn in_group(self) -> Self {
        Self { grouped: true, ..self }
    }

    /// Whether the communicator is as good as before.
    pub(crate) fn is_harmless(&self) -> bool {
        match &self.reason {
            _ if self.grouped => false,
            Reason::Code(code, _) => *code == ncclResult_t::ncclInvalidArgument,
            Reason::Missing(_) => true,
            Reason::Driver(_) => false,
        }
    }

    /// The error of a caller who was `doing` something.
    pub(crate) fn into_error(self, doing: String) -> Error {
        let call = self.call;
        match self.reason {
            Reason::Code(code, text) => Error::Nccl { doing: format!("{doing} ({call})"), code: code.0, name: code_name(code), text },
            Reason::Missing(missing) => Error::unsupported(doing, missing.to_string()),
            Reason::Driver(error) => driver::cuda_error(format!("{doing} ({call})"), error),
        }
    }
}

/// What NCCL answered: `Ok(true)` where it is still at it.
pub(crate) fn check(
    library: &Library,
    handle: ncclComm_t,
    call: &'static str,
    answer: Result<ncclResult_t, MissingSymbol>,
) -> Result<bool, Refusal> {
    match answer {
        Ok(ncclResult_t::ncclSuccess) => Ok(false),
        Ok(ncclResult_t::ncclInProgress) => Ok(true),
        Ok(code) => Err(refused(library, handle, call, code)),
        Err(missing) => Err(Refusal { call, reason: Reason::Missing(missing), grouped: false }),
    }
}

/// The refusal that goes with a code.
#[cold]
pub(crate) fn refused(library: &Library, handle: ncclComm_t, call: &'static str, code: ncclResult_t) -> Refusal {
    Refusal { call, reason: Reason::Code(code, last_error(library, handle, code)), grouped: false }
}

/// NCCL's words: the general ones of the code, and the last text it wrote, where there is one.
fn last_error(library: &Library, handle: ncclComm_t, code: ncclResult_t) -> String {
    // SAFETY: any code may be asked for; the string is the library's own and is never freed.
    let general = unsafe { library.ncclGetErrorString(code) }.ok();
    // SAFETY: the handle is that of a live communicator or null, both of which may be asked; the buffer is the library's own and is copied
    // at once. Another thread may write to it meanwhile, but not past its final zero.
    let last = unsafe { library.ncclGetLastError(handle) }.ok();
    let mut text = String::new();
    for pointer in [general, last].into_iter().flatten().filter(|pointer| !pointer.is_null()) {
        // SAFETY: NCCL's strings end in a zero, which is trusted of C.
        let words = unsafe { CStr::from_ptr(pointer) }.to_string_lossy();
        let words = words.trim();
        if !words.is_empty() && !text.contains(words) {
            text += if text.is_empty() { "" } else { "; last reported: " };
            text += words;
        }
    }
    if text.is_empty() { "no words".to_owned() } else { text }
}

/// The name of a code in `nccl.h`.
pub(crate) fn code_name(code: ncclResult_t) -> &'static str {
    match code {
        ncclResult_t::ncclSuccess => "ncclSuccess",
        ncclResult_t::ncclUnhandledCudaError => "ncclUnhandledCudaError",
        ncclResult_t::ncclSystemError => "ncclSystemError",
        ncclResult_t::ncclInternalError => "ncclInternalError",
        ncclResult_t::ncclInvalidArgument => "ncclInvalidArgument",
        ncclResult_t::ncclInvalidUsage => "ncclInvalidUsage",
        ncclResult_t::ncclRemoteError => "ncclRemoteError",
        ncclResult_t::ncclInProgress => "ncclInProgress",
        ncclResult_t::ncclTimeout => "ncclTimeout",
        _ => "a code that this crate does not know",
    }
}

/// NCCL's number for an element type; `None` where this release has none.
pub(crate) fn data_type(dtype: DType, version: Version) -> Option<ncclDataType_t> {
    let float8 = |code| (version >= Version::new(2, 24, 3)).then_some(code);
    match dtype {
        DType::F32 => Some(ncclDataType_t::ncclFloat32),
        DType::F64 => Some(ncclDataType_t::ncclFloat64),
        DType::F16 => Some(ncclDataType_t::ncclFloat16),
        DType::Bf16 => Some(ncclDataType_t::ncclBfloat16),
        DType::F8E4M3 => float8(ncclDataType_t::ncclFloat8e4m3),
        DType::F8E5M2 => float8(ncclDataType_t::ncclFloat8e5m2),
        DType::I8 => Some(ncclDataType_t::ncclInt8),
        DType::I32 => Some(ncclDataType_t::ncclInt32),
        DType::I64 => Some(ncclDataType_t::ncclInt64),
        DType::U8 | DType::Bool => Some(ncclDataType_t::ncclUint8),
        DType::U32 => Some(ncclDataType_t::ncclUint32),
        DType::U64 => Some(ncclDataType_t::ncclUint64),
        DType::I16 | DType::U16 => None,
    }
}

/// A new id, which is good for one communicator.
pub(crate) fn unique_id(library: &'static Library) -> Result<ncclUniqueId, Refusal> {
    let mut id = ncclUniqueId { internal: [0; nccl_sys::NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: the id is a variable of ours.
    let answer = unsafe { library.ncclGetUniqueId(&mut id) };
    check(library, nccl_sys::NCCL_COMM_NULL, "ncclGetUniqueId", answer)?;
    Ok(id)
}

/// A configuration in NCCL's form, with the strings that it points to.
#[derive(Debug)]
pub(crate) struct RawConfig {
    pub(crate) config: ncclConfig_t,
    /// What it points to, which must live for as long as the communicator.
    pub(crate) strings: [Option<CString>; 2],
}

impl RawConfig {
    /// Always of the kind that does not block.
    pub(crate) fn new(config: &NcclConfig) -> Result<Self, Error> {
        let mut raw = ncclConfig_t::new();
        let strings = [c_string("network_name", config.network_name.as_deref())?, c_string("name", config.name.as_deref())?];
        let [network_name, name] = &strings;
        raw.blocking = 0;
        set(&mut raw.cgaClusterSize, "cga_cluster_size", config.cga_cluster_size)?;
        set(&mut raw.minCTAs, "min_ctas", config.min_ctas)?;
        set(&mut raw.maxCTAs, "max_ctas", config.max_ctas)?;
        set(&mut raw.splitShare, "split_share", config.split_share.map(u32::from))?;
        set(&mut raw.trafficClass, "traffic_class", config.traffic_class)?;
        set(&mut raw.collnetEnable, "collnet", config.collnet.map(u32::from))?;
        set(&mut raw.CTAPolicy, "cta_policy", config.cta_policy.map(policy_code))?;
        set(&mut raw.shrinkShare, "shrink_share", config.shrink_share.map(u32::from))?;
        set(&mut raw.nvlsCTAs, "nvls_ctas", config.nvls_ctas)?;
        set(&mut raw.nChannelsPerNetPeer, "channels_per_net_peer", config.channels_per_net_peer)?;
        set(&mut raw.nvlinkCentricSched, "nvlink_centric_sched", config.nvlink_centric_sched.map(u32::from))?;
        set(&mut raw.graphUsageMode, "graph_usage", config.graph_usage.map(usage_code))?;
        set(&mut raw.numRmaCtx, "rma_contexts", config.rma_contexts)?;
        set(&mut raw.maxP2pPeers, "max_p2p_peers", config.max_p2p_peers)?;
        set(&mut raw.graphStreamOrdering, "graph_stream_ordering", config.graph_stream_ordering.map(u32::from))?;
        set(&mut raw.launchOrderImplicit, "launch_order_implicit", config.launch_order_implicit.map(u32::from))?;
        for (field, string) in [(&mut raw.netName, network_name), (&mut raw.commName, name)] {
            if let Some(string) = string {
                *field = string.as_ptr();
            }
        }
        Ok(Self { config: raw, strings })
    }
}

fn c_string(name: &str, text: Option<&str>) -> Result<Option<CString>, Error> {
    let convert = |text: &str| {
        CString::new(text).map_err(|_| Error::config(format!("NcclConfig::{name} {text:?}"), "a name without a zero byte is expected"))
    };
    text.map(convert).transpose()
}

fn set(field: &mut c_int, name: &str, value: Option<u32>) -> Result<(), Error> {
    if let Some(value) = value {
        *field = c_int::try_from(value)
            .map_err(|_| Error::config(format!("NcclConfig::{name} {value}"), format!("a number up to {} is expected", c_int::MAX)))?;
    }
    Ok(())
}

fn policy_code(policy: CtaPolicy) -> u32 {
    let code = match policy {
        CtaPolicy::Default => nccl_sys::NCCL_CTA_POLICY_DEFAULT,
        CtaPolicy::Efficiency => nccl_sys::NCCL_CTA_POLICY_EFFICIENCY,
        CtaPolicy::Zero => nccl_sys::NCCL_CTA_POLICY_ZERO,
    };
    code.unsigned_abs()
}

fn usage_code(usage: GraphUsage) -> u32 {
    match usage {
        GraphUsage::None => 0,
        GraphUsage::One => 1,
        GraphUsage::Mixed => 2,
    }
}
