//! Starts the ranks of one job on this host, watches them, and leaves none behind.
//!
//! Shared by `collrun`, which starts any program, and `collperf`, which starts itself.

mod child;
mod ending;
mod output;
mod store;
mod supervisor;
mod variables;

use std::ffi::OsString;
use std::time::Duration;

pub use output::Output;
pub use store::Store;

/// What to start, how often, and where in the job this host stands.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program, looked up in PATH.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Ranks on this host.
    pub local_world_size: usize,
    /// Hosts in the job, each with as many ranks.
    pub nodes: usize,
    /// This host's number among them.
    pub node: usize,
    /// Where the ranks' output goes.
    pub output: Output,
    /// How long ranks that were asked to stop may take before they are killed.
    pub grace: Duration,
    /// An exit code by which a rank tells what it found; it becomes ours, and the other ranks go on.
    pub verdict: Option<u8>,
    /// Whether the others go on when a rank fails, and one that succeeds is enough.
    pub keep_going: bool,
}

/// Why a job could not be started, and the exit code that says so.
#[derive(Debug)]
pub struct Refused {
    /// What went wrong, in words.
    pub message: String,
    /// As shells have it: 127 for a program that is not there, 126 for one that cannot be run, else 1.
    pub code: u8,
}

/// Starts the job's ranks and waits for all of them. Returns the exit code: that of the rank that failed first, else 0; 0 also
/// where ranks are to go on without those that fail and one has succeeded.
///
/// Must be called on a thread that lives as long as the process: the ranks die with it.
///
/// # Errors
///
/// When a rank or the means to watch it cannot be started; those already started are killed first.
pub fn run(name: &str, job: &Job, store: &Store) -> Result<u8, Refused> {
    // Signals first: from here on none of them can end this process before its ranks have heard of it.
    let (sender, events) = std::sync::mpsc::channel();
    supervisor::listen(&sender).map_err(|error| Refused { message: format!("waiting for signals: {error}"), code: 1 })?;
    let mut supervisor = supervisor::Supervisor::new(name, job, sender, events);
    let mut forwarders = output::Forwarders::default();
    for local_rank in 0..job.local_world_size {
        let rank = job.node * job.local_world_size + local_rank;
        let mut child = child::spawn(job, local_rank, &variables::variables(job, store, local_rank))
            .map_err(|error| child::refused(&job.program, rank, &error))?;
        forwarders.attach(rank, &mut child);
        supervisor.watch(rank, child).map_err(|error| Refused { message: format!("watching rank {rank}: {error}"), code: 1 })?;
    }
    let code = supervisor.wait();
    drop(supervisor);
    forwarders.finish();
    Ok(code)
}
