//! Reads the environment variables that launchers set for the processes that they start.
//!
//! The first launcher in this table whose rank and size are both set is used:
//!
//! | launcher | rank, size | local rank, local size | address and port |
//! | --- | --- | --- | --- |
//! | torchrun, collrun, by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK`, `…_SIZE` | `…_LOCAL_RANK`, `…_LOCAL_SIZE` | loopback if all ranks are local |
//! | Hydra (MPICH, Intel MPI) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | loopback if all ranks are local |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_NTASKS` or `SLURM_NPROCS` | `SLURM_LOCALID` | the first host of the step |
//! | another PMI | `PMI_RANK`, `PMI_SIZE` | | loopback if there is one rank |
//! | a Kubernetes indexed job | `JOB_COMPLETION_INDEX`, `WORLD_SIZE` | | `MASTER_ADDR` |
//!
//! Slurm comes after the MPI launchers: inside an allocation, their processes inherit Slurm's variables. In such a
//! process, Slurm's variables describe the batch script or the launcher's own helpers. `MPI_LOCALRANKID` distinguishes
//! Hydra from another PMI. `srun` may set `PMI_RANK` too, and then Slurm's own variables give more information.
//!
//! `MASTER_ADDR` and `MASTER_PORT` apply to every launcher. Without `MASTER_PORT` the port is chosen as follows:
//!
//! - If the launcher names the job (`PMIX_NAMESPACE`, `PMI_JOBID`, Slurm's job and step), the port is derived from that
//!   name, and lies between 20000 and 32000. Two jobs on one host then rarely collide.
//! - If it does not, and Open MPI or a PMI launcher runs all ranks on one host, the port is derived from their parent's
//!   process id. The parent must be the launcher, so a wrapper script must `exec` the program, or `MASTER_PORT` must be
//!   set.
//! - Otherwise it is 29500.

#[cfg(test)]
mod tests;

use super::url::{self, DEFAULT_PORT};
use crate::error::{Error, Result};

/// The first port that is derived from a job's name.
const FIRST_PORT: u64 = 20_000;
/// The last such port, below the range from which systems take ports for outgoing connections.
const LAST_PORT: u64 = 32_000;
/// The address at which ranks of one host meet.
const LOOPBACK: &str = "127.0.0.1";
/// The prefix of all keys of this crate, so that they do not collide with PyTorch's in the store of an elastic agent.
const PREFIX: &str = "collectives";

/// The variables that a launcher set for this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    /// This process's rank.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) world_size: usize,
    /// This process's rank among those of its host.
    pub(crate) local_rank: Option<usize>,
    /// The number of ranks on its host.
    pub(crate) local_world_size: Option<usize>,
    /// Whether the ranks are on several hosts, if the launcher specifies this by means other than the numbers above.
    pub(crate) several_hosts: Option<bool>,
    /// The host of rank 0: a name or an address, IPv6 without brackets.
    pub(crate) address: String,
    /// The port of the store.
    pub(crate) port: u16,
    /// Whether the launcher serves the store, so that rank 0 must not.
    pub(crate) agent_store: bool,
    /// The prefix of all keys.
    pub(crate) prefix: String,
    /// The launcher's name.
    pub(crate) launcher: &'static str,
}

/// The number of hosts that a job's ranks are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hosts {
    One,
    Several,
    Unknown,
}

impl Launch {
    /// Returns the number of hosts, as far as the launcher specifies it.
    pub(crate) fn hosts(&self) -> Hosts {
        match (self.local_world_size, self.several_hosts) {
            _ if self.world_size == 1 => Hosts::One,
            (Some(local), _) if local < self.world_size => Hosts::Several,
            (Some(_), _) | (None, Some(false)) => Hosts::One,
            (None, Some(true)) => Hosts::Several,
            (None, None) => Hosts::Unknown,
        }
    }
}

