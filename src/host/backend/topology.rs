//! Which ranks share a host.

use std::sync::Arc;

use crate::config::Transport;

/// The ranks of a communicator, host by host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// Each host's ranks, ascending. Hosts are in the order of their lowest rank.
    hosts: Vec<Vec<usize>>,
    /// This rank's host.
    host: usize,
    /// This rank's index on its host.
    local: usize,
    /// For each share: the ranks that carry it between hosts, one rank of each host. There are as many shares as the
    /// smallest host has ranks.
    share_owners: Vec<Arc<[usize]>>,
    /// Every rank.
    everyone: Arc<[usize]>,
}

impl Topology {
    /// Groups ranks by host identity; with [`Transport::Tcp`] every rank counts as a host of its own.
    pub(crate) fn new(identities: &[String], rank: usize, transport: Transport) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let mut names: Vec<&str> = Vec::new();
        for (member, identity) in identities.iter().enumerate() {
            match names.iter().position(|name| *name == identity && transport != Transport::Tcp) {
                Some(host) => hosts[host].push(member),
                None => {
                    names.push(identity);
                    hosts.push(vec![member]);
                }
            }
        }
        let host = hosts.iter().position(|members| members.contains(&rank)).unwrap_or_default();
        let local = hosts[host].iter().position(|member| *member == rank).unwrap_or_default();
        let shares = hosts.iter().map(Vec::len).min().unwrap_or(1);
        let share_owners = (0..shares).map(|share| hosts.iter().map(|members| members[share]).collect()).collect();
        Self { hosts, host, local, share_owners, everyone: (0..identities.len()).collect() }
    }

    /// Returns the ranks of this rank's host, ascending.
    pub(crate) fn local_ranks(&self) -> &[usize] {
        &self.hosts[self.host]
    }

    /// Returns this rank's index on its host.
    pub(crate) fn local(&self) -> usize {
        self.local
    }

    /// Returns the number of hosts.
    pub(crate) fn host_count(&self) -> usize {
        self.hosts.len()
    }

    /// Returns the index of this rank's host among the hosts.
    pub(crate) fn host(&self) -> usize {
        self.host
    }

    /// Returns how many ranks of every host carry a share between hosts.
    pub(crate) fn shares(&self) -> usize {
        self.share_owners.len()
    }

    /// Returns the ranks that carry share `share`, one of each host.
    pub(crate) fn share_owners(&self, share: usize) -> Arc<[usize]> {
        Arc::clone(&self.share_owners[share])
    }

    /// Returns every rank.
    pub(crate) fn everyone(&self) -> Arc<[usize]> {
        Arc::clone(&self.everyone)
    }

    /// Returns the host of a rank, and the rank's index on it.
    pub(crate) fn place(&self, rank: usize) -> (usize, usize) {
        let found = self.hosts.iter().enumerate().find_map(|(host, members)| {
            let local = members.iter().position(|member| *member == rank)?;
            Some((host, local))
        });
        found.unwrap_or_default()
    }

    /// Whether all ranks share one host; also true for a single rank.
    pub(crate) fn is_one_host(&self) -> bool {
        self.hosts.len() == 1
    }

    /// Whether no two ranks share a host.
    pub(crate) fn is_scattered(&self) -> bool {
        self.hosts.iter().all(|members| members.len() == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn ranks_are_grouped_by_identity_in_order() {
        let topology = Topology::new(&names("a b a c b a"), 4, Transport::Auto);
        assert_eq!(topology.local_ranks(), [1, 4]);
        assert_eq!((topology.host(), topology.local(), topology.host_count(), topology.shares()), (1, 1, 3, 1));
        assert_eq!(topology.place(5), (0, 2));
        assert_eq!((&topology.share_owners(0)[..], &topology.everyone()[..]), (&[0, 1, 3][..], &[0, 1, 2, 3, 4, 5][..]));
        assert!(!topology.is_one_host() && !topology.is_scattered());
    }

    #[test]
    fn tcp_makes_every_rank_a_host() {
        let topology = Topology::new(&names("a a a"), 1, Transport::Tcp);
        assert!(topology.is_scattered());
        assert_eq!(topology.local_ranks(), [1]);
    }
}
