//! Divides the samples of a data set among the ranks.
//!
//! An epoch's order is a permutation that is computed place by place. It is a Feistel network of eight rounds over the
//! smallest even number of bits that holds the data set's length. The network is applied again while the result is
//! outside the data set (cycle walking; J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So the
//! permutation needs no memory, whatever the length, and every place of every epoch costs the same.

use collectives::Communicator;
use collectives::{Error, Result};

/// The treatment of the last samples of an epoch, if a data set cannot be divided evenly among the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UnevenEnd {
    /// The first samples of the epoch are repeated at its end, until every rank has the same number of samples, as in
    /// torch's `DistributedSampler`.
    #[default]
    Repeat,
    /// The samples that remain after an even division are left out (torch's `drop_last`). If samples are shuffled,
    /// different samples are left out in each epoch. If samples come [in order](Sampler::in_order), the last samples
    /// are always left out.
    Drop,
    /// Each sample is taken once. Some ranks then have one sample fewer than others. So if your steps make collective
    /// calls, make sure that all ranks take the same number of steps. An evaluation with [`Metrics`](crate::Metrics)
    /// needs collective calls only at its end, so ranks may take different numbers of steps in it.
    Keep,
}

/// Shuffles a data set's samples by seed and epoch, and divides them among the ranks. The ranks need no communication
/// for this.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::{Sampler, UnevenEnd};
///
/// let taken = Communicator::run_local(3, |comm| {
///     let sampler = Sampler::new(comm, 10).with_seed(7).with_end(UnevenEnd::Keep);
///     Ok(sampler.epoch(0).collect::<Vec<usize>>())
/// })?;
/// let mut all = taken.concat();
/// all.sort_unstable();
/// assert_eq!(all, (0..10).collect::<Vec<_>>());
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// Rank r of n ranks takes the samples at the places r, r + n, r + 2·n … in the epoch's order, as in torch. So after
/// every rank has taken k samples, the ranks together have taken the samples at the first k·n places. Any number of
/// ranks can [continue](Self::epoch_from) from there.
///
/// All ranks must pass the same length, seed and [`UnevenEnd`]. The sampler does not compare these arguments between
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "DistributedSampler")]
pub struct Sampler {
    len: usize,
    rank: usize,
    world_size: usize,
    /// `None` if samples come in the data set's order.
    seed: Option<u64>,
    end: UnevenEnd,
}

impl Sampler {
    /// Shuffles `len` samples with seed 0, and divides them among a communicator's ranks. Samples are
    /// [repeated](UnevenEnd::Repeat) if they cannot be divided evenly.
    #[must_use]
    pub fn new(comm: &Communicator, len: usize) -> Self {
        Self { len, rank: comm.rank(), world_size: comm.world_size(), seed: Some(0), end: UnevenEnd::default() }
    }

