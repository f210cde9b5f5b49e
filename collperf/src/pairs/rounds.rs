//! Chooses which pairs are measured at the same time.

/// Returns rounds of pairs. In a round, each member is in at most one pair; over all rounds, it meets every other
/// member once. One member keeps its place, and the others rotate. If the number of members is odd, one rests in each
/// round.
pub(super) fn all(count: usize) -> Vec<Vec<(usize, usize)>> {
    let even = count + count % 2;
    let round = |round: usize| {
        let at = |place: usize| if place == 0 { 0 } else { (place - 1 + round) % (even - 1) + 1 };
        let pairs = (0..even / 2).map(|place| (at(place), at(even - 1 - place)));
        pairs.filter(|(a, b)| *a < count && *b < count).map(|(a, b)| (a.min(b), a.max(b))).collect()
    };
    if count < 2 { vec![] } else { (0..even - 1).map(round).collect() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_meets_each_once() {
        for count in 0..40 {
            let rounds = all(count);
            let mut met = BTreeSet::new();
            for round in &rounds {
                let busy: Vec<usize> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                assert_eq!(busy.iter().collect::<BTreeSet<_>>().len(), busy.len(), "{count}: {round:?}");
                assert_eq!(round.len(), count / 2);
                assert!(round.iter().all(|(a, b)| a < b && *b < count && met.insert((*a, *b))), "{count}: {round:?}");
            }
            assert_eq!(met.len(), count * count.saturating_sub(1) / 2);
        }
    }
}
