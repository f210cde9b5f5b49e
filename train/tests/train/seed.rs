//! Seeds of ranks and epochs: they are never equal, look random, and stay the same in all releases.

use std::collections::HashSet;

use collectives_train::seed_for;

#[test]
fn seeds_are_the_same_in_every_release() {
    // Computed by a program in another language. The innermost of the three steps is s(0) = 0xe220a8397b1dcdaf, the
    // first number that SplitMix64 is known to give for the seed 0.
    for (seed, rank, epoch, expected) in [
        (0, 0, 0, 0x2382_75bc_38fc_be91),
        (0, 0, 1, 0x2f32_a784_96c6_7c60),
        (0, 1, 0, 0x44e5_b981_00c6_7fb0),
        (1, 0, 0, 0xb18a_02f4_6d8d_86c3),
        (42, 7, 123, 0x3b0f_fb70_93fc_156f),
        (u64::MAX, usize::MAX, u64::MAX, 0x595b_17f4_87c0_e71b),
    ] {
        assert_eq!(seed_for(seed, rank, epoch), expected, "({seed}, {rank}, {epoch})");
    }
}

#[test]
fn no_two_seeds_of_many_are_equal() {
    // By chance, two of a million numbers of 64 bits are equal in one of 35 million cases.
    let mut seen = HashSet::new();
    for seed in [0, 1, 2, 3, 1 << 32, u64::MAX] {
        for rank in 0..170 {
            (0..1000).for_each(|epoch| assert!(seen.insert(seed_for(seed, rank, epoch)), "({seed}, {rank}, {epoch})"));
        }
    }
    assert_eq!(seen.len(), 1_020_000);
}

#[test]
fn a_step_of_one_argument_changes_half_of_the_bits() {
    let mut counts = [0_u64; 3];
    for number in 0..10_000_u64 {
        let (rank, mine) = (number as usize, seed_for(number, number as usize, number));
        let others = [seed_for(number + 1, rank, number), seed_for(number, rank + 1, number), seed_for(number, rank, number + 1)];
        counts.iter_mut().zip(others).for_each(|(count, other)| *count += u64::from((mine ^ other).count_ones()));
    }
    // 640,000 bits, of which half change, give or take 400.
    assert!(counts.iter().all(|count| count.abs_diff(320_000) < 2_400), "{counts:?}");
}
