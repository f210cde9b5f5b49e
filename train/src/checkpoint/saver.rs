//! Saving in the background: values are copied, and a thread writes the copies while training goes on.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use super::directory::random;
use super::publication::SAVING;
use super::values::Values;
use super::writer::{Writer, same_call};
use crate::agreement::everywhere;
use collectives::Communicator;
use collectives::{Error, Result};

/// Saves checkpoints in the background. [`save`](Self::save) copies what this rank writes, and returns. Then a thread
/// writes the copies, while training goes on and changes the values.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let directory = folder.path();
/// use collectives::Communicator;
/// use collectives_train::checkpoint::{Checkpoint, Piece, Saver, Writer};
///
/// Communicator::run_local(3, |comm| {
///     let mut saver = Saver::new(comm)?; // once
///     let mut weight = [0.0_f32; 4];
///     for step in 1..=10 {
///         weight.fill(step as f32); // training
///         if step % 5 == 0 {
///             let mut writer = Writer::new(comm, directory);
///             writer.tensor("weight", &[4], Piece::Whole, &weight).keep(2);
///             saver.save(writer, step)?; // instead of writer.commit(step)?
///         }
///     }
///     let last = saver.wait()?; // on disk now, or an error on every rank
///     assert_eq!(last, Some(directory.join("step-00000010")));
///     Ok(())
/// })?;
/// let checkpoint = Checkpoint::latest(directory)?.expect("two were saved");
/// assert_eq!(checkpoint.read_vec::<f32>("weight", &[4], Piece::Whole)?, [10.0; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A background save is all or nothing, like a [`commit`](Writer::commit). If the program ends before the save is done,
/// the previous checkpoint remains the latest. At the end of a program, call [`wait`](Self::wait).
///
/// The thread makes its collectives on the saver's own communicator. So these calls have no order relative to the calls
/// of the training, and a failure of a save does not end the training's communicator.
///
/// Only one save at a time may write to a folder. While a background save runs, do not `commit` to the same folder, and
/// do not save to it with another saver.
///
/// Dropping a saver waits until the running save is done. If this save fails, a `tracing` event reports the error.
pub struct Saver {
    comm: Communicator,
    /// A random number that is the same on all ranks, and not 0.
    id: u64,
    running: Option<Thread>,
}

/// The work of a thread.
type Job = Box<dyn FnOnce() -> Result<PathBuf> + Send>;

/// A thread that returns `None` if it got no job.
type Thread = JoinHandle<Option<Result<PathBuf>>>;

impl Saver {
    /// Creates a saver for the ranks of a communicator. Make one saver for a whole run. Collective.
    ///
    /// **Cost**: one [`duplicate`](Communicator::duplicate) of the communicator. The duplicate keeps the timeout of
    /// `comm`. If a slow disk needs more time, pass a handle with another timeout
    /// ([`Communicator::with_timeout`]).
    ///
    /// # Errors
    ///
    /// The errors of `duplicate`, and `Io` if the system gives no random numbers.
    pub fn new(comm: &Communicator) -> Result<Self> {
        let comm = comm.duplicate()?;
        let drawn = if comm.rank() == 0 { random() } else { Ok(String::new()) };
        let drawn = everywhere(&comm, "creating a saver", drawn)?;
        let mut id = [u64::from_str_radix(&drawn, 16).unwrap_or_default() | 1];
        comm.broadcast(&mut id, 0)?;
        Ok(Self { comm, id: id[0], running: None })
    }

    /// Copies what this rank writes, and begins to write a checkpoint in the background. After this call, the values
    /// may change. The communicator of `writer` must have the saver's ranks, in the same order. Collective.
    ///
    /// If an earlier save is not done, this call first waits for it. If the earlier save failed, this call returns its
    /// error on every rank, and saves nothing. The next call saves again.
    ///
    /// **Cost**: the call makes some small collectives on the communicator of `writer`, and touches no file. The copies
    /// need as much memory as this rank's file, until the file is written. If several ranks have the same piece, only
    /// one of them copies it. The wait for an earlier save is limited by the saver's timeout. The other ranks wait too,
    /// at most for the timeout of the communicator of `writer`.
    ///
    /// # Errors
    ///
    /// This call returns these errors itself. If one rank fails, all fail. The failing rank gets its own error, and the
    /// others get an `Io` that names the failing rank and the reason.
    ///
    /// - The error of the earlier save.
    /// - `InvalidArgument` if the arguments of the writer's methods were invalid, or if the pieces of all ranks
    ///   together are not whole tensors.
    /// - `InvalidArgument` if the communicator of `writer` does not have the saver's ranks.
    /// - `Mismatch` if ranks pass different steps, or use different savers, or if another rank calls `commit`.
    /// - `Io` if the system refuses to start a thread.
    /// - The errors common to all collectives.
    ///
    /// [`wait`](Self::wait) or the next call of `save` returns the errors of the background work:
    ///
    /// - `Io` if a file cannot be written or synced, if a rank does not see rank 0's files, or if there is not enough
    ///   memory for the copies.
    /// - `InvalidArgument` if the step is before the latest step in the folder.
    /// - The errors common to all collectives, if a rank dies or is late. The saver's communicator has then ended, so
    ///   later saves fail too. If all ranks are alive, make a new saver. Otherwise [`shrink`](Communicator::shrink) the
    ///   training's communicator first.
    pub fn save(&mut self, writer: Writer<'_>, step: u64) -> Result<()> {
        let comm = writer.communicator();
        same_call(comm, step, self.id)?;
        let ready = self.wait().and_then(|_| self.check_ranks(comm)).and_then(|()| start_thread());
        // A rank without a thread, or whose earlier save failed, fails on all ranks before anything is begun.
        let (jobs, thread) = everywhere(comm, SAVING, ready)?;
        let (publication, values) = writer.agree(step)?;
        // Ranks that have a copy wait for this rank. So an error goes through the save, and fails on all ranks there.
        let copies: Vec<Result<Vec<u8>>> = values.into_iter().map(Values::into_copy).collect();
        let comm = self.comm.clone();
        // If the thread were gone, `wait` would report it.
        let _ = jobs.send(Box::new(move || publication.publish(&comm, copies)));
        self.running = Some(thread);
        Ok(())
    }

