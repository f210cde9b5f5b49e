//! Answers `collperf ps`: the calls in which the communicators of this process are now, even if they hang.
//!
//! # The socket
//!
//! The first communicator of a process opens an abstract Unix socket, `collectives-status-PID-RANDOM`, and starts one
//! thread. `collperf ps` finds the names of all such sockets in `/proc/net/unix`. A connection is the question: the
//! thread sends the answer, and closes the connection. It reads nothing, so there is no input that could be malformed.
//! The name vanishes with the process, so a killed process leaves nothing behind.
//!
//! The thread sleeps in `accept` until a program asks. Calls do nothing for it: an answer consists of the flight
//! recorder's rings, which any thread can read while a call hangs. The socket and the thread live as long as the
//! process, so that programs that make many communicators do not start many threads.
//!
//! # Who gets an answer
//!
//! The kernel says which user is at the other end. This process's user and root get an answer; every other connection
//! is closed. An answer contains calls, errors, host names and process ids, but neither data nor the secret.
//!
//! # Forks
//!
//! A forked child inherits the socket, but not the thread. Its first own communicator opens another socket. If the
//! parent ends while such a child lives, the parent's socket remains without a thread. `collperf ps` compares the
//! process that opened a socket with the processes that exist.

mod answer;
mod server;

use std::sync::Mutex;

use crate::base::event;
use crate::base::fork::Process;

/// The process in which the thread runs.
static SERVING: Mutex<Option<Process>> = Mutex::new(None);

/// Begins to answer, unless this process answers already. If the system refuses the socket or the thread, there are no
/// answers, and the next communicator tries again.
pub(crate) fn serve() {
    // Miri has no such sockets.
    if cfg!(miri) {
        return;
    }
    // Another thread that holds the lock starts the server. In a forked child, the lock may never be released.
    let Some(mut serving) = event::try_lock(&SERVING) else { return };
    if serving.is_some_and(|process| !process.is_foreign()) {
        return;
    }
    match server::start() {
        Ok(()) => *serving = Some(Process::this()),
        Err(error) => event::debug!(%error, "this process does not answer collperf ps"),
    }
}
