//! Training that is stopped, saved and continued by another number of ranks has the same result as uninterrupted
//! training.

use std::path::Path;

use collectives::{Communicator, Error, Result};
use collectives_train::checkpoint::{Checkpoint, Piece, Writer};
use collectives_train::{Options, Parameter, ShardedOptimizer};

use crate::common::random::Random;
use crate::common::ranks::{Wiring, threads};

/// Samples of a batch: every number of ranks here divides it.
const SAMPLES: usize = 12;
const STEPS: u64 = 9;
const SAVED: u64 = 4;

/// Adam (Kingma, Ba 2015), in place.
fn adam(step: u64, x: &mut f32, slope: f32, (mean, square): (&mut f32, &mut f32)) {
    *mean = 0.9 * *mean + 0.1 * slope;
    *square = 0.999 * *square + 0.001 * slope * slope;
    let (mean, square) = (*mean / (1.0 - 0.9_f32.powi(step as i32 + 1)), *square / (1.0 - 0.999_f32.powi(step as i32 + 1)));
    *x -= 0.01 * mean / (square.sqrt() + 1e-8);
}

fn parameters() -> Vec<Parameter> {
    let shapes: [&[usize]; 6] = [&[31, 17], &[], &[0], &[2, 3], &[4099], &[1]];
    shapes.iter().enumerate().map(|(index, shape)| Parameter::new::<f32>(format!("p{index}"), shape)).collect()
}

fn lens() -> Vec<usize> {
    parameters().iter().map(|parameter| parameter.shape.iter().product()).collect()
}

/// Returns one sample's gradient of a parameter: 12 times a small whole number, for which every mean here is exact, or
/// any number.
fn sample(seed: u64, exact: bool, (step, sample, index): (u64, usize, usize), len: usize) -> Vec<f32> {
    let mut random = Random(seed ^ step << 40 ^ (sample as u64) << 20 ^ index as u64);
    let mut number = || if exact { 12.0 * (random.below(17) as f32 - 8.0) } else { random.unit() };
    (0..len).map(|_| number()).collect()
}

/// Returns the mean over this rank's samples.
fn gradient(comm: &Communicator, seed: u64, exact: bool, (step, index): (u64, usize), len: usize) -> Vec<f32> {
    let mut sum = vec![0.0; len];
    let own = (comm.rank()..SAMPLES).step_by(comm.world_size());
    for number in own.clone() {
        sum.iter_mut().zip(sample(seed, exact, (step, number, index), len)).for_each(|(sum, slope)| *sum += slope);
    }
    sum.iter_mut().for_each(|sum| *sum /= own.len() as f32);
    sum
}

/// A model in training.
struct Training {
    model: ShardedOptimizer,
    values: Vec<Vec<f32>>,
    /// Adam's two moments, for this rank's share of each bucket.
    means: Vec<Vec<f32>>,
    squares: Vec<Vec<f32>>,
}

impl Training {
    fn new(comm: &Communicator, bucket_bytes: usize) -> Result<Self> {
        let options = Options { first_bucket_bytes: bucket_bytes / 3, bucket_bytes, ..Options::default() };
        let model = ShardedOptimizer::new(comm, parameters(), options)?;
        let zeros = || -> Vec<Vec<f32>> { model.shard_lens().map(|len| vec![0.0; len]).collect() };
        let (means, squares) = (zeros(), zeros());
        Ok(Self { means, squares, values: lens().iter().map(|len| vec![f32::NAN; *len]).collect(), model })
    }

    /// Starts a new training, with rank 0's values.
    fn begin(&mut self) -> Result<()> {
        for (index, values) in self.values.iter_mut().enumerate() {
            *values = (0..values.len()).map(|at| (at % 7) as f32 * 0.1 - index as f32).collect();
            self.model.broadcast(index, values, 0)?;
        }
        Ok(())
    }

    fn save(&self, comm: &Communicator, directory: &Path, step: u64) -> Result<()> {
        let mut writer = Writer::new(comm, directory);
        for (parameter, values) in parameters().iter().zip(&self.values) {
            writer.tensor(&parameter.name, &parameter.shape, Piece::Whole, values);
        }
        writer.shares("adam.mean", &self.model, self.means.iter().map(Vec::as_slice));
        writer.shares("adam.square", &self.model, self.squares.iter().map(Vec::as_slice));
        writer.keep(2);
        writer.commit(step).map(drop)
    }

