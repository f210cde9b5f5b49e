//! Ranks as threads, for tests and examples.

use std::sync::{Mutex, PoisonError};

use candle_core::{Error, Result};
use collectives::Communicator;

use crate::error::{cause, failed};

/// Runs a program on several ranks, which are threads of this process, and returns the results in rank order. Works
/// like [`Communicator::run_local`], but the program returns errors of candle.
///
/// If a rank fails, its peers lose their connections to it, and also fail. So the function returns the earliest error
/// that reports more than a lost peer or an aborted communicator.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use collectives::ReduceOp;
/// use collectives_candle::{all_reduce, run_local};
///
/// let sums = run_local(2, |comm| {
///     let x = Tensor::new(&[1.0_f32, 2.0], &Device::Cpu)?;
///     all_reduce(comm, &x, ReduceOp::Sum)?.to_vec1::<f32>()
/// })?;
/// assert_eq!(sums, [[2.0, 4.0]; 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Fails in these cases:
///
/// - The program fails on a rank.
/// - The program panics on a rank.
/// - [`Communicator::run_local`] cannot start the ranks, for example because there are none.
pub fn run_local<T: Send>(ranks: usize, program: impl Fn(&Communicator) -> Result<T> + Sync) -> Result<Vec<T>> {
    let failures = Mutex::new(Vec::new());
    let keep = |error: Error| failures.lock().unwrap_or_else(PoisonError::into_inner).push(error);
    let results = Communicator::run_local(ranks, |comm| Ok(program(comm).map_err(keep).ok()));
    let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(own) = failures.iter().position(|error| !is_of_a_peer(error)) {
        return Err(failures.swap_remove(own));
    }
    // A panic is the reason why peers lost a rank.
    let results = results.map_err(failed)?;
    match failures.into_iter().next() {
        Some(first) => Err(first),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// Returns whether an error only reports that a peer is gone or has aborted.
fn is_of_a_peer(error: &Error) -> bool {
    cause(error).is_some_and(|cause| {
        let aborted = |error: &collectives::Error| matches!(error, collectives::Error::Aborted { .. });
        let ended_by_abort = matches!(cause, collectives::Error::Poisoned { cause, .. } if aborted(cause));
        cause.is_peer_lost() || aborted(cause) || ended_by_abort
    })
}
