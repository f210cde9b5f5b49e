//! Macros of `nccl.h` for which no bindings can be generated: initialisers, and the values that mean "unset".

#![allow(non_camel_case_types, reason = "names are C's")]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use crate::{NCCL_API_MAGIC, NCCL_VERSION_CODE};
use crate::{ncclCollConfig_t, ncclComm_t, ncclConfig_t, ncclEncryptionConfig_t, ncclEncryptionMode_t, ncclSimInfo_t};

/// In a configuration, means that NCCL chooses the number.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// In a configuration, means that NCCL chooses the string or list.
pub const NCCL_CONFIG_UNDEF_PTR: *mut c_void = null_mut();
/// Means that a time is not known yet.
pub const NCCL_UNDEF_FLOAT: f32 = -1.0;
/// Means that there is no communicator.
pub const NCCL_COMM_NULL: ncclComm_t = null_mut();
/// The value of `magic` in an [`ncclSimInfo_t`]. In other structs, `magic` is [`NCCL_API_MAGIC`].
pub const NCCL_SIM_INFO_MAGIC: c_uint = 0x7468_5283;

const VERSION: c_uint = NCCL_VERSION_CODE as c_uint;

impl ncclConfig_t {
    /// Returns `NCCL_CONFIG_INITIALIZER`, with which NCCL chooses every setting.
    pub const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: NCCL_API_MAGIC,
            version: VERSION,
            blocking: NCCL_CONFIG_UNDEF_INT,
            cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
            minCTAs: NCCL_CONFIG_UNDEF_INT,
            maxCTAs: NCCL_CONFIG_UNDEF_INT,
            netName: null(),
            splitShare: NCCL_CONFIG_UNDEF_INT,
            trafficClass: NCCL_CONFIG_UNDEF_INT,
            commName: null(),
            collnetEnable: NCCL_CONFIG_UNDEF_INT,
            CTAPolicy: NCCL_CONFIG_UNDEF_INT,
            shrinkShare: NCCL_CONFIG_UNDEF_INT,
            nvlsCTAs: NCCL_CONFIG_UNDEF_INT,
            nChannelsPerNetPeer: NCCL_CONFIG_UNDEF_INT,
            nvlinkCentricSched: NCCL_CONFIG_UNDEF_INT,
            graphUsageMode: NCCL_CONFIG_UNDEF_INT,
            numRmaCtx: NCCL_CONFIG_UNDEF_INT,
            maxP2pPeers: NCCL_CONFIG_UNDEF_INT,
            graphStreamOrdering: NCCL_CONFIG_UNDEF_INT,
            launchOrderImplicit: NCCL_CONFIG_UNDEF_INT,
            numRmaSig: NCCL_CONFIG_UNDEF_INT,
            rmaEagerInit: NCCL_CONFIG_UNDEF_INT,
            hostCftMode: NCCL_CONFIG_UNDEF_INT,
            nvlsHostMode: NCCL_CONFIG_UNDEF_INT,
        }
    }
}

impl ncclCollConfig_t {
    /// Returns `NCCL_COLLCONFIG_INITIALIZER`, with which NCCL chooses the algorithm, the number of CTAs and the CTA
    /// policy of a call. `forceAlgSelection` is 1, `userProfilerTag` is 0, and there is no `launchCompletionEvent`.
    pub const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: NCCL_API_MAGIC,
            version: VERSION,
            ext: null_mut(),
            minCTAs: NCCL_CONFIG_UNDEF_INT,
            maxCTAs: NCCL_CONFIG_UNDEF_INT,
            nvlsCTAs: NCCL_CONFIG_UNDEF_INT,
            cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
            algSelection: null(),
            forceAlgSelection: 1,
            CTAPolicy: NCCL_CONFIG_UNDEF_INT,
            userProfilerTag: 0,
            launchCompletionEvent: null_mut(),
        }
    }
}

impl ncclSimInfo_t {
    /// Returns `NCCL_SIM_INFO_INITIALIZER`, which contains no estimated time yet.
    pub const fn new() -> Self {
        Self { size: size_of::<Self>(), magic: NCCL_SIM_INFO_MAGIC, version: VERSION, estimatedTime: NCCL_UNDEF_FLOAT }
    }
}

impl ncclEncryptionConfig_t {
    /// Returns `NCCL_ENCRYPTION_CONFIG_INITIALIZER`, which means no encryption.
    pub const fn new() -> Self {
        let mode = ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_NONE.0 as c_int;
        Self { size: size_of::<Self>(), magic: NCCL_API_MAGIC, version: VERSION, mode, psk: null() }
    }
}

impl Default for ncclConfig_t {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for ncclCollConfig_t {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for ncclSimInfo_t {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for ncclEncryptionConfig_t {
    fn default() -> Self {
        Self::new()
    }
}
