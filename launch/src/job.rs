//! What a job is, and how it ended.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::bind::Binding;
use super::failure::Failure;
use super::output::{Logs, Output};

/// What to start, how often, and where in the job this host stands.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program, looked up in PATH.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The folder in which ranks start; this program's if it is `None`.
    pub folder: Option<PathBuf>,
    /// Variables that all its ranks get beside those that say who they are.
    pub variables: Vec<(OsString, OsString)>,
    /// Ranks on this host.
    pub local_world_size: usize,
    /// Hosts in the job, each with as many ranks.
    pub nodes: usize,
    /// This host's number among them.
    pub node: usize,
    /// The job's name, the same on every host (`TORCHELASTIC_RUN_ID`); where there is none, one is made of where its ranks meet.
    pub run_id: Option<String>,
    /// What all ranks are (`ROLE_NAME`).
    pub role: String,
    /// What each rank is bound to before its program begins.
    pub binding: Binding,
    /// Each rank sees one device, as the first one, and takes 0 for its local rank.
    pub virtual_local_rank: bool,
    /// Where the ranks' output goes.
    pub output: Output,
    /// What of it goes to files.
    pub logs: Logs,
    /// Where those files and the ranks' error files lie, in a folder of the job's own. Where it is none, error files lie in one that is removed at the
    /// end, or there are none where that cannot be made.
    pub log_folder: Option<PathBuf>,
    /// What stands before each line, with `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}` filled in.
    pub prefix: String,
    /// The signals that are passed on to the ranks, unless they were ignored.
    pub signals: Vec<i32>,
    /// How long ranks that were asked to stop, since another failed, may take before they are killed.
    pub grace: Duration,
    /// How long they may take after SIGINT, SIGTERM or SIGQUIT was passed on.
    pub grace_after_signal: Duration,
    /// How long the other hosts may take to come.
    pub patience: Duration,
    /// Whether another launcher says on standard input which signals to pass on, and by its end that the ranks are to stop.
    pub controlled: bool,
    /// How often all ranks of all hosts are started anew after a failure.
    pub most_restarts: u32,
    /// An exit code by which a rank tells what it found; it becomes ours, and the other ranks go on.
    pub verdict: Option<u8>,
    /// An exit code of ranks whose call failed, often since another rank is gone: such a rank is the first failure only where no other is.
    pub call_failed: Option<u8>,
    /// Whether the others go on when a rank fails, and one that succeeds is enough.
    pub keep_going: bool,
}

impl Job {
    /// [`Job::grace`] unless another is given.
    pub const GRACE: Duration = Duration::from_secs(5);
    /// [`Job::grace_after_signal`] unless another is given.
    pub const GRACE_AFTER_SIGNAL: Duration = Duration::from_secs(30);

    /// A job of this host alone, whose ranks are stopped when one fails, and whose output is shown behind `[rank] `.
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
            controlled: false,
            most_restarts: 0,
            verdict: None,
            call_failed: None,
            keep_going: false,
        }
    }
}

/// Why a job could not be started, and the exit code that says so.
#[derive(Debug)]
pub struct Refused {
    /// What went wrong, in words.
    pub message: String,
    /// As shells have it: 127 for a program that is not there, 126 for one that cannot be run, else 1.
    pub code: u8,
}

/// How a job ended.
#[derive(Debug)]
pub struct End {
    /// The exit code: that of the rank that failed first, else 0; 0 also where ranks are to go on without those that fail and one has
    /// succeeded.
    pub code: u8,
    /// The rank that failed first, on any host, as far as is known.
    pub failure: Option<Failure>,
}
