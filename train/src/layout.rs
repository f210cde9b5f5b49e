//! Decides which parameters share a bucket, and the places of their gradients in it. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use super::flat::Place;
use super::parameter::Parameter;
use crate::tuning::{BUCKET_BYTES, FIRST_BUCKET_BYTES, OWN_BUCKET_BYTES};
use collectives::DType;
use collectives::ReduceOp;
use collectives::{Error, Result};

/// Options that set how gradients are put into buckets, and how they are averaged. Every rank must use the same
/// options, except for the weight of a `PreMulSum`.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// The maximum size in bytes of the first bucket of each element type. A small first bucket lets the first
    /// reduction start early. Default: 1 MiB. With 0, the first bucket has one parameter. If `bucket_bytes` is 0 too,
    /// every parameter has its own bucket.
    pub first_bucket_bytes: usize,
    /// The maximum size in bytes of every other bucket. A parameter that is larger than this size has its own bucket.
    /// Default: 25 MiB.
    pub bucket_bytes: usize,
    /// A parameter of at least this size in bytes has its own bucket. The reduction of such a parameter's gradient
    /// starts as soon as the gradient arrives, and a [given](super::DataParallel::give) gradient is not copied. `None`
    /// means 256 KiB in host memory. On devices, every launch of a bucket takes time, so `None` means that no parameter
    /// has its own bucket because of this option. Default: `None`.
    pub own_bucket_bytes: Option<usize>,
    /// How the ranks' gradients are combined: `Avg`, `Sum`, or `PreMulSum` with this rank's weight, for example this
    /// rank's share of the samples of the whole batch. Your own hook may ignore this op. Default: `Avg`.
    pub op: ReduceOp,
    /// How a step treats parameters without a gradient. Default: `Refused`.
    pub missing: Missing,
}

/// How a step treats parameters that have no gradient on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Missing {
    /// The step fails on every rank with an error that names the rank and the parameter. Another step can follow. To
    /// detect missing gradients, each step makes one all-reduce of one number, in addition to the reductions of the
    /// buckets.
    #[default]
    Refused,
    /// On a rank without a gradient for a parameter, the parameter's gradient is the sum of the parts that were
    /// accumulated in this step. If no part was accumulated, the gradient counts as zeros.
    Zeros,
}

impl Default for Options {
    fn default() -> Self {
        let (op, missing) = (ReduceOp::Avg, Missing::default());
        Self { first_bucket_bytes: FIRST_BUCKET_BYTES, bucket_bytes: BUCKET_BYTES, own_bucket_bytes: None, op, missing }
    }
}

impl Options {
    /// Returns the sizes of buckets in a place.
    pub(super) fn caps(&self, place: &Place) -> Caps {
        let by_place = match place {
            Place::Host => OWN_BUCKET_BYTES,
            #[cfg(feature = "cuda")]
            Place::Device(_) => usize::MAX,
        };
        Caps { first: self.first_bucket_bytes, others: self.bucket_bytes, own: self.own_bucket_bytes.unwrap_or(by_place) }
    }

    /// Describes what all ranks must agree on, in words.
    pub(super) fn in_words(&self, place: &Place) -> String {
        let Self { first_bucket_bytes, bucket_bytes, op, missing, .. } = self;
        let own = self.caps(place).own;
        format!(
            "first_bucket_bytes {first_bucket_bytes}, bucket_bytes {bucket_bytes}, own_bucket_bytes {own}, op {op}, missing {missing:?}"
        )
    }
}

/// The place of a parameter's gradient in its bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// The parameter's number, in the order in which parameters were listed.
    pub parameter: usize,
    /// The parameter's shape.
    pub shape: Vec<usize>,
    /// The range of the parameter's elements in the bucket.
    pub range: Range<usize>,
}

impl Slot {
    /// Returns the elements of the parameter that are in `range`, a range of the bucket. The first result is the
    /// elements' range in the flattened parameter. The second result is their range relative to the start of `range`.
    /// Returns two empty ranges if there is no overlap.
    ///
    /// ```
    /// # use collectives_train::Slot;
    /// let slot = Slot { parameter: 0, shape: vec![2, 3], range: 10..16 };
    /// assert_eq!(slot.overlap(&(12..24)), (2..6, 0..4));
    /// assert_eq!(slot.overlap(&(0..12)), (0..2, 10..12));
    /// ```
    #[must_use]
    pub fn overlap(&self, range: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let (start, end) = (self.range.start.max(range.start), self.range.end.min(range.end));
        if start >= end {
            return (0..0, 0..0);
        }
        (start - self.range.start..end - self.range.start, start - range.start..end - range.start)
    }
}

