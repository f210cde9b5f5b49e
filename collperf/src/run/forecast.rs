//! How long calls of one collective should take: a few sizes are measured, and what lies between is read off the line through them.

use std::time::Duration;

use collectives::ReduceOp;

use super::call::Call;
use super::plane::{Memory, Plane};
use super::{Session, timing};
use crate::collective::Collective;
use crate::failure::Failure;
use crate::statistics::Spread;

/// The sizes that are measured, in bytes, and for how long each.
const SIZES: [usize; 6] = [16, 2 << 10, 24 << 10, 192 << 10, 1536 << 10, 12 << 20];
const TIME: Duration = Duration::from_millis(12);

/// Bytes and microseconds, ascending in bytes.
#[derive(Debug, Default)]
pub(super) struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// The microseconds of a call on so many bytes; `None` where nothing was measured. On straight lines between the logarithms of both, and as long for
    /// each byte beyond the largest size as there.
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

impl<P: Plane> Session<'_, P> {
    /// Measures a collective at the sizes, in f32, with the op Max where it has one. What has no algorithm is not measured.
    pub(super) fn curve_of(&self, collective: Collective) -> Result<Curve, Failure> {
        let (comm, element) = (self.comm, size_of::<f32>());
        let ranks = comm.world_size();
        if collective == Collective::SendRecv {
            return Ok(Curve::default());
        }
        if collective == Collective::Barrier {
            let cell = timing::sample(self.plane, self.world, TIME, 0, || comm.barrier())?;
            return Ok(Curve(Spread::of(&cell.samples).map(|spread| (1.0, spread.p50)).into_iter().collect()));
        }
        let counts = SIZES.map(|bytes| collective.count(bytes, element, ranks));
        let most = collective.bytes(counts[SIZES.len() - 1], 1, ranks);
        let [mut source, mut target] = self.plane.buffers::<f32>(most, 0)?;
        source.clear(most)?;
        target.clear(most)?;
        let mut curve = Curve::default();
        for count in counts {
            let bytes = collective.bytes(count, element, ranks);
            let call = Call::new(comm, collective, collective.reduces().then_some(ReduceOp::Max), count);
            let mut root = 0;
            // As rows are sampled: the root moves on, or calls that wait for nobody would queue up.
            let once = || {
                root = (root + 1) % ranks;
                call.out_of_place(root, &source, &mut target)
            };
            let cell = timing::sample(self.plane, self.world, TIME, bytes, once)?;
            curve.0.extend(Spread::of(&cell.samples).map(|spread| (bytes as f64, spread.p50)));
        }
        curve.0.dedup_by_key(|(bytes, _)| *bytes);
        Ok(curve)
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
