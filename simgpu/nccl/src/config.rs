//! Configurations of any length and version, read as NCCL reads them.

#![expect(unsafe_code, reason = "the caller's configuration may be shorter than ours")]

use crate::abi::{CONFIG_MAGIC, Config, UNDEFINED};
use crate::fault::{Fault, Outcome};
use std::mem::offset_of;
use std::ptr::null;
use std::sync::OnceLock;

/// Returns a configuration in which nothing is set.
#[must_use]
pub fn unset(version: u32) -> Config {
    const U: i32 = UNDEFINED;
    Config {
        size: size_of::<Config>(),
        magic: CONFIG_MAGIC,
        version,
        blocking: U,
        cga_cluster_size: U,
        min_ctas: U,
        max_ctas: U,
        net_name: null(),
        split_share: U,
        traffic_class: U,
        comm_name: null(),
        collnet_enable: U,
        cta_policy: U,
        shrink_share: U,
        nvls_ctas: U,
        n_channels_per_net_peer: U,
        nvlink_centric_sched: U,
        graph_usage_mode: U,
        num_rma_ctx: U,
        max_p2p_peers: U,
        graph_stream_ordering: U,
        launch_order_implicit: U,
        num_rma_sig: U,
        rma_eager_init: U,
        host_cft_mode: U,
        nvls_host_mode: U,
    }
}

/// The offset where each release's fields begin. A library reads none newer than itself, and none newer than the
/// version that the caller states.
const GROWTH: [(i32, usize); 12] = [
    (21400, offset_of!(Config, blocking)),
    (21700, offset_of!(Config, cga_cluster_size)),
    (21800, offset_of!(Config, split_share)),
    (22500, offset_of!(Config, traffic_class)),
    (22700, offset_of!(Config, comm_name)),
    (22800, offset_of!(Config, n_channels_per_net_peer)),
    (22900, offset_of!(Config, graph_usage_mode)),
    (23000, offset_of!(Config, max_p2p_peers)),
    (23005, offset_of!(Config, graph_stream_ordering)),
    (23100, offset_of!(Config, launch_order_implicit)),
    (23200, offset_of!(Config, nvls_host_mode)),
    (i32::MAX, size_of::<Config>()),
];

/// Returns the bytes of a configuration as a release knows it.
fn known(version: i32) -> usize {
    GROWTH.iter().find(|(since, _)| *since > version).map_or(size_of::<Config>(), |(_, offset)| *offset)
}

/// Settings of the environment, which take precedence over a caller's. As with NCCL, they are read once per process.
#[derive(Clone, Copy)]
pub(crate) struct Environment {
    /// Whether calls check their buffers. The default is no.
    pub(crate) check_pointers: bool,
    blocking: Option<i32>,
    split_share: Option<i32>,
    shrink_share: Option<i32>,
}

impl Environment {
    pub(crate) fn get() -> Environment {
        static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
        let flag = |name: &str| std::env::var(name).ok()?.trim().parse().ok().filter(|value| (0..=1).contains(value));
        *ENVIRONMENT.get_or_init(|| Environment {
            check_pointers: flag("NCCL_CHECK_POINTERS") == Some(1),
            blocking: flag("NCCL_COMM_BLOCKING"),
            split_share: flag("NCCL_COMM_SPLIT_SHARE_RESOURCES"),
            shrink_share: flag("NCCL_COMM_SHRINK_SHARE_RESOURCES"),
        })
    }
}

