//! The place of a host in its job.

/// The place of this host in its job.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The job runs on this host alone. The store's address and port are `None` if the command line does not give them.
    Alone { address: Option<String>, port: Option<u16> },
    /// One of several hosts.
    Among { node: u16, address: String, port: u16 },
    /// One of several hosts. The store gives each host its number.
    Unnumbered { address: String, port: u16 },
    /// One of a number of hosts that may change.
    Elastic { address: String, port: u16 },
}
