//! A rank is killed during training. The others get an error that names it. One rank fewer continues from the last
//! whole checkpoint, and reaches the result of one process without interruption.

use std::path::{Path, PathBuf};
use std::time::Instant;

use collectives::{Communicator, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use collectives_train::{FullySharded, FullyShardedOptions, Sampler};
use rustix::process::{Signal, getpid, kill_process};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, is_rank_of, patience};
use crate::network::{self, Host, LAYERS, Layer, Sample, distance, gradients, start};
use crate::processes::Ranks;

const FOLDER: &str = "COLLECTIVES_TEST_FOLDER";
const SEED: &str = "COLLECTIVES_TEST_TRAINING";
const WIRING: &str = "COLLECTIVES_TEST_WIRING";
/// The rank that is killed, and when: after this many of its calls, or during the save of a step.
const VICTIM: &str = "COLLECTIVES_TEST_VICTIM";
const CALLS: &str = "COLLECTIVES_TEST_CALLS";
const SAVE: &str = "COLLECTIVES_TEST_SAVE";

/// Samples of the data set and of each step, for any number of ranks: five steps per epoch, and some samples left out.
const SAMPLES: usize = 66;
const BATCH: usize = 12;
const STEPS: u64 = 16;
/// Steps between checkpoints.
const EVERY: u64 = 2;
/// Points in a step at which a rank may be killed: two for each gathering and one for each reduction of a unit, and one
/// before the update.
const PLACES: usize = 3 * LAYERS + 1;

/// The allowed difference of two runs in `f64`. Means in another order differ by about 1e-17. Adam divides a gradient
/// by its size, or by 1e-8 if that is larger, so the error of a step of 0.02 is at most 1e-10.
const BOUND: f64 = 1e-9;

/// Adam (Kingma, Ba 2015), in place.
fn adam(step: u64, x: &mut f64, slope: f64, (mean, square): (&mut f64, &mut f64)) {
    *mean = 0.9 * *mean + 0.1 * slope;
    *square = 0.999 * *square + 0.001 * slope * slope;
    let (mean, square) = (*mean / (1.0 - 0.9_f64.powi(step as i32 + 1)), *square / (1.0 - 0.999_f64.powi(step as i32 + 1)));
    *x -= 0.02 * mean / (square.sqrt() + 1e-8);
}

/// Trains on one process without checkpoints, and returns the parameters.
fn undisturbed(seed: u64) -> Vec<Layer> {
    let mut layers = start(seed);
    let zeros = || vec![0.0; layers.iter().flatten().map(Vec::len).sum()];
    let (mut means, mut squares) = (zeros(), zeros());
    let orders = (0..).flat_map(|epoch| {
        let order: Vec<usize> = Sampler::of_rank(0, 1, SAMPLES).unwrap().with_seed(seed).epoch(epoch).collect();
        order.chunks_exact(BATCH).map(<[usize]>::to_vec).collect::<Vec<_>>()
    });
    for (step, batch) in (0..STEPS).zip(orders) {
        let samples: Vec<Sample> = batch.into_iter().map(|index| network::sample(seed, index)).collect();
        let slopes = gradients(&layers, &samples, BATCH);
        let state = means.iter_mut().zip(&mut squares);
        let all = layers.iter_mut().flatten().flatten().zip(slopes.iter().flatten().flatten()).zip(state);
        all.for_each(|((x, slope), state)| adam(step, x, *slope, state));
    }
    layers
}

/// The event that kills this process.
#[derive(Default)]
struct Fate {
    /// The number of calls before it.
    calls: Option<usize>,
    /// The step during whose save it happens.
    save: Option<u64>,
}

impl Fate {
    /// Returns the event of this rank.
    fn of(rank: usize) -> Self {
        let number = |name: &str| std::env::var(name).ok().and_then(|number| number.parse().ok());
        match number(VICTIM) == Some(rank as u64) {
            true => Self { calls: number(CALLS).map(|calls| calls as usize), save: number(SAVE) },
            false => Self::default(),
        }
    }

