//! A different seed for each rank and epoch.

use super::random::Random;

/// Returns the seed of one rank's random numbers in one epoch, for example for dropout or data augmentation. In place
/// of the epoch, you can pass the number of a step.
///
/// If you change one of the three arguments, the result always changes. If you change several arguments, the result
/// stays the same with a probability of 2⁻⁶⁴. Arguments that are close to each other give results without a visible
/// relation.
///
/// ```
/// use collectives_train::seed_for;
///
/// let seed = seed_for(17, 3, 0); // rank 3, epoch 0
/// assert_eq!(seed, 0xfae8_cda8_1311_aaad); // the same in every run and release
/// assert_ne!(seed, seed_for(17, 3, 1));
/// assert_ne!(seed, seed_for(17, 4, 0));
/// ```
///
/// With s(x) as the first output of the generator SplitMix64 whose state is x, the result is s(s(s(`seed`) XOR `rank`)
/// XOR `epoch`). The generator is from G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number
/// Generators", 2014. Do not use the result for secrets, such as keys.
///
/// For numbers that must be the same on all ranks, such as initial parameters, use `seed` itself. If a job continues
/// with a different number of ranks, the samples of a rank change, and so do their random numbers.
#[must_use]
pub fn seed_for(seed: u64, rank: usize, epoch: u64) -> u64 {
    [rank as u64, epoch].into_iter().fold(Random(seed).next(), |mixed, part| Random(mixed ^ part).next())
}
