//! The only caller of nccl-sys: one function per NCCL call, with named errors.

#![expect(unsafe_code, reason = "NCCL is C")]

mod raw;

use std::ffi::{CStr, CString, c_int};
use std::sync::Mutex;

use cudarc::driver::DriverError;
use nccl_sys::{Library, MissingSymbol, Version, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclResult_t, ncclUniqueId};

use crate::authentication::{self, Secret};
use crate::base::event;
use crate::call::element::DType;
use crate::config::device_environment;
use crate::config::nccl::{CtaPolicy, GraphUsage, NcclConfig, NcclLibrary};
use crate::device::driver;
use crate::error::Error;

pub(crate) use self::raw::Raw;

/// The oldest NCCL that is used. `comm/` needs a child communicator that shares its parent's abort flags and outlives
/// its parent's abort. Release 2.18 hangs in an abort if other threads are active. In a slow abort, 2.19.1 and 2.19.3
/// detach a thread, and free memory that this thread still uses. 2.20.3 does not always connect children.
const OLDEST: Version = Version::new(2, 20, 5);

/// Returns NCCL: the named file, or a library that is already in the process or that the system's loader finds.
pub(crate) fn library(explicit: Option<&NcclLibrary>) -> Result<&'static Library, String> {
    let library = match explicit {
        None => Library::open(),
        // SAFETY: the creator of the value vouches that the file is an NCCL.
        Some(file) => unsafe { Library::open_file(file.path()) },
    };
    let library = library.map_err(|error| error.to_string())?;
    judge(library.version(), &library.path())?;
    Ok(library)
}

fn judge(found: Version, path: &str) -> Result<(), String> {
    let refusal = || {
        format!(
            "NCCL {found} ({path}) is older than {OLDEST}, the oldest supported version: install a newer one, or name its file in \
             COLLECTIVES_NCCL_LIBRARY"
        )
    };
    if found < OLDEST { Err(refusal()) } else { Ok(()) }
}

/// The key with which this process's NCCL encrypts, in the form in which it was given. NCCL may read this key at any
/// later time.
static ENCRYPTION: Mutex<Option<CString>> = Mutex::new(None);

/// Makes NCCL encrypt the data that it sends over TCP, in the whole process from now on, with a key derived from the
/// job's secret. The error states why it cannot.
pub(crate) fn encrypt(library: &Library, secret: &Secret) -> Result<(), String> {
    let digits: String = authentication::nccl_key(secret).iter().map(|byte| format!("{byte:02x}")).collect();
    let key = CString::new(digits).map_err(|_| "the key contains a zero byte".to_owned())?;
    let mut given = event::lock(&ENCRYPTION);
    match &*given {
        Some(before) if *before == key => return Ok(()),
        Some(_) => {
            return Err("NCCL already encrypts with another job's secret in this process, and can have only one key per process".to_owned());
        }
        None => {}
    }
    let mode = nccl_sys::ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_PSK.0 as c_int;
    let config = nccl_sys::ncclEncryptionConfig_t { mode, psk: key.as_ptr(), ..nccl_sys::ncclEncryptionConfig_t::new() };
    // SAFETY: the configuration has the form of the header that it was generated from, which it names, and lives
    // through the call. The key ends in a zero, and lives as long as the process once the call has succeeded.
    let answer = unsafe { library.ncclSetEncryption(&config) };
    if let Err(refusal) = check(library, nccl_sys::NCCL_COMM_NULL, "ncclSetEncryption", answer) {
        let error = refusal.into_error("making NCCL encrypt its connections".to_owned());
        return Err(format!("{error}; use NCCL 2.32.3 or later, or unset COLLECTIVES_ENCRYPT"));
    }
    *given = Some(key);
    Ok(())
}

/// The refusal of a call: its name, and the reason.
#[derive(Debug)]
pub(crate) struct Refusal {
    call: &'static str,
    reason: Reason,
    /// Whether the call was one of a group, of which other calls may have been made.
    grouped: bool,
}

#[derive(Debug)]
enum Reason {
    /// NCCL's result code, and the last error text that NCCL wrote. The text may be about an older error.
    Code(ncclResult_t, String),
    Missing(MissingSymbol),
    Driver(DriverError),
}