    /// Counts a call, or kills the process before it.
    fn call(&mut self) {
        match &mut self.calls {
            Some(0) => die(),
            Some(left) => *left -= 1,
            None => (),
        }
    }

    /// Has another thread kill the process during the save of a step, or just after it.
    fn saving(&self, directory: &Path, step: u64) {
        if self.save != Some(step) {
            return;
        }
        let (directory, begun) = (directory.to_owned(), format!("step-{step:08}"));
        std::thread::spawn(move || {
            let began = Instant::now();
            let is_begun = |name: String| name.trim_start_matches('.').starts_with(&begun);
            while !std::fs::read_dir(&directory).unwrap().any(|entry| is_begun(entry.unwrap().file_name().into_string().unwrap())) {
                assert!(began.elapsed() < patience(20), "no save of step {step} begins");
                std::thread::yield_now();
            }
            die();
        });
    }
}

fn die() {
    kill_process(getpid(), Signal::KILL).unwrap();
}

/// Training on one rank.
struct Training<'a> {
    comm: &'a Communicator,
    model: FullySharded,
    /// Adam's two moments, for this rank's share of each unit.
    means: Vec<Vec<f64>>,
    squares: Vec<Vec<f64>>,
    sampler: Sampler,
    seed: u64,
    step: u64,
    /// The current epoch, and the number of samples that all ranks have taken of it.
    epoch: u64,
    taken: usize,
}

impl<'a> Training<'a> {
    fn new(comm: &'a Communicator, seed: u64) -> Result<Self> {
        let mut model = FullySharded::new(comm, network::units::<f64>(), FullyShardedOptions::default())?;
        network::load::<f64>(&mut model, comm, seed)?;
        let zeros = || -> Vec<Vec<f64>> { model.shard_lens().map(|len| vec![0.0; len]).collect() };
        let (means, squares, sampler) = (zeros(), zeros(), Sampler::new(comm, SAMPLES).with_seed(seed));
        Ok(Self { comm, means, squares, model, sampler, seed, step: 0, epoch: 0, taken: 0 })
    }

    fn save(&self, directory: &Path) -> Result<()> {
        let shares: Vec<&[f64]> = (0..LAYERS).map(|unit| self.model.shard(unit)).collect::<Result<_>>()?;
        let mut writer = Writer::new(self.comm, directory);
        writer.shares("model", &self.model, shares);
        writer.shares("mean", &self.model, self.means.iter().map(Vec::as_slice));
        writer.shares("square", &self.model, self.squares.iter().map(Vec::as_slice));
        writer.metadata("epoch", self.epoch.to_string()).metadata("taken", self.taken.to_string()).keep(2);
        writer.commit(self.step).map(drop)
    }

    /// Continues from the latest checkpoint, if there is one.
    fn resume(&mut self, directory: &Path) -> Result<()> {
        let Some(checkpoint) = Checkpoint::resume(self.comm, directory)? else { return Ok(()) };
        let mut shares: Vec<Vec<f64>> = self.model.shard_lens().map(|len| vec![0.0; len]).collect();
        checkpoint.read_shares("model", &self.model, shares.iter_mut().map(Vec::as_mut_slice))?;
        shares.iter().enumerate().try_for_each(|(unit, share)| self.model.load_shard(unit, share))?;
        checkpoint.read_shares("mean", &self.model, self.means.iter_mut().map(Vec::as_mut_slice))?;
        checkpoint.read_shares("square", &self.model, self.squares.iter_mut().map(Vec::as_mut_slice))?;
        self.step = checkpoint.step().unwrap();
        self.epoch = checkpoint.metadata()["epoch"].parse().unwrap();
        self.taken = checkpoint.metadata()["taken"].parse().unwrap();
        Ok(())
    }

