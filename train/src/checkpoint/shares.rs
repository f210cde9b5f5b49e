//! Parameters, and the state of their optimiser, that are dealt out over the ranks: saved by share, loaded by another world size's shares.

use std::collections::BTreeSet;

use super::piece::Piece;
use super::reader::Checkpoint;
use super::writer::Writer;
use crate::fully_sharded::FullySharded;
use crate::layout::{BucketLayout, Slot};
use crate::sharded::ShardedOptimizer;
use collectives::Element;
use collectives::{Error, Result};

/// What is dealt out over the ranks by share: the buckets of a [`ShardedOptimizer`], whose parameters have names of
/// their own, and the units of a [`FullySharded`], where the unit's name and a dot come before the parameter's.
pub trait Sharded: sealed::Shares {}

impl Sharded for ShardedOptimizer {}

impl Sharded for FullySharded {}

mod sealed {
    use std::ops::Range;

    use super::{BucketLayout, Slot};

    pub trait Shares {
        /// The buckets, and which elements of each are this rank's.
        fn dealt(&self) -> Vec<(&BucketLayout, Range<usize>)>;

        /// The name of a bucket's parameter.
        fn name(&self, bucket: &BucketLayout, slot: &Slot) -> Option<String>;
    }
}

impl sealed::Shares for ShardedOptimizer {
    fn dealt(&self) -> Vec<(&BucketLayout, std::ops::Range<usize>)> {
        self.layouts().zip(self.shares()).collect()
    }

    fn name(&self, _: &BucketLayout, slot: &Slot) -> Option<String> {
        self.parameter(slot.parameter).map(|parameter| parameter.name.clone())
    }
}

impl sealed::Shares for FullySharded {
    fn dealt(&self) -> Vec<(&BucketLayout, std::ops::Range<usize>)> {
        self.layouts().enumerate().filter_map(|(unit, layout)| Some((layout, self.shard_range(unit).ok()?))).collect()
    }

    fn name(&self, unit: &BucketLayout, slot: &Slot) -> Option<String> {
        self.name_of(unit.index, slot.parameter)
    }
}

/// What one share has of one parameter.
struct Part<'a> {
    name: String,
    shape: &'a [usize],
    piece: Piece,
    /// Where in the share it lies.
    within: std::ops::Range<usize>,
}

impl<'a> Writer<'a> {
    /// Adds what this rank has for its shares of a model's buckets or units, their parameters or an optimiser's state: one slice for each, as long as the
    /// share ([`ShardedOptimizer::shard_lens`], [`FullySharded::shard_lens`]). It is saved as a tensor for each parameter, of the parameter's shape and
    /// named `prefix` and the parameter's name ([`Sharded`]), with a dot between: so any world size and any buckets can load it, and other tools read it.
    /// Names must be unique: nothing else is saved under one of them.
    ///
    /// A mistake is told by [`commit`](Self::commit): `InvalidArgument` where there are not as many slices, one has another length, or two parameters
    /// would have the same name: with a unit's name before it, `a.b` and `c` have that of `a` and `b.c`.
    pub fn shares<T: Element>(&mut self, prefix: &str, model: &impl Sharded, state: impl IntoIterator<Item = &'a [T]>) -> &mut Self {
        let mut state = state.into_iter();
        let parts = match parts("Writer::shares", prefix, model) {
            Ok(parts) => parts,
            Err(error) => return self.refused(error),
        };
        // Every rank has all names, so this is every rank's error; the parts of others could not tell namesakes from copies.
        self.reserve(parts.iter().flat_map(|(parts, _)| parts).map(|part| part.name.clone()));
        let count = parts.len();
        for (bucket, (parts, len)) in parts.into_iter().enumerate() {
            let share = match fitting("Writer::shares", prefix, bucket, len, state.next(), |share| share.len()) {
                Ok(share) => share,
                Err(error) => return self.refused(error),
            };
            for Part { name, shape, piece, within } in parts {
                self.add(&name, shape, piece, &share[within]);
            }
        }
        match state.next() {
            None => self,
            Some(_) => self.refused(surplus("Writer::shares", prefix, count)),
        }
    }

    fn refused(&mut self, error: Error) -> &mut Self {
        self.refuse(error);
        self
    }
}

impl Checkpoint {
    /// Reads what this rank has for its shares of a model's buckets or units, which [`Writer::shares`] saved under `prefix`, whatever the world
    /// size and the buckets were then. What lies behind a bucket's last parameter stays as it is. Local.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` where there are not as many slices as buckets, one is not as long as the share, or two parameters have the same name; and as
    /// [`read`](Self::read).
    pub fn read_shares<'s, T: Element>(
        &self,
        prefix: &str,
        model: &impl Sharded,
        state: impl IntoIterator<Item = &'s mut [T]>,
    ) -> Result<()> {
        let mut state = state.into_iter();
        let parts = parts("Checkpoint::read_shares", prefix, model)?;
        let count = parts.len();
        for (bucket, (parts, len)) in parts.into_iter().enumerate() {
            let share = fitting("Checkpoint::read_shares", prefix, bucket, len, state.next(), |share| share.len())?;
            for Part { name, shape, piece, within } in parts {
                self.read(&name, shape, piece, &mut share[within])?;
            }
        }
        state.next().map_or(Ok(()), |_| Err(surplus("Checkpoint::read_shares", prefix, count)))
    }
}

/// What a rank's share of one bucket has of each of its parameters, which may be nothing, and how long the share is.
type OfBucket<'m> = (Vec<Part<'m>>, usize);

/// What this rank's shares have, bucket by bucket. Refuses parameters of one name.
fn parts<'m>(call: &'static str, prefix: &str, model: &'m impl Sharded) -> Result<Vec<OfBucket<'m>>> {
    let of_bucket = |(layout, share): (&'m BucketLayout, std::ops::Range<usize>)| {
        let part = |slot: &'m Slot| {
            let (elements, within) = slot.overlap(&share);
            let name = format!("{prefix}.{}", model.name(layout, slot)?);
            Some(Part { name, shape: &slot.shape, piece: Piece::Flat(elements), within })
        };
        (layout.slots.iter().filter_map(part).collect(), share.len())
    };
    let parts: Vec<OfBucket<'m>> = model.dealt().into_iter().map(of_bucket).collect();
    let mut names = BTreeSet::new();
    match parts.iter().flat_map(|(parts, _)| parts).find(|part| !names.insert(&*part.name)) {
        None => Ok(parts),
        Some(Part { name, .. }) => {
            Err(Error::argument(call, format!("state {prefix:?}: two parameters are {name:?}: in checkpoints each has a name of its own")))
        }
    }
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

fn surplus(call: &'static str, prefix: &str, count: usize) -> Error {
    Error::argument(call, format!("state {prefix:?}: more slices than the {count} buckets"))
}
