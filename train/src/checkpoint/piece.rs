//! The elements of a tensor that a rank holds, and how the elements of one division map to those of another. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The part of a tensor that a rank has, with elements in row-major order. A buffer for a piece contains only the
/// elements of the piece, one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Piece {
    /// The whole tensor.
    Whole,
    /// A range of one dimension, with all elements of the other dimensions. In tensor parallelism, such a piece is a
    /// range of rows or columns.
    Along {
        /// The dimension, from 0.
        dimension: usize,
        /// The indices in that dimension.
        range: Range<usize>,
    },
    /// A range of the flattened tensor, such as a ZeRO share.
    Flat(Range<usize>),
}

impl Piece {
    /// Divides a dimension of length `side` into `parts` parts, and returns part number `index`. The parts' lengths
    /// differ by at most one, and longer parts come first.
    ///
    /// ```
    /// # use collectives_train::checkpoint::Piece;
    /// let ranges = [0..3, 3..5, 5..7].map(|range| Piece::Along { dimension: 1, range });
    /// assert_eq!([0, 1, 2].map(|rank| Piece::part(1, 7, rank, 3)), ranges);
    /// ```
    #[must_use]
    pub fn part(dimension: usize, side: usize, index: usize, parts: usize) -> Self {
        let parts = parts.max(1);
        let start = |index: usize| (side / parts).saturating_mul(index).saturating_add(index.min(side % parts)).min(side);
        Self::Along { dimension, range: start(index)..start(index.saturating_add(1)) }
    }

    /// Returns the number of elements of this piece in a tensor of the given shape.
    ///
    /// ```
    /// # use collectives_train::checkpoint::Piece;
    /// assert_eq!(Piece::part(1, 7, 0, 3).len(&[2, 7])?, 6);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the tensor has no such piece, or if the tensor has more elements than fit into the address
    /// space.
    pub fn len(&self, shape: &[usize]) -> collectives::Result<usize> {
        self.extent(shape).map(|extent| extent.len()).map_err(|reason| collectives::Error::argument("Piece::len", reason))
    }

    /// Returns the shape of this piece alone, in a tensor of the given shape. A flat range has one dimension.
    ///
    /// ```
    /// # use collectives_train::checkpoint::Piece;
    /// assert_eq!(Piece::part(1, 7, 0, 3).shape(&[2, 7])?, [2, 3]);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`len`](Self::len).
    pub fn shape(&self, whole: &[usize]) -> collectives::Result<Vec<usize>> {
        self.extent(whole).map_err(|reason| collectives::Error::argument("Piece::shape", reason))?;
        Ok(self.shape_of(whole))
    }

    /// Returns its elements in a form that is the same for all pieces with the same elements. The error says why a
    /// tensor of this shape has no such part.
    pub(crate) fn extent(&self, shape: &[usize]) -> Result<Extent, String> {
        let total = element_count(shape)?;
        let within = |range: &Range<usize>, end: usize| range.start <= range.end && range.end <= end;
        let flat = |range: Range<usize>| Ok(Extent::flat(range, total));
        match self {
            Self::Whole => flat(0..total),
            Self::Flat(range) if within(range, total) => flat(range.clone()),
            Self::Along { dimension, range } if shape.get(*dimension).is_some_and(|side| within(range, *side)) => {
                if total == 0 || range.is_empty() {
                    return flat(0..0);
                }
                // Factors of a product that did not overflow, none of them 0.
                let outer: usize = shape[..*dimension].iter().product();
                let inner: usize = shape[dimension + 1..].iter().product();
                if range.len() == shape[*dimension] {
                    return flat(0..total);
                }
                Ok(Extent { outer, stride: shape[*dimension] * inner, start: range.start * inner, end: range.end * inner })
            }
            _ => Err(format!("there is no part {self} of a tensor of shape {shape:?}")),
        }
    }

