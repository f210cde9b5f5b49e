//! A step of a network of 24 linear layers with 25.2 million parameters, on two ranks as threads. Prints the median
//! times, in milliseconds and measured in turns, of:
//!
//! - the backward pass alone,
//! - the pass with gradients averaged by [`DataParallel`],
//! - the pass with a call for each gradient,
//! - the calls alone.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p collectives-candle --bench step`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use collectives::{Communicator, ReduceOp};
use collectives_candle::{DataParallel, all_reduce_in_place};

const WIDTH: usize = 1024;
const LAYERS: usize = 24;
const SAMPLES: usize = 32;
const ROUNDS: usize = 31;

struct Network {
    weights: Vec<Var>,
    input: Tensor,
}

impl Network {
    fn new(rank: usize) -> Result<Self> {
        let weight = |_| Var::from_tensor(&Tensor::eye(WIDTH, candle_core::DType::F32, &Device::Cpu)?);
        let input = Tensor::full(1.0_f32 + rank as f32, (SAMPLES, WIDTH), &Device::Cpu)?;
        Ok(Self { weights: (0..LAYERS).map(weight).collect::<Result<_>>()?, input })
    }

    fn gradients(&self) -> Result<GradStore> {
        let output = self.weights.iter().try_fold(self.input.clone(), |x, weight| x.matmul(weight.as_tensor()))?;
        output.mean_all()?.backward()
    }

    /// Checks the mean of the ranks' gradients. All gradients of a layer are equal: the mean of the ranks' inputs
    /// determines them.
    fn assert_averaged(&self, gradients: &GradStore) -> Result<()> {
        for weight in &self.weights {
            let gradient = gradients.get(weight).expect("every weight has a gradient");
            let found = gradient.flatten_all()?.get(WIDTH + 1)?.to_scalar::<f32>()?;
            assert!((found - 1.5 / WIDTH as f32).abs() < 1e-6, "a wrong mean: {found}");
        }
        Ok(())
    }
}

fn rounds(comm: &Communicator) -> Result<BTreeMap<&'static str, Vec<Duration>>> {
    let network = Network::new(comm.rank())?;
    let mut model = DataParallel::new(comm, network.weights.clone())?;
    let spare: Vec<Tensor> = network.weights.iter().map(|weight| weight.as_tensor().ones_like()).collect::<Result<_>>()?;
    let each = |tensors: &[&Tensor]| tensors.iter().try_for_each(|tensor| all_reduce_in_place(comm, tensor, ReduceOp::Avg));
    let mut times: BTreeMap<&'static str, Vec<Duration>> = BTreeMap::new();
    let mut timed = |way, step: &mut dyn FnMut() -> Result<()>| {
        comm.barrier().expect("both ranks are there");
        let began = Instant::now();
        step()?;
        times.entry(way).or_default().push(began.elapsed());
        Result::Ok(())
    };
    for _ in 0..ROUNDS {
        timed("backward alone", &mut || network.gradients().map(drop))?;
        timed("calls alone", &mut || each(&spare.iter().collect::<Vec<_>>()))?;
        timed("DataParallel", &mut || {
            let mut gradients = network.gradients()?;
            model.average(&mut gradients)?;
            network.assert_averaged(&gradients)
        })?;
        timed("a call for each", &mut || {
            let gradients = network.gradients()?;
            each(&network.weights.iter().rev().filter_map(|weight| gradients.get(weight)).collect::<Vec<_>>())?;
            network.assert_averaged(&gradients)
        })?;
    }
    Ok(times)
}

fn main() -> collectives::Result<()> {
    let all = Communicator::run_local(2, |comm| Ok(rounds(comm).expect("candle")))?;
    for (way, mut times) in all.into_iter().next().unwrap_or_default() {
        times.sort_unstable();
        println!("{way}: {:.1} ms", times[times.len() / 2].as_secs_f64() * 1e3);
    }
    Ok(())
}