    /// Creates the sampler of one rank without a communicator, for a process that loads data for another process.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if `rank` is `world_size` or more.
    pub fn of_rank(rank: usize, world_size: usize, len: usize) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::argument("Sampler::of_rank", format!("rank {rank} is not below the world size {world_size}")));
        }
        Ok(Self { len, rank, world_size, seed: Some(0), end: UnevenEnd::default() })
    }

    /// Divides the same samples, in the same order, among the ranks of another communicator, for example after
    /// [`Communicator::admit`]. In the middle of an epoch, continue with [`epoch_from`](Self::epoch_from).
    ///
    /// ```
    /// # use collectives::Communicator;
    /// # use collectives_train::Sampler;
    /// let sampler = Sampler::of_rank(0, 4, 20)?.with_seed(7);
    /// let comm = &Communicator::local(1)?[0];
    /// let rest = sampler.resized(comm).epoch_from(0, 8)?; // four ranks have taken two samples each
    /// assert_eq!(rest.len(), 12);
    /// # Ok::<(), collectives::Error>(())
    /// ```
    #[must_use]
    pub fn resized(self, comm: &Communicator) -> Self {
        Self { rank: comm.rank(), world_size: comm.world_size(), ..self }
    }

    /// Shuffles with another seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Makes the sampler take the samples of every epoch in the data set's order, without shuffling.
    #[must_use]
    pub fn in_order(self) -> Self {
        Self { seed: None, ..self }
    }

    /// Sets what happens if the samples cannot be divided evenly among the ranks.
    #[must_use]
    pub fn with_end(self, end: UnevenEnd) -> Self {
        Self { end, ..self }
    }

    /// Returns this rank's samples of an epoch, as indices into the data set. The computation of each index takes a few
    /// hundred nanoseconds.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> Samples {
        self.rest_of(epoch, 0)
    }

    /// Returns the rest of this rank's samples in an epoch. `taken` is the number of samples that all ranks together
    /// have already taken in this epoch: usually steps × batch size × number of ranks at that time. The number of ranks
    /// may have changed since then. No sample is taken twice, except the samples that are [repeated](UnevenEnd::Repeat)
    /// at the end. `taken` may include repeated samples. If `taken` is at least the length of the data set, no sample
    /// is left.
    ///
    /// ```
    /// use collectives_train::{Sampler, UnevenEnd};
    ///
    /// let before = |rank| Sampler::of_rank(rank, 4, 20).map(|sampler| sampler.epoch(3).take(2).collect::<Vec<_>>());
    /// let after = |rank| Sampler::of_rank(rank, 3, 20).and_then(|sampler| sampler.epoch_from(3, 8)).map(|rest| rest.collect::<Vec<_>>());
    /// let mut all = Vec::new();
    /// (0..4).try_for_each(|rank| before(rank).map(|taken| all.extend(taken)))?;
    /// (0..3).try_for_each(|rank| after(rank).map(|taken| all.extend(taken)))?;
    /// all.sort_unstable();
    /// assert_eq!(all, (0..20).collect::<Vec<_>>());
    /// # Ok::<(), collectives::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if `taken` is larger than the number of samples that an epoch can have. Without repeated
    /// samples, this number is the length of the data set. With repeated samples, this number is the larger of 2·length
    /// − 1 and the number of ranks.
    pub fn epoch_from(&self, epoch: u64, taken: usize) -> Result<Samples> {
        if taken > self.most_taken() {
            let (len, most) = (self.len, self.most_taken());
            let reason =
                format!("{taken} samples were taken, but an epoch of {len} samples allows at most {most}: count from 0 in each epoch");
            return Err(Error::argument("Sampler::epoch_from", reason));
        }
        Ok(self.rest_of(epoch, taken))
    }

    /// Returns how many samples the ranks can have taken in one epoch. The number of ranks at that time is unknown. It
    /// is assumed to be at most the number of samples or, if that is larger, the present number of ranks.
    fn most_taken(&self) -> usize {
        match (self.end, self.len) {
            (UnevenEnd::Repeat, 1..) => (self.len - 1).saturating_add(self.len).max(self.world_size),
            _ => self.len,
        }
    }

    fn rest_of(&self, epoch: u64, taken: usize) -> Samples {
        let (left, ranks) = (self.len.saturating_sub(taken), self.world_size);
        let own = match self.end {
            UnevenEnd::Repeat => left.div_ceil(ranks),
            UnevenEnd::Drop => left / ranks,
            UnevenEnd::Keep => left / ranks + usize::from(self.rank < left % ranks),
        };
        let order = self.seed.map(|seed| Permutation::new(self.len, seed, epoch));
        Samples { order, len: self.len, next: place_behind(taken, self.rank, self.len), stride: ranks, left: own }
    }
}

/// A rank's samples of an epoch; see [`Sampler::epoch`].
#[derive(Debug, Clone)]
pub struct Samples {
    order: Option<Permutation>,
    len: usize,
    /// The next place in the epoch's order.
    next: usize,
    stride: usize,
    left: usize,
}

impl Iterator for Samples {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let place = self.next;
        self.next = place_behind(place, self.stride, self.len);
        Some(self.order.map_or(place, |order| order.at(place)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Samples {}

/// Returns the place `by` places after another one, wrapping around at the end.
fn place_behind(place: usize, by: usize, len: usize) -> usize {
    ((place as u128 + by as u128) % (len as u128).max(1)) as usize
}

/// A permutation of the numbers below a length.
#[derive(Debug, Clone, Copy)]
struct Permutation {
    len: u64,
    /// The bits of each half of a number.
    half_bits: u32,
    keys: [u64; ROUNDS],
}

const ROUNDS: usize = 8;

impl Permutation {
    fn new(len: usize, seed: u64, epoch: u64) -> Self {
        let len = len as u64;
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let mut state = mix(seed ^ mix(epoch.wrapping_add(GOLDEN)));
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(GOLDEN);
            mix(state)
        });
        Self { len, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// Returns the number at a place, which is below the length.
    fn at(&self, place: usize) -> usize {
        let mut number = place as u64;
        // There are at most four times as many numbers as places. So a few steps lead back to a place, and no two
        // places get the same number, because each number has one predecessor.
        loop {
            number = self.scrambled(number);
            if number < self.len {
                return number as usize;
            }
        }
    }

    /// Permutes the numbers that have twice as many bits as a half.
    fn scrambled(&self, number: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ mix(right ^ key) & mask);
        }
        left << self.half_bits | right
    }
}

/// 2⁶⁴ divided by the golden ratio: the step of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Computes the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014).
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn world(len: usize, ranks: usize, change: impl Fn(Sampler) -> Sampler) -> Vec<Vec<usize>> {
        (0..ranks).map(|rank| change(Sampler::of_rank(rank, ranks, len).unwrap()).epoch(5).collect()).collect()
    }

