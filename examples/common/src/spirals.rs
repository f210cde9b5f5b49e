//! Two spirals, one for each class: a data set that needs no file and that no linear layer can separate.

use std::f32::consts::PI;
use std::ops::Range;

use crate::uniform;

/// Samples of the data set.
#[derive(Debug, Clone)]
pub struct Spirals {
    /// Two coordinates for each sample.
    pub points: Vec<f32>,
    /// 0 or 1 for each sample.
    pub classes: Vec<u32>,
}

impl Spirals {
    /// Returns the samples of one rank in a step: the part `share` of the step's batch.
    #[must_use]
    pub fn of(step: usize, share: Range<usize>, batch: usize) -> Self {
        let random = uniform(step as u64 + 1, 1.0, 3 * batch);
        let mut samples = Self { points: Vec::with_capacity(2 * share.len()), classes: Vec::with_capacity(share.len()) };
        for index in share {
            let class = index % 2;
            let along = 0.5 + 0.5 * random[3 * index];
            let angle = 2.0 * PI * along + PI * class as f32;
            let radius = 0.2 + 0.8 * along;
            samples.points.push(radius * angle.cos() + 0.03 * random[3 * index + 1]);
            samples.points.push(radius * angle.sin() + 0.03 * random[3 * index + 2]);
            samples.classes.push(class as u32);
        }
        samples
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Returns whether there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }
}
