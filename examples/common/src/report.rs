//! Reports progress during training.

use std::time::Instant;

use collectives::{Communicator, ReduceOp};

use crate::Options;

/// The results of a rank.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// All parameters, concatenated.
    pub parameters: Vec<f32>,
    /// The loss of every step, over the samples of all ranks.
    pub losses: Vec<f32>,
    /// Samples per second, of all ranks together.
    pub samples_per_second: f64,
}

/// Prints loss, speed and memory every few steps, on rank 0.
pub struct Report<'a> {
    comm: &'a Communicator,
    options: &'a Options,
    began: Instant,
    losses: Vec<f32>,
}

impl<'a> Report<'a> {
    /// Starts the clock.
    #[must_use]
    pub fn new(comm: &'a Communicator, options: &'a Options) -> Self {
        Self { comm, options, began: Instant::now(), losses: Vec::with_capacity(options.steps) }
    }

    /// Records a step with this rank's loss.
    ///
    /// # Errors
    ///
    /// The errors of any collective.
    pub fn step(&mut self, loss: f32) -> anyhow::Result<()> {
        let mut mean = loss;
        self.comm.all_reduce(&mut mean, ReduceOp::Avg)?;
        self.losses.push(mean);
        // If `every` is 0, this is never true.
        if self.losses.len().is_multiple_of(self.options.every) && self.comm.rank() == 0 {
            let (step, speed, memory) = (self.losses.len(), self.samples_per_second(), in_words(peak_memory()));
            println!("step {step:5}  loss {mean:.5}  {speed:9.0} samples/s  peak memory {memory}");
        }
        Ok(())
    }

    fn samples_per_second(&self) -> f64 {
        (self.losses.len() * self.options.batch) as f64 / self.began.elapsed().as_secs_f64()
    }

    /// Ends the training and returns its results.
    #[must_use]
    pub fn finish(self, parameters: Vec<f32>) -> Outcome {
        Outcome { parameters, samples_per_second: self.samples_per_second(), losses: self.losses }
    }
}

/// Prints the results of the first rank of this process, if it is rank 0 of the job.
pub fn print_once(outcomes: &[Outcome], options: &Options, is_first: bool) {
    let Some(outcome) = outcomes.first().filter(|_| is_first) else { return };
    let (last, memory) = (outcome.losses.last().copied().unwrap_or(f32::NAN), in_words(peak_memory()));
    let (speed, parameters) = (outcome.samples_per_second, outcome.parameters.len());
    let way = if options.fully_sharded { "FullySharded".to_owned() } else { format!("{:?}", options.averaging) };
    println!("{way}: {parameters} parameters, last loss {last:.6}, {speed:.0} samples/s, peak memory {memory}");
}

/// Returns the peak memory of this process, in kB, if the system reports it.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok())
}

fn in_words(kilobytes: Option<u64>) -> String {
    kilobytes.map_or_else(|| "unknown".to_owned(), |kilobytes| format!("{:.1} MiB", kilobytes as f64 / 1024.0))
}
