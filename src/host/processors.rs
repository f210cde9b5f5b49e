//! Computes how many processors the ranks of a host share. Each rank knows only the processors that it is bound to, so
//! ranks exchange these.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Number of words in a set of processors, with 64 processors per word.
pub(crate) const WORDS: usize = CpuSet::MAX_CPU / 64;

type Mask = [u64; WORDS];

/// The processors that one rank may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Processors {
    /// How many of them it can keep busy, by quota or affinity.
    pub(crate) available: u32,
    /// The processors that it may run on; all zero if unknown.
    pub(crate) mask: Mask,
}

impl Processors {
    /// Returns the processors of the calling thread.
    pub(crate) fn here() -> Self {
        let available = std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
        let set = sched_getaffinity(None).ok();
        let bit = |processor: usize| set.as_ref().is_some_and(|set| set.is_set(processor));
        let word = |index: usize| (0..64).map(|place| u64::from(bit(index * 64 + place)) << place).sum();
        Self { available, mask: std::array::from_fn(word) }
    }

    /// Encodes it for other ranks: the number, then the words in hexadecimal without trailing zero words.
    pub(crate) fn to_text(self) -> String {
        let words = self.mask.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        self.mask[..words].iter().fold(self.available.to_string(), |text, word| format!("{text} {word:x}"))
    }

    /// Decodes [`Processors::to_text`]. Returns `None` for any other text.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let mut found = Self { available: words.next()?.parse().ok()?, mask: Mask::default() };
        for (place, word) in words.enumerate() {
            *found.mask.get_mut(place)? = u64::from_str_radix(word, 16).ok()?;
        }
        Some(found)
    }

    fn count(&self) -> usize {
        self.mask.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// Returns how many processors the ranks of one host share, by their affinities and quotas; at least 1.
pub(crate) fn between(ranks: &[Processors]) -> usize {
    let least = ranks.iter().map(|rank| rank.available as usize).min().unwrap_or(1);
    if ranks.iter().any(|rank| rank.count() == 0) {
        return least.max(1);
    }
    let either = |all: Mask, rank: &Processors| std::array::from_fn(|word| all[word] | rank.mask[word]);
    let union = Processors { available: 0, mask: ranks.iter().fold(Mask::default(), either) }.count();
    // Fewer than its affinity allows: that is a quota, which most likely applies to all ranks together.
    let has_quota = ranks.iter().any(|rank| (rank.available as usize) < rank.count());
    if has_quota { union.min(least) } else { union }.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(available: u32, processors: &[usize]) -> Processors {
        let mut mask = Mask::default();
        processors.iter().for_each(|processor| mask[processor / 64] |= 1 << (processor % 64));
        Processors { available, mask }
    }

    #[test]
    fn ranks_with_a_core_each_have_all_of_these() {
        assert_eq!(between(&[of(1, &[0]), of(1, &[1])]), 2);
        assert_eq!(between(&[of(1, &[1]), of(1, &[1])]), 1);
        assert_eq!(between(&[of(2, &[0, 64]), of(2, &[64, 130])]), 3);
        // A quota counts for all ranks. If affinities are unknown, so does the lowest number.
        assert_eq!(between(&[of(2, &[0, 1, 2, 3]), of(4, &[0, 1, 2, 3])]), 2);
        assert_eq!(between(&[of(2, &[]), of(4, &[0, 1, 2, 3])]), 2);
        assert_eq!(between(&[]), 1);
    }

    #[test]
    fn what_is_told_is_understood() {
        for processors in [of(1, &[]), of(3, &[0, 5, 63, 64, 1023]), Processors::here()] {
            assert_eq!(Processors::from_text(&processors.to_text()), Some(processors));
        }
        assert_eq!(of(2, &[0, 1]).to_text(), "2 3");
        for wrong in ["", "x", "1 g", "1 ", "-1 3", &format!("1{}", " 1".repeat(17))] {
            assert_eq!(Processors::from_text(wrong), None, "{wrong}");
        }
    }
}
