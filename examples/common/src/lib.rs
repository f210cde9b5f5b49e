//! Code that the training examples share: options, starting the ranks, a computed data set, progress reports, and the
//! checks of their tests.

mod report;
mod spirals;
pub mod testing;

use std::num::NonZeroUsize;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use collectives::{Builder, Communicator, Transport};
use collectives_train::Parameter;

pub use report::{Outcome, Report, print_once};
pub use spirals::Spirals;

/// Trains a small network on two spirals, on one rank or many, and prints loss, samples per second and peak memory.
#[derive(Debug, Clone, Parser)]
pub struct Options {
    /// Run this many ranks as threads of this process. Without this option, the process is one rank of a job that a
    /// launcher started: collrun, torchrun, mpirun
    #[arg(long)]
    pub ranks: Option<NonZeroUsize>,
    /// Steps of training
    #[arg(long, default_value_t = 200)]
    pub steps: usize,
    /// Samples of one step, on all ranks together
    #[arg(long, default_value_t = 256)]
    pub batch: usize,
    /// Outputs of each hidden layer
    #[arg(long, default_value_t = 32)]
    pub width: usize,
    /// Hidden layers
    #[arg(long, default_value_t = 3)]
    pub depth: usize,
    /// Learning rate
    #[arg(long, default_value_t = 0.5)]
    pub learning_rate: f64,
    /// How gradients are averaged
    #[arg(long, value_enum, default_value_t = Averaging::Buckets)]
    pub averaging: Averaging,
    /// Largest size of a bucket, in bytes
    #[arg(long, default_value_t = 1 << 20)]
    pub bucket_bytes: usize,
    /// Shard the parameters over the ranks (ZeRO stage 3). Each rank keeps one part of them, and gathers a layer's
    /// parameters only while the layer computes
    #[arg(long, conflicts_with_all = ["averaging", "bucket_bytes"])]
    pub fully_sharded: bool,
    /// Number of steps between two progress reports; 0: only at the end
    #[arg(long, default_value_t = 50)]
    pub every: usize,
    /// Train on GPUs, one for each rank of a host
    #[cfg(feature = "cuda")]
    #[arg(long, conflicts_with = "fully_sharded")]
    pub gpu: bool,
    /// Transport between the threads of `--ranks`
    #[arg(long, value_enum, default_value_t = Over::Shm)]
    pub transport: Over,
}

/// The way gradients are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Averaging {
    /// In buckets, each started as soon as it is full, while the backward pass continues.
    Buckets,
    /// One blocking call for each parameter, after the backward pass.
    EachParameter,
}

/// The transport between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Over {
    /// Shared memory.
    Shm,
    /// TCP, also within one host.
    Tcp,
}

impl Options {
    /// Returns the default options.
    #[must_use]
    pub fn new() -> Self {
        Self::parse_from(["example"])
    }

    /// Runs `train` on every rank of this process, and returns the results in rank order.
    ///
    /// # Errors
    ///
    /// The errors of `train`, and the errors of connecting the ranks.
    pub fn run<R: Send>(&self, train: impl Fn(&Communicator) -> anyhow::Result<R> + Sync) -> anyhow::Result<Vec<R>> {
        let Some(ranks) = self.ranks else {
            let comm = self.builder().from_env().context("joining the launcher's job; without a launcher, pass --ranks N")?;
            let result = train(&comm)?;
            comm.close()?;
            return Ok(vec![result]);
        };
        let transport = match self.transport {
            Over::Shm => Transport::Auto,
            Over::Tcp => Transport::Tcp,
        };
        let communicators = self.builder().configure(|config| config.transport = transport).local(ranks.get())?;
        std::thread::scope(|scope| {
            let train = &train;
            let rank = |comm: Communicator| scope.spawn(move || train(&comm).and_then(|result| Ok(comm.close().map(|()| result)?)));
            let threads: Vec<_> = communicators.into_iter().map(rank).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a rank panicked")))).collect()
        })
    }

    /// Returns the builder of the communicator; it requires a GPU if `--gpu` was given.
    fn builder(&self) -> Builder {
        let builder = Communicator::builder();
        #[cfg(feature = "cuda")]
        if self.gpu {
            return builder.require_device(collectives::DeviceChoice::Local);
        }
        builder
    }

    /// Returns this rank's share of a step's samples.
    ///
    /// # Errors
    ///
    /// The batch cannot be split equally. Then the mean of the ranks' means would not be the mean of all samples.
    pub fn share(&self, comm: &Communicator) -> anyhow::Result<std::ops::Range<usize>> {
        anyhow::ensure!(
            self.batch.is_multiple_of(comm.world_size()),
            "--batch {} cannot be split equally between {} ranks",
            self.batch,
            comm.world_size()
        );
        let each = self.batch / comm.world_size();
        Ok(comm.rank() * each..(comm.rank() + 1) * each)
    }

    /// Returns the numbers of inputs and outputs of each layer.
    #[must_use]
    pub fn layers(&self) -> Vec<(usize, usize)> {
        let mut sizes = vec![2];
        sizes.resize(self.depth + 1, self.width);
        sizes.push(2);
        sizes.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }

    /// Returns the descriptions of the layers' parameters for the buckets: weight, bias, weight, bias …
    #[must_use]
    pub fn parameters(&self, weight: impl Fn(usize, usize) -> [usize; 2]) -> Vec<Parameter> {
        let of_layer = |(layer, &(inputs, outputs)): (usize, &(usize, usize))| {
            let shape = weight(inputs, outputs);
            [Parameter::new::<f32>(format!("{layer}.weight"), &shape), Parameter::new::<f32>(format!("{layer}.bias"), &[outputs])]
        };
        self.layers().iter().enumerate().flat_map(of_layer).collect()
    }

    /// Returns the options of the buckets.
    #[must_use]
    pub fn buckets(&self) -> collectives_train::Options {
        let first_bucket_bytes = self.bucket_bytes.min(collectives_train::Options::default().first_bucket_bytes);
        collectives_train::Options { first_bucket_bytes, bucket_bytes: self.bucket_bytes, ..Default::default() }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns numbers between -`bound` and `bound`, which depend only on the seed (xorshift64*).
#[must_use]
pub fn uniform(seed: u64, bound: f32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| (2.0 * next() - 1.0) * bound).collect()
}

/// Returns the largest difference between two runs' parameters.
#[must_use]
pub fn largest_difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len(), "the runs have different networks");
    one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