/// The layout of one flat buffer, and of the gradients in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketLayout {
    /// The bucket's number. Buckets are reduced in the order of their numbers.
    pub index: usize,
    /// The type of the bucket's elements.
    pub dtype: DType,
    /// The places of the bucket's gradients. The places are contiguous, in the reverse order of the list of parameters.
    /// In a unit of [`FullySharded`](super::FullySharded), the places are in the order of the list.
    pub slots: Vec<Slot>,
    /// How many elements the bucket has. If ranks have shares of the bucket, the elements include padding after the
    /// last gradient, up to a multiple of the world size.
    pub len: usize,
}

/// Limits in bytes: the size of the first bucket of each element type, the size of the others, and the size from which
/// a parameter is alone in its bucket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caps {
    pub(super) first: usize,
    pub(super) others: usize,
    pub(super) own: usize,
}

/// Walks the parameters from the last to the first, in the order of a backward pass, and fills buckets. The walk skips
/// parameters that have their own bucket. Buckets are in the order in which they become full. Lengths are rounded up to
/// `multiple`.
pub(super) fn plan(parameters: &[Parameter], caps: Caps, multiple: usize) -> Result<Vec<BucketLayout>> {
    let mut open: BTreeMap<u8, Vec<Slot>> = BTreeMap::new();
    let (mut closed, mut alone): (Vec<(DType, Vec<Slot>)>, Vec<_>) = Default::default();
    for (index, parameter) in parameters.iter().enumerate().rev() {
        let len = checked_len(index, parameter)?;
        let dtype = parameter.dtype;
        let slot = |start: usize| Slot { parameter: index, shape: parameter.shape.clone(), range: start..start + len };
        if len > 0 && len.saturating_mul(dtype.size_bytes()) >= caps.own {
            alone.push((dtype, vec![slot(0)]));
            continue;
        }
        let is_first = !closed.iter().any(|(theirs, _)| *theirs == dtype);
        let cap = if is_first { caps.first } else { caps.others };
        let slots = open.entry(dtype as u8).or_default();
        let start = slots.last().map_or(0, |slot| slot.range.end);
        let fits = start.checked_add(len).and_then(|end| end.checked_mul(dtype.size_bytes())).is_some_and(|bytes| bytes <= cap);
        if !fits && !slots.is_empty() {
            closed.push((dtype, std::mem::take(slots)));
        }
        let start = slots.last().map_or(0, |slot| slot.range.end);
        slots.push(slot(start));
    }
    let rest = open.into_values().filter_map(|slots| Some((parameters[slots.first()?.parameter].dtype, slots)));
    closed.extend(rest.chain(alone).collect::<Vec<_>>());
    Ok(numbered(closed, multiple))
}

/// Sorts buckets in the order in which they become full.
fn numbered(mut buckets: Vec<(DType, Vec<Slot>)>, multiple: usize) -> Vec<BucketLayout> {
    // The lowest parameter of a bucket is the last one to be ready.
    buckets.sort_by_key(|(_, slots)| std::cmp::Reverse(slots.last().map(|slot| slot.parameter)));
    let layout = |(index, (dtype, slots)): (usize, (DType, Vec<Slot>))| {
        let len = slots.last().map_or(0, |slot| slot.range.end).next_multiple_of(multiple);
        BucketLayout { index, dtype, slots, len }
    };
    buckets.into_iter().enumerate().map(layout).collect()
}

/// Returns whether gradients can have this type.
pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
}

/// Returns the layout of a unit, whose parameters all have one type. Its length is rounded up to `multiple`.
pub(super) fn unit(index: usize, parameters: &[Parameter], multiple: usize) -> Result<BucketLayout> {
    let dtype = parameters.first().map_or(DType::F32, |first| first.dtype);
    let (mut slots, mut end) = (Vec::new(), 0_usize);
    for (number, parameter) in parameters.iter().enumerate() {
        let refused = |reason: &str| Error::argument("train", format!("unit {index}, parameter {number} {parameter}: {reason}"));
        if parameter.dtype != dtype {
            return Err(refused(&format!("the unit's first parameter is {dtype}, and all parameters of a unit must have the same type")));
        }
        let range = end..end.saturating_add(checked_len(number, parameter)?);
        end = range.end;
        if end > isize::MAX as usize / dtype.size_bytes() - multiple {
            return Err(refused("together with the parameters before this one, the unit does not fit into the address space"));
        }
        slots.push(Slot { parameter: number, shape: parameter.shape.clone(), range });
    }
    Ok(BucketLayout { index, dtype, slots, len: end.next_multiple_of(multiple) })
}