    /// Returns the shape of the part alone.
    pub(super) fn shape_of(&self, shape: &[usize]) -> Vec<usize> {
        match self {
            Self::Whole => shape.to_vec(),
            Self::Flat(range) => vec![range.len()],
            Self::Along { dimension, range } => {
                let mut shape = shape.to_vec();
                shape[*dimension] = range.len();
                shape
            }
        }
    }

    /// Returns the name of the tensor's part in a file.
    pub(super) fn key(&self, name: &str) -> String {
        match self {
            Self::Whole => name.to_owned(),
            Self::Flat(range) => format!("{name}#{}-{}", range.start, range.end),
            Self::Along { dimension, range } => format!("{name}#{dimension}:{}-{}", range.start, range.end),
        }
    }
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("(all of it)"),
            Self::Flat(range) => write!(f, "(elements {}..{} of the flattened tensor)", range.start, range.end),
            Self::Along { dimension, range } => write!(f, "({}..{} of dimension {dimension})", range.start, range.end),
        }
    }
}

/// Returns the number of elements of a tensor of this shape.
pub(crate) fn element_count(shape: &[usize]) -> Result<usize, String> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let count = shape.iter().try_fold(1_usize, |count, side| count.checked_mul(*side));
    // Elements have at most eight bytes.
    let count = count.filter(|count| *count <= isize::MAX as usize / 8);
    count.ok_or_else(|| format!("a tensor of shape {shape:?} has more elements than fit into the address space"))
}

/// The elements of a part: those from `start` to `end` in each of `outer` blocks of `stride` elements.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Extent {
    outer: usize,
    stride: usize,
    start: usize,
    end: usize,
}

impl Extent {
    /// Creates the extent of a range of a tensor of `total` elements.
    fn flat(range: Range<usize>, total: usize) -> Self {
        let Range { start, end } = if range.is_empty() { 0..0 } else { range };
        Self { outer: 1, stride: total, start, end }
    }

    /// Returns its number of elements.
    pub(crate) fn len(&self) -> usize {
        self.outer * (self.end - self.start)
    }

    /// Returns where it begins in each block.
    pub(super) fn start(&self) -> usize {
        self.start
    }
}

/// Returns the order of the non-empty parts of a tensor of `total` elements. Fails unless each element of the tensor is
/// in exactly one part.
pub(super) fn in_order(extents: &[&Extent], total: usize) -> Result<Vec<usize>, Division> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    order.sort_by_key(|index| extents[*index].start);
    let mut reached = 0;
    for (at, index) in order.iter().enumerate() {
        let (extent, before) = (extents[*index], order[at.saturating_sub(1)]);
        if (extent.outer, extent.stride) != (extents[before].outer, extents[before].stride) {
            return Err(Division::Dimensions(before, *index));
        }
        if extent.start < reached {
            return Err(Division::Overlap(before, *index));
        }
        if extent.start > reached {
            return Err(Division::Gap(missing(extent, reached..extent.start)));
        }
        reached = extent.end;
    }
    match (order.last().map(|index| extents[*index]), total) {
        (None, 0) => Ok(order),
        (None, total) => Err(Division::Gap(format!("its {total} elements are"))),
        (Some(last), _) if reached < last.stride => Err(Division::Gap(missing(last, reached..last.stride))),
        _ => Ok(order),
    }
}

/// The reason why parts are not a division of a tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Division {
    /// The two parts with these numbers have elements in common.
    Overlap(usize, usize),
    /// The two parts with these numbers are ranges along different dimensions.
    Dimensions(usize, usize),
    /// No part contains these elements. The string names the elements and ends with a verb, such as "elements 5..6 …
    /// are".
    Gap(String),
}

fn missing(extent: &Extent, range: Range<usize>) -> String {
    let Range { start, end } = range;
    match extent.outer {
        1 => format!("elements {start}..{end} of the flattened tensor are"),
        _ => format!("elements {start}..{end} of each block of {} are", extent.stride),
    }
}

