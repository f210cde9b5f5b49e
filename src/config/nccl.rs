//! What NCCL can be told about a communicator, and what a program vouches for where nobody can check it.

#![expect(unsafe_code, reason = "what a program vouches for, it says in an unsafe call")]

use std::fmt;
use std::path::{Path, PathBuf};

/// Which device calls ranks compare before they are queued; see [`Config::check_device_calls`](crate::Config::check_device_calls).
///
/// ```
/// use collectives::{Config, nccl::CheckDeviceCalls};
///
/// let mut config = Config::default();
/// assert_eq!(config.check_device_calls, CheckDeviceCalls::ALWAYS);
/// // SAFETY: every rank runs the same loop, over the same model: they make the same calls, with the same lengths, throughout.
/// config.check_device_calls = unsafe { CheckDeviceCalls::unchecked_after(64) };
/// ```
///
/// Comparing fewer than all is a promise, which safe code cannot make:
///
/// ```compile_fail,E0133
/// let _ = collectives::nccl::CheckDeviceCalls::unchecked_after(64);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CheckDeviceCalls {
    /// How many are compared; `None` for all.
    first: Option<u64>,
}

impl CheckDeviceCalls {
    /// All: the default.
    pub const ALWAYS: Self = Self { first: None };

    /// Only the first so many collectives of each communicator, and messages from each rank to each; 0 for none.
    ///
    /// # Safety
    ///
    /// NCCL compares nothing: where ranks call different things, it writes past the end of buffers, or puts bytes of one type where another
    /// one's are expected. So of all calls that are not compared, on all ranks of the communicators with this setting: every rank makes the same
    /// collectives in the same order, with the same op, element type, counts, root and lists of counts, and the same groups of them; and both
    /// ends of every message name the same element type and length, in the same order. Of an [`NcclCommunicator`](crate::nccl::NcclCommunicator), whose ranks
    /// have told each other nothing before: also with the same [`device_scratch_bytes`](crate::Config::device_scratch_bytes) and
    /// [`reproducible`](crate::Config::reproducible), on devices of one compute capability, and with the same groups of messages.
    #[must_use]
    pub const unsafe fn unchecked_after(calls: u64) -> Self {
        Self { first: Some(calls) }
    }

    /// Whether the call of this number, from 0, is compared.
    #[inline]
    pub(crate) fn covers(self, number: u64) -> bool {
        self.first.is_none_or(|first| number < first)
    }
}

impl fmt::Display for CheckDeviceCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first {
            None => f.write_str("always"),
            Some(first) => write!(f, "the first {first} alone"),
        }
    }
}

impl fmt::Debug for CheckDeviceCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckDeviceCalls({self})")
    }
}

/// The file of an NCCL to load, which the program vouches for.
///
/// ```
/// use collectives::{Config, nccl::NcclLibrary};
///
/// let mut config = Config::default();
/// // SAFETY: the NCCL that our packages install there.
/// config.nccl_library = Some(unsafe { NcclLibrary::at("/opt/nccl/lib/libnccl.so.2") });
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NcclLibrary(PathBuf);

impl NcclLibrary {
    /// The NCCL in this file: a path, or a name that the system's loader looks for. Nothing is loaded yet.
    ///
    /// # Safety
    ///
    /// Loading a file runs its code, and what is called in it are addresses under NCCL's names: it is an NCCL whenever it is loaded, by this
    /// process, through this value or its clones.
    #[must_use]
    pub unsafe fn at(file: impl Into<PathBuf>) -> Self {
        Self(file.into())
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The one that the environment names. Whoever sets a process's variables can have it load any code before `main` (`LD_PRELOAD`), and so
    /// vouches for this file as for the program.
    pub(crate) fn of_environment(file: String) -> Self {
        Self(file.into())
    }
}

/// Settings that are NCCL's own. What is not set is NCCL's choice, or that of its environment variables.
///
/// Ranks must agree on them. A library older than a setting ignores it.
///
/// ```
/// use collectives::nccl::NcclConfig;
///
/// let config = NcclConfig::default().max_ctas(16).name("gradients");
/// assert_eq!(config, NcclConfig::default().name("gradients").max_ctas(16));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NcclConfig {
    pub(crate) cga_cluster_size: Option<u32>,
    pub(crate) min_ctas: Option<u32>,
    pub(crate) max_ctas: Option<u32>,
    pub(crate) network_name: Option<String>,
    pub(crate) split_share: Option<bool>,
    pub(crate) traffic_class: Option<u32>,
    pub(crate) name: Option<String>,
    pub(crate) collnet: Option<bool>,
    pub(crate) cta_policy: Option<CtaPolicy>,
    pub(crate) shrink_share: Option<bool>,
    pub(crate) nvls_ctas: Option<u32>,
    pub(crate) channels_per_net_peer: Option<u32>,
    pub(crate) nvlink_centric_sched: Option<bool>,
    pub(crate) graph_usage: Option<GraphUsage>,
    pub(crate) rma_contexts: Option<u32>,
    pub(crate) max_p2p_peers: Option<u32>,
    pub(crate) graph_stream_ordering: Option<bool>,
    pub(crate) launch_order_implicit: Option<bool>,
}

