//! Threads of a communicator. Each thread is started before the work that needs it. So if the system refuses the
//! thread, nothing has happened yet.

use std::io;

use crate::base::own_thread::OwnThread;
use crate::error::{Error, Result};

/// Starts a thread with this name. If the system refuses it, the error calls the thread `what`.
pub(in crate::communicator) fn spawn(name: String, what: &str, body: impl FnOnce() + Send + 'static) -> Result<OwnThread> {
    #[cfg(test)]
    if refusal::is_due() {
        return Err(refused(what, &io::ErrorKind::WouldBlock.into()));
    }
    OwnThread::spawn(name, body).map_err(|error| refused(what, &error))
}

#[cold]
fn refused(what: &str, error: &io::Error) -> Error {
    let advice = "nothing was started; raise the limit on threads (ulimit -u, or pids.max of the cgroup) or on memory (ulimit -v)";
    Error::io(format!("starting {what}"), io::Error::new(error.kind(), format!("{error}: {advice}")))
}

/// Makes the start of threads fail in tests.
#[cfg(test)]
pub(in crate::communicator) mod refusal {
    use std::cell::Cell;

    thread_local! {
        static REFUSES: Cell<bool> = const { Cell::new(false) };
    }

    pub(in crate::communicator) fn is_due() -> bool {
        REFUSES.get()
    }

    /// Runs `body`, in which this thread cannot start any thread of a communicator.
    pub(in crate::communicator) fn during<R>(body: impl FnOnce() -> R) -> R {
        REFUSES.set(true);
        let result = body();
        REFUSES.set(false);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::refusal;
    use crate::call::op::ReduceOp;
    use crate::communicator::{Communicator, Envelope};
    use crate::error::{Error, Result};

    /// Asserts that a call was refused because its thread could not be started, and that the error gives advice.
    fn assert_refused<R>(result: Result<R>) {
        let error = result.err().expect("there is no thread for it");
        let words = error.to_string();
        assert!(matches!(error, Error::Io { .. }) && words.contains("nothing was started") && words.contains("pids.max"), "{words}");
    }

    #[test]
    fn a_started_call_whose_thread_cannot_be_had_has_not_begun() -> Result<()> {
        let got = Communicator::run_local(2, |comm| {
            let (other, tagged) = (1 - comm.rank(), Envelope::rank(1 - comm.rank()).tag(3));
            comm.barrier()?;
            if comm.rank() == 0 {
                refusal::during(|| {
                    assert_refused(comm.start_recv(vec![0_u8], other));
                    assert_refused(comm.start_recv(vec![0_u8; 1 << 20], tagged));
                    assert_refused(comm.start_send(vec![9_u8], other));
                    assert_refused(comm.start_send(vec![9_u8; 1 << 20], tagged));
                    assert_refused(comm.start_all_reduce(vec![9_u8], ReduceOp::Sum));
                    assert_refused(comm.start_all_reduce_many(vec![vec![9_u8]; 2], ReduceOp::Sum));
                    assert_refused(comm.start_barrier());
                    let (mine, mut theirs, mut sum) = ([9_u8], [0_u8], [9_u8]);
                    assert_refused(comm.group(|group| {
                        group.send(&mine, other)?;
                        group.recv(&mut theirs, other)?;
                        group.all_reduce(&mut sum, ReduceOp::Sum)
                    }));
                    Ok::<(), Error>(())
                })?;
            }
            // None of these calls has reached the other rank or waits for it: the next message and the next sum are the
            // first.
            let (mine, mut theirs) = ([comm.rank() as u8 + 1], [0_u8]);
            comm.send_recv(&mine, other, &mut theirs, other)?;
            let long = comm.start_send(vec![mine[0]; 1 << 20], tagged)?;
            let (their_long, _) = comm.start_recv(vec![0_u8; 1 << 20], tagged)?.wait()?;
            long.wait()?;
            let sum = comm.start_all_reduce(vec![1_u8], ReduceOp::Sum)?.wait()?;
            Ok((theirs[0], their_long[1 << 19], sum[0]))
        })?;
        assert_eq!(got, [(2, 2, 2), (1, 1, 2)]);
        Ok(())
    }

    #[test]
    fn messages_that_are_waited_for_need_no_thread() -> Result<()> {
        Communicator::run_local(2, |comm| {
            refusal::during(|| {
                let (other, mut theirs) = (1 - comm.rank(), vec![0_u8; 1 << 20]);
                comm.send_recv(&vec![1_u8; 1 << 20], other, &mut theirs, other)?;
                comm.group(|group| group.send(&[1_u8], other))?;
                comm.recv(&mut [0_u8], other).map(drop)
            })
        })
        .map(drop)
    }
}