/// The names of the variables with the rank and the size.
type Pair = (&'static str, &'static [&'static str]);

const PLAIN: Pair = ("RANK", &["WORLD_SIZE"]);
const OPEN_MPI: Pair = ("OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"]);
const PMI: Pair = ("PMI_RANK", &["PMI_SIZE"]);
const SLURM: Pair = ("SLURM_PROCID", &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"]);
const KUBERNETES: Pair = ("JOB_COMPLETION_INDEX", &["WORLD_SIZE"]);

/// The variables that errors show if they are set.
const MENTIONED: &[&str] = &[
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_NODELIST",
    "SLURM_JOB_ID",
    "JOB_COMPLETION_INDEX",
];

/// Finds this process's launcher and rank from the variables that `read` returns. `parent_process` is the id of the
/// process that started this one.
pub(crate) fn detect(read: &dyn Fn(&str) -> Option<String>, parent_process: u32) -> Result<Launch> {
    let variables = Variables { read };
    let launch = if variables.has(PLAIN) {
        plain(&variables)?
    } else if variables.has(OPEN_MPI) {
        open_mpi(&variables, parent_process)?
    } else if variables.has(PMI) && variables.text("MPI_LOCALRANKID").is_some() {
        pmi(&variables, "Hydra", parent_process)?
    } else if variables.has(SLURM) {
        slurm(&variables)?
    } else if variables.has(PMI) {
        pmi(&variables, "PMI", parent_process)?
    } else if variables.has(KUBERNETES) {
        kubernetes(&variables)?
    } else {
        return Err(variables.none());
    };
    check(&launch, &variables)?;
    Ok(Launch { several_hosts: variables.several_hosts(launch.launcher)?, ..launch })
}

/// Reads the variables of torchrun and of all launchers that set the same ones.
fn plain(variables: &Variables<'_>) -> Result<Launch> {
    let local_rank = variables.number("LOCAL_RANK")?;
    let local_world_size = variables.number("LOCAL_WORLD_SIZE")?;
    let launcher = if variables.text("TORCHELASTIC_RUN_ID").is_some() { "torchrun" } else { "RANK and WORLD_SIZE" };
    variables.launch(launcher, PLAIN, (local_rank, local_world_size), |_| Ok(None), |_| Ok(DEFAULT_PORT))
}

/// Reads the variables of Open MPI's mpirun. The addresses it exports belong to its own helpers, not to rank 0, so
/// they cannot be used.
fn open_mpi(variables: &Variables<'_>, parent: u32) -> Result<Launch> {
    let local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK")?;
    let local_world_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let port = |local| Ok(variables.job_port("PMIX_NAMESPACE", local, parent));
    variables.launch("Open MPI", OPEN_MPI, (local_rank, local_world_size), |_| Ok(None), port)
}

/// Reads the variables of a PMI launcher.
fn pmi(variables: &Variables<'_>, launcher: &'static str, parent: u32) -> Result<Launch> {
    let local_rank = variables.number("MPI_LOCALRANKID")?;
    let local_world_size = variables.number("MPI_LOCALNRANKS")?;
    let port = |local| Ok(variables.job_port("PMI_JOBID", local, parent));
    variables.launch(launcher, PMI, (local_rank, local_world_size), |_| Ok(None), port)
}

/// Reads the variables of a Kubernetes job with completion mode Indexed.
fn kubernetes(variables: &Variables<'_>) -> Result<Launch> {
    variables.launch("Kubernetes", KUBERNETES, (None, None), |_| Ok(None), |_| Ok(DEFAULT_PORT))
}

/// Reads the variables of `srun`.
fn slurm(variables: &Variables<'_>) -> Result<Launch> {
    let world_size = variables.first_number(SLURM.1)?;
    let in_step = ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST"].iter().any(|name| variables.text(name).is_some());
    if !in_step && world_size > 1 {
        let reason = format!(
            "not set, although SLURM_PROCID is: this process belongs to the batch script and is not one of \
             the {world_size} ranks; start it with srun"
        );
        return Err(variables.wrong("SLURM_STEP_ID", &reason));
    }
    let local = (variables.number("SLURM_LOCALID")?, slurm_local_world_size(variables)?);
    variables.launch("Slurm", SLURM, local, |local| slurm_address(variables, local), |_| Ok(slurm_port(variables)))
}

/// Returns the first host of the step; loopback if it is the only one.
fn slurm_address(variables: &Variables<'_>, local: bool) -> Result<Option<String>> {
    if local {
        return Ok(Some(LOOPBACK.to_owned()));
    }
    for name in ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"] {
        if let Some(list) = variables.text(name) {
            let wrong = |reason: String| variables.wrong(name, &format!("{:?}: {reason}", shortened(&list)));
            let (host, only) = first_host(&list).map_err(wrong)?;
            return Ok(Some(if only { LOOPBACK.to_owned() } else { host }));
        }
    }
    Ok(None)
}

/// Derives a port from the job and the step, so that two steps on one host do not collide.
fn slurm_port(variables: &Variables<'_>) -> u16 {
    let text = |names: [&str; 2]| names.iter().find_map(|name| variables.text(name));
    let job = text(["SLURM_JOB_ID", "SLURM_JOBID"]);
    let step = text(["SLURM_STEP_ID", "SLURM_STEPID"]).unwrap_or_default();
    job.map_or(DEFAULT_PORT, |job| port_of(&format!("{job}.{step}")))
}

/// Returns the number of tasks on this host, if Slurm gives it: `2(x3),1` is three hosts with two tasks and one with
/// one.
fn slurm_local_world_size(variables: &Variables<'_>) -> Result<Option<usize>> {
    let (Some(list), Some(node)) = (variables.text("SLURM_STEP_TASKS_PER_NODE"), variables.number("SLURM_NODEID")?) else {
        return Ok(None);
    };
    let mut before = node;
    for group in list.split(',') {
        let (tasks, hosts) = group.split_once("(x").map_or((group, Some("1")), |(tasks, hosts)| (tasks, hosts.strip_suffix(')')));
        let parsed = tasks.parse::<usize>().ok().zip(hosts.and_then(|hosts| hosts.parse::<usize>().ok()));
        let Some((tasks, hosts)) = parsed else {
            return Err(variables
                .wrong("SLURM_STEP_TASKS_PER_NODE", &format!("{:?} is not a list of counts such as \"2(x3),1\"", shortened(&list))));
        };
        if before < hosts {
            return Ok(Some(tasks));
        }
        before -= hosts;
    }
    Ok(None)
}

/// Returns the first host of a list such as `node[01-03,7],login`, and whether it is the only one. Only the first is
/// expanded: a short list can name more hosts than fit into memory.
fn first_host(list: &str) -> std::result::Result<(String, bool), String> {
    let mut host = String::new();
    let mut only = true;
    let mut rest = list;
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        let (literal, behind) = rest.split_at(end);
        if literal.contains(char::is_whitespace) {
            return Err(format!("{literal:?} cannot be part of a host name"));
        }
        host.push_str(literal);
        match behind.as_bytes().first() {
            None => break,
            Some(b',') => {
                only = false;
                break;
            }
            Some(b']') => return Err("a closing bracket has no opening bracket".to_owned()),
            Some(_) => {
                let (ranges, after) = behind[1..].split_once(']').ok_or("an opening bracket has no closing bracket")?;
                let first = ranges.split(['-', ',']).next().unwrap_or_default();
                if first.is_empty() || !ranges.bytes().all(|byte| byte.is_ascii_digit() || b"-,".contains(&byte)) {
                    return Err(format!("{ranges:?} in brackets is not a list of numbers"));
                }
                only &= first.len() == ranges.len();
                host.push_str(first);
                rest = after;
            }
        }
    }
    if host.is_empty() { Err("the first host has no name".to_owned()) } else { Ok((host, only)) }
}

