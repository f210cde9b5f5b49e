//! The mean of one number over all ranks, compared with one that is computed from whole numbers.

use collectives::Communicator;

use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads};

#[test]
fn a_mean_is_that_of_all_ranks_in_every_type() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            let numbers: Vec<u32> = (0..world_size).map(|_| random.below(1 << 20) as u32).collect();
            let expected = numbers.iter().sum::<u32>() as f64 / world_size as f64;
            let means = threads(wiring, world_size, |comm| {
                let mine = numbers[comm.rank()];
                [comm.mean(mine as f32), comm.mean(f64::from(mine)), comm.mean(mine)].map(|mean| mean.unwrap().to_bits())
            });
            assert!(means.iter().all(|means| *means == [expected.to_bits(); 3]), "{numbers:?}, {wiring:?}, seed {seed}");
        }
    }
}

#[test]
fn means_that_are_not_exact_have_the_same_bits_on_every_rank() {
    for wiring in Wiring::ALL {
        let means = threads(wiring, 4, |comm| comm.mean(1.0 / (comm.rank() as f64 + 3.0)).unwrap().to_bits());
        assert_eq!(means, [means[0]; 4], "{wiring:?}");
        assert!((f64::from_bits(means[0]) - (1.0 / 3.0 + 1.0 / 4.0 + 1.0 / 5.0 + 1.0 / 6.0) / 4.0).abs() < 1e-15);
    }
}

#[test]
fn nan_and_infinity_are_not_hidden() {
    threads(Wiring::Tcp, 3, |comm| {
        let of = |other: f32| comm.mean(if comm.rank() == 1 { other } else { 1.0 }).unwrap();
        assert!(of(f32::NAN).is_nan());
        assert_eq!(of(f32::NEG_INFINITY), f64::NEG_INFINITY);
    });
}

#[test]
fn a_rank_that_makes_another_call_instead_is_an_error_on_every_rank() {
    threads(Wiring::Shm, 3, |comm| {
        let result = if comm.rank() == 2 { comm.barrier() } else { comm.mean(1.0).map(drop) };
        assert!(result.unwrap_err().is_mismatch());
    });
}

#[test]
fn one_rank_is_the_main_rank() {
    let main = |comm: &Communicator| comm.is_main();
    assert_eq!(threads(Wiring::Shm, 3, main), [true, false, false]);
    // The lowest rank of a split is its main rank.
    let parts = threads(Wiring::Shm, 3, |comm| main(&comm.split(Some(u32::from(comm.rank() > 0)), 0).unwrap().unwrap()));
    assert_eq!(parts, [true, true, false]);
}