/// Elements that are contiguous both in a source and in the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The source.
    pub(crate) source: usize,
    /// The first of them in the source.
    pub(crate) from: usize,
    /// The first of them in the destination.
    pub(crate) to: usize,
    pub(crate) len: usize,
}

/// Maps the elements of a part to `sources`, which together are the whole tensor and are in order ([`in_order`]).
/// Returns runs of at most `longest` elements, in the order of the destination.
pub(super) fn runs<'a>(part: &'a Extent, sources: &'a [Extent], longest: usize) -> impl Iterator<Item = Run> + 'a {
    runs_in(part, 0..part.len(), sources, longest)
}

/// Maps the elements at `window` of a part to `sources`, like [`runs`].
pub(crate) fn runs_in<'a>(part: &'a Extent, window: Range<usize>, sources: &'a [Extent], longest: usize) -> impl Iterator<Item = Run> + 'a {
    let (mut to, end) = (window.start, window.end.min(part.len()));
    std::iter::from_fn(move || {
        if to >= end {
            return None;
        }
        let width = part.end - part.start;
        let (block, within) = (to / width, to % width);
        let flat = block * part.stride + part.start + within;
        // All sources have the same stride.
        let stride = sources.first()?.stride;
        let (block, place) = (flat / stride, flat % stride);
        let index = sources.partition_point(|source| source.end <= place);
        let source = sources.get(index)?;
        let from = block * (source.end - source.start) + (place - source.start);
        let len = (width - within).min(source.end - place).min(longest).min(end - to);
        let run = Run { source: index, from, to, len };
        to += len;
        Some(run)
    })
}

/// Returns the runs of [`runs_in`] that are of one source, without visiting those of other sources one by one.
pub(crate) fn runs_of<'a>(part: &'a Extent, window: Range<usize>, sources: &'a [Extent], source: usize) -> impl Iterator<Item = Run> + 'a {
    let (mut to, end) = sources.get(source).map_or((0, 0), |source| narrowed(part, &window, source));
    std::iter::from_fn(move || {
        while to < end {
            let run = runs_in(part, to..end, sources, usize::MAX).next()?;
            if run.source == source {
                to += run.len;
                return Some(run);
            }
            to += distance(part, to, &sources[source]);
        }
        None
    })
}

/// Returns the smallest window that contains the elements at `window` of a part that are in a source, if the source has
/// one block. If it has several, returns the window itself.
fn narrowed(part: &Extent, window: &Range<usize>, source: &Extent) -> (usize, usize) {
    let (first, last) = (window.start, window.end.min(part.len()));
    if source.outer != 1 {
        return (first, last);
    }
    let place = |flat: usize| until(flat, part.stride, part.start, part.end);
    (first.max(place(source.start)), last.min(place(source.end)))
}

/// Returns how far it is from element `to` of a part, which is not in a source, to the next one that may be: at most to
/// the end of the part's block.
fn distance(part: &Extent, to: usize, source: &Extent) -> usize {
    let width = part.end - part.start;
    let place = (to / width * part.stride + part.start + to % width) % source.stride;
    let ahead = if place < source.start { source.start - place } else { source.stride - place + source.start };
    ahead.min(width - to % width)
}

/// Returns how many elements at `window` of a part each of `sources` contains, without sources that contain none. The
/// sources are as for [`runs`]. Visits only sources that the window can overlap, or the runs of the window if those are
/// fewer, or if the part and the sources have several blocks of different lengths.
pub(crate) fn lens_by_source(part: &Extent, window: Range<usize>, sources: &[Extent]) -> BTreeMap<usize, usize> {
    let Some(form) = sources.first() else { return BTreeMap::new() };
    let near = overlapping(part, &window, sources);
    // Between the blocks of a part, there may be many sources with one block.
    let blocks = window.end.div_ceil((part.end - part.start).max(1)) - window.start / (part.end - part.start).max(1);
    let is_closed = has_blocks_of(part, form) || part.outer == 1 || (form.outer == 1 && near[0].len() <= blocks);
    if is_closed {
        let lens = near.into_iter().flatten().map(|source| (source, shared(part, &window, &sources[source])));
        return lens.filter(|(_, len)| *len > 0).collect();
    }
    let mut lens = BTreeMap::new();
    runs_in(part, window, sources, usize::MAX).for_each(|run| *lens.entry(run.source).or_default() += run.len);
    lens
}