    fn step(&mut self, fate: &mut Fate) -> Result<()> {
        let rest = self.sampler.epoch_from(self.epoch, self.taken)?;
        let own: Vec<Sample> = rest.take(BATCH / self.comm.world_size()).map(|index| network::sample(self.seed, index)).collect();
        network::pass::<f64, _>(&Host, &mut self.model, (&own, own.len()), || fate.call())?;
        fate.call();
        let (means, squares, step) = (&mut self.means, &mut self.squares, self.step);
        self.model.reduce()?.update(|shard| {
            let state = means[shard.bucket].iter_mut().zip(&mut squares[shard.bucket]);
            let (parameters, slopes) = shard.values::<f64>()?;
            parameters.iter_mut().zip(slopes).zip(state).for_each(|((x, slope), state)| adam(step, x, *slope, state));
            Ok(())
        })?;
        (self.step, self.taken) = (self.step + 1, self.taken + BATCH);
        if self.taken + BATCH > SAMPLES {
            (self.epoch, self.taken) = (self.epoch + 1, 0);
        }
        Ok(())
    }

    fn run(&mut self, directory: &Path, mut fate: Fate) -> Result<()> {
        self.resume(directory)?;
        println!("@begins at {}", self.step);
        while self.step < STEPS {
            self.step(&mut fate)?;
            if self.step.is_multiple_of(EVERY) {
                fate.saving(directory, self.step);
                self.save(directory)?;
                println!("@saved {}", self.step);
            }
        }
        Ok(())
    }
}

fn rank_in_training() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let rank: usize = variable("RANK").parse().unwrap();
    let wiring = if variable(WIRING) == "tcp" { Wiring::Tcp } else { Wiring::Shm };
    let comm = wiring.builder(rank).from_env().unwrap();
    let mut training = Training::new(&comm, variable(SEED).parse().unwrap()).unwrap();
    match training.run(&PathBuf::from(variable(FOLDER)), Fate::of(rank)) {
        Ok(()) => println!("@ended"),
        Err(error) => println!("@lost {}: {error}", error.is_peer_lost()),
    }
}

/// Returns the largest number that a rank has printed after a word.
fn said(lines: &[String], word: &str) -> Option<u64> {
    lines.iter().filter_map(|line| line.strip_prefix(word)?.trim().parse().ok()).max()
}

/// Runs a job in which one of `world_size` ranks is killed, and returns the step of the latest checkpoint.
fn run_until_killed(name: &str, folder: &Path, world_size: usize, variables: &[(&str, String)], what: &str) -> u64 {
    let victim: usize = variables.iter().find(|(name, _)| *name == VICTIM).unwrap().1.parse().unwrap();
    let mut ranks = Ranks::spawn_with(name, world_size, variables);
    let mut saved = 0;
    for rank in (0..world_size).filter(|rank| *rank != victim) {
        let words = ranks.last_words(rank, patience(30)).unwrap_or_else(|error| panic!("{error}, {what}"));
        let lost = words.last().unwrap();
        assert!(lost.starts_with("lost true") && lost.contains(&format!("rank {victim}")), "rank {rank} says {words:?}, {what}");
        saved = saved.max(said(&words, "saved").unwrap_or(0));
    }
    let end = ranks.outcome(victim).unwrap_err();
    assert!(end.contains("signal: 9"), "the victim was to be killed: {end}, {what}");
    let latest = *Checkpoint::steps(folder).unwrap().last().unwrap();
    assert!(latest >= saved && latest < STEPS, "{latest} is the latest and {saved} was saved, {what}");
    latest
}

/// Runs a job that starts from this checkpoint and ends normally.
fn run_to_the_end(name: &str, world_size: usize, variables: &[(&str, String)], latest: u64, what: &str) {
    let mut ranks = Ranks::spawn_with(name, world_size, variables);
    for rank in 0..world_size {
        let words = ranks.last_words(rank, patience(30)).unwrap_or_else(|error| panic!("{error}, {what}"));
        assert_eq!(said(&words, "begins at"), Some(latest), "{words:?}, {what}");
        assert_eq!(words.last().unwrap(), "ended", "{words:?}, {what}");
    }
}