    /// Returns whether no save is running on this rank. The save may have failed: [`wait`](Self::wait) then returns the
    /// error without waiting. Local.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.running.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the last save is done, and returns the checkpoint's path. Returns `None` if no save was begun, or if
    /// an earlier call of `wait` or [`save`](Self::save) has already waited for the last save. Local, but the save is
    /// done only when all ranks have written their files.
    ///
    /// # Errors
    ///
    /// The errors of the background work, which [`save`](Self::save) lists. An error is returned once.
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(thread) = self.running.take() else { return Ok(None) };
        let reason = || io::Error::other("its thread panicked; the message of the panic is on standard error");
        let done = thread.join().ok().flatten();
        done.unwrap_or_else(|| Err(Error::io("saving a checkpoint in the background", reason()))).map(Some)
    }

    /// Refuses a communicator on which this rank has another number, or that has fewer or more ranks.
    fn check_ranks(&self, comm: &Communicator) -> Result<()> {
        let (passed, own) = ([comm.rank(), comm.world_size()], [self.comm.rank(), self.comm.world_size()]);
        if passed == own {
            return Ok(());
        }
        let reason = format!(
            "the writer's communicator has this process as rank {} of {}, but the saver was made for rank {} of {}: make the saver and the \
             writer with the same communicator",
            passed[0], passed[1], own[0], own[1]
        );
        Err(Error::argument("Saver::save", reason))
    }
}

/// Starts a thread that waits for its job. If it is started first, a save that has begun cannot lack a thread.
fn start_thread() -> Result<(Sender<Job>, Thread)> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let run = move || jobs.recv().ok().map(|job| job());
    let started = thread::Builder::new().name("checkpoint".to_owned()).spawn(run);
    Ok((sender, started.map_err(|error| Error::io("starting a thread that saves a checkpoint", error))?))
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            crate::event::warn!(%error, "a checkpoint could not be saved in the background");
        }
    }
}

impl fmt::Debug for Saver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_done() { "idle" } else { "saving" };
        write!(f, "Saver({what}, on {:?})", self.comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, Piece};
    use collectives::ReduceOp;

    fn begin(saver: &mut Saver, comm: &Communicator, directory: &std::path::Path, step: u64) -> Result<()> {
        let mut writer = Writer::new(comm, directory);
        writer.tensor("a", &[2], Piece::Whole, &[1.0_f32, 2.0]);
        saver.save(writer, step)
    }

    #[test]
    fn the_end_of_a_savers_communicator_is_told_to_all_and_training_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let done = Communicator::run_local(3, |comm| {
            let mut saver = Saver::new(comm)?;
            begin(&mut saver, comm, folder.path(), 1)?;
            saver.wait()?;
            comm.barrier()?;
            if comm.rank() == 1 {
                saver.comm.abort();
            }
            begin(&mut saver, comm, folder.path(), 2)?;
            for step in 3..5 {
                let error = begin(&mut saver, comm, folder.path(), step).unwrap_err();
                assert!(!matches!(error, Error::InvalidArgument { .. }), "{error}");
                begin(&mut saver, comm, folder.path(), step)?;
            }
            let mut sum = [1_u64];
            comm.all_reduce(&mut sum, ReduceOp::Sum)?;
            drop(saver);
            let mut saver = Saver::new(comm)?;
            begin(&mut saver, comm, folder.path(), 5)?;
            Ok((sum, saver.wait()?.is_some()))
        });
        assert_eq!(done.unwrap(), [([3], true); 3]);
        assert_eq!(Checkpoint::steps(folder.path()).unwrap(), [1, 5]);
    }

    #[test]
    fn a_thread_that_panics_is_an_error() {
        let comm = Communicator::local(1).unwrap().remove(0);
        let mut saver = Saver::new(&comm).unwrap();
        let (jobs, thread) = start_thread().unwrap();
        saver.running = Some(thread);
        assert!(!saver.is_done(), "it waits for its job");
        jobs.send(Box::new(|| panic!("a panic on purpose"))).unwrap();
        let error = saver.wait().unwrap_err().to_string();
        assert!(error.contains("saving a checkpoint in the background") && error.contains("its thread panicked"), "{error}");
        assert!(saver.is_done() && saver.wait().unwrap().is_none());
    }
}
