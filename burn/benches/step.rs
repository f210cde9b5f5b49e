//! A step of a network of 24 linear layers with 25.2 million parameters, on two ranks as threads. Prints the median
//! times, in milliseconds and measured in turns, of:
//!
//! - the backward pass alone,
//! - the pass with gradients averaged by [`DataParallel`],
//! - the pass with a call for each gradient,
//! - the calls alone.
//!
//! `RAYON_NUM_THREADS=1 cargo bench -p collectives-burn --bench step`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use burn::module::{Module, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use collectives::{Communicator, ReduceOp};
use collectives_burn::{DataParallel, Result, all_reduce};

const WIDTH: usize = 1024;
const LAYERS: usize = 24;
const SAMPLES: usize = 32;
const ROUNDS: usize = 31;

#[derive(Module, Debug)]
struct Network {
    layers: Vec<Linear>,
}

impl Network {
    fn new(device: &Device) -> Self {
        let layer = |_| {
            let mut layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
            layer.weight = layer.weight.map(|_| Tensor::eye(WIDTH, device).require_grad());
            layer
        };
        Self { layers: (0..LAYERS).map(layer).collect() }
    }

    fn gradients(&self, input: &Tensor<2>) -> GradientsParams {
        let output = self.layers.iter().fold(input.clone(), |x, layer| layer.forward(x));
        GradientsParams::from_grads(output.mean().backward(), self)
    }

    fn identities(&self) -> impl Iterator<Item = ParamId> {
        self.layers.iter().map(|layer| layer.weight.id)
    }

    /// Checks the mean of the ranks' gradients. All gradients of a layer are equal: the mean of the ranks' inputs
    /// determines them.
    fn assert_averaged(&self, gradients: &GradientsParams) {
        for id in self.identities() {
            let gradient = gradients.get::<2>(id).expect("every weight has a gradient");
            let found: f32 = gradient.slice([1..2, 1..2]).into_scalar();
            assert!((found - 1.5 / WIDTH as f32).abs() < 1e-6, "a wrong mean: {found}");
        }
    }
}

/// Averages the gradients with a blocking call for each.
fn each(comm: &Communicator, network: &Network, mut gradients: GradientsParams) -> Result<GradientsParams> {
    for id in network.identities().collect::<Vec<_>>().into_iter().rev() {
        let gradient = gradients.remove::<2>(id).expect("every weight has a gradient");
        gradients.register(id, all_reduce(comm, gradient, ReduceOp::Avg)?);
    }
    Ok(gradients)
}

fn rounds(comm: &Communicator) -> Result<BTreeMap<&'static str, Vec<Duration>>> {
    let device = Device::flex().autodiff();
    let (mut parallel, network) = DataParallel::new(comm, Network::new(&device))?;
    let input = Tensor::<2>::full([SAMPLES, WIDTH], 1.0 + comm.rank() as f32, &device);
    let mut spare = vec![vec![1.0_f32; WIDTH * WIDTH]; LAYERS];
    let mut times: BTreeMap<&'static str, Vec<Duration>> = BTreeMap::new();
    let mut timed = |way, step: &mut dyn FnMut() -> Result<()>| {
        comm.barrier()?;
        let began = Instant::now();
        step()?;
        times.entry(way).or_default().push(began.elapsed());
        Result::Ok(())
    };
    for _ in 0..ROUNDS {
        timed("backward alone", &mut || {
            drop(network.gradients(&input));
            Ok(())
        })?;
        timed("calls alone", &mut || spare.iter_mut().try_for_each(|values| Ok(comm.all_reduce(&mut values[..], ReduceOp::Avg)?)))?;
        timed("DataParallel", &mut || {
            network.assert_averaged(&parallel.average(&network, network.gradients(&input))?);
            Ok(())
        })?;
        timed("a call for each", &mut || {
            network.assert_averaged(&each(comm, &network, network.gradients(&input))?);
            Ok(())
        })?;
    }
    Ok(times)
}

fn main() -> collectives::Result<()> {
    let all = Communicator::run_local(2, |comm| Ok(rounds(comm).expect("burn")))?;
    for (way, mut times) in all.into_iter().next().unwrap_or_default() {
        times.sort_unstable();
        println!("{way}: {:.1} ms", times[times.len() / 2].as_secs_f64() * 1e3);
    }
    Ok(())
}