/// Checks the variables against each other.
fn check(launch: &Launch, variables: &Variables<'_>) -> Result<()> {
    let wrong = |reason: String| Err(variables.wrong(launch.launcher, &reason));
    // A rank outside the world is refused later, when the others can be notified: see `rendezvous`.
    if launch.world_size == 0 {
        return wrong("the world size 0 is too small; a job has at least one rank".to_owned());
    }
    if !url::is_host(&launch.address) {
        return wrong(format!("{:?} is not a valid host for rank 0", shortened(&launch.address)));
    }
    match (launch.local_rank, launch.local_world_size) {
        (Some(rank), Some(size)) if rank >= size => wrong(format!("local rank {rank} is not below the local world size {size}")),
        (Some(rank), None) if rank >= launch.world_size => {
            wrong(format!("local rank {rank} is not below the world size {}", launch.world_size))
        }
        (_, Some(size)) if size > launch.world_size => {
            wrong(format!("the local world size {size} is above the world size {}", launch.world_size))
        }
        _ => Ok(()),
    }
}

/// Whether the launcher serves the store on this host and port, as torchrun's agent does.
pub(crate) fn serves_store(read: &dyn Fn(&str) -> Option<String>, address: &str, port: u16) -> bool {
    let variables = Variables { read };
    let asked = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let same_port = variables.text("MASTER_PORT").is_some_and(|value| url::port(&value) == Some(port));
    asked && same_port && variables.address().is_some_and(|value| value == address)
}

/// Returns the prefix of all keys. Each restart by an elastic agent gets a new one, so that it does not read the
/// previous keys.
pub(crate) fn prefix(read: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let restarts = Variables { read }.number("TORCHELASTIC_RESTART_COUNT")?;
    Ok(restarts.map_or_else(|| PREFIX.to_owned(), |restarts| format!("{PREFIX}/attempt_{restarts}")))
}

