//! How gradients are put into buckets and averaged.

use super::flat::Place;
use super::layout::Caps;
use crate::op::ReduceOp;

/// How gradients are put into buckets and averaged. Every rank must use the same, but for the weight of a `PreMulSum`.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The most bytes of the first bucket of an element type. Small, so that the first reduction starts early. Default: 1 MiB. With 0
    /// it holds one parameter; where `bucket_bytes` is 0 too, every parameter has a bucket of its own.
    pub first_bucket_bytes: usize,
    /// The most bytes of every other bucket; a parameter with more has one of its own. Default: 25 MiB.
    pub bucket_bytes: usize,
    /// A parameter of so many bytes has a bucket of its own: it starts as soon as it comes, and is not copied where it is
    /// [given](super::DataParallel::give). `None`: 256 KiB in host memory, and no such rule on devices, where every launch has its price.
    /// Default: `None`.
    pub own_bucket_bytes: Option<usize>,
    /// How the ranks' gradients become one: `Avg`, `Sum`, or `PreMulSum` with this rank's weight, say its share of the samples of the
    /// whole batch. Default: `Avg`. A hook of one's own decides by itself.
    pub op: ReduceOp,
    /// What becomes of parameters that get no gradient in a step. Default: `Refused`.
    pub missing: Missing,
}

/// What becomes of parameters that get no gradient on a rank in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Missing {
    /// The step fails on every rank with an error that names the rank and the parameter; the next one can follow. Costs one more
    /// all-reduce of one number a step, which goes on beside the buckets.
    #[default]
    Refused,
    /// They count as zeros, on this rank.
    Zeros,
}

impl Default for Options {
    fn default() -> Self {
        let (op, missing) = (ReduceOp::Avg, Missing::default());
        Self { first_bucket_bytes: 1 << 20, bucket_bytes: 25 << 20, own_bucket_bytes: None, op, missing }
    }
}

impl Options {
    /// The sizes of buckets in a place.
    pub(super) fn caps(&self, place: &Place) -> Caps {
        let by_place = match place {
            Place::Host => 256 << 10,
            #[cfg(feature = "cuda")]
            Place::Device(_) => usize::MAX,
        };
        Caps { first: self.first_bucket_bytes, others: self.bucket_bytes, own: self.own_bucket_bytes.unwrap_or(by_place) }
    }

    /// What all ranks must agree on, in words.
    pub(super) fn in_words(&self, place: &Place) -> String {
        let Self { first_bucket_bytes, bucket_bytes, op, missing, .. } = self;
        let own = self.caps(place).own;
        format!(
            "first_bucket_bytes {first_bucket_bytes}, bucket_bytes {bucket_bytes}, own_bucket_bytes {own}, op {op}, missing {missing:?}"
        )
    }
}
