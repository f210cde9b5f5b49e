//! Compares digests of all ranks. If they differ, every rank gets the same error, which describes the ranks that
//! differ.

use std::cmp::Reverse;
use std::collections::HashMap;

use collectives::{Communicator, Data, Error, Result};

/// At most this many bytes of a rank's description are sent.
const LONGEST_TEXT: usize = 256;
/// At most this many bytes of a label are printed in errors.
pub(super) const LONGEST_LABEL: usize = 80;
/// At most this many ranks are listed in an error.
const MOST_LISTED: usize = 16;

/// A SHA-256 digest.
pub(super) type Digest = [u8; 32];

/// Returns the value of every rank, in rank order. Collective.
pub(super) fn gather<T: Data>(comm: &Communicator, mine: T) -> Result<Vec<T>> {
    let mut all = vec![mine; comm.world_size()];
    comm.all_gather_into(&[mine][..], &mut all)?;
    Ok(all)
}

/// Returns a short text of every rank, in rank order. Longer texts are cut. Collective.
pub(super) fn gather_texts(comm: &Communicator, mine: &str) -> Result<Vec<String>> {
    let mut plain = [0_u8; LONGEST_TEXT];
    let mine = cut(mine, LONGEST_TEXT).as_bytes();
    plain[..mine.len()].copy_from_slice(mine);
    let text = |plain: [u8; LONGEST_TEXT]| String::from_utf8_lossy(&plain).trim_end_matches('\0').to_owned();
    Ok(gather(comm, plain)?.into_iter().map(text).collect())
}

/// Returns the error for ranks whose `keys` differ. Each rank passes the keys of all ranks, and its own call in words.
/// The error names a rank with the most frequent key, and all ranks with other keys. `advice` says what to do.
/// Collective.
pub(super) fn difference<K: Eq + std::hash::Hash>(comm: &Communicator, keys: &[K], mine: &str, advice: &str) -> Error {
    let mut said = match gather_texts(comm, mine) {
        Ok(said) => said,
        Err(error) => return error,
    };
    let usual = most_frequent(keys);
    let others: Vec<usize> = (0..keys.len()).filter(|rank| keys[*rank] != keys[usual]).collect();
    let other = others.first().copied().unwrap_or(usual);
    let (world_size, peers) = (comm.world_size(), comm.peers());
    let second_call = format!("{}; of {world_size} ranks, these differ from rank {usual}: {}; {advice}", said[other], listed(&others));
    let first_call = std::mem::take(&mut said[usual]);
    Error::Mismatch { first: peers[usual].clone(), first_call, second: peers[other].clone(), second_call }
}

/// Returns the first rank with the key that most ranks have. If several keys are equally frequent, the key of the
/// lowest rank counts.
pub(super) fn most_frequent<K: Eq + std::hash::Hash>(keys: &[K]) -> usize {
    let mut counts: HashMap<&K, (usize, Reverse<usize>)> = HashMap::new();
    keys.iter().enumerate().for_each(|(rank, key)| counts.entry(key).or_insert((0, Reverse(rank))).0 += 1);
    counts.into_values().max().map_or(0, |(_, Reverse(rank))| rank)
}

/// Returns the beginning of a text: at most `longest` bytes, and only whole characters.
pub(super) fn cut(text: &str, longest: usize) -> &str {
    let end = (0..=longest.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// Lists ranks in words. A long list is cut.
pub(super) fn listed(ranks: &[usize]) -> String {
    let mut words: Vec<String> = ranks.iter().take(MOST_LISTED).map(usize::to_string).collect();
    if ranks.len() > MOST_LISTED {
        words.push(format!("and {} more", ranks.len() - MOST_LISTED));
    }
    words.join(", ")
}

/// Writes a digest, or a part of it, as hexadecimal digits.
pub(super) fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_key_counts_and_among_equals_that_of_the_lowest_rank() {
        for (keys, first) in [(&[7][..], 0), (&[7, 7, 8], 0), (&[8, 7, 7], 1), (&[7, 8], 0), (&[9, 8, 7, 8, 7], 1), (&[1, 2, 2, 1], 0)] {
            assert_eq!(most_frequent(keys), first, "{keys:?}");
        }
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(listed(&[3, 5]), "3, 5");
        let all: Vec<usize> = (0..20).collect();
        assert_eq!(listed(&all), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, and 4 more");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let long = "é".repeat(200);
        let results = Communicator::run_local(2, |comm| gather_texts(comm, ["", &format!("a{long}")][comm.rank()]));
        results.unwrap().into_iter().for_each(|said| {
            assert_eq!(said[0], "");
            assert_eq!(said[1], format!("a{}", "é".repeat(127)));
        });
    }
}
