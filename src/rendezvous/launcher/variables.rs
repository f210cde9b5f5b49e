//! The environment as launchers set it: numbers, names and ports in it, and what was found where something is missing.

use crate::rendezvous::url::{self, DEFAULT_PORT};
use crate::{Error, Result};

/// The first port that is made from a job's name.
pub(super) const FIRST_PORT: u64 = 20_000;
/// The last one; below the range from which systems take ports for outgoing connections.
pub(super) const LAST_PORT: u64 = 32_000;
/// Where ranks of one host meet.
pub(super) const LOOPBACK: &str = "127.0.0.1";
/// Before all keys of this crate, so that they do not meet those of PyTorch in the store of an elastic agent.
pub(super) const PREFIX: &str = "collectives";

/// What a launcher has told this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    /// This process's rank.
    pub(crate) rank: usize,
    /// How many ranks there are.
    pub(crate) world_size: usize,
    /// Its rank among those of its host.
    pub(crate) local_rank: Option<usize>,
    /// How many ranks its host has.
    pub(crate) local_world_size: Option<usize>,
    /// The host of rank 0: a name or an address, IPv6 without brackets.
    pub(crate) address: String,
    /// The port of the store.
    pub(crate) port: u16,
    /// Whether the launcher serves the store, so that rank 0 must not.
    pub(crate) agent_store: bool,
    /// What comes before all keys.
    pub(crate) prefix: String,
    /// Who the launcher is.
    pub(crate) launcher: &'static str,
}

/// The rank and the size as the environment says them, with the names under which it does.
pub(super) type Pair = (&'static str, &'static [&'static str]);

pub(super) const PLAIN: Pair = ("RANK", &["WORLD_SIZE"]);
pub(super) const OPEN_MPI: Pair = ("OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"]);
pub(super) const PMI: Pair = ("PMI_RANK", &["PMI_SIZE"]);
pub(super) const SLURM: Pair = ("SLURM_PROCID", &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"]);
pub(super) const KUBERNETES: Pair = ("JOB_COMPLETION_INDEX", &["WORLD_SIZE"]);

/// The variables that errors mention where they are set.
pub(super) const MENTIONED: &[&str] = &[
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

/// Whether the launcher serves the store on this host and port, as torchrun's agent does.
pub(crate) fn serves_store(read: &dyn Fn(&str) -> Option<String>, address: &str, port: u16) -> bool {
    let variables = Variables { read };
    let asked = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let same_port = variables.text("MASTER_PORT").is_some_and(|value| url::port(&value) == Some(port));
    asked && same_port && variables.address().is_some_and(|value| value == address)
}

/// What comes before all keys. Each restart by an elastic agent gets its own, so that it does not read the keys of the last.
pub(crate) fn prefix(read: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let restarts = Variables { read }.number("TORCHELASTIC_RESTART_COUNT")?;
    Ok(restarts.map_or_else(|| PREFIX.to_owned(), |restarts| format!("{PREFIX}/attempt_{restarts}")))
}

/// The environment.
pub(super) struct Variables<'a> {
    pub(super) read: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    /// A variable; one that is set to nothing counts as not set.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.read)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// A variable that is a number, if it is set.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let number = url::digits(&value).and_then(|digits| digits.parse().ok());
        number.map(Some).ok_or_else(|| self.wrong(name, &format!("{value:?} is no number")))
    }

    /// Whether a launcher's rank and size are set.
    pub(super) fn has(&self, (rank, sizes): Pair) -> bool {
        self.text(rank).is_some() && sizes.iter().any(|size| self.text(size).is_some())
    }

    /// The first of `names` that is set, as a number; all of them missing is an error that names the first.
    pub(super) fn first_number(&self, names: &[&'static str]) -> Result<usize> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(number);
            }
        }
        Err(self.wrong(names.first().copied().unwrap_or_default(), "not set"))
    }

    /// `MASTER_ADDR`, without brackets around IPv6.
    pub(super) fn address(&self) -> Option<String> {
        let address = self.text("MASTER_ADDR")?;
        let bare = address.strip_prefix('[').and_then(|address| address.strip_suffix(']'));
        Some(bare.map_or(address.clone(), str::to_owned))
    }

    /// Puts together what a launcher says. `address` and `port` say where to meet where `MASTER_ADDR` and `MASTER_PORT` do not; both are
    /// told whether all ranks are on this host.
    pub(super) fn launch(
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
                    &format!("not set, and {launcher} does not say where rank 0 of these {world_size} runs; set it to the host of rank 0"),
                )
            })?,
        };
        let port = match self.text("MASTER_PORT") {
            Some(value) => url::port(&value).ok_or_else(|| self.wrong("MASTER_PORT", &format!("{value:?} is no port from 0 to 65535")))?,
            None => port(local)?,
        };
        let agent_store = serves_store(self.read, &address, port);
        let prefix = prefix(self.read)?;
        Ok(Launch { rank, world_size, local_rank, local_world_size, address, port, agent_store, prefix, launcher })
    }

    /// A port made from the job's name in `variable`; else, for ranks of one host, from the launcher's process id.
    pub(super) fn job_port(&self, variable: &str, local: bool, parent: u32) -> u16 {
        match self.text(variable) {
            Some(job) => port_of(&job),
            None if local => port_of(&parent.to_string()),
            None => DEFAULT_PORT,
        }
    }

    /// The error for a variable, with those that were found.
    pub(super) fn wrong(&self, what: &str, reason: &str) -> Error {
        Error::config(what, format!("{reason} (found: {})", self.found()))
    }

    /// The error where no launcher is recognised.
    pub(super) fn none(&self) -> Error {
        for (rank, sizes) in [PLAIN, OPEN_MPI, PMI, SLURM, KUBERNETES] {
            let size = sizes[0];
            match (self.text(rank).is_some(), sizes.iter().any(|size| self.text(size).is_some())) {
                (true, false) => return self.wrong(size, &format!("not set, although {rank} is")),
                // A Kubernetes job's size is also the plain one, so that both ranks are named.
                (false, true) if rank == "RANK" => {
                    return self.wrong(rank, &format!("not set (nor JOB_COMPLETION_INDEX), although {size} is"));
                }
                (false, true) => return self.wrong(rank, &format!("not set, although {size} is")),
                _ => {}
            }
        }
        self.wrong("RANK", "not set, nor is the rank of any launcher known here; start with torchrun, collrun, srun or mpirun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    }

    /// The variables that are set, in words.
    pub(super) fn found(&self) -> String {
        let found: Vec<String> =
            MENTIONED.iter().filter_map(|name| (self.read)(name).map(|value| format!("{name}={:?}", shortened(&value)))).collect();
        if found.is_empty() { "none of the variables of any launcher".to_owned() } else { found.join(", ") }
    }
}

/// The beginning of a long text.
pub(super) fn shortened(value: &str) -> String {
    value.chars().take(80).collect()
}

/// A port from 20000 to 32000 made from a job's name: FNV-1a, so that it is the same in every build.
pub(super) fn port_of(job: &str) -> u16 {
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    // At most 32000, so it fits.
    (FIRST_PORT + hash % (LAST_PORT - FIRST_PORT + 1)) as u16
}