/// Access to the environment variables.
struct Variables<'a> {
    read: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    /// Returns a variable; an empty one counts as not set.
    fn text(&self, name: &str) -> Option<String> {
        (self.read)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Returns a variable that is a number, if it is set.
    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let number = url::digits(&value).and_then(|digits| digits.parse().ok());
        number.map(Some).ok_or_else(|| self.wrong(name, &format!("{value:?} is not a number")))
    }

    /// Whether a launcher's rank and size are set.
    fn has(&self, (rank, sizes): Pair) -> bool {
        self.text(rank).is_some() && sizes.iter().any(|size| self.text(size).is_some())
    }

    /// Returns the first of `names` that is set, as a number. If none is set, the error names the first.
    fn first_number(&self, names: &[&'static str]) -> Result<usize> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(number);
            }
        }
        Err(self.wrong(names.first().copied().unwrap_or_default(), "not set"))
    }

    /// Returns `MASTER_ADDR`, without brackets around IPv6.
    fn address(&self) -> Option<String> {
        let address = self.text("MASTER_ADDR")?;
        let bare = address.strip_prefix('[').and_then(|address| address.strip_suffix(']'));
        Some(bare.map_or(address.clone(), str::to_owned))
    }

    /// Combines what a launcher specifies. `address` and `port` apply if `MASTER_ADDR` and `MASTER_PORT` are not set.
    /// Their argument is whether all ranks are on this host.
    fn launch(
        &self,
        launcher: &'static str,
        (rank, sizes): Pair,
        (local_rank, local_world_size): (Option<usize>, Option<usize>),
        address: impl FnOnce(bool) -> Result<Option<String>>,
        port: impl FnOnce(bool) -> Result<u16>,
    ) -> Result<Launch> {
        let rank = self.first_number(&[rank])?;
        let world_size = self.first_number(sizes)?;
        let local = world_size == 1 || local_world_size == Some(world_size);
        let address = match self.address() {
            Some(address) => address,
            None => address(local)?.or_else(|| local.then(|| LOOPBACK.to_owned())).ok_or_else(|| {
                self.wrong(
                    "MASTER_ADDR",
                    &format!("not set, and {launcher} does not give the host of rank 0 (of {world_size} ranks); set it to that host"),
                )
            })?,
        };
        let port = match self.text("MASTER_PORT") {
            Some(value) => {
                url::port(&value).ok_or_else(|| self.wrong("MASTER_PORT", &format!("{value:?} is not a port from 0 to 65535")))?
            }
            None => port(local)?,
        };
        let agent_store = serves_store(self.read, &address, port);
        let prefix = prefix(self.read)?;
        Ok(Launch { rank, world_size, local_rank, local_world_size, several_hosts: None, address, port, agent_store, prefix, launcher })
    }

    /// Whether the ranks are on several hosts, if a variable gives the number of hosts.
    fn several_hosts(&self, launcher: &str) -> Result<Option<bool>> {
        let names: &[&str] = match launcher {
            "Slurm" => &["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"],
            "torchrun" | "RANK and WORLD_SIZE" => &["GROUP_WORLD_SIZE"],
            _ => &[],
        };
        for name in names {
            if let Some(hosts) = self.number(name)? {
                return Ok(Some(hosts > 1));
            }
        }
        Ok(None)
    }

    /// Derives a port from the job's name in `variable`; without it, and if all ranks are on one host, from the
    /// launcher's process id.
    fn job_port(&self, variable: &str, local: bool, parent: u32) -> u16 {
        match self.text(variable) {
            Some(job) => port_of(&job),
            None if local => port_of(&parent.to_string()),
            None => DEFAULT_PORT,
        }
    }

    /// Makes the error for a variable, including the variables that were found.
    fn wrong(&self, what: &str, reason: &str) -> Error {
        Error::config(what, format!("{reason} (found: {})", self.found()))
    }

    /// Makes the error for an unrecognised launcher.
    fn none(&self) -> Error {
        for (rank, sizes) in [PLAIN, OPEN_MPI, PMI, SLURM, KUBERNETES] {
            let size = sizes[0];
            match (self.text(rank).is_some(), sizes.iter().any(|size| self.text(size).is_some())) {
                (true, false) => return self.wrong(size, &format!("not set, although {rank} is")),
                // A Kubernetes job's size variable is also the plain one, so the error names both rank variables.
                (false, true) if rank == "RANK" => {
                    return self.wrong(rank, &format!("not set (nor JOB_COMPLETION_INDEX), although {size} is"));
                }
                (false, true) => return self.wrong(rank, &format!("not set, although {size} is")),
                _ => {}
            }
        }
        self.wrong(
            "RANK",
            "not set, and the rank variable of no other launcher is set; start with torchrun, collrun, srun or mpirun, or set RANK, \
             WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    }

    /// Lists the variables that are set.
    fn found(&self) -> String {
        let found: Vec<String> =
            MENTIONED.iter().filter_map(|name| (self.read)(name).map(|value| format!("{name}={:?}", shortened(&value)))).collect();
        if found.is_empty() { "none of the variables of any launcher".to_owned() } else { found.join(", ") }
    }
}

/// Returns the first 80 characters of a text.
fn shortened(value: &str) -> String {
    value.chars().take(80).collect()
}

/// Derives a port from 20000 to 32000 from a job's name, by FNV-1a, so that it is the same in every build.
fn port_of(job: &str) -> u16 {
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // The sum is at most 32000, so it fits.
    (FIRST_PORT + hash % (LAST_PORT - FIRST_PORT + 1)) as u16
}
