//! The communication module of an inference engine, over this crate: the engine's own trait, tensor-parallel layers, two
//! pipeline stages, and a pool of worker threads that share the weights.
//!
//! `cargo run -p collectives-candle --example engine -- 4` runs four ranks as threads. As processes, ranks would call
//! `Communicator::from_env` or, with the engine's own store, `Communicator::builder().with_store(…)`.

use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::Linear;
use collectives::{Communicator, ReduceOp};
use collectives_candle::{all_reduce, cause, recv_tensor, run_local, send_tensor};

/// The calls that the engine's layers and stages make. An engine can have other implementations, for example over NCCL.
pub trait Comm: Send + Sync {
    /// Returns the sum of the tensors of all ranks of the stage.
    fn sum_all_reduce(&self, x: &Tensor) -> Result<Tensor>;
    /// Sends activations to the next stage.
    fn send_to_next(&self, x: &Tensor) -> Result<()>;
    /// Receives activations from the previous stage.
    fn recv_from_previous(&self) -> Result<Tensor>;
}

/// The communicators of one worker thread.
pub struct Worker {
    /// The lane that belongs to this worker, among the ranks of the stage. The lanes of different workers need no common
    /// order.
    stage: Communicator,
    /// One rank of each stage. All workers use it, each with its own tag.
    pipeline: Communicator,
    tag: u64,
}

impl Comm for Worker {
    fn sum_all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        all_reduce(&self.stage, x, ReduceOp::Sum)
    }

    fn send_to_next(&self, x: &Tensor) -> Result<()> {
        send_tensor(&self.pipeline, x, self.pipeline.rank() + 1, self.tag)
    }

    fn recv_from_previous(&self) -> Result<Tensor> {
        match self.pipeline.rank().checked_sub(1) {
            Some(previous) => recv_tensor(&self.pipeline, previous, self.tag, &Device::Cpu),
            None => candle_core::bail!("the first stage has no previous stage"),
        }
    }
}

/// A row-parallel layer of the engine. The inner layer may be any module, for example a quantised matrix.
struct RowParallel<M> {
    inner: M,
    bias: Tensor,
}

impl<M: Module> RowParallel<M> {
    fn forward(&self, comm: &dyn Comm, x: &Tensor) -> Result<Tensor> {
        comm.sum_all_reduce(&self.inner.forward(x)?)?.broadcast_add(&self.bias)
    }
}

/// A block of the model: this rank's part of two layers, with a residual connection.
struct Mlp {
    up: Linear,
    down: RowParallel<Linear>,
}

impl Mlp {
    /// Makes the part of a rank among the ranks of its stage.
    fn part(block: usize, rank: usize, ranks: usize) -> Result<Self> {
        if !HIDDEN.is_multiple_of(ranks) {
            candle_core::bail!("{HIDDEN} hidden units cannot be split between {ranks} ranks");
        }
        let own = HIDDEN / ranks;
        let up = whole_numbers(block, &[HIDDEN, WIDTH])?.narrow(0, rank * own, own)?.contiguous()?;
        let down = whole_numbers(block + BLOCKS, &[WIDTH, HIDDEN])?.narrow(1, rank * own, own)?.contiguous()?;
        let bias = whole_numbers(block + 2 * BLOCKS, &[WIDTH])?;
        Ok(Self { up: Linear::new(up, None), down: RowParallel { inner: Linear::new(down, None), bias } })
    }

    fn forward(&self, comm: &dyn Comm, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(comm, &self.up.forward(x)?.relu()?)?
    }
}

/// A rank of the engine.
pub struct Engine {
    blocks: Arc<Vec<Mlp>>,
    workers: Vec<Worker>,
}

