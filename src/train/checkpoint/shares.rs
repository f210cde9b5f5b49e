//! The state of an optimiser that is dealt out over the ranks: saved by share, loaded by another world size's shares.

use super::piece::Piece;
use super::reader::Checkpoint;
use super::writer::Writer;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::train::layout::Slot;
use crate::train::parameter::Parameter;
use crate::train::sharded::ShardedOptimizer;

/// What one share has of one parameter.
struct Part<'a> {
    parameter: &'a Parameter,
    piece: Piece,
    /// Where in the share it lies.
    within: std::ops::Range<usize>,
}

impl<'a> Writer<'a> {
    /// Adds this rank's state for its shares of an optimiser's buckets: one slice a bucket, as long as the share
    /// ([`ShardedOptimizer::shard_lens`]). It is saved as a tensor for each parameter, of the parameter's shape and named `prefix` and the
    /// parameter's name, with a dot between: so any world size and any buckets can load it, and other tools read it. Names must be unique.
    ///
    /// A mistake is told by [`commit`](Self::commit): `InvalidArgument` where there are not as many slices, or one has another length.
    pub fn shares<T: Element>(&mut self, prefix: &str, model: &ShardedOptimizer, state: impl IntoIterator<Item = &'a [T]>) -> &mut Self {
        let mut state = state.into_iter();
        for (bucket, (parts, len)) in parts(model).enumerate() {
            let share = match fitting("Writer::shares", prefix, bucket, len, state.next(), |share| share.len()) {
                Ok(share) => share,
                Err(error) => return self.refused(error),
            };
            for Part { parameter, piece, within } in parts {
                self.tensor(&name(prefix, parameter), &parameter.shape, piece, &share[within]);
            }
        }
        match state.next() {
            None => self,
            Some(_) => self.refused(surplus("Writer::shares", prefix, model)),
        }
    }

    fn refused(&mut self, error: Error) -> &mut Self {
        self.refuse(error);
        self
    }
}

impl Checkpoint {
    /// Reads the state for this rank's shares of an optimiser's buckets, which [`Writer::shares`] saved under `prefix`, whatever the world
    /// size and the buckets were then. What lies behind a bucket's last parameter stays as it is. Local.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there are not as many slices as buckets, or one is not as long as the share; and as [`read`](Self::read).
    pub fn read_shares<'s, T: Element>(
        &self,
        prefix: &str,
        model: &ShardedOptimizer,
        state: impl IntoIterator<Item = &'s mut [T]>,
    ) -> Result<()> {
        let mut state = state.into_iter();
        for (bucket, (parts, len)) in parts(model).enumerate() {
            let share = fitting("Checkpoint::read_shares", prefix, bucket, len, state.next(), |share| share.len())?;
            for Part { parameter, piece, within } in parts {
                self.read(&name(prefix, parameter), &parameter.shape, piece, &mut share[within])?;
            }
        }
        state.next().map_or(Ok(()), |_| Err(surplus("Checkpoint::read_shares", prefix, model)))
    }
}

/// For each bucket what this rank's share has of each of its parameters, which may be nothing, and how long the share is.
fn parts(model: &ShardedOptimizer) -> impl Iterator<Item = (Vec<Part<'_>>, usize)> {
    model.layouts().zip(model.shares()).map(|(layout, share)| {
        let part = |slot: &Slot| {
            let (elements, within) = slot.overlap(&share);
            Some(Part { parameter: model.parameter(slot.parameter)?, piece: Piece::Flat(elements), within })
        };
        (layout.slots.iter().filter_map(part).collect(), share.len())
    })
}

fn name(prefix: &str, parameter: &Parameter) -> String {
    format!("{prefix}.{}", parameter.name)
}

/// The slice of a bucket, which must be there and as long as the share.
fn fitting<S>(call: &'static str, prefix: &str, bucket: usize, len: usize, share: Option<S>, count: impl Fn(&S) -> usize) -> Result<S> {
    let refused = |reason: String| Error::argument(call, format!("state {prefix:?}: {reason}"));
    let share = share.ok_or_else(|| refused(format!("there is none for bucket {bucket}")))?;
    match count(&share) {
        passed if passed == len => Ok(share),
        passed => Err(refused(format!("{passed} elements for bucket {bucket}, of which this rank's share has {len}"))),
    }
}

fn surplus(call: &'static str, prefix: &str, model: &ShardedOptimizer) -> Error {
    Error::argument(call, format!("state {prefix:?}: more slices than the {} buckets", model.layouts().len()))
}
