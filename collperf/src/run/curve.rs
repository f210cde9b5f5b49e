//! The time of calls by size, interpolated from a few measured sizes.

/// Pairs of bytes and microseconds, ascending in bytes.
#[derive(Debug, Default)]
pub(super) struct Curve(pub(super) Vec<(f64, f64)>);

impl Curve {
    /// Returns the microseconds of a call on `bytes` bytes; `None` if nothing was measured. Interpolates linearly
    /// between the logarithms of both. Beyond the largest size, the time per byte is the same as at that size.
    pub(super) fn at(&self, bytes: usize) -> Option<f64> {
        let bytes = bytes as f64;
        let above = self.0.partition_point(|(size, _)| *size < bytes);
        match (above.checked_sub(1).and_then(|below| self.0.get(below)), self.0.get(above)) {
            (Some((low, fast)), Some((high, slow))) => {
                let part = (bytes / low).ln() / (high / low).ln();
                Some(fast * (slow / fast).powf(part))
            }
            (Some((size, time)), None) => Some(time * bytes / size),
            (None, found) => found.map(|(_, time)| *time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_goes_through_what_was_measured_and_between() {
        let curve = Curve(vec![(16.0, 2.0), (1600.0, 8.0)]);
        let near = |bytes, time: f64| (curve.at(bytes).unwrap() / time - 1.0).abs() < 1e-9;
        assert!(near(0, 2.0) && near(16, 2.0) && near(160, 4.0) && near(1600, 8.0) && near(16_000, 80.0));
        assert_eq!(Curve::default().at(8), None);
        assert_eq!(Curve(vec![(1.0, 5.0)]).at(0), Some(5.0));
    }
}
