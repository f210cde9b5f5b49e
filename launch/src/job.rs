//! A job, and how it ended.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::bind::Binding;
use super::failure::Failure;
use super::output::{Logs, Output};

/// The program to start, the number of ranks, and this host's place in the job.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program, looked up in PATH.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The folder in which ranks start. If `None`, they start in this program's current folder.
    pub folder: Option<PathBuf>,
    /// Environment variables that all ranks get, in addition to the variables that identify each rank.
    pub variables: Vec<(OsString, OsString)>,
    /// Ranks on this host.
    pub local_world_size: usize,
    /// The number of hosts in the job, each with `local_world_size` ranks.
    pub nodes: usize,
    /// This host's number among the hosts of the job.
    pub node: usize,
    /// The job's name, the same on every host (`TORCHELASTIC_RUN_ID`). If `None`, the store's address and port form the
    /// name.
    pub run_id: Option<String>,
    /// The role of all ranks (`ROLE_NAME`).
    pub role: String,
    /// The processors to which each rank is bound before its program begins.
    pub binding: Binding,
    /// Whether each rank sees only its own device, as device 0, and has local rank 0.
    pub virtual_local_rank: bool,
    /// The destination of the ranks' output.
    pub output: Output,
    /// Which output goes to files.
    pub logs: Logs,
    /// The folder in which the job makes its own folder for log files and error files. If `None`, error files are in a
    /// temporary folder, which is removed at the end. If no temporary folder can be made, there are no error files.
    pub log_folder: Option<PathBuf>,
    /// The text before each line of output. In this text, the launcher replaces `${role_name}`, `${local_rank}`,
    /// `${rank}` and `${hostname}`.
    pub prefix: String,
    /// The signals that are passed on to the ranks. A signal that was already ignored when this process started stays
    /// ignored, and is not passed on.
    pub signals: Vec<i32>,
    /// How long ranks may take to stop after another rank has failed. After this time, the ranks are killed.
    pub grace: Duration,
    /// How long ranks may take to stop after SIGINT, SIGTERM or SIGQUIT was passed on.
    pub grace_after_signal: Duration,
    /// How long the other hosts may take to start.
    pub patience: Duration,
    /// Set if the number of hosts may change while the job runs. `nodes` and `node` then have no effect.
    pub elastic: Option<Elastic>,
    /// Whether another launcher controls this launcher. The other launcher then sends the signals for the ranks over
    /// standard input. When the input ends, this launcher stops the ranks.
    pub controlled: bool,
    /// The maximum number of restarts after failures. A restart starts all ranks of all hosts again.
    pub most_restarts: u32,
    /// An exit code with which a rank reports a result rather than a failure. It becomes the job's exit code, and the
    /// other ranks continue.
    pub verdict: Option<u8>,
    /// The exit code of a rank that ends because a call failed. Often, the call failed because another rank is gone. So a
    /// rank with this exit code counts as the first failure only if no other rank failed.
    pub call_failed: Option<u8>,
    /// Whether the other ranks continue when a rank fails. The job then succeeds if at least one rank succeeds.
    pub keep_going: bool,
    /// The maximum number of processes that are started in the place of failed ranks while the other ranks continue.
    /// Needs [`Job::keep_going`] and a job of one host. A new process joins the running job, so the ranks must call
    /// `Communicator::from_env` and `admit`.
    pub replacements: u32,
}

impl Job {
    /// The default of [`Job::grace`].
    pub const GRACE: Duration = Duration::from_secs(5);
    /// The default of [`Job::grace_after_signal`].
    pub const GRACE_AFTER_SIGNAL: Duration = Duration::from_secs(30);

    /// Creates a job on this host alone. When a rank fails, the other ranks are stopped. Output is shown with `[rank] `
    /// before each line.
    pub fn new(program: OsString, arguments: Vec<OsString>, local_world_size: usize) -> Self {
        Self {
            program,
            arguments,
            folder: None,
            variables: vec![],
            local_world_size,
            nodes: 1,
            node: 0,
            run_id: None,
            role: "default".to_owned(),
            binding: Binding::none(None),
            virtual_local_rank: false,
            output: Output::Prefixed,
            logs: Logs::default(),
            log_folder: None,
            prefix: "[${rank}] ".to_owned(),
            signals: vec![SIGINT, SIGTERM, SIGHUP],
            grace: Self::GRACE,
            grace_after_signal: Self::GRACE_AFTER_SIGNAL,
            patience: Duration::from_secs(1800),
            elastic: None,
            controlled: false,
            most_restarts: 0,
            verdict: None,
            call_failed: None,
            keep_going: false,
            replacements: 0,
        }
    }

    /// Whether the ranks of this host may start again after those of another host have failed.
    pub(super) fn waits_for_all(&self) -> bool {
        self.most_restarts > 0 || self.elastic.is_some()
    }

    /// Returns the job's name in keys of the store.
    pub(super) fn run_name(&self) -> String {
        self.run_id.clone().unwrap_or_else(|| "none".to_owned())
    }
}

/// The rules of a job whose number of hosts may change.
#[derive(Debug, Clone)]
pub struct Elastic {
    /// The smallest number of hosts with which ranks run.
    pub least: usize,
    /// The largest number of hosts. Further hosts wait until one of the others is lost.
    pub most: usize,
    /// How long the job waits for further hosts before it begins, once the smallest number has come.
    pub last_call: Duration,
    /// How long a host may be silent before the others continue without it.
    pub lost_after: Duration,
    /// Whether this host serves the store. This host decides for all others. If it is lost, the job ends.
    pub serves: bool,
}

/// The reason why a job could not be started, and the exit code to report.
#[derive(Debug)]
pub struct Refused {
    /// The error message.
    pub message: String,
    /// The code that shells use: 127 for a program that is not found, 126 for one that cannot be run, else 1.
    pub code: u8,
}

/// How a job ended.
#[derive(Debug)]
pub struct End {
    /// The exit code of the rank that failed first. If no rank failed:
    ///
    /// - 1 if restarts are allowed or hosts may change, and the launcher that serves the store was lost.
    /// - 1 if another host was lost, and the job cannot go on without it.
    /// - 128 plus the number of a signal if ranks were ended after this signal.
    /// - Otherwise, [`Job::verdict`] if a rank of this host ended with this exit code, else 0.
    ///
    /// With [`Job::keep_going`], the code is 0 if at least one rank of this host succeeded.
    pub code: u8,
    /// The rank that failed first, on any host, as far as is known.
    pub failure: Option<Failure>,
}
