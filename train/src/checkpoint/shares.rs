//! Saves the shares of parameters and of an optimiser's state, and loads them with another world size.

use std::collections::BTreeSet;

use super::piece::Piece;
use super::reader::Checkpoint;
use super::writer::Writer;
use crate::bucket::range_of;
use crate::fully_sharded::FullySharded;
use crate::layout::{BucketLayout, Slot};
use crate::sharded::ShardedOptimizer;
use collectives::{Communicator, Element};
use collectives::{Error, Result};

/// A model that is sharded over the ranks. In a checkpoint, the parameters of a [`ShardedOptimizer`] keep their names.
/// For a parameter of a [`FullySharded`], the name in the checkpoint consists of the unit's name, a dot and the
/// parameter's name.
pub trait Sharded: sealed::Shares {}

impl Sharded for ShardedOptimizer {}

impl Sharded for FullySharded {}

mod sealed {
    use std::ops::Range;

    use super::{BucketLayout, Communicator, Slot};

    pub trait Shares {
        /// Returns the communicator of the ranks that have shares.
        fn ranks(&self) -> &Communicator;

        /// Returns the layout of each bucket, and the range of the bucket's elements that belongs to a rank.
        fn dealt_to(&self, rank: usize) -> Vec<(&BucketLayout, Range<usize>)>;

        /// Returns the name of a bucket's parameter.
        fn name(&self, bucket: &BucketLayout, slot: &Slot) -> Option<String>;
    }
}

impl sealed::Shares for ShardedOptimizer {
    fn ranks(&self) -> &Communicator {
        self.communicator()
    }

    fn dealt_to(&self, rank: usize) -> Vec<(&BucketLayout, std::ops::Range<usize>)> {
        self.layouts().map(|layout| (layout, range_of(self.communicator(), layout, rank))).collect()
    }

    fn name(&self, _: &BucketLayout, slot: &Slot) -> Option<String> {
        self.parameter(slot.parameter).map(|parameter| parameter.name.clone())
    }
}

impl sealed::Shares for FullySharded {
    fn ranks(&self) -> &Communicator {
        self.communicator()
    }

    fn dealt_to(&self, rank: usize) -> Vec<(&BucketLayout, std::ops::Range<usize>)> {
        self.layouts().map(|layout| (layout, range_of(self.communicator(), layout, rank))).collect()
    }

    fn name(&self, unit: &BucketLayout, slot: &Slot) -> Option<String> {
        self.name_of(unit.index, slot.parameter)
    }
}

/// The part of one parameter in one share.
pub(crate) struct Part<'a> {
    pub(crate) name: String,
    pub(crate) shape: &'a [usize],
    pub(crate) piece: Piece,
    /// Its place in the share.
    pub(crate) within: std::ops::Range<usize>,
}

impl<'a> Writer<'a> {
    /// Adds this rank's shares of a model's buckets or units. The shares contain parameters, or an optimiser's state.
    /// `state` must have one slice for each share, and each slice must be as long as its share
    /// ([`ShardedOptimizer::shard_lens`], [`FullySharded::shard_lens`]).
    ///
    /// Each parameter is saved as a tensor of the parameter's shape. The tensor's name consists of `prefix`, a dot and
    /// the parameter's name ([`Sharded`]). So a job with another world size or other buckets can load the tensor, and
    /// other tools can read it. The names must be unique: no other tensor may be saved with one of these names.
    ///
    /// This call returns no error. [`commit`](Self::commit) returns `InvalidArgument` in these cases:
    ///
    /// - The number of slices is not the number of shares.
    /// - A slice is not as long as its share.
    /// - Two parameters would have the same name. For example, parameter `c` of a unit `a.b` has the same name as
    ///   parameter `b.c` of a unit `a`.
    pub fn shares<T: Element>(&mut self, prefix: &str, model: &impl Sharded, state: impl IntoIterator<Item = &'a [T]>) -> &mut Self {
        let mut state = state.into_iter();
        let parts = match parts("Writer::shares", prefix, model) {
            Ok(parts) => parts,
            Err(error) => return self.refused(error),
        };
        // Every rank has all names, so this is every rank's error. The parts alone do not show whether equal names are
        // copies.
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
    /// Reads this rank's shares of a model's buckets or units. [`Writer::shares`] must have saved these shares with the
    /// same `prefix`. At that time, the world size and the buckets may have been different. In each slice of `state`,
    /// elements after a bucket's last parameter stay unchanged. Local.
    ///
    /// # Errors
    ///
    /// - `InvalidArgument` if the number of slices is not the number of buckets, or if a slice is not as long as its
    ///   share.
    /// - `InvalidArgument` if two parameters have the same name.
    /// - The errors of [`read`](Self::read).
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

/// The parts of a bucket's parameters in a rank's share, and the length of the share. Some parts may be empty.
pub(crate) type OfBucket<'m> = (Vec<Part<'m>>, usize);

/// Returns the parts of parameters that are in this rank's shares, in one list for each bucket. Refuses two parameters
/// with the same name.
pub(crate) fn parts<'m>(call: &'static str, prefix: &str, model: &'m impl Sharded) -> Result<Vec<OfBucket<'m>>> {
    parts_of(call, prefix, model, model.ranks().rank())
}

/// Returns the parts of parameters that are in the shares of a rank, like [`parts`].
pub(crate) fn parts_of<'m>(call: &'static str, prefix: &str, model: &'m impl Sharded, rank: usize) -> Result<Vec<OfBucket<'m>>> {
    let ranks = model.ranks().world_size();
    if rank >= ranks {
        return Err(Error::argument(call, format!("state {prefix:?}: the model has no rank {rank}: its ranks are 0 to {}", ranks - 1)));
    }
    let of_bucket = |(layout, share): (&'m BucketLayout, std::ops::Range<usize>)| {
        let part = |slot: &'m Slot| {
            let (elements, within) = slot.overlap(&share);
            let name = format!("{prefix}.{}", model.name(layout, slot)?);
            Some(Part { name, shape: &slot.shape, piece: Piece::Flat(elements), within })
        };
        (layout.slots.iter().filter_map(part).collect(), share.len())
    };
    let parts: Vec<OfBucket<'m>> = model.dealt_to(rank).into_iter().map(of_bucket).collect();
    let mut names = BTreeSet::new();
    match parts.iter().flat_map(|(parts, _)| parts).find(|part| !names.insert(&*part.name)) {
        None => Ok(parts),
        Some(Part { name, .. }) => Err(Error::argument(
            call,
            format!("state {prefix:?}: two parameters are named {name:?}, but in a checkpoint each needs its own name"),
        )),
    }
}

/// Returns the slice that was passed for a bucket. Fails if there is no slice, or if the slice is not as long as the
/// rank's share.
pub(crate) fn fitting<S>(
    call: &'static str,
    prefix: &str,
    bucket: usize,
    len: usize,
    share: Option<S>,
    count: impl Fn(&S) -> usize,
) -> Result<S> {
    let refused = |reason: String| Error::argument(call, format!("state {prefix:?}: {reason}"));
    let share = share.ok_or_else(|| refused(format!("there is no slice for bucket {bucket}")))?;
    match count(&share) {
        passed if passed == len => Ok(share),
        passed => Err(refused(format!("{passed} elements were passed for bucket {bucket}, but this rank's share of the bucket has {len}"))),
    }
}

pub(crate) fn surplus(call: &'static str, prefix: &str, count: usize) -> Error {
    Error::argument(call, format!("state {prefix:?}: more slices were passed than the model has buckets ({count})"))
}