/// Returns a parameter's length, if gradients can have its type and it fits into the address space.
fn checked_len(index: usize, parameter: &Parameter) -> Result<usize> {
    let refused = |reason: &str| Error::argument("train", format!("parameter {index} {parameter}: {reason}"));
    if !is_float(parameter.dtype) {
        return Err(refused("gradients must be f32, f64, f16 or bf16"));
    }
    parameter.len().ok_or_else(|| refused("the parameter has more elements than fit into the address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(lengths: &[usize], first: usize, others: usize, own: usize) -> Vec<Vec<usize>> {
        let parameters: Vec<_> = lengths.iter().map(|len| Parameter::new::<f32>("p", &[*len])).collect();
        let buckets = plan(&parameters, Caps { first, others, own }, 1).unwrap();
        buckets.iter().map(|bucket| bucket.slots.iter().map(|slot| slot.parameter).collect()).collect()
    }

    #[test]
    fn buckets_are_filled_from_the_last_parameter_and_hold_no_more_than_their_caps() {
        const NONE: usize = usize::MAX;
        assert_eq!(sizes(&[1, 1, 1, 1, 1], 4, 8, NONE), [vec![4], vec![3, 2], vec![1, 0]]);
        assert_eq!(sizes(&[1, 100, 1, 1], 8, 8, NONE), [vec![3, 2], vec![1], vec![0]]);
        assert_eq!(sizes(&[5, 0, 5], 0, 0, NONE), [vec![2], vec![1], vec![0]]);
        assert_eq!(sizes(&[], 1, 1, NONE), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn a_large_parameter_has_a_bucket_of_its_own_and_small_ones_on_both_sides_of_it_share_theirs() {
        assert_eq!(sizes(&[1, 10, 1, 1, 10, 1], 8, 8, 40), [vec![4], vec![5, 3], vec![1], vec![2, 0]]);
        assert_eq!(sizes(&[1, 10, 1, 1, 10, 1], 8, 8, 41), [vec![5], vec![4], vec![3, 2], vec![1], vec![0]]);
        assert_eq!(sizes(&[1, 0, 2], 100, 100, 0), [vec![2], vec![1], vec![0]]);
    }

    #[test]
    fn types_have_buckets_of_their_own_ordered_by_when_they_are_complete() {
        let parameters = [Parameter::new::<f32>("a", &[1]), Parameter::new::<half::f16>("b", &[3]), Parameter::new::<f32>("c", &[2])];
        let buckets = plan(&parameters, Caps { first: 100, others: 100, own: usize::MAX }, 4).unwrap();
        let seen: Vec<_> = buckets.iter().map(|bucket| (bucket.index, bucket.dtype, bucket.slots.len(), bucket.len)).collect();
        assert_eq!(seen, [(0, DType::F16, 1, 4), (1, DType::F32, 2, 4)]);
        assert_eq!(buckets[1].slots[1].range, 2..3);
    }

    #[test]
    fn a_unit_lies_flat_in_the_order_of_its_parameters_and_is_filled_up() {
        let parameters = [Parameter::new::<f32>("a", &[2, 3]), Parameter::new::<f32>("b", &[]), Parameter::new::<f32>("c", &[0])];
        let layout = unit(5, &parameters, 4).unwrap();
        let ranges: Vec<_> = layout.slots.iter().map(|slot| slot.range.clone()).collect();
        assert_eq!((layout.index, layout.len, ranges), (5, 8, vec![0..6, 6..7, 7..7]));
        assert_eq!(unit(0, &[], 4).unwrap().len, 0);
        let mixed = [Parameter::new::<f32>("a", &[1]), Parameter::new::<f64>("b", &[1])];
        let huge = [Parameter::new::<f32>("a", &[isize::MAX as usize / 4]), Parameter::new::<f32>("b", &[1])];
        for (parameters, word) in [(mixed, "must have the same type"), (huge, "address space")] {
            let error = unit(1, &parameters, 2).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("unit 1"), "{error}");
        }
    }

    #[test]
    fn what_no_gradient_can_be_is_refused() {
        let huge = Parameter::new::<f32>("huge", &[usize::MAX, 2]);
        let whole = Parameter { name: "count".to_owned(), shape: vec![1], dtype: DType::I32 };
        for (parameter, word) in [(huge, "address space"), (whole, "gradients must be")] {
            let error = plan(&[parameter], Caps { first: 1, others: 1, own: 1 }, 1).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