impl Engine {
    /// Divides the ranks into stages with equally many blocks, and each block between the ranks of its stage.
    /// Collective.
    pub fn new(comm: &Communicator, stages: usize, workers: usize) -> Result<Self> {
        let ranks = comm.world_size();
        if stages == 0 || !ranks.is_multiple_of(stages) || !BLOCKS.is_multiple_of(stages) {
            candle_core::bail!("{ranks} ranks and {BLOCKS} blocks cannot be divided into {stages} stages");
        }
        if workers == 0 {
            candle_core::bail!("an engine needs at least one worker");
        }
        let (each, blocks) = (ranks / stages, BLOCKS / stages);
        let (number, place) = (comm.rank() / each, comm.rank() % each);
        let group = |color: usize| -> Result<Communicator> {
            comm.split(Some(color as u32), 0).map_err(std::io::Error::other)?.ok_or_else(|| candle_core::Error::Msg("no group".to_owned()))
        };
        let (stage, pipeline) = (group(number)?, group(place)?);
        let worker = |tag: usize| -> Result<Worker> {
            let stage = stage.lane(tag as u32).map_err(std::io::Error::other)?;
            Ok(Worker { stage, pipeline: pipeline.clone(), tag: tag as u64 })
        };
        let own = number * blocks..(number + 1) * blocks;
        Ok(Self {
            blocks: Arc::new(own.map(|block| Mlp::part(block, place, each)).collect::<Result<_>>()?),
            workers: (0..workers).map(worker).collect::<Result<_>>()?,
        })
    }

    /// Serves requests with all workers. Worker `n` serves every request whose number is `n` modulo the number of
    /// workers. On the ranks of the last stage, returns the answers and the numbers of their requests.
    pub fn serve(self, requests: &Arc<Vec<Tensor>>) -> Result<Vec<(usize, Tensor)>> {
        let count = self.workers.len();
        let start = |(number, worker): (usize, Worker)| {
            let (blocks, requests) = (Arc::clone(&self.blocks), Arc::clone(requests));
            std::thread::spawn(move || -> Result<Vec<(usize, Tensor)>> {
                let own = (number..requests.len()).step_by(count);
                own.filter_map(|request| answer(&worker, &blocks, &requests[request]).map(|x| Some((request, x?))).transpose()).collect()
            })
        };
        let threads: Vec<_> = self.workers.into_iter().enumerate().map(start).collect();
        let answers = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| candle_core::bail!("a worker panicked")));
        let mut answers = answers.collect::<Result<Vec<_>>>()?.concat();
        answers.sort_by_key(|(request, _)| *request);
        Ok(answers)
    }
}

/// Runs the blocks of this stage for one request. Returns the answer on the last stage.
fn answer(worker: &Worker, blocks: &[Mlp], request: &Tensor) -> Result<Option<Tensor>> {
    let (stage, stages) = (worker.pipeline.rank(), worker.pipeline.world_size());
    let x = if stage == 0 { request.clone() } else { worker.recv_from_previous()? };
    let x = blocks.iter().try_fold(x, |x, block| block.forward(worker, &x))?;
    if stage + 1 == stages {
        return Ok(Some(x));
    }
    worker.send_to_next(&x).map(|()| None)
}

/// The number of blocks of the model.
const BLOCKS: usize = 2;
const WIDTH: usize = 8;
const HIDDEN: usize = 24;

/// Returns a tensor of small whole numbers. All sums of the model are whole numbers below 2²⁴, so the answers do not
/// depend on the order of the sums.
fn whole_numbers(seed: usize, shape: &[usize]) -> Result<Tensor> {
    let number = |index: usize| ((seed * 31 + index * 17 + index / 5) % 7) as f32 - 3.0;
    Tensor::from_vec((0..shape.iter().product()).map(number).collect::<Vec<_>>(), shape, &Device::Cpu)
}

/// Returns requests with different numbers of tokens.
pub fn requests(count: usize) -> Result<Arc<Vec<Tensor>>> {
    (0..count).map(|request| whole_numbers(100 + request, &[1 + request % 4, WIDTH])).collect::<Result<Vec<_>>>().map(Arc::new)
}

fn main() -> Result<()> {
    let ranks = std::env::args().nth(1).map_or(Ok(4), |ranks| ranks.parse()).map_err(candle_core::Error::wrap)?;
    let stages = if ranks % 2 == 0 { 2 } else { 1 };
    let requests = requests(16)?;
    match run_local(ranks, |comm| Engine::new(comm, stages, 3)?.serve(&requests)) {
        Ok(answers) => answers.iter().enumerate().for_each(|(rank, answers)| println!("rank {rank}: {} answers", answers.len())),
        Err(error) if cause(&error).is_some_and(collectives::Error::is_peer_lost) => println!("start the job again: {error}"),
        Err(error) => return Err(error),
    }
    Ok(())
}
