//! The distribution of times: percentiles, histograms, and the pauses of the machine.

mod chart;
mod histogram;
mod pauses;

pub(crate) use chart::Chart;
pub(crate) use histogram::Histogram;
pub(crate) use pauses::Pauses;
