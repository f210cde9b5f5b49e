//! Settings that are passed to NCCL, and facts that a program vouches for because they cannot be checked.

#![expect(unsafe_code, reason = "a program vouches for these facts in an unsafe call")]

use std::fmt;
use std::path::{Path, PathBuf};

/// The number of device calls that ranks compare with each other; see
/// [`Config::check_device_calls`](crate::Config::check_device_calls). Ranks compare a call before they queue it.
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
/// A program that does not compare all calls promises that its ranks make matching calls. Only `unsafe` code can make
/// this promise, so this example does not compile:
///
/// ```compile_fail,E0133
/// let _ = collectives::nccl::CheckDeviceCalls::unchecked_after(64);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CheckDeviceCalls {
    /// How many calls are compared; `None` for all.
    first: Option<u64>,
}

impl CheckDeviceCalls {
    /// Compares all calls. This is the default.
    pub const ALWAYS: Self = Self { first: None };

    /// Compares only the first `calls` collectives of each communicator, and the first `calls` messages from each rank
    /// to each other rank. If `calls` is 0, the ranks compare no calls, except for two kinds of calls on an
    /// `NcclCommunicator` (see the next paragraph).
    ///
    /// Two kinds of calls make the ranks wait for each other even if the calls are not compared: the first use of a
    /// custom op, and the first call that needs more than 8 MiB of scratch memory. Before such a call, the ranks agree
    /// that all of them can load the kernel and allocate the memory. On an
    /// [`NcclCommunicator`](crate::nccl::NcclCommunicator), every rank sends 64 B for this agreement, and the ranks
    /// also compare the call.
    ///
    /// # Safety
    ///
    /// NCCL compares nothing. If ranks make different calls, NCCL can write past the end of buffers, or put bytes of
    /// one type into a buffer of another type. So the following must be true for all calls that are not compared, on
    /// all ranks of the communicators with this setting:
    ///
    /// - Every rank makes the same collectives in the same order, with the same op, element type, counts, root and
    ///   lists of counts. The ranks also put the same collectives into each group.
    /// - Both ends of every message pass the same element type and length. The sender makes its sends in the order in
    ///   which the receiver makes the matching receives.
    /// - If the communicator is an [`NcclCommunicator`](crate::nccl::NcclCommunicator), the following must also be the
    ///   same on all ranks, because the ranks of such a communicator exchange nothing before calls that are not compared:
    ///   - [`device_scratch_bytes`](crate::Config::device_scratch_bytes) and
    ///     [`reproducible`](crate::Config::reproducible),
    ///   - the compute capability of the devices,
    ///   - the groups of messages.
    #[must_use]
    pub const unsafe fn unchecked_after(calls: u64) -> Self {
        Self { first: Some(calls) }
    }

    /// Returns whether the call with this number is compared; the first call has number 0.
    #[inline]
    pub(crate) fn covers(self, number: u64) -> bool {
        self.first.is_none_or(|first| number < first)
    }
}

impl fmt::Display for CheckDeviceCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first {
            None => f.write_str("always"),
            Some(first) => write!(f, "only the first {first}"),
        }
    }
}

impl fmt::Debug for CheckDeviceCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckDeviceCalls({self})")
    }
}

/// The file of an NCCL library to load. The program must guarantee that the file is an NCCL library.
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
    /// Names the NCCL library to load: a path, or a name that the system's loader looks for. Nothing is loaded yet.
    ///
    /// # Safety
    ///
    /// Loading the file runs its code, and this crate then calls the functions that the file exports under NCCL's
    /// names. So the file must be an NCCL library whenever this process loads it through this value or a clone of it.
    #[must_use]
    pub unsafe fn at(file: impl Into<PathBuf>) -> Self {
        Self(file.into())
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Takes the library that the environment names. A user who sets a process's variables can make it load any code
    /// before `main` (`LD_PRELOAD`), and so vouches for this file as for the program.
    pub(crate) fn of_environment(file: String) -> Self {
        Self(file.into())
    }
}

/// NCCL's own settings. If you leave a setting unset here, NCCL or its environment variables choose the value.
///
/// All ranks must use the same settings. A version of NCCL that does not have a setting yet ignores it.
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

/// The share of the device that NCCL's kernels may take from other kernels: NCCL's `CTAPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CtaPolicy {
    /// The number of blocks that gives the most bandwidth.
    Default,
    /// Fewer blocks than with `Default`, if this costs little bandwidth.
    Efficiency,
    /// No blocks if copy engines can do the work. This setting needs NCCL windows, and NCCL 2.28.3 or later.
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
    /// In several graphs, or both in graphs and outside of graphs.
    Mixed,
}

impl NcclConfig {
    /// Sets the number of blocks in a cluster on sm_90 and later: `cgaClusterSize`, 0 to 8. Since NCCL 2.17.1.
    #[must_use]
    pub fn cga_cluster_size(mut self, blocks: u32) -> Self {
        self.cga_cluster_size = Some(blocks);
        self
    }

