//! Hosts that can resolve each other's names.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::hosts::Hosts;

/// Network namespaces whose `/etc/hosts` names them all. Dropping this value removes them.
pub(crate) struct NamedHosts {
    hosts: Hosts,
}

impl NamedHosts {
    /// Creates one host for each name, with the addresses 10.99.`net`.1 and up.
    pub(crate) fn up(net: u8, names: &[String]) -> Result<Self, String> {
        let hosts = Hosts::up(net, names.len()).map_err(|why| format!("network namespaces cannot be made: {why}"))?;
        let named = Self { hosts };
        let lines = names.iter().zip(1..).map(|(name, number)| format!("10.99.{net}.{number} {name}\n"));
        let text = format!("127.0.0.1 localhost\n{}", lines.collect::<String>());
        for host in 0..names.len() {
            fs::create_dir_all(named.etc(host)).map_err(|error| error.to_string())?;
            fs::write(named.etc(host).join("hosts"), &text).map_err(|error| error.to_string())?;
        }
        Ok(named)
    }

    /// The folder that `ip netns exec` mounts over /etc.
    fn etc(&self, host: usize) -> PathBuf {
        Path::new("/etc/netns").join(self.hosts.space(host))
    }

    /// Returns a command that runs on a host.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        self.hosts.command(host, program)
    }
}

impl Drop for NamedHosts {
    fn drop(&mut self) {
        for host in 0..self.hosts.count {
            drop(fs::remove_dir_all(self.etc(host)));
        }
        // The folder stays if another test or program has files in it.
        drop(fs::remove_dir("/etc/netns"));
    }
}