/// Reads a caller's configuration as NCCL of `version` does.
///
/// # Safety
/// `theirs` is null or points to a configuration that states its own size.
pub(crate) unsafe fn read(theirs: *const Config, version: i32) -> Outcome<Config> {
    let mut ours = unset(version as u32);
    if theirs.is_null() {
        return check(ours);
    }
    // SAFETY: every configuration begins with its size.
    let size = unsafe { theirs.cast::<usize>().read_unaligned() };
    let readable = size.min(known(version));
    let mut copy = unset(0);
    copy.magic = 0;
    // SAFETY: no more is read than the caller's size, nor than the copy can hold.
    unsafe { std::ptr::copy_nonoverlapping(theirs.cast::<u8>(), (&raw mut copy).cast::<u8>(), readable) };
    if copy.magic != CONFIG_MAGIC {
        return Err(Fault::argument("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
    }
    let trusted = readable.min(known(copy.version.min(i32::MAX as u32 - 1) as i32)).max(offset_of!(Config, blocking));
    let begin = offset_of!(Config, blocking);
    // SAFETY: both are configurations. Fields are copied whole, because `known` returns offsets of fields; a field
    // that is cut off keeps its value.
    unsafe {
        let (from, into) = ((&raw const copy).cast::<u8>(), (&raw mut ours).cast::<u8>());
        std::ptr::copy_nonoverlapping(from.add(begin), into.add(begin), trusted - begin);
    }
    check(ours)
}

fn check(config: Config) -> Outcome<Config> {
    let set = |value: i32| value != UNDEFINED;
    let bad = |name: &str, value: i32| Err(Fault::argument(format!("Invalid config {name} attribute value {value}")));
    let flags = [
        ("blocking", config.blocking),
        ("splitShare", config.split_share),
        ("shrinkShare", config.shrink_share),
        ("collnetEnable", config.collnet_enable),
        ("nvlinkCentricSched", config.nvlink_centric_sched),
    ];
    if let Some((name, value)) = flags.into_iter().find(|&(_, value)| set(value) && value != 0 && value != 1) {
        return bad(name, value);
    }
    if set(config.cga_cluster_size) && config.cga_cluster_size < 0 {
        return bad("cgaClusterSize", config.cga_cluster_size);
    }
    let (least, most) = (config.min_ctas, config.max_ctas);
    // As with NCCL, a minimum without a maximum is refused: "not set" is the smallest number.
    if (set(least) && least <= 0) || (set(most) && most <= 0) || least > most {
        return Err(Fault::argument(format!("Invalid config min/max channels attribute value {least}/{most}")));
    }
    let positive =
        [("nvlsCTAs", config.nvls_ctas), ("nChannelsPerNetPeer", config.n_channels_per_net_peer), ("maxP2pPeers", config.max_p2p_peers)];
    if let Some((name, value)) = positive.into_iter().find(|&(_, value)| set(value) && value <= 0) {
        return bad(name, value);
    }
    if set(config.cta_policy) && !(0..=2).contains(&config.cta_policy) {
        return bad("policy", config.cta_policy);
    }
    if set(config.graph_usage_mode) && !(0..=2).contains(&config.graph_usage_mode) {
        return bad("graphUsageMode", config.graph_usage_mode);
    }
    let or = |value: i32, default: i32| if set(value) { value } else { default };
    let environment = Environment::get();
    Ok(Config {
        blocking: environment.blocking.unwrap_or(or(config.blocking, 1)),
        split_share: environment.split_share.unwrap_or(config.split_share),
        shrink_share: environment.shrink_share.unwrap_or(config.shrink_share),
        ..config
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn parse(config: Config, version: i32) -> Outcome<Config> {
        // SAFETY: the configuration is whole.
        unsafe { read(&raw const config, version) }
    }

    #[test]
    fn fields_newer_than_either_side_are_not_seen() {
        let all = Config { blocking: 0, max_ctas: 8, max_p2p_peers: 3, nvls_host_mode: 1, ..unset(23203) };
        let seen = parse(all, 23203).unwrap();
        assert_eq!((seen.blocking, seen.max_ctas, seen.max_p2p_peers, seen.nvls_host_mode), (0, 8, 3, 1));
        let old_library = parse(all, 22809).unwrap();
        assert_eq!((old_library.max_ctas, old_library.max_p2p_peers), (8, UNDEFINED));
        let old_caller = parse(Config { version: 21400, ..all }, 23203).unwrap();
        assert_eq!((old_caller.blocking, old_caller.max_ctas), (0, UNDEFINED));
        let short = parse(Config { size: offset_of!(Config, max_p2p_peers), ..all }, 23203).unwrap();
        assert_eq!(short.max_p2p_peers, UNDEFINED);
    }

    #[test]
    fn bad_values_are_refused_in_words() {
        let text = |config| parse(config, 23203).unwrap_err().text;
        assert!(text(Config { magic: 1, ..unset(23203) }).contains("NCCL_CONFIG_INITIALIZER"));
        assert!(text(Config { blocking: 2, ..unset(23203) }).contains("blocking attribute value 2"));
        assert!(text(Config { min_ctas: 4, ..unset(23203) }).contains("min/max channels"), "as NCCL does where no maximum is set");
        assert!(parse(Config { min_ctas: 4, max_ctas: 4, ..unset(23203) }, 23203).is_ok());
    }
}
