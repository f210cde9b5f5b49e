//! Starts the ranks of one job on this host, watches them, restarts them if the job allows it, and leaves no process
//! behind.
//!
//! Shared by `collrun`, which starts any program, and `collperf`, which starts itself.

mod arrivals;
mod attempt;
mod bind;
mod broken_pipe;
mod child;
mod control;
mod elastic;
mod event;
mod exit;
mod failure;
mod guardian;
mod hosts;
mod job;
mod limits;
mod numa;
mod output;
mod replacement;
mod signals;
mod store;
mod supervisor;
mod terminal;
mod topology;

pub use attempt::temporary_folder;
pub use bind::{Asked, Bind, Binding, Width, processors_here, told};
pub use broken_pipe::end_unread;
use collectives::Secret;
pub use exit::wait_for_end;
pub use failure::Failure;
pub use guardian::guard;
pub use job::{Elastic, End, Job, Refused};
pub use limits::{explained, hint};
pub use numa::NumaBinding;
pub use output::{Logs, Output, Streams, carry};
pub use signals::{Interrupts, Request, on_signals, signal_name};
pub use store::{Found, Store};
pub use terminal::{Stream, Writer, say};

/// Starts the job's ranks and waits until all of them have ended. After a failure, restarts the ranks, as often as the
/// job allows. `name` is the program's name, which precedes each message on standard error. `secret` is the secret of
/// the store's server, if the server has one.
///
/// Must be called on a thread that lives as long as the process: the ranks are killed when that thread ends. The
/// program must call [`guard`] before anything else, and exit if `guard` returns `true`. From the call of `run` on, the
/// job's signals are passed on to the ranks. A signal that was already ignored when this process started stays ignored,
/// and is not passed on. For each rank, this function starts one process, and up to three threads of this process. In
/// addition, one process guards the ranks.
///
/// # Errors
///
/// If a rank cannot be started or watched. In this case, ranks that were already started are killed first.
pub fn run(name: &str, job: &Job, store: &Store, secret: Option<&Secret>) -> Result<End, Refused> {
    attempt::run(name, job, store, secret)
}