fn has_blocks_of(part: &Extent, source: &Extent) -> bool {
    (part.outer, part.stride) == (source.outer, source.stride)
}

/// Returns the sources that the elements at `window` of a part may be in. A source may be in both ranges. The second one
/// is for a window that continues at the start of the next block.
fn overlapping(part: &Extent, window: &Range<usize>, sources: &[Extent]) -> [Range<usize>; 2] {
    let Some(form) = sources.first().filter(|_| !window.is_empty() && part.len() > 0) else { return [0..0, 0..0] };
    let at = |start: usize, end: usize| {
        let first = sources.partition_point(|source| source.end <= start);
        first..first.max(sources.partition_point(|source| source.start < end))
    };
    let around = |from: usize, start: usize, end: usize| match from + window.len() {
        _ if window.len() >= end - start => [at(start, end), 0..0],
        to if to <= end => [at(from, to), 0..0],
        to => [at(from, end), at(start, start + to - end)],
    };
    let width = part.end - part.start;
    let flat = |at: usize| at / width * part.stride + part.start + at % width;
    match () {
        () if has_blocks_of(part, form) => around(part.start + window.start % width, part.start, part.end),
        () if part.outer == 1 => around((part.start + window.start) % form.stride, 0, form.stride),
        () if form.outer == 1 => [at(flat(window.start), flat(window.end - 1) + 1), 0..0],
        () => [0..sources.len(), 0..0],
    }
}

/// Returns the most pairs of a window and a source with elements in common, if a part is divided into windows of
/// `window_len` elements.
pub(crate) fn most_pairs(part: &Extent, window_len: usize, sources: &[Extent]) -> u64 {
    let windows = part.len().div_ceil(window_len.max(1));
    let near: usize = overlapping(part, &(0..part.len()), sources).iter().map(Range::len).sum();
    let most = match sources.first() {
        // In the order of the part, each window and each source begins once.
        Some(form) if form.outer == 1 => (windows + near).saturating_sub(1),
        _ => windows.saturating_mul(near.min(window_len)),
    };
    most.min(part.len()) as u64
}

/// Returns the number of the first `x` elements of blocks of `stride` elements that are in a range of their block.
fn until(x: usize, stride: usize, start: usize, end: usize) -> usize {
    x / stride * (end - start) + (x % stride).clamp(start, end) - start
}

/// Returns the number of elements at `window` of a part that are in a source. One of them has only one block, or both
/// have the same blocks.
fn shared(part: &Extent, window: &Range<usize>, source: &Extent) -> usize {
    if part.len() == 0 || source.len() == 0 {
        0
    } else if (part.outer, part.stride) == (source.outer, source.stride) {
        let within = |at: usize| at.clamp(part.start, part.end) - part.start;
        let (width, start, end) = (part.end - part.start, within(source.start), within(source.end));
        until(window.end, width, start, end) - until(window.start, width, start, end)
    } else if source.outer == 1 {
        // The part's elements in one range of the tensor are contiguous in the part.
        let place = |flat: usize| until(flat, part.stride, part.start, part.end);
        let (start, end) = (place(source.start), place(source.end));
        window.end.clamp(start, end) - window.start.clamp(start, end)
    } else {
        let before = |at: usize| until(part.start + at, source.stride, source.start, source.end);
        before(window.end) - before(window.start)
    }
}

#[cfg(test)]
mod tests;