    /// Continues from the latest checkpoint, and returns the next step.
    fn resume(&mut self, comm: &Communicator, directory: &Path) -> Result<u64> {
        let checkpoint = Checkpoint::resume(comm, directory)?.ok_or_else(|| Error::Conflict { reason: "none".to_owned() })?;
        for (index, (parameter, values)) in parameters().iter().zip(&mut self.values).enumerate() {
            checkpoint.read(&parameter.name, &parameter.shape, Piece::Whole, values)?;
            self.model.load(index, values)?;
        }
        checkpoint.read_shares("adam.mean", &self.model, self.means.iter_mut().map(Vec::as_mut_slice))?;
        checkpoint.read_shares("adam.square", &self.model, self.squares.iter_mut().map(Vec::as_mut_slice))?;
        Ok(checkpoint.step().unwrap())
    }

    fn step(&mut self, comm: &Communicator, seed: u64, exact: bool, step: u64) -> Result<()> {
        for (index, len) in lens().into_iter().enumerate().rev() {
            self.model.ready(index, &gradient(comm, seed, exact, (step, index), len))?;
        }
        let (means, squares) = (&mut self.means, &mut self.squares);
        let updated = self.model.reduce()?.update(|shard| {
            let (mean, square) = (&mut means[shard.bucket], &mut squares[shard.bucket]);
            let (parameters, slopes) = shard.values::<f32>()?;
            for (at, x) in parameters.iter_mut().enumerate() {
                adam(step, x, slopes[at], (&mut mean[at], &mut square[at]));
            }
            Ok(())
        })?;
        self.values.iter_mut().enumerate().try_for_each(|(index, values)| updated.copy_to(index, values))
    }
}

/// Trains with 4 ranks and saves some steps; continues with `ranks` ranks and other buckets. Returns the parameters of
/// both runs.
fn compare(seed: u64, exact: bool, ranks: usize) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = threads(Wiring::Shm, 4, |comm| {
        let mut training = Training::new(comm, 3000).unwrap();
        training.begin().unwrap();
        for step in 0..STEPS {
            training.step(comm, seed, exact, step).unwrap();
            if step < SAVED {
                training.save(comm, folder.path(), step + 1).unwrap();
            }
        }
        training.values
    });
    let resumed = threads(Wiring::Shm, ranks, |comm| {
        let mut training = Training::new(comm, 500).unwrap();
        let begin = training.resume(comm, folder.path()).unwrap();
        assert_eq!(begin, SAVED);
        (begin..STEPS).for_each(|step| training.step(comm, seed, exact, step).unwrap());
        training.values
    });
    assert!(resumed.iter().all(|values| *values == resumed[0]), "ranks differ, seed {seed}");
    (undisturbed.into_iter().next().unwrap(), resumed.into_iter().next().unwrap())
}

#[test]
fn a_run_that_goes_on_with_other_ranks_ends_with_the_same_bits_where_means_are_exact() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    for ranks in [1, 2, 3, 4] {
        let (undisturbed, resumed) = compare(random.next(), true, ranks);
        assert!(undisturbed == resumed, "{ranks} ranks, seed {seed}");
    }
}

#[test]
fn a_run_that_goes_on_with_three_of_four_ranks_ends_within_rounding() {
    let (mut random, seed) = Random::new();
    println!("seed {seed}");
    let (undisturbed, resumed) = compare(random.next(), false, 3);
    let differences = undisturbed.iter().flatten().zip(resumed.iter().flatten()).map(|(a, b)| (a - b).abs());
    // Each of the five steps moves a parameter by about 0.01, of which a mean in another order changes a millionth; if
    // gradients nearly cancel, more.
    let most = differences.fold(0.0, f32::max);
    println!("they differ by {most}");
    assert!(most <= 1e-4, "{most}, seed {seed}");
}

#[test]
fn state_that_does_not_fit_the_shares_is_refused_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    threads(Wiring::Shm, 2, |comm| {
        let mut training = Training::new(comm, 3000).unwrap();
        training.begin().unwrap();
        training.save(comm, folder.path(), 1).unwrap();
        let mut short = training.means.clone();
        if comm.rank() == 1 {
            short.pop();
        }
        let mut writer = Writer::new(comm, folder.path());
        writer.shares("mean", &training.model, short.iter().map(Vec::as_slice));
        let error = writer.commit(2).unwrap_err().to_string();
        assert!(error.contains("state \"mean\": there is no slice for bucket"), "{error}");
        let checkpoint = Checkpoint::resume(comm, folder.path()).unwrap().unwrap();
        let error = checkpoint.read_shares("other", &training.model, short.iter_mut().map(Vec::as_mut_slice)).unwrap_err();
        assert!(error.to_string().contains("tensor \"other.p"), "{error}");
        short.iter_mut().for_each(|share| share.push(0.0));
        let error = checkpoint.read_shares("adam.mean", &training.model, short.iter_mut().map(Vec::as_mut_slice)).unwrap_err();
        assert!(error.to_string().contains("elements were passed for bucket 0, but this rank's share of the bucket has"), "{error}");
    });
}