impl Refusal {
    /// Creates the refusal of a driver call, such as `cuLaunchKernel`.
    pub(crate) fn driver(call: &'static str, error: DriverError) -> Self {
        Self { call, reason: Reason::Driver(error), grouped: false }
    }

    /// Returns the same refusal, for a call that was one of a group.
    pub(in crate::device) fn in_group(self) -> Self {
        Self { grouped: true, ..self }
    }

    /// Whether the communicator remains usable.
    pub(crate) fn is_harmless(&self) -> bool {
        match &self.reason {
            _ if self.grouped => false,
            Reason::Code(code, _) => *code == ncclResult_t::ncclInvalidArgument,
            Reason::Missing(_) => true,
            Reason::Driver(_) => false,
        }
    }

    /// Returns the error of a caller who was `doing` something.
    pub(crate) fn into_error(self, doing: String) -> Error {
        let call = self.call;
        match self.reason {
            Reason::Code(code, text) => Error::Nccl { doing: format!("{doing} ({call})"), code: code.0, name: code_name(code), text },
            Reason::Missing(missing) => Error::unsupported(doing, missing.to_string()),
            Reason::Driver(error) => driver::cuda_error(format!("{doing} ({call})"), error),
        }
    }
}

/// Checks NCCL's answer. Returns `Ok(true)` if the call is still in progress.
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

/// Returns the refusal for a code.
#[cold]
pub(crate) fn refused(library: &Library, handle: ncclComm_t, call: &'static str, code: ncclResult_t) -> Refusal {
    Refusal { call, reason: Reason::Code(code, last_error(library, handle, code)), grouped: false }
}

/// Returns NCCL's texts: the general text for the code, and the last text that it wrote, if there is one.
fn last_error(library: &Library, handle: ncclComm_t, code: ncclResult_t) -> String {
    // SAFETY: any code may be passed; the string is the library's own and is never freed.
    let general = unsafe { library.ncclGetErrorString(code) }.ok();
    // SAFETY: the handle is that of a live communicator or null, which are both allowed; the buffer is the library's
    // own and is copied at once. Another thread may write to it meanwhile, but not past its final zero.
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
    if text.is_empty() { "no description".to_owned() } else { text }
}

/// Returns the name of a code in `nccl.h`.
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
        _ => "unknown code",
    }
}

/// Returns NCCL's number for an element type; `None` if this release has none.
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

/// Creates a new id, which is valid for one communicator.
pub(crate) fn unique_id(library: &'static Library) -> Result<ncclUniqueId, Refusal> {
    let mut id = ncclUniqueId { internal: [0; nccl_sys::NCCL_UNIQUE_ID_BYTES] };
    // SAFETY: the id is our variable.
    let answer = unsafe { library.ncclGetUniqueId(&mut id) };
    check(library, nccl_sys::NCCL_COMM_NULL, "ncclGetUniqueId", answer)?;
    Ok(id)
}

/// The purpose of an NCCL communicator; see `comm/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// For creating and ending other communicators. A control communicator is non-blocking, and its children share its
    /// abort flags.
    Control,
    /// For calls. A data communicator is blocking, and has no children.
    Data,
}

/// A configuration in NCCL's form, with the strings that it points to.
#[derive(Debug)]
pub(crate) struct RawConfig {
    pub(crate) config: ncclConfig_t,
    /// The strings that the configuration points to. They must live as long as the communicator.
    pub(crate) strings: [Option<CString>; 2],
}

