//! Starts the ranks of one job on this host, watches them, starts them anew if they may be, and leaves none behind.
//!
//! Shared by `collrun`, which starts any program, and `collperf`, which starts itself.

mod arrivals;
mod attempt;
mod bind;
mod broken_pipe;
mod child;
mod control;
mod exit;
mod failure;
mod guardian;
mod hosts;
mod limits;
mod output;
mod signals;
mod supervisor;
mod terminal;
mod topology;

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use bind::{Asked, Bind, Binding, Width, processors_here, told};
pub use broken_pipe::end_unread;
use collectives::Secret;
use collectives::store::{TcpStore, TcpStoreServer};
pub use exit::wait_for_end;
pub use failure::Failure;
pub use guardian::guard;
pub use limits::{explained, hint};
pub use output::{Logs, Output, Streams, carry};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
pub use signals::{Interrupts, Request, on_signals, signal_name};
pub use terminal::{Stream, Writer, say};

/// What to start, how often, and where in the job this host stands.
#[derive(Debug, Clone)]
pub struct Job {
    /// The program, looked up in PATH.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// The folder in which ranks start; this program's where it is none.
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

/// Where the ranks of a job meet: the address that every rank is told, and the server while it runs here, as in torchrun's agent.
pub struct Store {
    /// As in `MASTER_ADDR`.
    pub address: String,
    /// As in `MASTER_PORT`.
    pub port: u16,
    /// A secret that ranks have to be told, because their environment does not say it.
    pub secret: Option<Secret>,
    /// Kept so that it serves until the last rank has ended.
    _server: Option<TcpStoreServer>,
}

impl Store {
    /// Serves a job of this host alone, on the loopback address and a free port.
    ///
    /// # Errors
    ///
    /// As [`Store::serve`].
    pub fn local(secret: Option<&Secret>) -> collectives::Result<Self> {
        Self::serve(&IpAddr::V4(Ipv4Addr::LOCALHOST).to_string(), 0, secret)
    }

    /// Serves a job of several hosts on the address that they were all given; port 0 is one that is free.
    ///
    /// # Errors
    ///
    /// Where the address is not this host's, or its port is taken.
    pub fn serve(address: &str, port: u16, secret: Option<&Secret>) -> collectives::Result<Self> {
        let server = match secret {
            Some(secret) => TcpStoreServer::bind_with_secret((address, port), secret)?,
            None => TcpStoreServer::bind((address, port))?,
        };
        Ok(Self { address: address.to_owned(), port: server.local_addr().port(), secret: None, _server: Some(server) })
    }

    /// Serves the job's store where nobody does yet, as [`Store::serve`], or connects to whoever does, for as long as `patience` lasts. Says behind
    /// `name` on standard error, after ten seconds and then more and more seldom, why it has not come to either.
    ///
    /// # Errors
    ///
    /// As [`TcpStore::connect`]; and where listening fails for another reason than that the address is another host's, or taken.
    pub fn serve_or_reach(name: &str, address: &str, port: u16, secret: Option<&Secret>, patience: Duration) -> collectives::Result<Found> {
        arrivals::Place { address: address.to_owned(), port, secret: secret.cloned() }.serve_or_reach(name, patience)
    }

    /// The store that another host serves.
    pub fn elsewhere(address: &str, port: u16) -> Self {
        Self { address: address.to_owned(), port, secret: None, _server: None }
    }
}

/// A job's store, as a host finds it that was not told its number.
pub enum Found {
    /// This host came first, and serves it.
    Served(Store),
    /// Another host serves it.
    Elsewhere(Arc<TcpStore>),
}

/// Starts the job's ranks and waits for all of them; after a failure once more, as often as the job says.
/// `name`, the program's, stands before what is said of them on standard error. `secret` is what the store's server knows, where there is one.
///
/// Must be called on a thread that lives as long as the process: the ranks die with it. A program that calls it has to call [`guard`] first of all,
/// and to end where that says so. From here on the job's signals are passed on to the ranks, unless they were ignored. Costs a process and up to three
/// threads for each rank, and one process more.
///
/// # Errors
///
/// When a rank or the means to watch it cannot be started; those already started are killed first.
pub fn run(name: &str, job: &Job, store: &Store, secret: Option<&Secret>) -> Result<End, Refused> {
    attempt::run(name, job, store, secret)
}
