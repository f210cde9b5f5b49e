//! Predicts how long calls of one collective should take, from a few measured sizes.

use std::time::Duration;

use collectives::ReduceOp;

use super::backend::{Backend, Memory};
use super::call::Call;
use super::curve::Curve;
use super::session::Session;
use super::timing;
use crate::collective::Collective;
use crate::failure::Failure;
use crate::layout::Layout;
use crate::statistics::Spread;

/// The measured sizes in bytes, and the time for each.
const SIZES: [usize; 6] = [16, 2 << 10, 24 << 10, 192 << 10, 1536 << 10, 12 << 20];
const TIME: Duration = Duration::from_millis(12);

impl<P: Backend> Session<'_, P> {
    /// Measures a collective at these sizes, in f32, with the op Max if it has one. Does nothing if it has no
    /// algorithm.
    pub(super) fn curve_of(&self, collective: Collective) -> Result<Curve, Failure> {
        let (comm, element) = (self.comm, size_of::<f32>());
        let ranks = comm.world_size();
        if collective == Collective::SendRecv {
            return Ok(Curve::default());
        }
        if collective == Collective::Barrier {
            let cell = timing::sample(self.backend, self.world, TIME, 0, || comm.barrier())?;
            return Ok(Curve(Spread::of(&cell.samples).map(|spread| (1.0, spread.p50)).into_iter().collect()));
        }
        let counts = SIZES.map(|bytes| collective.count(bytes, element, ranks));
        let most = collective.bytes(counts[SIZES.len() - 1], 1, ranks);
        let [mut source, mut target] = self.backend.buffers::<f32>(most, 0)?;
        source.clear(most)?;
        target.clear(most)?;
        let mut curve = Curve::default();
        for count in counts {
            let bytes = collective.bytes(count, element, ranks);
            let layout = Layout::new(collective, ranks, 0, count);
            let call = Call::new(comm, collective, collective.reduces().then_some(ReduceOp::Max), count, &layout);
            let mut root = 0;
            // As in sampled rows: the root changes, since calls that do not wait for other ranks would queue up.
            let once = || {
                root = (root + 1) % ranks;
                call.out_of_place(root, &source, &mut target)
            };
            let cell = timing::sample(self.backend, self.world, TIME, bytes, once)?;
            curve.0.extend(Spread::of(&cell.samples).map(|spread| (bytes as f64, spread.p50)));
        }
        curve.0.dedup_by_key(|(bytes, _)| *bytes);
        Ok(curve)
    }
}
