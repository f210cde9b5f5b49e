//! The list of measurements: collectives, types, ops, roots and counts.

use collectives::{DType, ReduceOp};

use crate::collective::Collective;
use crate::settings::Settings;

/// The subject of a row: everything except its size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    pub(super) collective: Collective,
    pub(super) op: Option<ReduceOp>,
    pub(super) root: usize,
}

impl Subject {
    /// Returns the element counts of the requested sizes. No count occurs twice in a row unless ranks are divided into
    /// groups.
    pub(super) fn counts(&self, sizes: &[usize], element_bytes: usize, world_size: usize, is_divided: bool) -> Vec<usize> {
        let mut counts: Vec<_> = sizes.iter().map(|bytes| self.collective.count(*bytes, element_bytes, world_size)).collect();
        if !is_divided {
            // Groups of unequal size would omit different ones.
            counts.dedup();
        }
        counts
    }
}

/// The types in which an all-reduce in place is also sampled.
pub(super) const EXTRA_TYPES: [DType; 2] = [DType::F16, DType::Bf16];

/// Whether the defaults are sampled in cells: then all-reduce is sampled in 16-bit floats, too.
pub(super) fn has_extra_types(settings: &Settings) -> bool {
    settings.cell.is_some() && settings.dtypes == [DType::F32] && settings.ops == [ReduceOp::Sum]
}

/// Returns the types, ops and roots of a collective, without those that the library refuses.
pub(super) fn subjects(settings: &Settings, collective: Collective, world_size: usize) -> Vec<(DType, Option<ReduceOp>, usize)> {
    let ops: Vec<Option<ReduceOp>> = if collective.reduces() { settings.ops.iter().copied().map(Some).collect() } else { vec![None] };
    let roots = match settings.root {
        _ if !collective.is_rooted() || settings.cell.is_some() => 0..1,
        Some(root) => root..root + 1,
        None => 0..world_size,
    };
    let extra: &[DType] = if collective == Collective::AllReduce && has_extra_types(settings) { &EXTRA_TYPES } else { &[] };
    let dtypes = settings.dtypes.iter().chain(extra);
    let pairs = dtypes.flat_map(|dtype| ops.iter().map(|op| (*dtype, *op)));
    let possible = pairs.filter(|(dtype, op)| op.is_none_or(|op| op.check(*dtype).is_ok()));
    possible.flat_map(|(dtype, op)| roots.clone().map(move |root| (dtype, op, root))).collect()
}

/// Returns the approximate bytes of each row of one cycle.
pub(super) fn expected_rows(settings: &Settings, world_size: usize) -> Vec<usize> {
    let rows = |collective: &Collective| match collective {
        Collective::Barrier => vec![0],
        _ => settings.sizes.repeat(subjects(settings, *collective, world_size).len()),
    };
    settings.collectives.iter().flat_map(rows).collect()
}

/// Returns the bytes of the largest buffer that any row needs.
pub(super) fn largest_buffer(settings: &Settings, world_size: usize) -> usize {
    let sizes = settings.sizes.iter().copied().max().unwrap_or(0);
    let types = settings.dtypes.iter().map(|dtype| dtype.size_bytes());
    let bytes =
        |collective: Collective, element: usize| collective.bytes(collective.count(sizes, element, world_size), element, world_size);
    let of_traffic = |collective: Collective, element: usize| {
        let exchange = settings.exchange(collective, world_size, bytes(collective, element), element).ok().flatten();
        exchange.and_then(|exchange| exchange.largest()).map_or(0, |most| most.saturating_mul(element))
    };
    let needed = |collective: Collective, element: usize| bytes(collective, element).max(of_traffic(collective, element));
    let of_type = |element: usize| settings.collectives.iter().map(|collective| needed(*collective, element)).max();
    types.filter_map(of_type).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::Arguments;

    fn settings(line: &str) -> Settings {
        Settings::new(
            &Arguments::parse_from(std::iter::once("collperf").chain(line.split(' '))),
            &crate::environment::Environment::default(),
        )
        .unwrap()
    }

    #[test]
    fn the_largest_buffer_is_known_beforehand() {
        for (line, bytes) in [
            ("all_reduce -e 1M", 1 << 20),
            ("all -e 1M", 1 << 20),
            ("all -d all -b 1 -e 1", 24),
            ("all --sizes 9,7,100 -d i16", 100),
            ("barrier", 0),
        ] {
            assert_eq!(largest_buffer(&settings(line), 3), bytes, "{line}");
        }
    }

    #[test]
    fn subjects_are_what_was_asked_for() {
        let all = settings("all -o all -d all -r -1");
        // Without avg of bool, three bitwise ops of six floats, and mulsum of eight integers and bool.
        assert_eq!(subjects(&all, Collective::AllReduce, 3).len(), 15 * 9 - 1 - 3 * 6 - 9);
        assert_eq!(subjects(&all, Collective::Broadcast, 3).len(), 15 * 3);
        assert_eq!(subjects(&all, Collective::AllGather, 3).len(), 15);
        assert_eq!(subjects(&settings("reduce -r 2"), Collective::Reduce, 3), [(DType::F32, Some(ReduceOp::Sum), 2)]);
    }

    #[test]
    fn cells_of_all_reduce_come_in_16_bits_too() {
        let types =
            |line: &str, collective| subjects(&settings(line), collective, 2).into_iter().map(|subject| subject.0).collect::<Vec<_>>();
        assert_eq!(types("all --cell-ms 5", Collective::AllReduce), [DType::F32, DType::F16, DType::Bf16]);
        assert_eq!(types("all --cell-ms 5", Collective::ReduceScatter), [DType::F32]);
        assert_eq!(types("all --cell-ms 5 -d bf16", Collective::AllReduce), [DType::Bf16]);
        assert_eq!(types("all", Collective::AllReduce), [DType::F32]);
    }
}
