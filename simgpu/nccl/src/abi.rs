//! The declarations of NCCL's header, written a second time: an independent check of the bindings that are tested
//! against this library.

#![expect(unsafe_code, reason = "a configuration holds pointers that are never followed")]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A result code. A planted fault may use any number, so this is no enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Code(pub c_int);

impl Code {
    /// The call succeeded.
    pub const SUCCESS: Code = Code(0);
    /// The driver refused something.
    pub const UNHANDLED_CUDA_ERROR: Code = Code(1);
    /// The system refused something.
    pub const SYSTEM_ERROR: Code = Code(2);
    /// A fault of the library.
    pub const INTERNAL_ERROR: Code = Code(3);
    /// An argument is wrong.
    pub const INVALID_ARGUMENT: Code = Code(4);
    /// The call is not allowed here.
    pub const INVALID_USAGE: Code = Code(5);
    /// A peer is gone.
    pub const REMOTE_ERROR: Code = Code(6);
    /// The call goes on in the background.
    pub const IN_PROGRESS: Code = Code(7);
    /// A wait on the device took too long.
    pub const TIMEOUT: Code = Code(8);
}

/// A communicator's handle: a number that is never used twice, not an address.
pub type Handle = *mut c_void;
/// A CUDA stream.
pub type Stream = *mut c_void;

/// The identifier that one rank makes and sends to the others.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    /// Opaque to users.
    pub internal: [u8; 128],
}

/// "Not set" in a numeric field of a configuration.
pub const UNDEFINED: c_int = c_int::MIN;
/// The magic number of every configuration.
pub const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// The magic number of every simulation record.
pub const SIM_INFO_MAGIC: c_uint = 0x7468_5283;

/// The configuration of a communicator as of 2.32.3. Callers may pass a shorter or a longer one: `size` is its length.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are NCCL's")]
pub struct Config {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub blocking: c_int,
    pub cga_cluster_size: c_int,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub net_name: *const c_char,
    pub split_share: c_int,
    pub traffic_class: c_int,
    pub comm_name: *const c_char,
    pub collnet_enable: c_int,
    pub cta_policy: c_int,
    pub shrink_share: c_int,
    pub nvls_ctas: c_int,
    pub n_channels_per_net_peer: c_int,
    pub nvlink_centric_sched: c_int,
    pub graph_usage_mode: c_int,
    pub num_rma_ctx: c_int,
    pub max_p2p_peers: c_int,
    pub graph_stream_ordering: c_int,
    pub launch_order_implicit: c_int,
    pub num_rma_sig: c_int,
    pub rma_eager_init: c_int,
    pub host_cft_mode: c_int,
    pub nvls_host_mode: c_int,
}

/// The record that `ncclGroupSimulateEnd` fills in.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are NCCL's")]
pub struct SimInfo {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub estimated_time: f32,
}

/// The argument of `ncclSetEncryption`, from 2.32.3.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are NCCL's")]
pub struct EncryptionConfig {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub mode: c_int,
    pub psk: *const c_char,
}

const _: () = assert!(size_of::<EncryptionConfig>() == 32 && std::mem::offset_of!(EncryptionConfig, psk) == 24);

/// The configuration of one call, from 2.31.2.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the names are NCCL's")]
pub struct CollConfig {
    pub size: usize,
    pub magic: c_uint,
    pub version: c_uint,
    pub ext: *mut c_void,
    pub min_ctas: c_int,
    pub max_ctas: c_int,
    pub nvls_ctas: c_int,
    pub cga_cluster_size: c_int,
    pub alg_selection: *const c_char,
    pub force_alg_selection: c_int,
    pub cta_policy: c_int,
    pub user_profiler_tag: u64,
    pub launch_completion_event: *mut c_void,
}

const _: () = assert!(size_of::<Config>() == 120 && size_of::<SimInfo>() == 24 && size_of::<CollConfig>() == 72);
const _: () = assert!(std::mem::offset_of!(Config, comm_name) == 48 && std::mem::offset_of!(Config, nvls_host_mode) == 112);

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the types'")]
pub enum Kind {
    I8 = 0,
    U8 = 1,
    I32 = 2,
    U32 = 3,
    I64 = 4,
    U64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
    E4m3 = 10,
    E5m2 = 11,
}

impl Kind {
    /// All types, by number.
    pub const ALL: [Kind; 12] = [
        Kind::I8,
        Kind::U8,
        Kind::I32,
        Kind::U32,
        Kind::I64,
        Kind::U64,
        Kind::F16,
        Kind::F32,
        Kind::F64,
        Kind::Bf16,
        Kind::E4m3,
        Kind::E5m2,
    ];

    /// Returns the type with a number, if there is one.
    #[must_use]
    pub fn of(number: c_int) -> Option<Kind> {
        usize::try_from(number).ok().and_then(|number| Kind::ALL.get(number)).copied()
    }

    /// Returns the bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Kind::I8 | Kind::U8 | Kind::E4m3 | Kind::E5m2 => 1,
            Kind::F16 | Kind::Bf16 => 2,
            Kind::I32 | Kind::U32 | Kind::F32 => 4,
            Kind::I64 | Kind::U64 | Kind::F64 => 8,
        }
    }

    /// Whether this is an 8-bit float, which needs a device of compute capability 9.0 to be reduced.
    #[must_use]
    pub fn is_float8(self) -> bool {
        matches!(self, Kind::E4m3 | Kind::E5m2)
    }

    /// Whether this is a float of any width.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Kind::F16 | Kind::F32 | Kind::F64 | Kind::Bf16) || self.is_float8()
    }
}

// SAFETY: this library never reads the strings that a configuration points to; it only returns them as numbers.
unsafe impl Send for Config {}
// SAFETY: as above.
unsafe impl Sync for Config {}
