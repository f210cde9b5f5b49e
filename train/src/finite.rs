//! Checks losses and gradients for NaN and infinity.

use super::comparison::{LONGEST_LABEL, cut, gather_texts, listed};
use super::parameter::Float;
use collectives::{Communicator, Error, ReduceOp, Result};

/// Checks that the values of every rank are finite: neither NaN nor infinite. Use this function for a loss, or for a
/// gradient that has not been averaged yet. Collective.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::check_finite;
///
/// let errors = Communicator::run_local(3, |comm| {
///     let loss = if comm.rank() == 1 { f32::NAN } else { 0.5 };
///     Ok(check_finite(comm, "loss", &[loss]).unwrap_err().to_string()) // an error on every rank
/// })?;
/// assert!(errors[0].starts_with("check_finite: \"loss\" is NaN on rank 1"));
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// Ranks may pass different numbers of values. Once gradients have been averaged, every rank has the same values, so
/// [`Averaged::check_finite`](crate::Averaged::check_finite) needs no communication. It names the parameter, but not the
/// rank. With [`LossScaler`](crate::LossScaler), gradients that are not finite are normal: use
/// [`update`](crate::LossScaler::update) instead.
///
/// Cost: reads each value once, and makes one all-reduce of 1 B. If a value is not finite, there is one more all-gather
/// of 256 B per rank.
///
/// # Errors
///
/// - `InvalidArgument` on every rank if a rank has a value that is not finite. The error names the first of these
///   ranks, with the label, the rank's first such value, and the position of this value. It also lists the other ranks
///   with such a value. The communicator stays usable.
/// - The errors of [`Communicator::all_reduce`].
pub fn check_finite<T: Float>(comm: &Communicator, label: &str, values: &[T]) -> Result<()> {
    let bad = values.iter().position(|value| !value.to_f64().is_finite());
    let mut is_bad_anywhere = bad.is_some();
    comm.all_reduce(&mut is_bad_anywhere, ReduceOp::Max)?;
    if !is_bad_anywhere {
        return Ok(());
    }
    let label = cut(label, LONGEST_LABEL);
    let in_words = |index: usize| match values.len() {
        1 => format!("{label:?} is {}", values[index].to_f64()),
        len => format!("element {index} (from 0) of the {len} elements of {label:?} is {}", values[index].to_f64()),
    };
    let said = gather_texts(comm, &bad.map(in_words).unwrap_or_default())?;
    let ranks: Vec<usize> = (0..said.len()).filter(|rank| !said[*rank].is_empty()).collect();
    Err(Error::argument("check_finite", reason(comm, &said, &ranks)))
}

/// Describes what the given ranks said.
fn reason(comm: &Communicator, said: &[String], ranks: &[usize]) -> String {
    const ADVICE: &str = "skip this step on all ranks, or continue from an earlier checkpoint with a lower learning rate";
    match ranks {
        [] => format!("a rank has a value that is not finite; {ADVICE}"),
        [rank] => format!("{} on {}; {ADVICE}", said[*rank], comm.peers()[*rank]),
        [rank, others @ ..] => {
            format!("{} on {}; values are not finite on these ranks either: {}; {ADVICE}", said[*rank], comm.peers()[*rank], listed(others))
        }
    }
}