/// Returns the parameters at the end of a run.
fn ended(folder: &Path) -> Vec<Layer> {
    let checkpoint = Checkpoint::latest(folder).unwrap().unwrap();
    assert_eq!(checkpoint.step(), Some(STEPS));
    let whole = |unit: usize, name: &str| {
        let name = format!("model.layer {unit}.{name}");
        checkpoint.read_vec(&name, checkpoint.shape(&name).unwrap(), Piece::Whole).unwrap()
    };
    (0..LAYERS).map(|unit| ["weight", "bias"].map(|name| whole(unit, name))).collect()
}

/// Returns the rank that is killed in a job that starts at a step, and when: after the first checkpoint, in a step or
/// in any save but the last.
fn fate(random: &mut Random, world_size: usize, in_a_save: bool, begun: u64) -> [(&'static str, String); 2] {
    let spared = if begun == 0 { EVERY } else { 0 };
    let steps = (STEPS - begun - spared) as usize;
    let place = match in_a_save {
        true => (SAVE, (begun + spared + EVERY * (1 + random.below(steps / EVERY as usize - 1) as u64)).to_string()),
        false => (CALLS, (spared as usize * PLACES + random.below(steps * PLACES)).to_string()),
    };
    [(VICTIM, random.below(world_size).to_string()), place]
}

/// Returns the variables of a job.
fn variables(folder: &Path, seed: u64, wiring: &str) -> Vec<(&'static str, String)> {
    vec![(FOLDER, folder.to_str().unwrap().to_owned()), (SEED, seed.to_string()), (WIRING, wiring.to_owned())]
}

/// Compares the end of a run with that of one process.
fn assert_ended(folder: &Path, seed: u64, what: &str) {
    let alone = undisturbed(seed);
    let (moved, apart) = (distance(&alone, &start(seed)), distance(&ended(folder), &alone));
    println!("{apart:e} apart, {what}");
    assert!(moved > 0.1, "the network has learnt nothing: {moved}, {what}");
    assert!(apart <= BOUND, "{apart:e} apart, at most {BOUND:e}, {what}");
}

#[test]
fn one_rank_fewer_goes_on_after_a_kill_and_ends_where_nobody_was_disturbed() {
    let name = "checkpoint::killed_training::one_rank_fewer_goes_on_after_a_kill_and_ends_where_nobody_was_disturbed";
    if is_rank_of(name) {
        return rank_in_training();
    }
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for (world_size, wiring) in [(4, "shm"), (3, "tcp"), (2, "shm"), (4, "tcp"), (3, "shm"), (2, "tcp")] {
        for in_a_save in [false, true] {
            let (folder, training) = (tempfile::tempdir().unwrap(), random.next());
            let (common, fate) = (variables(folder.path(), training, wiring), fate(&mut random, world_size, in_a_save, 0));
            let what = format!("{world_size} ranks over {wiring}, {fate:?}, seed {seed}");
            let latest = run_until_killed(name, folder.path(), world_size, &[&common[..], &fate].concat(), &what);
            run_to_the_end(name, world_size - 1, &common, latest, &what);
            assert_ended(folder.path(), training, &what);
        }
    }
}

#[test]
fn four_ranks_of_which_three_are_killed_one_after_the_other_end_there_too() {
    let name = "checkpoint::killed_training::four_ranks_of_which_three_are_killed_one_after_the_other_end_there_too";
    if is_rank_of(name) {
        return rank_in_training();
    }
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let (folder, training) = (tempfile::tempdir().unwrap(), random.next());
    let common = variables(folder.path(), training, "shm");
    let mut latest = 0;
    for world_size in [4, 3, 2] {
        let fate = fate(&mut random, world_size, false, latest);
        let what = format!("{world_size} ranks from step {latest} on, {fate:?}, seed {seed}");
        latest = run_until_killed(name, folder.path(), world_size, &[&common[..], &fate].concat(), &what);
    }
    let what = format!("one rank from step {latest} on, seed {seed}");
    run_to_the_end(name, 1, &common, latest, &what);
    assert_ended(folder.path(), training, &what);
}
