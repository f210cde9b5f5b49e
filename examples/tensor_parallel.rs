//! A stack of layers whose weights are split over the ranks, held in an `Arc` and called by a pool of threads.
//!
//! The threads share the weights. Each thread has its own lane of the communicator, so the calls of different requests
//! need no common order. Thread `n % threads` serves request `n` on every rank.
//!
//! `cargo launch --nproc-per-node 2 -- target/debug/examples/tensor_parallel`

use std::sync::Arc;
use std::sync::mpsc::channel;

use collectives::{Communicator, ReduceOp};

const WIDTH: usize = 16;
const LAYERS: usize = 3;
const THREADS: usize = 4;
const REQUESTS: usize = 32;

/// A row-parallel layer: this rank's inputs × all outputs.
struct Layer {
    inputs: std::ops::Range<usize>,
    weight: Vec<[f32; WIDTH]>,
}

impl Layer {
    /// Returns this rank's rows of a matrix that only shifts values by one place.
    fn new(rank: usize, ranks: usize) -> Self {
        let inputs = rank * WIDTH / ranks..(rank + 1) * WIDTH / ranks;
        let row = |input: usize| std::array::from_fn(|output| if output == (input + 1) % WIDTH { 1.0 } else { 0.0 });
        Self { weight: inputs.clone().map(row).collect(), inputs }
    }

    fn forward(&self, comm: &Communicator, values: &[f32; WIDTH]) -> collectives::Result<[f32; WIDTH]> {
        let mut sums = [0.0; WIDTH];
        for (input, row) in self.inputs.clone().zip(&self.weight) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += values[input] * weight);
        }
        comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums)
    }
}

/// The layers, which all threads share.
struct Stack(Vec<Layer>);

impl Stack {
    fn new(comm: &Communicator) -> Self {
        Self((0..LAYERS).map(|_| Layer::new(comm.rank(), comm.world_size())).collect())
    }

    fn forward(&self, lane: &Communicator, input: [f32; WIDTH]) -> collectives::Result<[f32; WIDTH]> {
        self.0.iter().try_fold(input, |values, layer| layer.forward(lane, &values))
    }
}

fn main() -> collectives::Result<()> {
    let comm = Communicator::from_env()?;
    let stack = Arc::new(Stack::new(&comm));
    let (answer, answers) = channel();
    let pool: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (stack, answer, comm) = (Arc::clone(&stack), answer.clone(), comm.clone());
            std::thread::spawn(move || {
                // The threads of the ranks with one number serve the same requests.
                let lane = comm.lane(thread as u32)?;
                for request in (thread..REQUESTS).step_by(THREADS) {
                    let input = std::array::from_fn(|place| (request * WIDTH + place) as f32);
                    answer.send((request, stack.forward(&lane, input)?)).expect("the main thread waits for the answers");
                }
                collectives::Result::Ok(())
            })
        })
        .collect();
    drop(answer);
    let right = answers.iter().filter(|(request, output)| {
        let expected = |place: usize| (request * WIDTH + (place + WIDTH - LAYERS) % WIDTH) as f32;
        (0..WIDTH).all(|place| output[place] == expected(place))
    });
    println!("rank {}: {} of {REQUESTS} answers are right", comm.rank(), right.count());
    pool.into_iter().try_for_each(|thread| thread.join().expect("no thread of the pool panics"))?;
    comm.close()
}
