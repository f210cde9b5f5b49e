//! A Slurm cluster for the test: munge, a controller, and a daemon for each node. Each node is a network namespace.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::named_hosts::NamedHosts;
use crate::peer::{Peer, absent};

/// The seconds that the start may take on a loaded machine.
const START: &str = "90";

/// A running cluster. Dropping this value ends all of it.
pub(crate) struct Cluster {
    daemons: Vec<Peer>,
    hosts: NamedHosts,
    net: u8,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts a cluster of `nodes` nodes, `node1` and up, with the addresses 10.99.`net`.1 and up.
    pub(crate) fn up(net: u8, nodes: usize) -> Result<Self, String> {
        let missing: Vec<&str> = ["munged", "slurmctld", "slurmd", "srun"].into_iter().filter(|program| !is_installed(program)).collect();
        if !missing.is_empty() {
            return absent("launchers", format!("no Slurm here: {} not installed", missing.join(", ")));
        }
        let hosts = NamedHosts::up(net, &(1..=nodes).map(|node| format!("node{node}")).collect::<Vec<_>>())?;
        let folder = tempfile::Builder::new().prefix("slurm").permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
        let mut cluster = Self { daemons: Vec::new(), hosts, net, folder };
        cluster.write_configuration(nodes);
        if let Err(why) = cluster.start(nodes) {
            return absent("launchers", why);
        }
        Ok(cluster)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration and munge's key.
    fn write_configuration(&self, nodes: usize) {
        let at = self.folder.path().display();
        let hostname = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let (hostname, net) = (hostname.trim(), self.net);
        let mut text = format!(
            "ClusterName=interop\nSlurmctldHost={hostname}(10.99.{net}.1)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={at}/munge.socket\nCredType=cred/munge\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n\
             JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSlurmdParameters=config_overrides\nReturnToService=2\n\
             MessageTimeout={START}\n\
             StateSaveLocation={at}/state\nSlurmdSpoolDir={at}/spool-%n\nMailProg=/bin/true\nSlurmctldPidFile={at}/slurmctld.pid\n\
             SlurmdPidFile={at}/slurmd-%n.pid\nSlurmctldLogFile={at}/slurmctld.log\nSlurmdLogFile={at}/slurmd-%n.log\n"
        );
        for node in 1..=nodes {
            text += &format!("NodeName=node{node} NodeHostname={hostname} NodeAddr=10.99.{net}.{node} CPUs=8\n");
        }
        text += "PartitionName=all Nodes=ALL Default=YES State=UP\n";
        fs::write(self.path("slurm.conf"), text).unwrap();
        // No control groups are used here. The plugin is set because detecting their version fails if a namespace hides
        // them.
        fs::write(self.path("cgroup.conf"), "CgroupPlugin=cgroup/v1\n").unwrap();
        fs::write(self.path("munge.key"), random_key()).unwrap();
        fs::set_permissions(self.path("munge.key"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(self.path("state")).unwrap();
    }

    /// Starts the daemons and waits until a job has run on all nodes.
    fn start(&mut self, nodes: usize) -> Result<(), String> {
        // munged goes into the background once it accepts requests. It is killed with its host.
        let mut munged = self.hosts.command(0, "munged");
        munged.arg("--force");
        for (option, file) in
            [("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"), ("seed-file", "munge.seed")]
        {
            munged.arg(format!("--{option}={}", self.path(file).display()));
        }
        self.must_end(munged.arg(format!("--log-file={}", self.path("munge.log").display())))?;
        self.daemons.push(Peer::start(self.command(0, "slurmctld").args(["-D", "-c"])));
        for node in 1..=nodes {
            self.daemons.push(Peer::start(self.command(node - 1, "slurmd").args(["-D", "-c", "-N", &format!("node{node}")])));
        }
        self.must_end(self.command(0, "timeout").args([START, "srun", "-N", &nodes.to_string(), "true"]))
    }

    /// Waits for a command to succeed. Otherwise returns its errors and those in the daemons' logs.
    fn must_end(&self, command: &mut Command) -> Result<(), String> {
        let (success, _, errors) = Peer::start(command).end();
        if success {
            return Ok(());
        }
        let logs = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let logs = logs.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        let said: String = logs.map(|log| fs::read_to_string(log).unwrap_or_default()).collect();
        let troubles: Vec<&str> = said.lines().filter(|line| line.contains("error:") || line.contains("fatal:")).collect();
        Err(format!("Slurm does not start: {command:?} fails: {errors}\nits daemons say:\n{}", troubles.join("\n")))
    }

    /// Returns a command that runs on a node.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        let mut command = self.hosts.command(host, program);
        command.env("SLURM_CONF", self.path("slurm.conf")).stdin(Stdio::null());
        command
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The nodes' daemons end before the controller. The processes that they started, and munge, end with the hosts.
        while self.daemons.pop().is_some() {}
    }
}

/// Whether a program is installed. Daemons are in folders outside a user's `PATH`.
fn is_installed(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':').chain(["/usr/sbin", "/sbin"]).any(|folder| std::path::Path::new(folder).join(program).exists())
}

/// Returns a key for munge.
fn random_key() -> [u8; 128] {
    let mut bytes = [0; 128];
    std::io::Read::read_exact(&mut fs::File::open("/dev/urandom").unwrap(), &mut bytes).unwrap();
    bytes
}
