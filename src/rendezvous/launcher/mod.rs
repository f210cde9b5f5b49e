//! What launchers tell the processes they start, in environment variables.
//!
//! The first of these whose rank and size are both set is believed:
//!
//! | launcher | rank, size | local rank, local size | address and port |
//! | --- | --- | --- | --- |
//! | torchrun, collrun, by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK`, `…_SIZE` | `…_LOCAL_RANK`, `…_LOCAL_SIZE` | loopback where all ranks are local |
//! | Hydra (MPICH, Intel MPI) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | loopback where all ranks are local |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID` | the first host of the step |
//! | another PMI | `PMI_RANK`, `PMI_SIZE` | | loopback where there is one rank |
//! | a Kubernetes indexed job | `JOB_COMPLETION_INDEX`, `WORLD_SIZE` | | `MASTER_ADDR` |
//!
//! Slurm comes after the MPI launchers, because inside an allocation their processes inherit Slurm's variables, which then speak of
//! the batch script or of the launcher's own helpers. Hydra is told from another PMI by `MPI_LOCALRANKID`: `srun` may set `PMI_RANK`
//! too, and then Slurm's own variables say more.
//!
//! `MASTER_ADDR` and `MASTER_PORT` are believed whoever the launcher is. Without `MASTER_PORT` the port is 29500, or, where the
//! launcher names the job (`PMIX_NAMESPACE`, `PMI_JOBID`, Slurm's job and step), one from 20000 to 32000 made from that name, so that two
//! jobs on one host rarely meet. Where it does not, and all ranks are on one host, the port is made from the process id of their
//! parent, the launcher: so a wrapper script must `exec` the program, or `MASTER_PORT` must be set.

mod slurm;
#[cfg(test)]
mod tests;
mod variables;

use variables::{KUBERNETES, OPEN_MPI, PLAIN, PMI, SLURM, Variables, shortened};
pub(crate) use variables::{Launch, prefix, serves_store};

use super::url::{self, DEFAULT_PORT};
use crate::Result;

/// Finds out from the variables that `read` returns what this process is. `parent_process` is the id of the process that started
/// this one.
pub(crate) fn detect(read: &dyn Fn(&str) -> Option<String>, parent_process: u32) -> Result<Launch> {
    let variables = Variables { read };
    let launch = if variables.has(PLAIN) {
        plain(&variables)?
    } else if variables.has(OPEN_MPI) {
        open_mpi(&variables, parent_process)?
    } else if variables.has(PMI) && variables.text("MPI_LOCALRANKID").is_some() {
        pmi(&variables, "Hydra", parent_process)?
    } else if variables.has(SLURM) {
        slurm::launch(&variables)?
    } else if variables.has(PMI) {
        pmi(&variables, "PMI", parent_process)?
    } else if variables.has(KUBERNETES) {
        kubernetes(&variables)?
    } else {
        return Err(variables.none());
    };
    check(&launch, &variables)?;
    Ok(launch)
}

/// torchrun and all who set the same variables.
fn plain(variables: &Variables<'_>) -> Result<Launch> {
    let local_rank = variables.number("LOCAL_RANK")?;
    let local_world_size = variables.number("LOCAL_WORLD_SIZE")?;
    let launcher = if variables.text("TORCHELASTIC_RUN_ID").is_some() { "torchrun" } else { "RANK and WORLD_SIZE" };
    variables.launch(launcher, PLAIN, (local_rank, local_world_size), |_| Ok(None), |_| Ok(DEFAULT_PORT))
}

/// Open MPI's mpirun. The addresses that it exports are those of its own helpers, not of rank 0, so they are of no use here.
fn open_mpi(variables: &Variables<'_>, parent: u32) -> Result<Launch> {
    let local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK")?;
    let local_world_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let port = |local| Ok(variables.job_port("PMIX_NAMESPACE", local, parent));
    variables.launch("Open MPI", OPEN_MPI, (local_rank, local_world_size), |_| Ok(None), port)
}

/// A PMI launcher.
fn pmi(variables: &Variables<'_>, launcher: &'static str, parent: u32) -> Result<Launch> {
    let local_rank = variables.number("MPI_LOCALRANKID")?;
    let local_world_size = variables.number("MPI_LOCALNRANKS")?;
    let port = |local| Ok(variables.job_port("PMI_JOBID", local, parent));
    variables.launch(launcher, PMI, (local_rank, local_world_size), |_| Ok(None), port)
}

/// A Kubernetes job with completion mode Indexed.
fn kubernetes(variables: &Variables<'_>) -> Result<Launch> {
    variables.launch("Kubernetes", KUBERNETES, (None, None), |_| Ok(None), |_| Ok(DEFAULT_PORT))
}

/// Checks what the variables say together.
fn check(launch: &Launch, variables: &Variables<'_>) -> Result<()> {
    let wrong = |reason: String| Err(variables.wrong(launch.launcher, &reason));
    // A rank outside the world is refused once the others can be told: see the exchange over the store.
    if launch.world_size == 0 {
        return wrong("the world size 0 leaves no room for a rank".to_owned());
    }
    if !url::is_host(&launch.address) {
        return wrong(format!("{:?} is no host where rank 0 could be", shortened(&launch.address)));
    }
    match (launch.local_rank, launch.local_world_size) {
        (Some(rank), Some(size)) if rank >= size => wrong(format!("local rank {rank} is not below the local world size {size}")),
        (_, Some(size)) if size > launch.world_size => {
            wrong(format!("the local world size {size} is above the world size {}", launch.world_size))
        }
        _ => Ok(()),
    }
}
