//! What a communicator can be told, and the only place where the environment is read.

use std::time::Duration;

/// Which links the host plane may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Transport {
    /// Shared memory inside a host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory only; ranks on several hosts are refused.
    Shm,
    /// TCP only, also inside a host.
    Tcp,
}

/// Settings of a communicator. Every rank of a job must use the same.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// How long any one wait may take before it ends in an error. Default: 30 minutes, as torch.distributed has it.
    pub timeout: Duration,
    /// Which links to use. Default: `Auto`.
    pub transport: Transport,
    /// Fold in rank order only: the same bits whatever the transport, algorithm and number of hosts. Costs bandwidth: each rank
    /// receives every other rank's share directly instead of partial results. Default: off.
    pub reproducible: bool,
    /// Overrides the host identity (boot id and namespaces) by which ranks are found to share a host. Default: `None`.
    pub host_identity: Option<String>,
    /// Overrides the choice of algorithm, as `name:from-to` ranges of bytes separated by commas, e.g.
    /// `doubling:0-16K,ring:16K-`. Default: `None`, the cost table decides.
    pub algorithm: Option<String>,
    /// The most bytes that the objects of one object collective may have together. Default: 256 MiB.
    pub object_limit_bytes: usize,
    /// The address on which this rank listens for peers of other hosts. Default: `None`, the address by which it reaches
    /// rank 0's store.
    pub listen_address: Option<std::net::IpAddr>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30 * 60),
            transport: Transport::Auto,
            reproducible: false,
            host_identity: None,
            algorithm: None,
            object_limit_bytes: 256 << 20,
            listen_address: None,
        }
    }
}

/// One variable of the environment. What is not UTF-8 in it is replaced, so that errors can quote it.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