/// What NCCL's kernels may cost the others on the device: `CTAPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CtaPolicy {
    /// As many blocks as give the most bandwidth.
    Default,
    /// Fewer where that costs little bandwidth.
    Efficiency,
    /// None where copy engines can do the work: windows, and NCCL 2.28.3.
    Zero,
}

/// How a communicator is used with CUDA graphs: `graphUsageMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GraphUsage {
    /// Never in a graph.
    None,
    /// In one graph, and nowhere else.
    One,
    /// In several graphs, or in graphs and outside of them.
    Mixed,
}

impl NcclConfig {
    /// Blocks in a cluster on sm_90 and later: `cgaClusterSize`, 0 to 8. NCCL 2.17.1.
    #[must_use]
    pub fn cga_cluster_size(mut self, blocks: u32) -> Self {
        self.cga_cluster_size = Some(blocks);
        self
    }

    /// The fewest blocks of a kernel: `minCTAs`, no more than [`max_ctas`](Self::max_ctas), which must be set, too. NCCL 2.17.1.
    #[must_use]
    pub fn min_ctas(mut self, blocks: u32) -> Self {
        self.min_ctas = Some(blocks);
        self
    }

    /// The most blocks of a kernel, each of which takes most of a multiprocessor: `maxCTAs`, up to 64. NCCL 2.17.1.
    #[must_use]
    pub fn max_ctas(mut self, blocks: u32) -> Self {
        self.max_ctas = Some(blocks);
        self
    }

    /// The network plugin by its name, as `IB` or `Socket`: `netName`. NCCL 2.17.1.
    #[must_use]
    pub fn network_name(mut self, name: impl Into<String>) -> Self {
        self.network_name = Some(name.into());
        self
    }

    /// Whether communicators split off this one share its resources: `splitShare`. NCCL 2.18.1. `true` is refused: NCCL aborts what shares
    /// resources together, and a split shall outlive what it was split from.
    #[must_use]
    pub fn split_share(mut self, share: bool) -> Self {
        self.split_share = Some(share);
        self
    }

    /// The traffic class of its packets: `trafficClass`. NCCL 2.26.2.
    #[must_use]
    pub fn traffic_class(mut self, class: u32) -> Self {
        self.traffic_class = Some(class);
        self
    }

    /// What NCCL calls it in its logs: `commName`. NCCL 2.27.3.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether reductions inside the network are used (SHARP): `collnetEnable`. NCCL 2.27.3.
    #[must_use]
    pub fn collnet(mut self, enable: bool) -> Self {
        self.collnet = Some(enable);
        self
    }

    /// What its kernels may cost the others on the device: `CTAPolicy`. NCCL 2.27.3.
    #[must_use]
    pub fn cta_policy(mut self, policy: CtaPolicy) -> Self {
        self.cta_policy = Some(policy);
        self
    }

    /// Whether a communicator shrunk from this one shares its resources: `shrinkShare`. NCCL 2.27.3. `true` is refused, as of
    /// [`split_share`](Self::split_share).
    #[must_use]
    pub fn shrink_share(mut self, share: bool) -> Self {
        self.shrink_share = Some(share);
        self
    }

    /// Blocks of kernels that reduce in the NVLink switch: `nvlsCTAs`. NCCL 2.27.3.
    #[must_use]
    pub fn nvls_ctas(mut self, blocks: u32) -> Self {
        self.nvls_ctas = Some(blocks);
        self
    }

    /// Channels to each peer over the network, for all-to-all and messages: `nChannelsPerNetPeer`. NCCL 2.28.3.
    #[must_use]
    pub fn channels_per_net_peer(mut self, channels: u32) -> Self {
        self.channels_per_net_peer = Some(channels);
        self
    }

    /// Whether messages are scheduled for NVLink first: `nvlinkCentricSched`. NCCL 2.28.3.
    #[must_use]
    pub fn nvlink_centric_sched(mut self, enable: bool) -> Self {
        self.nvlink_centric_sched = Some(enable);
        self
    }

    /// How it is used with CUDA graphs, which spares bookkeeping where it is used in one way only: `graphUsageMode`. NCCL 2.29.2.
    #[must_use]
    pub fn graph_usage(mut self, usage: GraphUsage) -> Self {
        self.graph_usage = Some(usage);
        self
    }

    /// Contexts for one-sided operations: `numRmaCtx`. NCCL 2.29.2.
    #[must_use]
    pub fn rma_contexts(mut self, contexts: u32) -> Self {
        self.rma_contexts = Some(contexts);
        self
    }

    /// The most peers that it sends messages to at once: `maxP2pPeers`. NCCL 2.30.3.
    #[must_use]
    pub fn max_p2p_peers(mut self, peers: u32) -> Self {
        self.max_p2p_peers = Some(peers);
        self
    }

    /// Whether the order of streams is kept inside graphs: `graphStreamOrdering`. NCCL 2.30.7.
    #[must_use]
    pub fn graph_stream_ordering(mut self, keep: bool) -> Self {
        self.graph_stream_ordering = Some(keep);
        self
    }

    /// Whether kernels of several communicators run in the order in which they were launched: `launchOrderImplicit`. NCCL 2.31.2.
    #[must_use]
    pub fn launch_order_implicit(mut self, keep: bool) -> Self {
        self.launch_order_implicit = Some(keep);
        self
    }
}
