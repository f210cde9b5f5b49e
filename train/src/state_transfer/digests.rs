//! Compares the ranks' copies at the end of a transfer.
//!
//! Two kinds of elements are compared. A part that several ranks offer or want must be equal on all of them. If a rank
//! wants a part that no rank offers as a whole, each source of it must be equal on that rank and on a rank that offers
//! the source. All ranks list the same comparisons. A rank computes the SHA-256 of the elements that it has. The maximum
//! of the digests of all ranks and the maximum of the digests' complements then show whether all digests are equal.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use super::plan::{Plan, Want};
use super::values::Parts;
use crate::checkpoint::piece::{lens_by_source, runs_in};
use crate::comparison::{Digest, difference, gather, hexadecimal, most_frequent};
use collectives::{Communicator, ReduceOp, Result};

const ADVICE: &str = "offer the tensor only on ranks with equal state, for example the ranks with the newest step";

/// Elements that several ranks have.
struct Comparison {
    tensor: usize,
    /// The digests of this rank's copies.
    mine: Vec<Digest>,
}

/// Compares the elements that were moved. Fails on every rank if two copies differ. Collective.
pub(super) fn compare(comm: &Communicator, plan: &Plan, parts: &Parts<'_>) -> Result<()> {
    let comparisons = comparisons(comm.rank(), plan, parts);
    // The last word makes ranks wait for each other even if there is nothing to compare.
    let mut words = vec![0_u64; 4 * comparisons.len() + 1];
    for (comparison, words) in comparisons.iter().zip(words.chunks_exact_mut(4)) {
        for digest in &comparison.mine {
            let (high, low) = (word(digest, 0), word(digest, 8));
            words.iter_mut().zip([high, !high, low, !low]).for_each(|(word, own)| *word = (*word).max(own));
        }
    }
    comm.all_reduce(&mut words, ReduceOp::Max)?;
    let differs = |words: &[u64]| words[0] != !words[1] || words[2] != !words[3];
    match words.chunks_exact(4).position(differs) {
        None => Ok(()),
        Some(index) => differ(comm, plan, &comparisons[index]),
    }
}

/// Returns eight bytes of a digest as a number.
fn word(digest: &Digest, at: usize) -> u64 {
    digest[at..at + 8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Returns the error for copies that differ, on every rank. Collective.
fn differ(comm: &Communicator, plan: &Plan, comparison: &Comparison) -> Result<()> {
    let mine = comparison.mine.first().copied().unwrap_or_default();
    let is_held = u8::from(!comparison.mine.is_empty());
    let mut plain = [is_held; 33];
    plain[..32].copy_from_slice(&mine);
    let mut all = gather(comm, plain)?;
    let held: Vec<[u8; 33]> = all.iter().copied().filter(|plain| plain[32] != 0).collect();
    // Ranks without the elements do not differ from the others.
    let usual = held.get(most_frequent(&held)).copied().unwrap_or([0; 33]);
    all.iter_mut().filter(|plain| plain[32] == 0).for_each(|plain| *plain = usual);
    let tensor = &plan.tensors[comparison.tensor];
    let call = format!("StateTransfer::run with tensor {:?} ({}), SHA-256 {}…", tensor.name, tensor.form, hexadecimal(&mine[..8]));
    Err(difference(comm, &all, &call, ADVICE))
}

/// Lists all comparisons, in the same order on every rank.
fn comparisons(rank: usize, plan: &Plan, parts: &Parts<'_>) -> Vec<Comparison> {
    let mut wants: BTreeMap<(usize, Option<usize>), Vec<&Want>> = BTreeMap::new();
    for want in &plan.wants {
        // The sources are in order.
        let same = plan.tensors[want.tensor].sources.binary_search(&want.extent).ok();
        wants.entry((want.tensor, same)).or_default().push(want);
    }
    let mut comparisons = Vec::new();
    for (tensor, parts_of) in plan.tensors.iter().enumerate() {
        for (source, holders) in parts_of.holders.iter().enumerate() {
            let same = wants.get(&(tensor, Some(source))).map_or(&[][..], Vec::as_slice);
            if holders.len() + same.len() > 1 {
                let offered = holders.iter().filter(|holder| holder.0 == rank).map(|holder| parts.offered[holder.1]);
                let wanted = same.iter().filter(|want| want.rank == rank).map(|want| parts.wanted[want.number].bytes());
                let mine = offered.chain(wanted).map(|bytes| Sha256::digest(bytes).into()).collect();
                comparisons.push(Comparison { tensor, mine });
            }
        }
        for want in wants.get(&(tensor, None)).into_iter().flatten() {
            comparisons.extend(by_source(rank, plan, want, parts).into_values().map(|mine| Comparison { tensor, mine }));
        }
    }
    comparisons
}

/// Returns this rank's digests of the elements of a wanted part, for each source that the part has elements of.
fn by_source(rank: usize, plan: &Plan, want: &Want, parts: &Parts<'_>) -> BTreeMap<usize, Vec<Digest>> {
    let tensor = &plan.tensors[want.tensor];
    let size = tensor.element_bytes;
    let wanted = (want.rank == rank).then(|| parts.wanted[want.number].bytes());
    let all = 0..want.extent.len();
    let sources = lens_by_source(&want.extent, all.clone(), &tensor.sources).into_keys();
    let mut digests: BTreeMap<usize, (Sha256, Sha256)> = sources.map(|source| (source, Default::default())).collect();
    let offered = |source: usize| tensor.holders[source].first().filter(|holder| holder.0 == rank).map(|holder| parts.offered[holder.1]);
    let is_involved = wanted.is_some() || digests.keys().any(|source| offered(*source).is_some());
    let runs = is_involved.then(|| runs_in(&want.extent, all.clone(), &tensor.sources, usize::MAX));
    for run in runs.into_iter().flatten() {
        let (from, to) = digests.entry(run.source).or_default();
        if let Some(bytes) = offered(run.source) {
            from.update(&bytes[run.from * size..(run.from + run.len) * size]);
        }
        if let Some(bytes) = wanted {
            to.update(&bytes[run.to * size..(run.to + run.len) * size]);
        }
    }
    let held = |(source, (from, to)): (usize, (Sha256, Sha256))| {
        let both = [offered(source).map(|_| from), wanted.map(|_| to)];
        (source, both.into_iter().flatten().map(|digest| digest.finalize().into()).collect())
    };
    digests.into_iter().map(held).collect()
}