impl RawConfig {
    pub(crate) fn new(config: &NcclConfig, purpose: Purpose) -> Result<Self, Error> {
        check_config(config)?;
        let mut raw = ncclConfig_t::new();
        let strings = [c_string("network_name", config.network_name.as_deref())?, c_string("name", config.name.as_deref())?];
        let [network_name, name] = &strings;
        let is_control = purpose == Purpose::Control;
        (raw.blocking, raw.splitShare, raw.shrinkShare) = (c_int::from(!is_control), c_int::from(is_control), 0);
        set(&mut raw.cgaClusterSize, "cga_cluster_size", config.cga_cluster_size)?;
        set(&mut raw.minCTAs, "min_ctas", config.min_ctas)?;
        set(&mut raw.maxCTAs, "max_ctas", config.max_ctas)?;
        set(&mut raw.trafficClass, "traffic_class", config.traffic_class)?;
        set(&mut raw.collnetEnable, "collnet", config.collnet.map(u32::from))?;
        set(&mut raw.CTAPolicy, "cta_policy", config.cta_policy.map(policy_code))?;
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

/// Refuses settings that NCCL would refuse without an explanation, and settings that are not supported.
fn check_config(config: &NcclConfig) -> Result<(), Error> {
    match (config.min_ctas, config.max_ctas) {
        (Some(least), None) => {
            let reason = "NCCL accepts a minimum only together with a maximum: also set max_ctas";
            return Err(Error::config(format!("NcclConfig::min_ctas {least}"), reason));
        }
        (Some(least), Some(most)) if least > most => {
            return Err(Error::config(format!("NcclConfig::min_ctas {least}"), format!("it is larger than max_ctas, which is {most}")));
        }
        _ => {}
    }
    for (name, share) in [("split_share", config.split_share), ("shrink_share", config.shrink_share)] {
        if share == Some(true) {
            let reason =
                "if NCCL aborts a communicator, it aborts all that share resources with it, but in this crate, each must end independently";
            return Err(Error::config(format!("NcclConfig::{name} true"), reason));
        }
    }
    Ok(())
}

/// Refuses an environment that overrides the settings of the two NCCL communicators behind each communicator. NCCL
/// reads it once, and also puts the settings of its files (`nccl.conf`) there.
pub(crate) fn check_environment() -> Result<(), Error> {
    match device_environment().overrides {
        Some(setting) => {
            let reason = "it overrides the settings of every communicator, but these must differ between communicators: unset it, in the \
                          environment and in nccl.conf";
            Err(Error::config(setting, reason))
        }
        None => Ok(()),
    }
}

fn c_string(name: &str, text: Option<&str>) -> Result<Option<CString>, Error> {
    let convert =
        |text: &str| CString::new(text).map_err(|_| Error::config(format!("NcclConfig::{name} {text:?}"), "the name contains a zero byte"));
    text.map(convert).transpose()
}

fn set(field: &mut c_int, name: &str, value: Option<u32>) -> Result<(), Error> {
    if let Some(value) = value {
        *field = c_int::try_from(value)
            .map_err(|_| Error::config(format!("NcclConfig::{name} {value}"), format!("expected a number up to {}", c_int::MAX)))?;
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

#[cfg(test)]
mod tests {
    //! Tests that need no NCCL.

    use nccl_sys::{NCCL_CONFIG_UNDEF_INT, Version, ncclDataType_t, ncclResult_t};

    use half::{bf16, f16};

    use super::raw::scalar_bytes;
    use super::*;
    use crate::call::op::ReduceOp;
    use crate::config::nccl::{CtaPolicy, GraphUsage, NcclConfig};
    use crate::host::reduce::premultiply;

    const NEW: Version = Version::new(2, 28, 9);

    fn code(code: u32, text: &str) -> Refusal {
        Refusal { call: "ncclAllReduce", reason: Reason::Code(ncclResult_t(code), text.to_owned()), grouped: false }
    }

    fn missing() -> Refusal {
        let missing = MissingSymbol { symbol: "ncclCommRevoke", since: Version::new(2, 28, 7), loaded: Version::new(2, 27, 5) };
        Refusal { call: "ncclCommRevoke", reason: Reason::Missing(missing), grouped: false }
    }

    #[test]
    fn a_refusal_says_what_was_being_done_which_call_and_why() {
        let error = code(6, "remote process exited").into_error("rank 1 of 2: all_reduce".to_owned());
        assert_eq!(error.to_string(), "rank 1 of 2: all_reduce (ncclAllReduce): NCCL returned 6 (ncclRemoteError): remote process exited");
        let error = missing().into_error("revoking".to_owned());
        assert!(error.is_unsupported());
        assert!(error.to_string().contains("revoking") && error.to_string().contains("2.28.7"), "{error}");
    }

    #[test]
    fn only_wrong_arguments_and_missing_functions_are_harmless_and_not_in_groups() {
        for number in 1..10 {
            assert_eq!(code(number, "").is_harmless(), number == ncclResult_t::ncclInvalidArgument.0, "{number}");
            assert!(!code(number, "").in_group().is_harmless(), "{number}");
        }
        assert!(missing().is_harmless());
        assert!(!missing().in_group().is_harmless());
    }

    #[test]
    fn every_code_has_a_name_and_strange_ones_too() {
        assert_eq!(code_name(ncclResult_t(0)), "ncclSuccess");
        assert_eq!(code_name(ncclResult_t(8)), "ncclTimeout");
        assert_eq!(code_name(ncclResult_t(99)), code_name(ncclResult_t(9)));
        let mut names: Vec<_> = (0..9).map(|number| code_name(ncclResult_t(number))).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 9);
    }

    #[test]
    fn element_types_have_the_numbers_of_nccl_and_sizes() {
        let sizes = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];
        for dtype in DType::ALL {
            match data_type(dtype, NEW) {
                Some(number) => assert_eq!(sizes[number.0 as usize], dtype.size_bytes(), "{dtype}"),
                None => assert!(matches!(dtype, DType::I16 | DType::U16), "{dtype}"),
            }
        }
        assert_eq!(data_type(DType::Bf16, NEW), Some(ncclDataType_t::ncclBfloat16));
        assert_eq!(data_type(DType::F16, NEW), Some(ncclDataType_t::ncclFloat16));
        assert_eq!(data_type(DType::U32, NEW), Some(ncclDataType_t::ncclUint32));
        assert_eq!(data_type(DType::I32, NEW), Some(ncclDataType_t::ncclInt32));
    }

    #[test]
    fn small_floats_need_a_newer_library() {
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            assert_eq!(data_type(dtype, Version::new(2, 23, 4)), None);
            assert!(data_type(dtype, Version::new(2, 24, 3)).is_some());
        }
    }

    #[test]
    fn scalars_are_rounded_to_their_type() {
        let bytes = |dtype| scalar_bytes(1.0 / 3.0, dtype).unwrap();
        assert_eq!(bytes(DType::F32)[..4], (1.0f32 / 3.0).to_ne_bytes());
        assert_eq!(bytes(DType::F64), (1.0f64 / 3.0).to_ne_bytes());
        assert_eq!(bytes(DType::F16)[..2], 0x3555u16.to_ne_bytes());
        assert_eq!(bytes(DType::Bf16)[..2], 0x3eabu16.to_ne_bytes());
        assert_eq!(scalar_bytes(2.0, DType::F8E4M3).unwrap()[0], 0x40);
        assert_eq!(scalar_bytes(2.0, DType::F8E5M2).unwrap()[0], 0x40);
        assert_eq!(scalar_bytes(2.0, DType::I32), None);
    }

    /// The magnitudes of a 16-bit float type, from zero on, by bit pattern. The one after the largest finite one stands
    /// for infinity.
    fn ladder(mantissa_bits: u32, bias: i32) -> Vec<f64> {
        let worth = |pattern: u32| {
            let (exponent, mantissa) = (pattern >> mantissa_bits, pattern & ((1 << mantissa_bits) - 1));
            let leading = u32::from(exponent > 0) << mantissa_bits;
            f64::from(leading + mantissa) * 2_f64.powi(exponent.max(1) as i32 - bias - mantissa_bits as i32)
        };
        (0..=(1 << 15) - (1 << mantissa_bits)).map(worth).collect()
    }

    #[test]
    fn a_scalar_next_to_a_tie_has_the_same_bits_on_devices_and_on_the_host() {
        fn check<T: crate::call::element::Element>(dtype: DType, mantissa_bits: u32, bias: i32, one: T, bits: fn(T) -> u16) {
            let ladder = ladder(mantissa_bits, bias);
            let mut scaled = Vec::new();
            for (pattern, pair) in ladder.windows(2).enumerate() {
                let (low, high) = (pattern as u16, pattern as u16 + 1);
                // Exact: the midpoint of two neighbours needs one more bit than they do, and an f64 has it.
                let tie = (pair[0] + pair[1]) / 2.0;
                let even = if low % 2 == 0 { low } else { high };
                for (scalar, expected) in [(pair[0], low), (tie.next_down(), low), (tie, even), (tie.next_up(), high), (pair[1], high)] {
                    for (scalar, expected) in [(scalar, expected), (-scalar, expected | 0x8000)] {
                        assert_eq!(scalar_bytes(scalar, dtype).unwrap()[..2], expected.to_ne_bytes(), "{scalar:e} as {dtype}");
                        premultiply(&ReduceOp::PreMulSum(scalar).into(), &[one], &mut scaled);
                        assert_eq!(bits(scaled[0]), expected, "{scalar:e} as {dtype}, on the host");
                    }
                }
            }
        }
        check(DType::F16, 10, 15, f16::ONE, f16::to_bits);
        check(DType::Bf16, 7, 127, bf16::ONE, bf16::to_bits);
    }

    #[test]
    fn an_empty_configuration_leaves_to_nccl_what_has_nothing_to_do_with_the_purpose() {
        for (purpose, blocking, split_share) in [(Purpose::Control, 0, 1), (Purpose::Data, 1, 0)] {
            let raw = RawConfig::new(&NcclConfig::default(), purpose).unwrap().config;
            let expected = nccl_sys::ncclConfig_t { blocking, splitShare: split_share, shrinkShare: 0, ..nccl_sys::ncclConfig_t::new() };
            assert_eq!(raw, expected);
            assert_eq!(raw.minCTAs, NCCL_CONFIG_UNDEF_INT);
        }
    }

    #[test]
    fn settings_that_nccl_would_refuse_or_that_tie_communicators_together_are_refused_in_words() {
        let config = NcclConfig::default;
        for (config, words) in [
            (config().min_ctas(4), "also set max_ctas"),
            (config().min_ctas(4).max_ctas(3), "larger than max_ctas, which is 3"),
            (config().split_share(true), "split_share true"),
            (config().shrink_share(true), "shrink_share true"),
        ] {
            let error = RawConfig::new(&config, Purpose::Control).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn every_setting_reaches_its_field() {
        let config = NcclConfig::default()
            .cga_cluster_size(1)
            .min_ctas(2)
            .max_ctas(3)
            .network_name("Socket")
            .split_share(false)
            .traffic_class(4)
            .name("gradients")
            .collnet(true)
            .cta_policy(CtaPolicy::Zero)
            .shrink_share(false)
            .nvls_ctas(5)
            .channels_per_net_peer(6)
            .nvlink_centric_sched(true)
            .graph_usage(GraphUsage::One)
            .rma_contexts(7)
            .max_p2p_peers(8)
            .graph_stream_ordering(false)
            .launch_order_implicit(true);
        let RawConfig { config: raw, strings } = RawConfig::new(&config, Purpose::Control).unwrap();
        let [network_name, name] = &strings;
        let expected = nccl_sys::ncclConfig_t {
            blocking: 0,
            cgaClusterSize: 1,
            minCTAs: 2,
            maxCTAs: 3,
            netName: network_name.as_ref().unwrap().as_ptr(),
            splitShare: 1,
            trafficClass: 4,
            commName: name.as_ref().unwrap().as_ptr(),
            collnetEnable: 1,
            CTAPolicy: 2,
            shrinkShare: 0,
            nvlsCTAs: 5,
            nChannelsPerNetPeer: 6,
            nvlinkCentricSched: 1,
            graphUsageMode: 1,
            numRmaCtx: 7,
            maxP2pPeers: 8,
            graphStreamOrdering: 0,
            launchOrderImplicit: 1,
            ..nccl_sys::ncclConfig_t::new()
        };
        assert_eq!(raw, expected);
        assert_eq!((network_name.as_ref().unwrap().to_str(), name.as_ref().unwrap().to_str()), (Ok("Socket"), Ok("gradients")));
    }

    #[test]
    fn settings_that_c_cannot_hold_are_quoted() {
        let error = RawConfig::new(&NcclConfig::default().max_ctas(u32::MAX), Purpose::Data).unwrap_err().to_string();
        assert!(error.contains("max_ctas") && error.contains("4294967295"), "{error}");
        let error = RawConfig::new(&NcclConfig::default().name("a\0b"), Purpose::Data).unwrap_err().to_string();
        assert!(error.contains("name"), "{error}");
    }

    #[test]
    fn a_library_that_is_too_old_is_named_with_its_version() {
        assert_eq!(judge(Version::new(2, 20, 5), "a"), Ok(()));
        let words = judge(Version::new(2, 4, 8), "/usr/lib/libnccl.so.2").unwrap_err();
        assert!(words.starts_with("NCCL 2.4.8 (/usr/lib/libnccl.so.2) is older than 2.20.5"), "{words}");
    }
}
