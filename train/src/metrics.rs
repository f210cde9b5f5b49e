//! Means of metrics over the samples of all ranks.

use super::agreement::{Listed, agree};
use collectives::{Communicator, ReduceOp, Result};

/// Averages metrics over all samples of all ranks. Each sample has the same weight, whatever rank or batch it is in.
/// Ranks may have different numbers of samples and batches, or none.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::{Metrics, Sampler, UnevenEnd};
///
/// let means = Communicator::run_local(3, |comm| {
///     let mut metrics = Metrics::new(["loss", "accuracy"]);
///     // Seven samples: rank 0 has three, the others have two.
///     for sample in Sampler::new(comm, 7).in_order().with_end(UnevenEnd::Keep).epoch(0) {
///         let (loss, is_right) = (sample as f64, sample < 2); // what the model computes
///         metrics.add([loss, f64::from(is_right)], 1);
///     }
///     let [loss, accuracy] = metrics.finish(comm)?.expect("there are samples");
///     Ok((loss, accuracy))
/// })?;
/// assert_eq!(means, [(3.0, 2.0 / 7.0); 3]);
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// A mean of the ranks' means would be wrong here, because it gives the samples different weights.
///
/// If metrics have different weights, such as a mean over tokens and a mean over samples, use one `Metrics` for each
/// kind of weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics<const N: usize> {
    names: [String; N],
    /// For each metric, the sum of the values times the numbers of samples.
    sums: [f64; N],
    samples: u64,
}

impl<const N: usize> Metrics<N> {
    /// Creates metrics with these names and without samples. All ranks must pass the same names, in the same order.
    #[must_use]
    pub fn new<S: Into<String>>(names: [S; N]) -> Self {
        Self { names: names.map(Into::into), sums: [0.0; N], samples: 0 }
    }

    /// Adds the means of a batch, one for each metric, and the number of samples in the batch. If `samples` is 0, the
    /// values are ignored, because the mean of an empty batch is often NaN. Sums are in `f64`.
    pub fn add(&mut self, values: [impl Into<f64>; N], samples: usize) {
        if samples == 0 {
            return;
        }
        self.samples = self.samples.saturating_add(samples as u64);
        self.sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value.into() * samples as f64);
    }

    /// Returns each metric's mean over the samples of all ranks, and starts again without samples. Returns `None` if no
    /// rank has a sample. Every rank gets the same bits. Collective.
    ///
    /// Cost: one all-gather of 40 B per rank compares the names, and one all-reduce sends 8·(`N` + 1) bytes.
    ///
    /// # Errors
    ///
    /// - `Mismatch` on every rank if two ranks have different names. The error names the first difference. The
    ///   communicator stays usable.
    /// - The errors of [`Communicator::all_reduce`].
    ///
    /// If the call fails, the samples are kept.
    pub fn finish(&mut self, comm: &Communicator) -> Result<Option<[f64; N]>> {
        let lines = self.names.iter().enumerate().map(|(index, name)| format!("metric {index} {name:?}")).collect();
        agree(comm, "Metrics::finish", &Listed { noun: "metrics", lines }, "")?;
        let mut sums = self.sums.to_vec();
        // Numbers of samples below 2⁵³ are exact.
        sums.push(self.samples as f64);
        comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        (self.sums, self.samples) = ([0.0; N], 0);
        let samples = sums[N];
        Ok((samples > 0.0).then(|| std::array::from_fn(|index| sums[index] / samples)))
    }
}
