//! Reports to all ranks whether a part of a step has succeeded on each rank.

use candle_core::Result;
use collectives::{Communicator, ReduceOp};

use crate::failed;

/// How a part of a step went on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Skipped,
    Failed,
}

/// Fails if a rank has failed, or if some ranks have skipped what other ranks have done. Collective.
pub(super) fn agree(comm: &Communicator, what: &str, own: Outcome) -> Result<()> {
    let rank = comm.rank() as u64 + 1;
    let mut last_with = [Outcome::Done, Outcome::Skipped, Outcome::Failed].map(|outcome| if own == outcome { rank } else { 0 });
    comm.all_reduce(&mut last_with, ReduceOp::Max).map_err(failed)?;
    match last_with {
        [_, 0, 0] | [0, _, 0] => Ok(()),
        [done, skipped, 0] => candle_core::bail!(
            "{what}: rank {} skipped the step and rank {} did not; make the same decision on every rank, for example with LossScaler::update",
            skipped - 1,
            done - 1
        ),
        [.., rank] => candle_core::bail!("{what} failed on rank {}; the error of that rank says why", rank - 1),
    }
}

/// Returns a rank's own error, or an error if another rank has failed. Collective.
pub(super) fn together<R>(comm: &Communicator, what: &str, own: Result<R>) -> Result<R> {
    let agreed = agree(comm, what, if own.is_ok() { Outcome::Done } else { Outcome::Failed });
    own.and_then(|value| agreed.map(|()| value))
}
