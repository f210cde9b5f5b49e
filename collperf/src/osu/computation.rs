//! Computation on the processor for a given time, to overlap a call with.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The side of the matrices.
const SIDE: usize = 12;

/// A piece of arithmetic that is repeated until a time has passed. It stays in the nearest cache, and a pass takes less
/// than a microsecond.
pub(super) struct Computation {
    matrix: [[f32; SIDE]; SIDE],
    vector: [f32; SIDE],
}

impl Computation {
    pub(super) fn new() -> Self {
        Self { matrix: std::array::from_fn(|row| std::array::from_fn(|column| (row + column) as f32 / 100.0)), vector: [0.5; SIDE] }
    }

    /// Computes for at least this time.
    pub(super) fn perform(&mut self, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time {
            let vector = black_box(self.vector);
            for (result, row) in self.vector.iter_mut().zip(&self.matrix) {
                let product: f32 = row.iter().zip(&vector).map(|(one, other)| one * other).sum();
                // Bounded, so that the numbers stay ordinary ones however long it runs.
                *result = product.fract() + 0.25;
            }
            black_box(&self.vector);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_its_time_and_keeps_its_numbers() {
        let mut computation = Computation::new();
        let began = Instant::now();
        computation.perform(Duration::from_millis(3));
        assert!(began.elapsed() >= Duration::from_millis(3));
        assert!(computation.vector.iter().all(|value| (0.25..1.25).contains(value)), "{:?}", computation.vector);
    }
}