    #[test]
    fn each_length_has_an_order_in_which_every_sample_comes_once() {
        for len in (1..300).chain([1000, 1023, 1024, 1025, 65_537]) {
            let order = Permutation::new(len, 11, 2);
            let mut seen = vec![false; len];
            (0..len).for_each(|place| assert!(!std::mem::replace(&mut seen[order.at(place)], true), "{len}"));
        }
        let huge = Permutation::new(usize::MAX, 1, 1);
        assert_ne!(huge.at(usize::MAX - 1), huge.at(0));
        for end in [UnevenEnd::Repeat, UnevenEnd::Drop, UnevenEnd::Keep] {
            let sampler = Sampler::of_rank(2, 3, usize::MAX).unwrap().with_end(end);
            assert_eq!(sampler.epoch(0).take(3).collect::<std::collections::BTreeSet<_>>().len(), 3);
            assert_eq!(sampler.epoch(0).len(), usize::MAX / 3);
            assert!(sampler.epoch_from(0, usize::MAX).unwrap().next().is_none());
            assert_eq!(sampler.epoch_from(0, usize::MAX - 1).unwrap().count(), usize::from(end == UnevenEnd::Repeat));
        }
    }

    #[test]
    fn orders_differ_between_epochs_and_seeds_and_are_alike_otherwise() {
        let order = |seed, epoch| Sampler::of_rank(0, 1, 1000).unwrap().with_seed(seed).epoch(epoch).collect::<Vec<_>>();
        assert_eq!(order(3, 4), order(3, 4));
        for other in [order(3, 5), order(4, 4), order(4, 3)] {
            let alike = order(3, 4).iter().zip(&other).filter(|(one, other)| one == other).count();
            assert!(alike < 15, "{alike} of 1000 places");
        }
    }

    #[test]
    fn every_sample_is_as_often_at_every_place() {
        // Over 20,000 seeds each sample is at each of 20 places 1,000 times, give or take 31.
        let mut counts = [[0_u32; 20]; 20];
        for seed in 0..20_000 {
            let order = Permutation::new(20, seed, 0);
            (0..20).for_each(|place| counts[place][order.at(place)] += 1);
        }
        let chi_squared: f64 = counts.iter().flatten().map(|count| (f64::from(*count) - 1000.0).powi(2) / 1000.0).sum();
        // 361 degrees of freedom: above 480 in one of 30,000 cases.
        assert!(chi_squared < 480.0, "{chi_squared}");
    }

    #[test]
    fn no_two_ranks_take_one_sample_and_uneven_ends_are_as_said() {
        for (len, ranks) in [(12, 4), (13, 4), (15, 4), (3, 4), (1, 13), (0, 3), (100, 1), (101, 13)] {
            let sorted = |ranks: &[Vec<usize>]| {
                let mut all = ranks.concat();
                all.sort_unstable();
                all
            };
            let kept = world(len, ranks, |sampler| sampler.with_end(UnevenEnd::Keep));
            assert_eq!(sorted(&kept), (0..len).collect::<Vec<_>>(), "{len} over {ranks}");
            let dropped = world(len, ranks, |sampler| sampler.with_end(UnevenEnd::Drop));
            assert!(dropped.iter().all(|own| own.len() == len / ranks));
            assert!(sorted(&dropped).windows(2).all(|pair| pair[0] < pair[1]));
            let repeated = world(len, ranks, |sampler| sampler);
            assert!(repeated.iter().all(|own| own.len() == len.div_ceil(ranks)));
            let mut distinct = sorted(&repeated);
            distinct.dedup();
            assert_eq!(distinct.len(), len);
        }
    }

    #[test]
    fn in_order_is_dealt_as_torch_deals() {
        assert_eq!(world(7, 3, Sampler::in_order), [[0, 3, 6], [1, 4, 0], [2, 5, 1]]);
        assert_eq!(world(2, 5, Sampler::in_order), [[0], [1], [0], [1], [0]]);
    }

    #[test]
    fn an_epoch_goes_on_in_a_world_of_another_size() {
        for (before, after, steps) in [(4, 3, 5), (3, 4, 7), (2, 13, 0), (5, 1, 20)] {
            let len = 103;
            let mut all = Vec::new();
            for rank in 0..before {
                all.extend(Sampler::of_rank(rank, before, len).unwrap().with_end(UnevenEnd::Keep).epoch(9).take(steps));
            }
            for rank in 0..after {
                let sampler = Sampler::of_rank(rank, after, len).unwrap().with_end(UnevenEnd::Keep);
                all.extend(sampler.epoch_from(9, steps * before).unwrap());
            }
            all.sort_unstable();
            assert_eq!(all, (0..len).collect::<Vec<_>>(), "{before} then {after}");
        }
        assert_eq!(Sampler::of_rank(1, 2, 10).unwrap().epoch_from(0, 10).unwrap().len(), 0);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(Sampler::of_rank(2, 2, 10).unwrap_err().to_string().contains("rank 2"));
        assert!(Sampler::of_rank(0, 0, 10).is_err());
        assert!(Sampler::of_rank(0, 2, 10).unwrap().epoch_from(0, 20).unwrap_err().to_string().contains("20 samples"));
    }
}
