//! Hosts with addresses of their own: network namespaces joined by a bridge. Needs root and `ip`.

use std::process::{Command, Stdio};

/// Runs a command; what it says where it fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Hosts that vanish with this value.
pub struct Hosts {
    tag: String,
    pub count: usize,
}

impl Hosts {
    /// `count` namespaces on one bridge, with the addresses 10.99.`net`.1 and up.
    pub fn up(net: u8, count: usize) -> Result<Self, String> {
        let hosts = Self { tag: format!("c{}n{net}", std::process::id() % 10_000), count };
        let bridge = format!("{}br", hosts.tag);
        run("ip", &["link", "add", &bridge, "type", "bridge"])?;
        run("ip", &["link", "set", &bridge, "up"])?;
        for host in 0..count {
            let (space, outer) = (hosts.space(host), format!("{}v{host}", hosts.tag));
            run("ip", &["netns", "add", &space])?;
            run("ip", &["link", "add", &outer, "type", "veth", "peer", "name", "eth0", "netns", &space])?;
            run("ip", &["link", "set", &outer, "master", &bridge, "up"])?;
            run("ip", &["-n", &space, "addr", "add", &format!("10.99.{net}.{}/24", host + 1), "dev", "eth0"])?;
            run("ip", &["-n", &space, "link", "set", "lo", "up"])?;
            run("ip", &["-n", &space, "link", "set", "eth0", "up"])?;
        }
        Ok(hosts)
    }

    /// The namespace of a host.
    pub fn space(&self, host: usize) -> String {
        format!("{}h{host}", self.tag)
    }

    /// A command on a host.
    pub fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host), program]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..self.count {
            let _ = run("ip", &["netns", "del", &self.space(host)]);
            let _ = run("ip", &["link", "del", &format!("{}v{host}", self.tag)]);
        }
        let _ = run("ip", &["link", "del", &format!("{}br", self.tag)]);
    }
}
