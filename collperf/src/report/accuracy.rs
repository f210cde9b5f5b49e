//! The accuracy of predictions over all rows.

use std::fmt;

use crate::row::Row;
use crate::sizes::human;

/// The largest factor between predicted and measured time, in either direction, at which a prediction counts as good.
const GOOD: f64 = 1.5;

/// The accuracy of the predictions so far.
#[derive(Debug, Default)]
pub(super) struct Accuracy {
    cells: usize,
    good: usize,
    /// The largest error as a factor, and its row.
    worst: Option<(f64, String)>,
}

impl Accuracy {
    pub(super) fn add(&mut self, row: &Row) {
        for (half, in_place) in row.halves() {
            let (Some(ratio), Some(prediction)) = (half.ratio(), half.prediction) else { continue };
            let factor = ratio.max(1.0 / ratio);
            self.cells += 1;
            self.good += usize::from(factor <= GOOD);
            if self.worst.as_ref().is_none_or(|(worst, _)| factor > *worst) {
                let place = if in_place { " in place" } else { "" };
                let what = format!("{} of {}{place}", row.collective, human(row.bytes));
                let figures = format!("{:.2} us predicted and {:.2} measured", prediction.time_us, half.time_us);
                self.worst = Some((factor, format!("{what}, {figures}")));
            }
        }
    }
}

impl fmt::Display for Accuracy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((factor, what)) = &self.worst else { return f.write_str("Predictions: none for the measured calls") };
        write!(
            f,
            "Predictions within a factor of {GOOD} of the measured time: {} of {}. The worst is off by a factor of {factor:.2}: {what}",
            self.good, self.cells
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::Algorithm;

    use crate::collective::Collective;
    use crate::row::{Forecast, Half};

    #[test]
    fn the_worst_is_named_whichever_way_it_is_off() {
        let row = |predicted: &[f64]| {
            let half = |time_us: &f64| Half {
                prediction: Some(Forecast { algorithm: Algorithm::Ring, time_us: *time_us }),
                ..Half::new(Collective::AllReduce, 2, 1024, 10.0)
            };
            Row {
                collective: Collective::AllReduce,
                op: None,
                dtype: None,
                root: None,
                ranks: 2,
                count: 256,
                bytes: 1024,
                iterations: 1,
                out_of_place: predicted.first().map(half),
                in_place: predicted.get(1).map(half),
            }
        };
        let mut accuracy = Accuracy::default();
        assert!(accuracy.to_string().contains("none"));
        accuracy.add(&row(&[10.0, 4.0]));
        accuracy.add(&row(&[15.0, 20.0]));
        let text = accuracy.to_string();
        assert!(text.contains("2 of 4") && text.contains("by a factor of 2.50: all_reduce of 1 KiB in place, 4.00 us predicted"), "{text}");
    }

    #[test]
    fn times_of_nothing_are_left_out() {
        let half =
            Half { prediction: Some(Forecast { algorithm: Algorithm::Ring, time_us: 1.0 }), ..Half::new(Collective::Barrier, 2, 0, 0.0) };
        assert_eq!(half.ratio(), None);
    }
}
