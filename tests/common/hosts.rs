//! Hosts with separate addresses: network namespaces joined by a bridge. Needs root and `ip`.

use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// Ends a test and reports that it did not run, even if the output of tests is captured.
macro_rules! skip {
    ($($why:tt)*) => {{
        use std::io::Write as _;
        let test = std::thread::current();
        let _ = writeln!(std::io::stderr(), "skipped: {}: {}", test.name().unwrap_or_default(), format_args!($($why)*));
        return;
    }};
}
pub(crate) use skip;

/// Runs a command. Returns its error output if it fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// A set of hosts. Dropping this value removes them.
#[allow(dead_code, reason = "each test program uses what it needs")]
pub struct Hosts {
    tag: String,
    pub count: usize,
}

#[allow(dead_code, reason = "each test program uses what it needs")]
impl Hosts {
    /// Creates `count` namespaces on one bridge, with the addresses 10.99.`net`.1 and up.
    pub fn up(net: u8, count: usize) -> Result<Self, String> {
        let hosts = Self { tag: format!("c{}n{net}", std::process::id()), count };
        // A killed test leaves its namespaces behind, and this process may have the same pid.
        hosts.clear();
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

    /// Cuts a host off from the network, without notifying either end.
    pub fn cut(&self, host: usize) {
        run("ip", &["link", "set", &format!("{}v{host}", self.tag), "nomaster"]).unwrap();
    }

    /// Reconnects a host.
    pub fn heal(&self, host: usize) {
        run("ip", &["link", "set", &format!("{}v{host}", self.tag), "master", &format!("{}br", self.tag)]).unwrap();
    }

    /// Returns the name of a host's namespace.
    pub fn space(&self, host: usize) -> String {
        format!("{}h{host}", self.tag)
    }

    /// Ends the processes on the hosts and removes the hosts.
    fn clear(&self) {
        for host in 0..self.count {
            self.kill_all(host);
            let _ = run("ip", &["netns", "del", &self.space(host)]);
            let _ = run("ip", &["link", "del", &format!("{}v{host}", self.tag)]);
        }
        let _ = run("ip", &["link", "del", &format!("{}br", self.tag)]);
    }

    /// Kills the processes on a host, including daemons. Repeats this, since some may have started others meanwhile.
    fn kill_all(&self, host: usize) {
        for _ in 0..100 {
            let Ok(listed) = Command::new("ip").args(["netns", "pids", &self.space(host)]).output() else { return };
            let listed = String::from_utf8_lossy(&listed.stdout);
            let mut pids = listed.lines().filter_map(|line| Pid::from_raw(line.trim().parse().ok()?)).peekable();
            if pids.peek().is_none() {
                return;
            }
            pids.for_each(|pid| kill_process(pid, Signal::KILL).unwrap_or_default());
        }
    }

    /// Returns a command that runs on a host.
    pub fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(host), program]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.clear();
    }
}
