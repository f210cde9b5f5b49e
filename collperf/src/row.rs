//! One measured cell: what was called, how long it took, and how many elements were wrong.

use collectives::{Algorithm, DType, ReduceOp};

use crate::collective::Collective;
use crate::inputs::table_name;
use crate::statistics::Spread;

/// The figures of one call at one size, with two buffers or with one.
#[derive(Debug, Clone)]
pub(crate) struct Half {
    /// Microseconds per call.
    pub(crate) time_us: f64,
    /// The algorithm's bandwidth: bytes over time, in 10^9 bytes per second.
    pub(crate) algbw: f64,
    /// The bus bandwidth: what each link carries, in 10^9 bytes per second.
    pub(crate) busbw: f64,
    /// Wrong elements over all ranks; `None` if nothing was checked.
    pub(crate) wrong: Option<u64>,
    /// A summary of the times of single calls, if they were measured.
    pub(crate) spread: Option<Spread>,
    /// The times of single calls in microseconds, each the slowest rank's.
    pub(crate) samples: Vec<f64>,
    /// The prediction, if one was requested.
    pub(crate) prediction: Option<Forecast>,
}

/// The prediction for a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Forecast {
    /// The algorithm of the call.
    pub(crate) algorithm: Algorithm,
    /// Microseconds per call.
    pub(crate) time_us: f64,
}

impl Half {
    /// Returns the figures of a call that took `time_us`.
    pub(crate) fn new(collective: Collective, ranks: usize, bytes: usize, time_us: f64) -> Self {
        let algbw = if bytes == 0 { 0.0 } else { bytes as f64 / time_us / 1e3 * collective.algorithm_factor(ranks) };
        Self { time_us, algbw, busbw: algbw * collective.bus_factor(ranks), wrong: None, spread: None, samples: vec![], prediction: None }
    }

    /// Returns the predicted over the measured time.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.prediction.map(|prediction| prediction.time_us / self.time_us).filter(|ratio| ratio.is_finite())
    }
}

/// One line of the table.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) collective: Collective,
    pub(crate) op: Option<ReduceOp>,
    /// `None` for a barrier.
    pub(crate) dtype: Option<DType>,
    pub(crate) root: Option<usize>,
    pub(crate) ranks: usize,
    /// Elements per block, or of the whole vector.
    pub(crate) count: usize,
    /// Bytes of the larger of a rank's two buffers.
    pub(crate) bytes: usize,
    /// Timed calls.
    pub(crate) iterations: u64,
    pub(crate) out_of_place: Option<Half>,
    pub(crate) in_place: Option<Half>,
}

impl Row {
    /// Returns the type as nccl-tests names it.
    pub(crate) fn type_name(&self) -> &'static str {
        self.dtype.map_or("none", table_name)
    }

    /// Returns the reduce op.
    pub(crate) fn op_name(&self) -> &'static str {
        self.op.map_or("none", ReduceOp::name)
    }

    /// Returns the halves that were measured, and whether each is in place.
    pub(crate) fn halves(&self) -> impl Iterator<Item = (&Half, bool)> {
        self.out_of_place.iter().map(|half| (half, false)).chain(self.in_place.iter().map(|half| (half, true)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_follow_from_the_time() {
        let half = Half::new(Collective::AllReduce, 4, 2_000_000, 1000.0);
        assert_eq!((half.algbw, half.busbw), (2.0, 3.0));
        let empty = Half::new(Collective::AllReduce, 4, 0, 0.0);
        assert_eq!((empty.algbw, empty.busbw), (0.0, 0.0));
    }
}
