//! Samples distributed over ranks, compared with the order of one process.

use collectives::{Communicator, Result};
use collectives_train::{Sampler, UnevenEnd};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, processes, threads};

/// Gathers every rank's samples on all ranks.
fn told(comm: &Communicator, mine: &[usize]) -> Result<Vec<Vec<usize>>> {
    let mut counts = vec![0_u64; comm.world_size()];
    comm.all_gather_into(&[mine.len() as u64], &mut counts)?;
    let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
    let mine: Vec<u64> = mine.iter().map(|sample| *sample as u64).collect();
    let mut all = vec![0_u64; counts.iter().sum()];
    comm.all_gather_v_into(&mine, &mut all, &counts)?;
    let mut all = all.into_iter().map(|sample| sample as usize);
    Ok(counts.into_iter().map(|count| all.by_ref().take(count).collect()).collect())
}

/// Returns the order of an epoch on one process, which contains each sample once.
fn order(len: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let order: Vec<usize> = Sampler::of_rank(0, 1, len).unwrap().with_seed(seed).epoch(epoch).collect();
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..len).collect::<Vec<_>>(), "seed {seed}, epoch {epoch}");
    order
}

/// Returns each rank's samples if these are distributed in turn.
fn dealt(order: impl Iterator<Item = usize>, ranks: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new(); ranks];
    order.enumerate().for_each(|(place, sample)| all[place % ranks].push(sample));
    all
}

/// Compares all ranks' samples of some epochs with the order of one process, for every handling of the end.
fn epochs(comm: &Communicator, len: usize, seed: u64) -> Result<()> {
    let ranks = comm.world_size();
    for epoch in [0, 1, u64::MAX] {
        let (order, what) = (order(len, seed, epoch), format!("{len} samples on {ranks} ranks, seed {seed}, epoch {epoch}"));
        let sampler = Sampler::new(comm, len).with_seed(seed);
        let all = |end| told(comm, &sampler.with_end(end).epoch(epoch).collect::<Vec<_>>());
        let even = len / ranks * ranks;
        assert_eq!(all(UnevenEnd::Keep)?, dealt(order.iter().copied(), ranks), "{what}");
        assert_eq!(all(UnevenEnd::Drop)?, dealt(order[..even].iter().copied(), ranks), "{what}");
        let repeated = order.iter().copied().cycle().take(len.next_multiple_of(ranks));
        assert_eq!(all(UnevenEnd::Repeat)?, dealt(repeated, ranks), "{what}");
    }
    Ok(())
}

#[test]
fn every_rank_takes_its_turn_in_the_order_of_one_process() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for wiring in Wiring::ALL {
        for world_size in [1, 2, 3, 4] {
            let (lens, seed) = ([0, 1, world_size, random.below(300)], random.next());
            threads(wiring, world_size, |comm| lens.iter().for_each(|len| epochs(comm, *len, seed).unwrap()));
        }
    }
}

#[test]
fn every_rank_takes_its_turn_between_processes() {
    processes("sampler::every_rank_takes_its_turn_between_processes", Wiring::Tcp, 3, |comm| epochs(comm, 101, 20_270_116));
}

/// Runs two epochs in batches on worlds of changing size, each of which continues at the saved position of the one
/// before. Returns the samples taken, in the order of steps.
fn in_turns(worlds: &[usize], len: usize, batch: usize, seed: u64, random: &mut Random) -> Vec<Vec<usize>> {
    let (mut taken, mut position, mut worlds) = (vec![Vec::new(), Vec::new()], (0_u64, 0_usize), worlds.iter().cycle());
    while position.0 < 2 {
        let (world_size, steps, begin) = (*worlds.next().unwrap(), random.below(4), position);
        let results = threads(Wiring::Shm, world_size, |comm| {
            let sampler = Sampler::new(comm, len).with_seed(seed).with_end(UnevenEnd::Keep);
            let (mut own, (epoch, mut saved)) = (Vec::new(), begin);
            let mut rest = sampler.epoch_from(epoch, saved).unwrap();
            for _ in 0..=steps {
                own.extend(rest.by_ref().take(batch));
                saved = (saved + batch * world_size).min(len);
            }
            (told(comm, &own).unwrap().concat(), if saved == len { (epoch + 1, 0) } else { (epoch, saved) })
        });
        assert!(results.iter().all(|result| *result == results[0]), "ranks differ");
        let (all, saved) = results.into_iter().next().unwrap();
        taken[position.0 as usize].extend(all);
        position = saved;
    }
    taken
}

#[test]
fn ranks_of_any_number_go_on_from_a_saved_position_and_take_every_sample_once() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for worlds in [&[4, 3][..], &[3, 2], &[2, 1], &[1, 4, 2, 3]] {
        let (len, batch, shuffled) = (1 + random.below(120), 1 + random.below(5), random.next());
        let taken = in_turns(worlds, len, batch, shuffled, &mut random);
        for (epoch, mut taken) in taken.into_iter().enumerate() {
            taken.sort_unstable();
            assert_eq!(taken, (0..len).collect::<Vec<_>>(), "epoch {epoch}, {worlds:?}, {len} samples by {batch}, seed {seed}");
        }
    }
}

#[test]
fn behind_a_whole_epoch_whose_end_was_repeated_nothing_is_left() {
    // (samples, ranks that took the epoch in steps of one sample each): they took more samples than there are.
    for (len, before) in [(10, 4), (10, 3), (7, 5), (1, 1), (2, 2), (13, 13)] {
        let taken: usize = (0..before).map(|rank| Sampler::of_rank(rank, before, len).unwrap().epoch(0).count()).sum();
        assert_eq!(taken, before * len.div_ceil(before));
        for (ranks, rank) in [(1, 0), (before, before - 1), (5, 2), (13, 12)] {
            let sampler = Sampler::of_rank(rank, ranks, len).unwrap();
            assert_eq!(sampler.epoch_from(0, taken).unwrap().len(), 0, "{taken} of {len} by {before} ranks, then {ranks}");
            assert_eq!(sampler.epoch_from(0, taken).unwrap().next(), None);
        }
    }
    // More ranks than samples.
    for rank in 0..4 {
        assert_eq!(Sampler::of_rank(rank, 4, 1).unwrap().epoch_from(0, 4).unwrap().count(), 0);
    }
}

#[test]
fn more_than_an_epoch_has_was_taken_in_none() {
    let refused = |sampler: Sampler, taken| {
        let error = sampler.epoch_from(0, taken).map(drop).unwrap_err().to_string();
        assert!(error.contains(&format!("{taken} samples were taken")) && error.contains("count from 0 in each epoch"), "{error}");
    };
    let of = |ranks, len| Sampler::of_rank(0, ranks, len).unwrap();
    for (ranks, len, taken) in [(4, 10, 20), (4, 10, usize::MAX), (4, 1, 5), (1, 1, 2), (4, 0, 1), (4, 0, 4)] {
        refused(of(ranks, len), taken);
    }
    for end in [UnevenEnd::Drop, UnevenEnd::Keep] {
        refused(of(4, 10).with_end(end), 11);
        assert_eq!(of(4, 10).with_end(end).epoch_from(0, 10).unwrap().count(), 0);
    }
}
