//! A communicator's settings in NCCL's form.

use std::ffi::{CString, c_int};

use nccl_sys::ncclConfig_t;

use crate::error::Error;
use crate::nccl_config::{CtaPolicy, GraphUsage, NcclConfig};

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
