//! A request to stop, which any rank can make, and which all ranks see at the same step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use collectives::{Communicator, ReduceOp, Result};

/// Stops training on all ranks at the same step, as soon as one rank asks for it.
///
/// Any thread or signal handler of any rank can raise its rank's flag. In each step, all ranks call
/// [`agreed`](Self::agreed), which returns `true` on every rank if a rank has raised its flag:
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::StopFlag;
///
/// let steps = Communicator::run_local(3, |comm| {
///     let stop = StopFlag::new();
///     let mut step = 0;
///     while !stop.agreed(comm)? {
///         step += 1; // take a step
///         if comm.rank() == 2 && step == 5 {
///             stop.raise(); // only one rank wants to stop
///         }
///     }
///     Ok(step) // save a checkpoint
/// })?;
/// assert_eq!(steps, [5, 5, 5]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// Clones share one flag. To raise the flag when a signal arrives, pass the result of [`handle`](Self::handle) to the
/// function that installs the signal handler, such as `signal_hook::flag::register`.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Creates a flag that is not raised.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises this rank's flag. Sends nothing to other ranks: they see the flag at the next [`agreed`](Self::agreed).
    /// The flag cannot be lowered.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns the flag itself. To raise the flag, a signal handler or a thread stores `true`.
    #[must_use]
    pub fn handle(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }

    /// Returns whether a rank has raised its flag. All ranks get the same answer from the same call. After the first
    /// `true`, every later answer is `true`. Makes one all-reduce of 1 B. Collective.
    ///
    /// Call this between two steps. During a step, the calls of a [`DataParallel`](crate::DataParallel) use the
    /// communicator too, and their order may differ between ranks. If a step is much shorter than the time of an
    /// all-reduce, call `agreed` only in some steps, for example in every tenth, and in the same steps on all ranks.
    ///
    /// # Errors
    ///
    /// The errors of [`Communicator::all_reduce`].
    pub fn agreed(&self, comm: &Communicator) -> Result<bool> {
        let mut is_raised = self.0.load(Ordering::Relaxed);
        comm.all_reduce(&mut is_raised, ReduceOp::Max)?;
        if is_raised {
            // The answer stays the same, even if the rank that raised its flag is lost later.
            self.raise();
        }
        Ok(is_raised)
    }
}