    /// Sets the minimum number of blocks of a kernel: `minCTAs`. You must also set [`max_ctas`](Self::max_ctas), to at
    /// least this minimum. Since NCCL 2.17.1.
    #[must_use]
    pub fn min_ctas(mut self, blocks: u32) -> Self {
        self.min_ctas = Some(blocks);
        self
    }

    /// Sets the maximum number of blocks of a kernel, up to 64: `maxCTAs`. Each block takes most of a multiprocessor.
    /// Since NCCL 2.17.1.
    #[must_use]
    pub fn max_ctas(mut self, blocks: u32) -> Self {
        self.max_ctas = Some(blocks);
        self
    }

    /// Sets the network plugin by its name, such as `IB` or `Socket`: `netName`. Since NCCL 2.17.1.
    #[must_use]
    pub fn network_name(mut self, name: impl Into<String>) -> Self {
        self.network_name = Some(name.into());
        self
    }

    /// Sets whether a communicator shares its resources with the communicators that are split from it: `splitShare`.
    /// Since NCCL 2.18.1. `true` is refused: when NCCL aborts a communicator, it also aborts all communicators that
    /// share its resources. In this crate, a communicator that is split from another must stay usable after the other
    /// has ended.
    #[must_use]
    pub fn split_share(mut self, share: bool) -> Self {
        self.split_share = Some(share);
        self
    }

    /// Sets the traffic class of NCCL's packets: `trafficClass`. Since NCCL 2.26.2.
    #[must_use]
    pub fn traffic_class(mut self, class: u32) -> Self {
        self.traffic_class = Some(class);
        self
    }

    /// Sets the name that NCCL uses for the communicator in its logs: `commName`. Since NCCL 2.27.3.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets whether NCCL uses reductions inside the network (SHARP): `collnetEnable`. Since NCCL 2.27.3.
    #[must_use]
    pub fn collnet(mut self, enable: bool) -> Self {
        self.collnet = Some(enable);
        self
    }

    /// Sets the share of the device that NCCL's kernels may take from other kernels: `CTAPolicy`. Since NCCL 2.27.3.
    #[must_use]
    pub fn cta_policy(mut self, policy: CtaPolicy) -> Self {
        self.cta_policy = Some(policy);
        self
    }

    /// Sets whether a communicator shares its resources with a communicator that is shrunk from it: `shrinkShare`.
    /// Since NCCL 2.27.3. `true` is refused, for the same reason as in [`split_share`](Self::split_share).
    #[must_use]
    pub fn shrink_share(mut self, share: bool) -> Self {
        self.shrink_share = Some(share);
        self
    }

    /// Sets the number of blocks of kernels that reduce in the NVLink switch: `nvlsCTAs`. Since NCCL 2.27.3.
    #[must_use]
    pub fn nvls_ctas(mut self, blocks: u32) -> Self {
        self.nvls_ctas = Some(blocks);
        self
    }

    /// Sets the number of channels to each peer over the network, for all-to-all and messages: `nChannelsPerNetPeer`.
    /// Since NCCL 2.28.3.
    #[must_use]
    pub fn channels_per_net_peer(mut self, channels: u32) -> Self {
        self.channels_per_net_peer = Some(channels);
        self
    }

    /// Sets whether NCCL gives NVLink priority when it schedules messages: `nvlinkCentricSched`. Since NCCL 2.28.3.
    #[must_use]
    pub fn nvlink_centric_sched(mut self, enable: bool) -> Self {
        self.nvlink_centric_sched = Some(enable);
        self
    }

    /// Sets how the communicator is used with CUDA graphs: `graphUsageMode`. NCCL needs less bookkeeping for
    /// [`GraphUsage::None`] and [`GraphUsage::One`] than for [`GraphUsage::Mixed`]. Since NCCL 2.29.2.
    #[must_use]
    pub fn graph_usage(mut self, usage: GraphUsage) -> Self {
        self.graph_usage = Some(usage);
        self
    }

    /// Sets the number of contexts for one-sided operations: `numRmaCtx`. Since NCCL 2.29.2.
    #[must_use]
    pub fn rma_contexts(mut self, contexts: u32) -> Self {
        self.rma_contexts = Some(contexts);
        self
    }

    /// Sets the maximum number of peers to which a rank sends messages at the same time: `maxP2pPeers`. Since NCCL
    /// 2.30.3.
    #[must_use]
    pub fn max_p2p_peers(mut self, peers: u32) -> Self {
        self.max_p2p_peers = Some(peers);
        self
    }

    /// Sets whether NCCL keeps the order of streams inside graphs: `graphStreamOrdering`. Since NCCL 2.30.7.
    #[must_use]
    pub fn graph_stream_ordering(mut self, keep: bool) -> Self {
        self.graph_stream_ordering = Some(keep);
        self
    }

    /// Sets whether kernels of several communicators run in the order in which they were launched:
    /// `launchOrderImplicit`. Since NCCL 2.31.2.
    #[must_use]
    pub fn launch_order_implicit(mut self, keep: bool) -> Self {
        self.launch_order_implicit = Some(keep);
        self
    }
}
